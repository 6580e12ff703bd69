"""README's commands in folders whose names Hydra's grammar, a shell, a URL or a template could misread."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from scaleflow.config.compose import compose_config, list_options
from scaleflow.features.pipelines.definition import load_pipeline
from tests.conftest import Command

#: Characters that Hydra's grammar, a shell, a URL or a template reads otherwise, all at once. `[` is refused.
ALL = 'müller\'s My Project (1) R&D a=b #1 "x" 100% a,b {x} $y'

CODE = """
import keras
import numpy as np
from scaleflow.interfaces import Arrays, Inputs, Outputs

class Rows:
    inputs = Inputs(shape=(4,), dtype="float32")
    outputs = Outputs(kind="binary", shape=(1,))
    splits = ("train", "test")

    def load(self, split):
        x = np.random.default_rng(len(split)).normal(size=(64, 4)).astype("float32")
        return Arrays(x, (x[:, :1] > 0).astype("float32"))

def build(inputs, outputs, units):
    layers = [keras.Input(inputs.shape), keras.layers.Dense(units), keras.layers.Dense(1)]
    return keras.Sequential(layers)
"""

PIPELINE = """
overrides: [dataset=mine, model=mine, training.max_steps=2]
stages:
  fit:  {command: train}
  week: {command: evaluate, run: "${stages.fit.run_id}"}
"""


def make_project(folder: Path) -> None:
    """Makes a folder with own code, own options and a pipeline, in a folder of options with the same name."""
    options = folder / folder.name
    for name, text in (
        ("dataset/mine.yaml", "_target_: names_code.Rows\n"),
        ("model/mine.yaml", "_target_: names_code.build\nunits: 4\n"),
        ("pipeline/mine.yaml", PIPELINE),
        ("names_code.py", CODE),
    ):
        path = options / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(params=[ALL, "1e5"])
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / str(request.param)
    make_project(folder)
    monkeypatch.chdir(folder)
    return folder


def test_options_in_a_folder_with_an_odd_name_are_found(project: Path) -> None:
    dirs = [project.name]
    assert compose_config(["dataset=mine", "model=mine"], dirs).config.model.units == 4
    assert "mine" in list_options(dirs)["dataset"]
    assert [*load_pipeline("mine", dirs).stages] == ["fit", "week"]


def test_a_wrong_word_is_named_beside_a_folder_with_an_odd_name(command: Command) -> None:
    command.folder /= ALL
    make_project(command.folder)
    ended = command("--config-dir", ALL, "dataset=mine", "model=mien")
    assert (ended.returncode, ended.stderr.partition(";")[0]) == (2, "scaleflow: model=mien: there is no such option")


def test_a_folder_in_which_tensorflow_cannot_read_its_own_files_is_refused_before_the_run(command: Command) -> None:
    command.folder /= "[v2]"
    command.folder.mkdir()
    for words in ((), ("-m", "model.units=8,16")):
        ended = command("training.max_steps=1", "tracking=none", *words)
        assert ended.returncode == 2
        assert "TensorFlow cannot read checkpoints and models below a folder with [ or" in ended.stderr
        assert not [*command.folder.glob("outputs/**/events.jsonl")]


@pytest.mark.slow  # its parts: above, and in tests/features/pipelines/test_stages.py
@pytest.mark.parametrize("name", [ALL, "1e5"])
def test_the_commands_of_the_readme_work_in_a_folder_with_an_odd_name(
    name: str, command: Command, empty_store: Path
) -> None:
    command.folder /= name
    make_project(command.folder)
    shutil.copy(empty_store, command.folder / "mlflow.db")
    dirs, own = ("--config-dir", name), ("dataset=mine", "model=mine", "training.max_steps=2")

    def run(*words: str) -> dict[str, object]:
        ended = command(*words, "--json")
        assert ended.returncode == 0, f"{shlex.join(words)}\n{ended.stdout}{ended.stderr}"
        answer: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
        return answer

    first = run(*dirs, *own)
    run_id = str(first["run_id"])
    folder = str(command.run_folder().relative_to(command.folder))
    assert run("check", *dirs, "dataset=mine")
    run("resume=" + folder, "training.max_steps=3", *dirs)
    run("-m", *dirs, *own, "model.units=4,8")
    run("find", "lr", *dirs, *own, "--steps", "20")
    trusted = ("--trust", "names_code")
    again = run("rerun", run_id, *dirs, *trusted)
    run("diff", run_id, str(again["run_id"]))
    run("evaluate", run_id, *dirs, *trusted)
    run("convert", run_id, "export.formats=[keras]", *dirs, *trusted)
    run("promote", run_id, "--model", "names", *dirs, *trusted)
    run("pipeline", "mine", *dirs)
    run("sync", "outputs")
    run("clean", "outputs")
    run("doctor")
