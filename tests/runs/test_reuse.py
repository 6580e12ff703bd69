"""A command about an earlier run uses the values with which that run began."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaleflow.config.compose import CommandWords, compose_config
from scaleflow.config.parse import flatten_config
from scaleflow.errors import ConfigError
from scaleflow.interfaces import features
from scaleflow.interfaces.events import RunEnded, RunReady, TagsSet
from scaleflow.interfaces.features import Feature
from scaleflow.launcher.launch import write_configs
from scaleflow.launcher.prepare import PreparedRun, prepare_run
from scaleflow.runs import RunFolder
from scaleflow.runs.event_log import append_event
from scaleflow.runs.identity import is_computed_by, is_ignored
from scaleflow.runs.resume import LENGTH_KEYS, RESUME_KEYS, is_changeable, list_changeable
from scaleflow.runs.reuse import load_config, load_interpolations, reuse_config
from scaleflow.runs.run import Run
from scaleflow.runs.state import make_length_tags

DOCS = Path(__file__).parents[2] / "docs"

RECIPE = """# @package _global_
optimizer: {learning_rate: "${oc.decode:${oc.env:LR}}", momentum: "${oc.decode:0.${training.epochs}}"}
training: {epochs: "${oc.decode:${oc.env:EPOCHS,2}}"}
model: {l2: "${oc.decode:${oc.env:L2}}"}
dataset: {limit: "${training.max_steps}"}
checkpoint: {every_epochs: "${training.epochs}", keep: "${oc.decode:1${training.epochs}}", folder: "${oc.env:FOLDER}"}
tracking: {name: none, run_name: "${now:%f}", tags: {token: "${oc.env:OWN_TOKEN}"}}
"""


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a finished run of this recipe; the environment has changed since."""
    monkeypatch.chdir(tmp_path)
    Path("own/experiment").mkdir(parents=True)
    Path("own/experiment/mine.yaml").write_text(RECIPE)
    set_environment(monkeypatch, LR="0.1", L2="0.01", FOLDER="first", OWN_TOKEN="hunter2-planted")
    make_run(["optimizer=sgd", "experiment=mine", "training.max_steps=4"], tmp_path / "run")
    set_environment(monkeypatch, LR="0.5", L2="0.01", FOLDER="other", OWN_TOKEN="hunter2-planted", EPOCHS="7")
    return tmp_path / "run"


def set_environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def make_run(words: Sequence[str], folder: Path) -> PreparedRun:
    """Writes what the launcher and the worker of a finished run write that commands about it read."""
    run = prepare_run(compose_config([*words, f"hydra.run.dir={folder}"], ["own"]))
    folder.mkdir()
    write_configs(run)
    config = flatten_config(run.spec.plan.config)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
    resolved = {"global_batch_size": "32", "cache": "memory", "steps_per_epoch": "2"}
    params = {**run.spec.plan.choices, **texts, **{f"resolved.{key}": each for key, each in resolved.items()}}
    append_event(RunFolder(folder).events, RunReady("a-run", params=params, steps=4, epochs=2))
    append_event(RunFolder(folder).events, RunEnded("FINISHED"))
    return run


def resume(folder: Path, *words: str) -> PreparedRun:
    return prepare_run(compose_config([f"resume={folder}", *words], ["own"]))


def test_a_run_keeps_the_values_with_which_it_began(begun: Path) -> None:
    config = yaml.safe_load((begun / "config.yaml").read_text())
    assert (config["optimizer"]["learning_rate"], config["training"]["epochs"]) == (0.1, 2)
    assert config["checkpoint"]["every_epochs"] == "${training.epochs}"
    assert config["tracking"]["tags"]["token"] == "${oc.env:OWN_TOKEN}"
    written = "".join(path.read_text() for path in begun.iterdir())
    assert "hunter2" not in written
    kept = RunFolder(begun).interpolations.read_text()
    assert load_interpolations(kept)["optimizer", "learning_rate"] == "${oc.decode:${oc.env:LR}}"


def test_a_resumed_run_uses_them_and_says_what_differs_here(begun: Path) -> None:
    first = resume(begun)
    plan = first.spec.plan
    assert (plan.optimizer.learning_rate, plan.training.epochs, plan.checkpoint.folder) == (0.1, 2, "first")
    assert plan.config["model"]["l2"] == 0.01
    assert plan.tracking.run_name == resume(begun).spec.plan.tracking.run_name
    assert first.composed.notes == [
        "note: optimizer.learning_rate=0.1 as when the run began; ${oc.decode:${oc.env:LR}} is 0.5 here",
        "note: training.epochs=2 as when the run began; ${oc.decode:${oc.env:EPOCHS,2}} is 7 here",
        "note: checkpoint.folder=first as when the run began; ${oc.env:FOLDER} is other here",
    ]
    assert first.is_finished


def test_references_follow_the_words_of_the_command_that_resumes(begun: Path) -> None:
    longer = resume(begun, "training.epochs=3", "checkpoint.folder=typed", "training.max_steps=9")
    plan = longer.spec.plan
    assert (plan.training.epochs, plan.checkpoint.every_epochs, plan.checkpoint.keep) == (3, 3, 13)
    assert plan.checkpoint.folder == "typed"
    assert (plan.config["optimizer"]["momentum"], plan.dataset.limit) == (0.2, 4)  # they may not change
    reasons = [note.partition("as when the run began")[2] for note in longer.composed.notes if "refers" in note]
    assert reasons == [
        ": it refers to a key that was typed, and would be 9",
        ": it refers to a key that was typed, and would be 0.3",
    ]
    typed = resume(begun, "checkpoint.every_epochs=${training.max_steps}")
    assert typed.spec.plan.checkpoint.every_epochs == 4  # the run's
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate=0\.5: the run was started with"):
        resume(begun, "optimizer.learning_rate='${oc.decode:${oc.env:LR}}'")


def test_a_longer_run_goes_on_with_its_length_of_now(begun: Path) -> None:
    longer = resume(begun, "training.epochs=3", "training.max_steps=9")
    assert longer.spec.length == {"training.epochs": 3, "training.max_steps": 9}
    assert not longer.is_finished
    events = RunFolder(begun).events
    append_event(events, RunReady("a-run", steps=9, epochs=3, resumed=4))
    append_event(events, TagsSet(make_length_tags(longer.spec.length)))
    lost = resume(begun)  # it was killed before its end
    assert (lost.spec.plan.training.epochs, lost.spec.plan.training.max_steps, lost.is_finished) == (3, 9, False)
    append_event(events, RunEnded("FINISHED"))
    finished = resume(begun)
    plan = finished.spec.plan
    assert (plan.training.epochs, plan.checkpoint.every_epochs, plan.checkpoint.keep, plan.dataset.limit) == (
        3,
        3,
        13,
        4,
    )
    assert finished.spec.length == longer.spec.length
    assert finished.is_finished
    config = Run(begun).config  # what rerun, refit, evaluate and a pipeline use
    assert (config["training"]["epochs"], config["training"]["max_steps"], config["dataset"]["limit"]) == (3, 9, 4)
    assert Run(begun).settings["training.epochs"] == "3"


def test_a_resumed_refit_uses_what_another_run_decided(begun: Path) -> None:
    assert resume(begun).spec.plan.answers == {}
    RunFolder(begun).answers.write_text(json.dumps({"set_threshold": 0.4}))
    assert resume(begun).spec.plan.answers == {"set_threshold": 0.4}


def test_a_new_command_about_the_run_uses_them(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own/optimizer").mkdir()
    option = "_target_: keras.optimizers.SGD\nlearning_rate: ${oc.decode:${oc.env:LR}}\nmomentum: 0.2\n"
    Path("own/optimizer/mine.yaml").write_text(option)
    config = load_config((begun / "config.yaml").read_text(), "0" * 32)
    params: dict[str, Any] = {"optimizer": "mine", "model": "mlp", "dataset": "digits"}
    interpolations = load_interpolations((begun / "interpolations.yaml").read_text())
    monkeypatch.setenv("L2", "0.5")  # no option of this machine has that interpolation, so it is not looked at
    config["tracking"]["tags"] = {}
    again = reuse_config(config, params, CommandWords((), ["own"]), interpolations=interpolations)
    assert again.resolved["optimizer"]["learning_rate"] == 0.1
    assert again.resolved["model"]["l2"] == 0.01
    assert again.notes == [
        "note: optimizer.learning_rate=0.1 as when the run began; ${oc.decode:${oc.env:LR}} is 0.5 here"
    ]


def test_a_new_command_keeps_references_to_sections_that_it_does_not_use_and_follows_typed_keys() -> None:
    config = compose_config(["dataset=digits", "model=mlp"]).raw
    config["seed"] = "${training.batch_size}"
    config["dataset"]["limit"] = "${model.units.0}"
    config["training"]["batch_size"] = 48
    params = {"model": "mlp", "dataset": "digits"}

    def read(*words: str, sections: Sequence[str] | None = None) -> tuple[int, int]:
        resolved = reuse_config(config, params, CommandWords(words), sections).resolved
        return resolved["seed"], resolved["dataset"]["limit"]

    assert read(sections=("seed", "dataset")) == (48, 128)  # as evaluate, convert and promote do
    assert read() == (48, 128)
    assert read("training.batch_size=64", "model.units=[7]") == (64, 7)  # as rerun does
    assert read("model=linear") == (48, 128)


def test_a_section_that_a_command_does_not_use_gives_away_no_value_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OWN_VALUE", "planted")
    config = compose_config(["dataset=digits", "model=mlp"]).raw
    config["tracking"]["experiment"] = "${oc.env:OWN_VALUE}"
    config["dataset"]["split"]["column"] = "${tracking.experiment}"
    params = {"model": "mlp", "dataset": "digits"}
    with pytest.raises(ConfigError, match="masked secret"):
        reuse_config(config, params, CommandWords(), sections=("dataset",))


def test_a_stage_that_trains_no_model_cannot_be_resumed(begun: Path) -> None:
    (begun / "config.yaml").write_text("tracking: {name: none}\n")
    with pytest.raises(ConfigError, match=r"a command that trains no model; repeat that command"):
        resume(begun)


def test_a_value_that_has_a_clock_in_it_is_not_compared_with_the_environment(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = yaml.safe_load((begun / "interpolations.yaml").read_text())
    texts["tracking"]["run_name"] = "${now:%f}-${oc.env:LR}"
    (begun / "interpolations.yaml").write_text(yaml.safe_dump(texts))
    notes = resume(begun).composed.notes
    assert [note for note in notes if "run_name" in note] == []
    assert [note for note in notes if "learning_rate" in note] != []


def test_a_place_outside_that_this_machine_would_choose_too_is_trusted(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own/dataset").mkdir()
    Path("own/dataset/mine.yaml").write_text("_target_: scaleflow.dataset.table.Table\ndata_dir: ${oc.env:DATA}\n")
    config = load_config((begun / "config.yaml").read_text(), "0" * 32)
    config["tracking"]["tags"] = {}
    config["dataset"] = {"_target_": "scaleflow.dataset.table.Table", "data_dir": "/data/a.csv"}
    interpolations = {("dataset", "data_dir"): "${oc.env:DATA}"}
    params = {"dataset": "mine"}
    monkeypatch.setenv("DATA", "/data/a.csv")
    words = CommandWords((), ["own"])
    assert reuse_config(config, params, words, interpolations=interpolations).notes == []
    monkeypatch.setenv("DATA", "/data/b.csv")
    with pytest.raises(ConfigError, match=r"dataset\.data_dir=/data/a\.csv: comes from a tracked run and points out"):
        reuse_config(config, params, words, interpolations=interpolations)


def test_the_message_and_the_docs_name_all_that_a_resumed_run_may_change(begun: Path) -> None:
    sections = ", ".join(list_changeable())
    with pytest.raises(
        ConfigError, match=rf"\(training\.epochs, training\.max_steps\) and {sections}; start a new run"
    ):
        resume(begun, "seed=7")
    text = (DOCS / "troubleshooting.md").read_text()
    assert f"a resumed run may change only its length (...) and {sections}`" in text
    table = (DOCS / "reliability.md").read_text().partition("You may change:")[2].partition("Every other change")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    keys = re.findall(r"`([\w.]+)`", " ".join(rows))
    lengths = [f"training.{name}" for name in LENGTH_KEYS]
    assert sorted(keys) == sorted([*list_changeable(), *lengths, *RESUME_KEYS[1:]])


def test_a_feature_says_which_of_its_keys_do_not_change_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_changeable("lines.file")
    lines = Feature(name="lines", ignored_keys=("lines.file", "pages"))
    monkeypatch.setattr(features, "list_features", lambda: {"lines": lines})
    for key, ignored in {"lines.file": True, "pages.count": True, "lines": False, "lines.every": False}.items():
        assert is_changeable(key) is ignored
        assert is_ignored(key) is ignored
        assert is_computed_by(key) is not ignored


@pytest.mark.parametrize("section", list_changeable())
def test_what_the_message_names_may_change(section: str) -> None:
    assert is_changeable(section)
