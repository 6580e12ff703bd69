"""A run that is resumed, or repeated, after its data or its code changed. All in one process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from scaleflow.runs import RunFolder
from scaleflow.runs.provenance.record import Provenance, read_data_files, read_states
from tests.processes import call

MODEL = """
import keras

def build(inputs, outputs):
    given = {name: keras.Input(each.shape, name=name) for name, each in inputs.items()}
    joined = keras.layers.Concatenate()(list(given.values()))
    return keras.Model(given, keras.layers.Dense(1)(joined))
"""


def write_table(rows: int, first_income: int) -> None:
    """Writes a table whose first row is of the training split."""
    values = [(20 + n % 50, first_income if n == 0 else 1000 + 7 * n, n % 90) for n in range(rows)]
    Path("house.csv").write_text("age,income,price\n" + "".join(f"{a},{b},{c}\n" for a, b, c in values))


def run_and_change(folder: str) -> dict[str, Any]:
    """What the commands say and do that resume or repeat a run, by what changed before each."""
    import scaleflow
    from scaleflow import ConfigError
    from scaleflow.features.compare import rerun
    from scaleflow.features.pipelines.ledger import describe_longer_runs
    from scaleflow.runs.run import Run

    os.chdir(folder)
    Path("own/model").mkdir(parents=True)
    Path("own/nets.py").write_text(MODEL)
    Path("own/model/mine.yaml").write_text("_target_: nets.build\n_partial_: true\n")
    found: dict[str, Any] = {}

    def attempt(name: str, *words: str) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                scaleflow.run("hardware=cpu", "debug=inline", "evaluation=none", *words, config_dir="own")
            except ConfigError as error:
                print(error)
        found[name] = printed.getvalue()

    write_table(400, 1000)
    os.environ["LR"] = "0.002"
    attempt("first", "optimizer.learning_rate='${oc.decode:${oc.env:LR}}'",
             "dataset=table", "dataset.data_dir=house.csv", "dataset.target=price", "dataset.kind=regression",
            "model=mine", "training.epochs=2", "hydra.run.dir=run")  # fmt: skip
    found["files"] = read_data_files(RunFolder(Path("run")))
    os.environ["LR"] = "0.5"
    write_table(400, 1001)
    Path("own/nets.py").write_text(f"# a comment\n{MODEL}")
    attempt("a value", "resume=run", "training.epochs=3")
    again = ("hydra.run.dir=again", "--trust", "nets", "--trust", "./", "--config-dir", "own")
    run_id = json.loads(Path("run/record.json").read_text())["run_id"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        rerun.main([run_id, *again])
    found["rerun"] = printed.getvalue()
    write_table(500, 1001)
    attempt("rows", "resume=run", "training.epochs=3")
    Path("own/nets.py").write_text(MODEL.replace("Dense(1)", "Dense(1, use_bias=True)"))
    attempt("code", "resume=run", "training.epochs=3", "resume_data=changed")
    attempt("finished", "resume=run")
    attempt("allowed", "resume=run", "training.epochs=3", "resume_data=changed", "resume_code=changed")
    attempt("no more", "resume=run", "training.epochs=4")
    attempt("shorter", "resume=run", "training.epochs=1", "resume_data=changed", "resume_code=changed")
    attempt("a wrong word", "resume=run", "resume_data=any")
    files = RunFolder(Path("run"))
    found["states"] = read_states(files)
    run = Run.find("run")
    found["now"] = (run.config["training"]["epochs"], run.settings["training.epochs"], run.params["training.epochs"])
    found["store"] = (run.tracked.data.tags["scaleflow.training.epochs"], run.tracked.data.tags["mlflow.note.content"])
    found["pipeline"] = describe_longer_runs(str(Path("run").absolute()))
    found["copies"] = [
        files.kept_code(number).joinpath("nets.py").read_text() for number in (0, found["states"][-1].resume)
    ]
    found["again"] = Path("again/events.jsonl").read_text().splitlines()
    found["events"] = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    told: dict[str, Any] = call(run_and_change, str(tmp_path_factory.mktemp("changes")))
    return told


def test_changed_data_is_refused_by_split_and_file(found: dict[str, Any]) -> None:
    assert found["files"].keys() == {"house.csv"}
    words = (
        ": the data is not what the run was trained on: {}; restore it, or add resume_data=changed to continue with it"
    )
    assert (
        words.format("values of train changed (288 examples as before); files: house.csv changed") in found["a value"]
    )
    counts = (
        "train had 288 examples and has 360; validation had 32 examples and has 40; test had 80 examples and has 100"
    )
    assert words.format(f"{counts}; files: house.csv changed") in found["rows"]
    assert "resume_data=any: expected one of same, changed" in found["a wrong word"]


def test_a_run_continues_with_changed_data_and_code_if_asked_to(found: dict[str, Any]) -> None:
    assert "note: resume_data=changed: train had 288 examples and has 360" in found["allowed"]
    assert "note: resume_code=changed: nets.py changed" in found["allowed"]
    assert "FINISHED" in found["allowed"]
    assert "FINISHED" in found["no more"]  # what the run was last trained with counts
    assert "resume_data=changed" not in found["no more"]
    assert "resume_code=changed" not in found["no more"]
    epochs = [(event["epoch"], event["step"]) for event in found["events"] if event["event"] == "epoch"]
    assert epochs[:4] == [(1, 9), (2, 18), (3, 30), (4, 42)]  # 9 steps in an epoch, then 12
    tags = [event["values"] for event in found["events"] if event["event"] == "tags"]
    lengths = [{"scaleflow.training.epochs": "3"}, {"scaleflow.training.epochs": "4"}]
    assert tags == [lengths[0], {"scaleflow.resume_data": "changed"}, {"scaleflow.resume_code": "changed"}, lengths[1]]


def test_the_environment_is_that_of_the_first_command(found: dict[str, Any]) -> None:
    note = "note: optimizer.learning_rate=0.002 as when the run began; ${oc.decode:${oc.env:LR}} is 0.5 here"
    assert note in found["allowed"]
    rates = [event["params"]["optimizer.learning_rate"] for event in found["events"] if event["event"] == "ready"]
    assert rates == ["0.002"] * 3
    assert "FINISHED" in found["rerun"]  # its interpolation is not one of this machine's options
    again = [json.loads(line) for line in found["again"] if '"ready"' in line]
    assert again[0]["params"]["optimizer.learning_rate"] == "0.002"


def test_a_longer_run_is_known_with_its_length_of_now(found: dict[str, Any]) -> None:
    assert found["now"] == (4, "4", "2")  # its config, the settings that `diff` compares, the params
    tag, description = found["store"]
    assert tag == "4"
    assert "Resumed with `training.epochs=4`: the params have the length with which the run began." in description
    assert "training.epochs=8" in description  # to train it longer
    assert found["pipeline"] == "run was resumed with training.epochs=4"


def test_a_length_below_what_is_trained_is_refused(found: dict[str, Any]) -> None:
    assert "training.epochs=1: the run has trained " in found["shorter"]
    assert re.search(r"name at least \d, or leave it out", found["shorter"])


def test_changed_code_is_refused_by_file(found: dict[str, Any]) -> None:
    assert "the code is not what the run was trained with: nets.py changed; restore it" in found["code"]
    assert "resume_code=changed to continue" in found["code"]
    assert "the code" not in found["finished"]


def test_rerun_says_that_the_data_is_another(found: dict[str, Any]) -> None:
    text = "note: rerun: the data is not that of the first run: values of train changed (288 examples as before)"
    assert text in found["rerun"]
    assert found["rerun"].index(text) < found["rerun"].index("epoch 1/")
    assert "FINISHED" in found["rerun"]


def test_the_record_keeps_what_the_run_began_with_and_adds_what_changed(found: dict[str, Any]) -> None:
    first, second = (state for state in found["states"] if isinstance(state, Provenance))
    assert (first.resume, second.resume) == (0, 1)  # a refused command does not count
    assert first.packages == second.packages
    assert first.code.modules["nets.py"] != second.code.modules["nets.py"]
    assert found["copies"] == [MODEL, MODEL.replace("Dense(1)", "Dense(1, use_bias=True)")]
    examples = [state.data["splits"]["train"]["examples"] for state in (first, second)]
    assert examples == [288, 360]
    assert first.data["files"]["house.csv"][0] != second.data["files"]["house.csv"][0]
    assert first.data["splits"]["train"]["inputs"].keys() == {"age", "income"}
