"""`scaleflow init` makes a project that works, and `scaleflow schema` describes its files, and all of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scaleflow.config.compose import compose_config
from scaleflow.features.housekeeping import init, schema
from scaleflow.interfaces.features import list_conf_folders, list_option_files
from tests.conftest import Command

#: Options of these are no sections of the config; a recipe may set any key.
WITHOUT_SCHEMA, RECIPES = ("hydra", "pipeline"), "experiment"


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    folders = [path for folder in list_conf_folders() for path in folder.iterdir() if path.is_dir()]
    groups = sorted({path.name for path in folders} - {*WITHOUT_SCHEMA})
    return {group: schema.describe_config(None if group == RECIPES else group) for group in groups if group[0] != "_"}


def find_faults(schemas: dict[str, Any], group: str, text: str) -> list[str]:
    validator = jsonschema.Draft7Validator(schemas[group])
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


def test_every_option_fits_its_schema(schemas: dict[str, Any]) -> None:
    for group in schemas:
        for path in list_option_files(group):
            assert find_faults(schemas, group, path.read_text() or "{}") == [], path
    for key, each in schemas["training"]["properties"].items():
        assert key == "defaults" or each.get("description") or key == "_target_"


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("training", "epohs: 3"),
        ("training", "epochs: 0"),
        ("training", "on_nan: start"),
        ("training", "early_stopping: {patence: 3}"),
        ("checkpoint", "write_seconds: 0"),
        ("dataset", "split: {by: groups}"),
        ("dataset", "limit: many"),
        ("experiment", "trainning: {epochs: 3}"),
        ("experiment", "model: {lora: {rank: 0}}"),
    ],
)
def test_what_a_run_would_refuse_is_a_fault(schemas: dict[str, Any], group: str, text: str) -> None:
    assert find_faults(schemas, group, text)


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("dataset", "{_target_: my.Data, split: group, limit: '${size}', own: [1]}"),
        ("model", "{_target_: my.build, freeze: {0: ['*'], 3: []}}"),
        ("experiment", "{seed: 3, tracking: {tags: {team: vision}}, objective: {class_weight: {0: 1, 1: 2.5}}}"),
    ],
)
def test_what_a_run_takes_is_none(schemas: dict[str, Any], group: str, text: str) -> None:
    assert find_faults(schemas, group, text) == []


def test_the_command_prints_the_schema_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema.main(["model"]) == 0
    assert json.loads(capsys.readouterr().out) == schema.describe_config("model")
    assert schema.main(["modle"]) == 2
    assert "modle: there is no such group; did you mean model?" in capsys.readouterr().err


def test_a_folder_with_files_or_another_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for folder, why in (
        ("used", "has files already"),
        ("1 b", "use letters"),
        ("file", "cannot be written: File exists"),
    ):
        assert init.main([str(tmp_path / folder)]) == 2
        assert why in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["notes.txt"]


def test_a_new_project_composes_and_its_files_fit(tmp_path: Path, schemas: dict[str, Any]) -> None:
    folder = tmp_path / "my-project"
    assert init.main([str(folder)]) == 0
    for path in (folder / "conf").glob("*/*.yaml"):
        if path.parent.name not in WITHOUT_SCHEMA:
            assert find_faults(schemas, path.parent.name, path.read_text()) == [], path
            (named,) = [line.split("=")[1] for line in path.read_text().splitlines() if "yaml-language-server" in line]
            made = json.loads((path.parent / named).read_text())
            assert made == schemas[path.parent.name]
    composed = compose_config(["experiment=first"], [str(folder / "conf")]).config
    assert composed["tracking"]["experiment"] == "my-project"
    assert not [path for path in folder.rglob("*") if path.is_file() and "PROJECT" in path.read_text()]


@pytest.mark.slow
def test_what_a_new_project_says_works(tmp_path: Path) -> None:
    command = Command(tmp_path)
    made = command("init", "first_project")
    assert made.returncode == 0, made.stderr
    command.folder = tmp_path / "first_project"
    run = command("--config-dir", "conf", "experiment=first", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["metrics"]["test/accuracy"] > 0.95
    done = command("pipeline", "everything", "--config-dir", "conf")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "promoted" in done.stdout
    tests = command.cold("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tests.returncode == 0, tests.stdout
