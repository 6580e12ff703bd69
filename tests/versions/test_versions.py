"""What depends on the versions of other packages. `python -m tests.versions` runs tests with those versions."""

from __future__ import annotations

import json
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.config.conditions import is_applicable
from scaleflow.config.plan import find_version_rules
from scaleflow.tracking import connection
from tests.processes import ROOT
from tests.versions.environments import NAMES, read_constraints


def make_plan(strategy: str, engine: str, remat: Any) -> Any:
    """The parts of a plan that the rules read."""
    groups = {"strategy": {"name": strategy}, "training": {"engine": engine}, "hardware": {"remat": remat}}
    return SimpleNamespace(**{group: SimpleNamespace(**values) for group, values in groups.items()})


@pytest.mark.parametrize(
    ("keras", "refused"), [("3.8.0", 3), ("3.11.2", 2), ("3.13.2", 1), ("3.14.0", 0), ("4.0.0", 0)]
)
def test_what_an_older_keras_cannot_do_is_refused_with_the_version_that_can(keras: str, refused: int) -> None:
    rules = find_version_rules({"keras": keras}.__getitem__)
    cases = (("pipeline", "loop", False), ("mirrored", "fit", False), ("mirrored", "loop", True))
    plans = [make_plan(*each) for each in cases]
    assert [any(is_applicable(rule, plan) for plan in plans) for rule in rules] == refused * [True]
    assert not any(is_applicable(rule, make_plan("mirrored", "loop", False)) for rule in rules)
    assert all(f"and {keras} is installed" in rule.reason and "install Keras 3.1" in rule.instead for rule in rules)


def use_mlflow(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(connection, "version", versions.__getitem__)


def test_the_last_line_names_the_store_where_mlflow_would_open_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_BACKEND_STORE_URI", raising=False)
    file = tmp_path / "mlflow.db"
    use_mlflow(monkeypatch, mlflow="3.6.0")
    assert not connection.opens_by_default(file)
    use_mlflow(monkeypatch, mlflow="3.7.0")
    assert connection.opens_by_default(file)
    assert not connection.opens_by_default(tmp_path / "other.db")
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    assert connection.opens_by_default(file)
    (tmp_path / "mlruns" / "0" / "meta.yaml").touch()
    assert not connection.opens_by_default(file)


def test_stores_of_other_versions_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic.util.exc import CommandError

    use_mlflow(monkeypatch, mlflow="3.1.4", sqlalchemy="2.1.9")
    explain = connection.explain_versions
    assert explain(CommandError("Can't locate revision identified by 'f4a9b2c7d1e6'")) == (
        "a newer MLflow than 3.1.4 has written this database; install that version, or name another database, such as "
        "tracking.uri=sqlite:///other.db"
    )
    assert explain(ImportError("cannot import name 'QueuePool' from 'sqlalchemy.pool'")) == (
        "MLflow 3.1.4 does not work beside SQLAlchemy 2.1.9; install 'sqlalchemy<2.1', or MLflow 3.10 or newer"
    )
    assert explain(ImportError("No module named 'psycopg2'")) is explain(ValueError("another")) is None


def read_file_of_keras(path: str) -> str:
    from scaleflow.errors import ConfigError
    from scaleflow.model.initial import read_weights

    with pytest.raises(ConfigError) as error:
        read_weights(path, "old.keras")
    return str(error.value)


def test_a_model_of_a_newer_keras_is_refused_with_its_version(isolated: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "new.keras"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "9.1.0"}))
        archive.writestr("config.json", json.dumps({"module": "keras", "class_name": "Unknown", "config": {}}))
    message = isolated(read_file_of_keras, str(file))
    assert message.startswith("model.init_from=old.keras: cannot be read as a Keras model (Keras 9.1.0 wrote it, and ")


def test_the_constraints_are_within_the_ranges_of_the_package() -> None:
    """The oldest versions that are tested are those that pip may choose, and no older ones."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges: Mapping[str, Any] = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    assert NAMES == ("oldest", "between", "newest")
    for name in NAMES:
        for requirement in read_constraints(name):
            if requirement.name in ranges and name != "newest":
                (pin,) = requirement.specifier
                release = pin.version.removesuffix(".*")
                assert release in ranges[requirement.name], (name, requirement)
    lower = {name: next(s.version for s in each if s.operator == ">=") for name, each in ranges.items()}
    oldest = {each.name: next(iter(each.specifier)).version.removesuffix(".*") for each in read_constraints("oldest")}
    assert {name: oldest[name].startswith(lower[name]) for name in lower} == dict.fromkeys(lower, True)
