"""`scaleflow rerun` and `scaleflow.evaluate` on runs that were really tracked."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.formatting import format_number
from tests.conftest import Command

OWN = """
import keras

from scaleflow.model import mlp


@keras.saving.register_keras_serializable("test_of_ours")
class Doubled(keras.layers.Layer):
    def call(self, inputs):
        return 2.0 * inputs


def build(inputs, outputs, units, api_key):
    assert api_key == "hunter2-planted"
    made = mlp.build(inputs, outputs, units)
    own = keras.Input(inputs.shape)
    return keras.Model(own, made(Doubled()(own)))
"""

INLINE = ("debug=inline", "hardware=cpu")


def said(command: Callable[[list[str]], int], *words: str) -> tuple[int, str]:
    """(exit code, what was printed)."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = command(list(words))
    return code, printed.getvalue()


def runs_of_an_own_model(folder: str) -> dict[str, Any]:
    """A run with code and a secret of its user's; what comes of it afterwards."""
    import keras
    from mlflow import MlflowClient

    import scaleflow
    from scaleflow import evaluate
    from scaleflow.features.compare import rerun

    os.chdir(folder)
    Path("own/model").mkdir(parents=True)
    Path("own/own_net.py").write_text(OWN)
    Path("own/model/mine.yaml").write_text(
        "_target_: own_net.build\n_partial_: true\nunits: [8]\napi_key: hunter2-planted\n"
    )
    first = scaleflow.run("model=mine", "training.epochs=2", *INLINE, config_dir="own")
    assert first.run_id is not None
    trust, here = ("--trust", "own_net"), ("--config-dir", "own")
    told: dict[str, Any] = {"first": first}
    told["untrusted"] = said(rerun.main, first.run_id, *here)
    told["masked"] = said(rerun.main, first.run_id, *trust)
    told["again"] = said(rerun.main, first.run_id, *here, *trust, "hydra.run.dir=again", "checkpoint=none")
    told["evaluated"] = said(evaluate.main, first.run_id, *trust, *INLINE)
    window = ("profiler=trace", "profiler.start_step=3", "profiler.steps=2")
    told["profiled"] = said(evaluate.main, first.run_id, *trust, *INLINE, *window)
    told["other_shape"] = said(evaluate.main, first.run_id, *trust, *INLINE, "dataset=synthetic")
    told["other_targets"] = said(
        evaluate.main, first.run_id, *trust, *INLINE, "dataset=synthetic", "dataset.shape=[8,8,1]", "dataset.outputs=12"
    )
    told["no_split"] = said(
        evaluate.main, first.run_id, *trust, *INLINE, "--split", "validation", "dataset.validation=0"
    )
    keras.saving.get_custom_objects().clear()  # as in a process that has not built it
    told["not_trusted"] = said(evaluate.main, first.run_id, *INLINE)
    told["shards"] = said(evaluate.main, first.run_id, *trust, *INLINE, "dataset.shards=2")
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("scaleflow").experiment_id])
    told["runs"] = [
        (
            run.info.run_id,
            run.data.tags,
            run.data.metrics,
            run.data.params,
            [d.dataset.name for d in run.inputs.dataset_inputs],
        )
        for run in runs
    ]
    told["artifacts"] = [a.path for a in client.list_artifacts(first.run_id, "evaluate/digits")]
    told["profile"] = [a.path for a in client.list_artifacts(first.run_id, "evaluate/digits/profile")]
    told["left"] = sorted(path.name for path in Path().iterdir())
    return told


@pytest.mark.slow
def test_an_own_model_is_run_again_and_evaluated(isolated: Callable[..., Any], tmp_path: Path) -> None:
    told = isolated(runs_of_an_own_model, str(tmp_path), timeout=280)
    first = told["first"]
    code, text = told["untrusted"]
    assert code == 2
    assert "scaleflow: model._target_=own_net.build: this code is not trusted" in text
    assert "--trust own_net" in text
    code, text = told["masked"]
    assert code == 2
    assert "scaleflow: model.api_key: the tracked value is a masked secret; type the value" in text
    code, text = told["again"]
    assert code == 0, text
    runs = {run[0]: run[1:] for run in told["runs"]}
    assert len(runs) == 2, "a refusal leaves no run"
    tags, metrics, _, inputs = runs.pop(first.run_id)
    (other,) = runs.values()
    assert other[0]["scaleflow.rerun_of"] == first.run_id
    assert other[0]["scaleflow.folder"] == str(tmp_path / "again")
    assert other[1]["test/loss"] == pytest.approx(metrics["test/loss"])
    assert (other[2]["model"], other[2]["model.api_key"], other[2]["trusted_modules"]) == (
        "mine",
        "****",
        '["own_net"]',
    )
    kept = "".join(path.read_text() for path in (tmp_path / "again").glob("*.yaml"))
    assert "hunter2" not in kept

    code, text = told["evaluated"]
    assert code == 0, text
    assert metrics["evaluate/digits/loss"] == pytest.approx(metrics["test/loss"], rel=1e-5)
    assert metrics["evaluate/digits/accuracy"] == metrics["test/accuracy"]
    assert ["evaluate/digits/accuracy", format_number(metrics["test/accuracy"])] in [
        line.split()[:2] for line in text.splitlines()
    ]
    assert tags["scaleflow.evaluate.digits"].startswith("359 examples of test, one_device, float32, 1 replica(s)")
    assert tags["scaleflow.status"] == "FINISHED"
    own = [f"evaluate/digits/confusion_matrix.{kind}" for kind in ("csv", "svg")]
    assert {*own, "evaluate/digits/profile", "evaluate/digits/report.html"} <= set(told["artifacts"])
    assert set(inputs) == {"digits"}
    code, text = told["not_trusted"]
    assert code == 2
    assert "its model cannot be loaded" in text
    assert "add --trust MODULE" in text
    code, text = told["shards"]
    assert code == 2
    assert "dataset.shards: an evaluation reads all files in one process; leave it out" in text
    code, text = told["other_shape"]
    assert code == 2
    assert "dataset=synthetic: has inputs of shape (batch, 32, 32, 3), float32, but the model of" in text
    assert "needs shape (batch, 8, 8, 1), float32" in text
    code, text = told["other_targets"]
    assert code == 2
    assert "targets of 'train' have 10 (example " in text
    assert "expected a class of the training split (0, 1, 2" in text
    code, text = told["profiled"]
    assert code == 0, text
    assert "profile  " in text
    assert "steps 3 to 4: " in text
    assert metrics["evaluate/digits/profile/step_ms"] > 0
    made = {path.removeprefix("evaluate/digits/profile/") for path in told["profile"]}
    assert {"summary.json", "summary.md", "profile.svg", "trace.json.gz", "plugins"} <= made
    code, text = told["no_split"]
    assert code == 2
    assert "--split validation: there is no such split; the splits are test, train" in text
    assert told["left"] == ["again", "mlartifacts", "mlflow.db", "mlflow.db.lock", "outputs", "own"]


def rows(path: str, count: int, first: int) -> None:
    colours = ("red", "green", "blue")
    lines = [
        f"{colours[n % 3]},{n % 7},{'' if n % 5 == 0 else n % 11},{'yes' if n % 3 else 'no'}"
        for n in range(first, first + count)
    ]
    Path(path).write_text("colour,size,weight,answer\n" + "\n".join(lines) + "\n")


def runs_of_a_table(folder: str) -> dict[str, Any]:
    """A model that takes rows of text, evaluated on rows that it has not seen."""
    import scaleflow
    from scaleflow import evaluate

    os.chdir(folder)
    rows("train.csv", 200, 0)
    rows("new.csv", 90, 1)
    data = ("dataset=csv", "dataset.data_dir=train.csv", "dataset.target=answer")
    first = scaleflow.run(*data, "training.epochs=1", *INLINE)
    assert first.run_id is not None
    same = said(evaluate.main, first.run_id, *INLINE)
    new = said(
        evaluate.main, first.run_id, *INLINE, *data[:1], "dataset.data_dir=new.csv", *data[2:], "--split", "train"
    )
    return {"first": first, "same": same, "new": new}


@pytest.mark.slow
def test_a_model_takes_raw_rows_and_several_replicas_count_each_once(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    told = isolated(runs_of_a_table, str(tmp_path), timeout=240)
    code, text = told["same"]
    assert code == 0, text
    metrics = told["first"].metrics
    for name in ("accuracy", "loss"):
        assert [f"evaluate/csv/{name}", format_number(metrics[f"test/{name}"])] in [
            line.split()[:2] for line in text.splitlines()
        ]
    code, text = told["new"]
    assert code == 0, text
    assert "evaluate/csv.train/loss" in text
    words = ("strategy=mirrored", "hardware.logical_devices=2", "precision=mixed_bfloat16")
    ended = run_named(tmp_path, "evaluate", told["first"].run_id, *words)
    assert ended.returncode == 0, ended.stderr
    assert "40 examples of test, mirrored, mixed_bfloat16, 2 replica(s)" in ended.stdout
    (loss,) = (float(line.split()[-1]) for line in ended.stdout.splitlines() if line.startswith("evaluate/csv/loss"))
    assert loss == pytest.approx(metrics["test/loss"], rel=0.02)


def run_named(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return Command(folder).python("-m", "scaleflow", name, *words)


UNKNOWN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("module", ["scaleflow.features.compare.rerun", "scaleflow.evaluate"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["abc"], "abc: expected the id of a run in MLflow (32 hexadecimal digits), the folder of a run, models:"),
        ([UNKNOWN], "there is no such store; set tracking.uri=... to the store that has the run"),
        ([UNKNOWN, "tracking.uri=http://127.0.0.1:9"], "no tracking server answers there"),
        ([UNKNOWN, "tracking.uri=a", "seed=1,2"], "MLflow 3 does not store runs in plain folders"),
    ],
)
def test_without_a_run_there_is_a_line(
    module: str, words: Sequence[str], expected: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert importlib.import_module(module).main(list(words)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert expected in shown.err
    assert list(tmp_path.iterdir()) == []
