"""One pipeline with every command that a stage can be, own code in the folder of --config-dir, and references."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scaleflow.config.compose import user_module_folders
from scaleflow.errors import ConfigError
from scaleflow.features.pipelines import stage_commands
from scaleflow.features.pipelines.command import check_stages
from scaleflow.features.pipelines.decisions import StageComposer
from scaleflow.features.pipelines.definition import load_pipeline
from scaleflow.features.pipelines.stage_commands import list_stage_commands
from scaleflow.interfaces.features import Feature, list_features
from scaleflow.interfaces.stages import StageCommand
from scaleflow.runs import RunFolder
from tests.conftest import Command

#: A name that Hydra's grammar cannot read without quotes.
FOLDER = "it's made (1), R&D"

FILE = """
more: {overrides: [model.units=4, training.max_steps=3], looks: [prepare], arguments: {rows: 80}}
file: "${stages.prepare.result.file}"
at: "${stages.week.metrics.loss}"
data: [dataset=table, "dataset.data_dir=${stages.prepare.result.file}", dataset.target=y]
overrides: [model=mine, "${data}"]
stages:
  prepare: {command: python, target: stage_code.prepare, arguments: "${more.arguments}", writes: [notes.txt]}
  look:    {command: check, level: fault, after: "${more.looks}"}
  search:  {command: sweep, overrides: ["model.units=2,4", training.max_steps=2], after: look}
  fit:     {command: train, overrides: "${more.overrides}", after: search}
  best:    {command: train, overrides: ["${stages.search.best.overrides}", "${more.overrides}"], after: fit}
  week:    {command: evaluate, run: "${stages.fit.run_id}", overrides: ["dataset.data_dir=${file}"]}
  say:     {command: predict, run: "${stages.fit.model}", input: "${stages.prepare.result.file}", probabilities: true}
  small:   {command: convert, run: "${stages.fit.run_id}", overrides: ["export.formats=[keras]"]}
  go:      {command: promote, run: "${stages.fit.run_id}", model: made, after: week}
  tell:    {command: python, target: stage_code.tell, arguments: {file: "${stages.say.file}", at: "${at}"}}
"""

CODE = f"""
import csv
from pathlib import Path

def prepare(rows):
    folder = Path({FOLDER!r})
    folder.mkdir(exist_ok=True)
    Path("notes.txt").write_text("made")
    path = folder / "made.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "y"])
        writer.writerows([n, n * 7 % 11, "yes" if n % 3 else "no"] for n in range(rows))
    return {{"file": str(path), "overrides": ["seed=3"]}}

def tell(file, at):
    import pyarrow.parquet
    return {{"rows": pyarrow.parquet.read_table(file).num_rows, "loss": at}}

def build(inputs, outputs, units):
    import keras
    made = {{name: keras.Input(each.shape, dtype=each.dtype, name=name) for name, each in inputs.items()}}
    joined = keras.layers.Concatenate()([keras.layers.Reshape((-1,))(each) for each in made.values()])
    hidden = keras.layers.Dense(units)(joined)
    return keras.Model(made, keras.layers.Dense(*outputs.shape)(hidden))
"""


def make_project(folder: Path, file: str = FILE) -> Path:
    """Makes the folder of --config-dir, with all code of the pipeline in it."""
    conf = folder / "own conf"
    for name, text in (
        ("pipeline/mine.yaml", file),
        ("model/mine.yaml", "_target_: stage_code.build\nunits: 4\n"),
        ("stage_code.py", CODE),
    ):
        (conf / name).parent.mkdir(parents=True, exist_ok=True)
        (conf / name).write_text(text)
    return conf


def test_every_command_is_a_stage_of_the_pipeline_below(tmp_path: Path) -> None:
    pipeline = load_pipeline("mine", [str(make_project(tmp_path))])
    assert {stage.command.name for stage in pipeline.stages.values()} == {*list_stage_commands()}


def test_the_words_of_a_stage_are_flags_that_its_command_has() -> None:
    from scaleflow.features.predict.command import make_predict_parser

    predict = list_stage_commands()["predict"]
    values = {**dict.fromkeys(predict.flags, "1"), "run": "1", "on_bad": "skip"}
    values |= {"probabilities": True, "logits": True, "explain": True}
    _, *words = predict.make_words(values, Path("stage"), ("conf",))
    typed = make_predict_parser().parse_intermixed_args(words)
    assert (typed.on_bad, typed.shard_rows, typed.top_k) == ("skip", 1, 1)


HELLO = StageCommand(name="hello", flags={"to": (), "how": ("loud", "quiet")}, required=("to",), outputs=("said",))

THEIRS = Feature(name="theirs", stages=(f"{__name__}:HELLO",))


@pytest.fixture
def theirs() -> Iterator[None]:
    """Adds a feature with a stage, whose command has only its keys and its answer."""
    features = {**list_features(), "theirs": THEIRS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_commands, "list_features", lambda: features)
        list_stage_commands.cache_clear()
        yield
    list_stage_commands.cache_clear()


def test_a_feature_adds_a_stage(theirs: None, tmp_path: Path) -> None:
    stage = "  greet: {command: hello, to: [you, me], how: loud}\n"
    made = load_pipeline("mine", [str(make_project(tmp_path, f"stages:\n{stage}"))])
    hello = made.stages["greet"].command
    assert hello is HELLO
    words = hello.make_words(made.stages["greet"].values, tmp_path, ["conf"])
    assert words == ["hello", "--to", "you", "--to", "me", "--how", "loud"]
    assert hello.read_outputs({"said": "hello", "other": 1}, {}, tmp_path) == {"said": "hello"}
    with pytest.raises(ConfigError, match=r"volume: is no key of hello \(command, after, when, foreach, to, how\)"):
        load_pipeline("mine", [str(make_project(tmp_path, f"stages:\n{stage.replace('how', 'volume')}"))])
    with pytest.raises(ConfigError, match=r"helo: is no command of a stage; did you mean hello\? \(check, convert"):
        load_pipeline("mine", [str(make_project(tmp_path, f"stages:\n{stage.replace('hello', 'helo')}"))])


def test_a_stage_that_is_there_already_or_cannot_be_imported_is_named_and_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Feature(name="first", stages=THEIRS.stages)
    again = Feature(name="again", stages=(*THEIRS.stages, f"{__name__}:ABSENT"))
    monkeypatch.setattr(stage_commands, "list_features", lambda: {"first": first, "again": again})
    list_stage_commands.cache_clear()
    assert list(list_stage_commands()) == ["hello"]
    list_stage_commands.cache_clear()
    taken, absent = capsys.readouterr().err.splitlines()
    assert taken.startswith("scaleflow: the feature again: its stage ")
    assert taken.endswith(" is skipped: ValueError: there is a stage hello already")
    assert "ABSENT is skipped: AttributeError: " in absent


def test_the_files_of_all_stages_are_those_of_a_run_in_the_folder_of_a_stage_only(tmp_path: Path) -> None:
    names = {name for command in list_stage_commands().values() for name in command.files}
    names.add("predictions.parquet")
    assert names == {"data_report.html", "result.json", "predictions.parquet"}
    folder = RunFolder(tmp_path)
    assert not any(folder.is_own(name) for name in names)
    (tmp_path / "stage.log").touch()
    assert all(folder.is_own(name) for name in names)
    assert not folder.is_own("graph.svg")


def check(folder: Path, file: str) -> None:
    conf = [str(make_project(folder, file))]
    check_stages(load_pipeline("mine", conf), StageComposer(conf, {}), folder / "pipelines" / "mine")


def test_all_stages_are_checked_before_their_data_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(tmp_path, FILE)
    for wrong, message in (
        ("model.unist=4", r"stage fit: model.unist: there is no such key"),
        ("training.max_steps=x", r"stage fit: training.max_steps=x: "),
    ):
        with pytest.raises(ConfigError, match=message):
            check(tmp_path, FILE.replace("training.max_steps=3", wrong))
    for wrong, right, message in (
        ("stage_code.prepare", "stage_code.prepaer", "stage_code.py has no function prepaer; did you mean prepare"),
        ("stage_code.tell", "no_code.tell", "no module no_code in the current folder, in one of --config-dir, or"),
        ('"${more.arguments}"', '"${more.overrides}"', "arguments: .*expected {NAME: VALUE}"),
        ('"${more.overrides}"]', '"${more.arguments}"]', "expected words KEY=VALUE in quotes"),
        ('after: "${more.looks}"', 'after: "${stages.fit.result}"', "must be known before any of them has run"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(tmp_path, FILE.replace(wrong, right))
    assert str(tmp_path) in user_module_folders()


@pytest.mark.parametrize(
    "words", ["'dataset=${stages.prepare.result.name}', dataset.x=1", "'${stages.prepare.result.overrides}'"]
)
def test_a_config_whose_options_a_stage_chooses_is_checked_later(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stages = "prepare: {command: python, target: stage_code.prepare, arguments: {rows: 1}}"
    check(tmp_path, f"stages:\n  {stages}\n  fit: {{command: train, overrides: [{words}]}}\n")


WORDS = ("pipeline", "mine", "--config-dir", "own conf")


def run_stages(command: Command, file: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Runs the pipeline; returns what it says of its stages."""
    make_project(command.folder, file)
    done = command(*WORDS, "--json", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    stages: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["stages"]
    assert {each["status"] for each in stages.values()} == {"FINISHED"}
    return stages


@pytest.mark.slow  # two of its stages: below
def test_every_command_works_with_own_code_and_data_that_a_stage_made(command: Command, empty_store: Path) -> None:
    shutil.copy(empty_store, command.folder / "mlflow.db")
    stages = run_stages(command, FILE)
    assert stages["tell"]["result"] == {"rows": 80, "loss": stages["week"]["metrics"]["loss"]}
    assert command(*WORDS, "--dry-run").stdout.count("reuse") == len(stages)


def test_a_function_whose_files_are_gone_runs_again_and_only_the_pipeline_takes_an_opened_run(
    command: Command, empty_store: Path
) -> None:
    from mlflow import MlflowClient

    shutil.copy(empty_store, command.folder / "mlflow.db")
    client = MlflowClient(tracking_uri=f"sqlite:///{command.folder}/mlflow.db")
    opened = client.create_run("0").info.run_id
    mlflow = {"MLFLOW_RUN_ID": opened, "MLFLOW_EXPERIMENT_ID": "0"}  # as `mlflow run . -e pipeline` does
    kept = [line for line in FILE.splitlines() if not re.match("  (?!prepare|fit|say)", line)]
    stages = run_stages(command, "\n".join(kept).replace(", after: search", ""), **mlflow)
    parents = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in client.search_runs(["0"])}
    assert parents.pop(opened) is None
    assert [*parents.values()] == [opened] * 3
    assert stages["fit"]["run_id"] in parents
    assert command(*WORDS, "--dry-run").stdout.count("reuse") == len(stages)
    for path in (f"{FOLDER}/made.csv", "notes.txt", FOLDER):
        gone = command.folder / path
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        first = command(*WORDS, "--dry-run").stdout.splitlines()[0]
        assert re.fullmatch("prepare  run  .* is gone", first)
        assert command(*WORDS, "--only", "prepare").returncode == 0
    assert command(*WORDS, "--dry-run").stdout.count("reuse") == len(stages)
