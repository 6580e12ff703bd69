"""Where weights to begin with come from, as far as that needs no store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.runs import RunSpec
from scaleflow.tracking import locate_weights
from scaleflow.worker.tasks import TrainModel

Make = Callable[..., Any]


def file_of(plan: Any) -> str:
    with locate_weights(plan) as found:
        assert found.weights is not None
        return found.weights


@pytest.mark.parametrize("place", ["model.keras", "data/model.keras", "model/model.keras", "deep/in/it/mine.keras"])
def test_a_folder_stands_for_the_keras_file_in_it(plan: Make, tmp_path: Path, place: str) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("weights")
    assert file_of(plan(f"model.init_from={tmp_path}")) == str(file)
    assert file_of(plan(f"model.init_from={file}")) == str(file)


def test_missing_initial_weights_are_refused_without_mlflow(
    plan: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # its import fails
    monkeypatch.chdir(tmp_path)
    wanted = {
        "nothing.keras": "there is no such file or folder; use a file",
        str(tmp_path): "contains no Keras file",
        "models:/mine/1": f"there is no tracking store sqlite:///{tmp_path}/mlflow.db",
    }
    for origin, words in wanted.items():
        with (
            pytest.raises(ConfigError, match=f"model.init_from={origin}: {words}"),
            locate_weights(plan(f"model.init_from={origin}")),
        ):
            pass


def test_a_folder_with_weights_alone_is_refused_with_what_they_are_good_for(plan: Make, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.weights.h5"
    weights.parent.mkdir()
    weights.write_text("weights")
    words = "contains a model that Keras could not write as a .keras file.*load_weights.*model/model.weights.h5"
    with pytest.raises(ConfigError, match=words), locate_weights(plan(f"model.init_from={tmp_path}")):
        pass


def test_the_worker_is_told_the_file_and_the_config_keeps_what_was_said(plan: Make, tmp_path: Path) -> None:
    (tmp_path / "model.keras").write_text("weights")
    with locate_weights(plan(f"model.init_from={tmp_path}")) as found:
        sent = RunSpec.from_line(RunSpec(found, tmp_path, 0.0, TrainModel()).to_line()).plan
    assert sent.weights == str(tmp_path / "model.keras")
    assert sent.model.init_from == sent.config["model"]["init_from"] == str(tmp_path)
