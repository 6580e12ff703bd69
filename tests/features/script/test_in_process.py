"""`scaleflow.fit` and `callbacks=[scaleflow.Record()]`: Keras trains as it does alone, and a run is recorded."""

from __future__ import annotations

import os
import random
import shutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scaleflow
from scaleflow.errors import ConfigError
from scaleflow.interfaces.events import MetricsLogged, RunReady
from tests.conftest import Command
from tests.features.script.runs import join_histories


def make_model() -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def make_data() -> tuple[Any, Any]:
    rows = np.random.default_rng(0).random((100, 4)).astype("float32")
    return rows, (rows.sum(1) > 2).astype("int32")


def make_failing_callback(error: BaseException) -> Any:
    import keras

    class Fail(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise error

    return Fail()


def train_twice(train: Callable[..., Any]) -> tuple[Any, ...]:
    """Trains a model two times with one seed. Returns what a difference in random numbers would change."""
    import keras

    keras.utils.set_random_seed(3)
    model = make_model()
    x, y = make_data()
    histories = []
    for _ in range(2):
        history = train(model, x, y, epochs=2, batch_size=16, validation_split=0.25, verbose=0)
        histories.append(history.history)
    weights = [weight.tolist() for weight in model.get_weights()]
    drawn = (random.random(), np.random.random(), float(keras.random.uniform(())))
    return histories, weights, drawn, history


def read_store(run_id: str) -> tuple[Any, dict[str, list[tuple[int, float]]], list[str]]:
    """Returns a run of the store, its metrics' points, and its artifacts."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")
    run = client.get_run(run_id)
    points = {}
    for name in run.data.metrics:
        points[name] = [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
    artifacts = [item.path for folder in ("", "provenance/code") for item in client.list_artifacts(run_id, folder)]
    return run, points, artifacts


def compare_with_keras(folder: str) -> dict[str, Any]:
    import keras
    import mlflow

    os.chdir(folder)
    plain = train_twice(lambda model, *data, **named: model.fit(*data, **named))
    fitted = train_twice(scaleflow.fit)
    record = scaleflow.Record()
    recorded = train_twice(lambda model, *data, **named: model.fit(*data, callbacks=[record], **named))
    history = fitted[-1]
    runs = []
    for result in (history.run, record.run):
        run, points, artifacts = read_store(result.run_id)
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        model = mlflow.pyfunc.load_model(result.model_uri)
        answer = model.predict(make_data()[0][:2])
        runs.append((run.data.params, points, artifacts, np.asarray(answer).shape, run.info.status))
    return {
        "is_history": isinstance(history, keras.callbacks.History),
        "plain": plain[:-1],
        "fitted": fitted[:-1],
        "recorded": recorded[:-1],
        "runs": runs,
        "metrics": dict(history.run.metrics),
        "folders": len(list(Path(folder, "outputs").glob("*/*"))),
    }


def check_points(points: Mapping[str, Sequence[tuple[int, float]]], history: Mapping[str, Sequence[float]]) -> None:
    for name, values in join_histories([history]).items():
        assert points[name] == [(5 * (epoch + 1), value) for epoch, value in enumerate(values)]


def test_keras_trains_with_the_same_bits_and_its_history_is_recorded(
    isolated: Callable[..., Any], tmp_path: Path, empty_store: Path
) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    seen = isolated(compare_with_keras, str(tmp_path))
    assert seen["fitted"] == seen["plain"]
    assert seen["recorded"] == seen["plain"]
    assert seen["is_history"]
    assert seen["folders"] == 4
    second = seen["plain"][0][1]
    assert seen["metrics"]["val/loss"] == second["val_loss"][-1]
    (params, points, artifacts, shape, status), (other_params, other_points, _, other_shape, _) = seen["runs"]
    check_points(points, second)
    check_points(other_points, second)
    assert shape == other_shape == (2, 2)
    assert status == "FINISHED"
    assert params["fit.batch_size"] == "16"
    assert params["fit.epochs"] == other_params["fit.epochs"] == "2"
    assert params["loss"] == other_params["loss"] == "sparse_categorical_crossentropy"
    assert (params["optimizer"], params["optimizer.momentum"]) == ("SGD", "0.5")
    assert (params["script.call"], other_params["script.call"]) == ("scaleflow.fit", "scaleflow.Record")
    assert not [name for name in params if name.startswith(("dataset", "model", "strategy"))]
    assert {"environment.txt", "provenance", "config.yaml"} <= {*artifacts}


def end_early(folder: str) -> list[Any]:
    import keras

    os.chdir(folder)
    x, y = make_data()
    seen: list[Any] = []
    for error in (ValueError("no more"), KeyboardInterrupt()):
        name = type(error).__name__
        try:
            words = [f"hydra.run.dir={name}", "tracking=none"]
            scaleflow.fit(
                make_model(), x, y, epochs=3, verbose=0, callbacks=[make_failing_callback(error)], overrides=words
            )
        except BaseException as passed:
            seen.append((passed is error, read_end(name)))
    try:
        scaleflow.fit(make_model(), x, y[:3], verbose=0, overrides=["hydra.run.dir=early", "tracking=none"])
    except ValueError:
        seen.append(Path("early").exists())
    down = ["tracking.uri=http://localhost:1", "hydra.run.dir=down"]
    history = scaleflow.fit(make_model(), x, y, epochs=1, verbose=0, overrides=down)
    seen.append((history.run.status, history.run.run_id, isinstance(history, keras.callbacks.History)))
    Path("file").touch()
    history = scaleflow.fit(make_model(), x, y, epochs=1, verbose=0, overrides=["hydra.run.dir=file/run"])
    seen.append((history.run, len(history.history["loss"])))
    record = scaleflow.Record("hydra.run.dir=file/run")
    history = make_model().fit(x, y, epochs=1, verbose=0, callbacks=[record])
    seen.append((record.run, len(history.history["loss"])))
    return seen


def read_end(folder: str) -> tuple[str | None, str]:
    from scaleflow.runs import RunState

    state = RunState.read(Path(folder))
    return state.status, state.error


def test_recording_never_ends_a_training_and_exceptions_pass_on(
    isolated: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failed, stopped, early, down, blocked, blocked_record = isolated(end_early, str(tmp_path))
    assert failed == (True, ("FAILED", "ValueError: no more"))
    assert stopped == (True, ("KILLED", "stopped by Ctrl-C"))
    assert early is False  # Keras refused the data before the training began
    assert down == ("FINISHED", None, True)
    assert blocked == blocked_record == (None, 1)
    printed = capfd.readouterr().out
    assert printed.count("the store has not received the whole run") == 1
    assert printed.count("the run is not recorded any further, and the training goes on") == 2


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("strategy=mirrored", "`scaleflow train.py strategy=mirrored` runs a script with it"),
        ("precision=mixed", "are set up already"),
        ("training.epochs=3", "the arguments of the fit decide it"),
        ("optimizer=adam", "change model.compile"),
        ("profiler=trace", "it takes tracking.NAME=VALUE, seed=NUMBER"),
        ("seed", "expected KEY=VALUE"),
        ("tracking.nothing=1", "no such key"),
    ],
)
def test_words_that_cannot_apply_are_refused(word: str, reason: str) -> None:
    from scaleflow.features.script.local_run import read_settings

    with pytest.raises(ConfigError) as refusal:
        read_settings([word], "fit(overrides=...)")
    assert reason in str(refusal.value)
    assert read_settings(["tracking=none", "seed=4"], "fit(overrides=...)").seed == 4


def test_a_run_that_cannot_be_recorded_further_has_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from scaleflow.features.script.local_run import LocalRun, read_settings

    settings = read_settings(["tracking=none", f"hydra.run.dir={tmp_path}/run"], "Record(...)")
    run = LocalRun(settings, 1, lambda folder: None)
    run.emit(RunReady("name"))
    run.give_up(OSError("the disk is full"))
    run.give_up(OSError("again"))
    run.emit(MetricsLogged(1, {"train/loss": 1.0}))
    result = run.finish("FINISHED")
    assert result is not None
    assert (result.status, dict(result.metrics)) == ("FINISHED", {})
    assert not run.is_open
    assert capsys.readouterr().out.count("the disk is full") == 1


PROGRAM = """
import keras
import numpy as np

import scaleflow

UNITS = 3
keras.utils.set_random_seed(1)
x = np.arange(32, dtype="float32").reshape(16, 2)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(UNITS)

    def call(self, inputs):
        return self.layer(inputs)


class Fail(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError("the callback fails")


model = Own()
model.compile("sgd", "mse")
history = scaleflow.fit(model, x, x[:, :1], epochs=2, verbose=0)
print("run", history.run is not None)
model.fit(x, x[:, :1], verbose=0, callbacks=[scaleflow.Record(), Fail()])
"""


def test_a_program_and_a_script_record_each_training_once(command: Command) -> None:
    (command.folder / "train.py").write_text(PROGRAM)
    ended = command.python("train.py")
    assert "RuntimeError: the callback fails" in ended.stderr
    assert "run True" in ended.stdout
    folders = sorted((command.folder / "outputs").glob("*/*"))
    ends = [read_end(str(folder)) for folder in folders]
    assert ends == [("FINISHED", ""), ("FAILED", "RuntimeError: the callback fails")]
    code = folders[0] / "provenance" / "code" / "train.py"
    assert "class Own" in code.read_text()
    run_id = scaleflow.api.read_result(folders[0]).run_id
    for words in (("rerun", run_id), ("evaluate", run_id), (f"resume={folders[0]}",)):
        refused = command(*words)
        assert refused.returncode == 2, refused.stdout
        assert "run" in refused.stderr
    script = command("train.py", "hydra.run.dir=script")
    assert "run False" in script.stdout
    assert read_end(str(command.folder / "script"))[0] == "FAILED"
    assert len(sorted((command.folder / "outputs").glob("*/*"))) == 2


CELLS = [
    "import keras, numpy as np, scaleflow\nx = np.ones((8, 2), 'float32')",
    "class Own(keras.layers.Layer):\n    def call(self, inputs):\n        return 2 * inputs",
    "model = keras.Sequential([keras.Input((2,)), Own(), keras.layers.Dense(1)])\nmodel.compile('sgd', 'mse')",
    "history = scaleflow.fit(model, x, x[:, :1], verbose=0, overrides=['hydra.run.dir=first', 'tracking=none'])",
    "class Fail(keras.callbacks.Callback):\n    def on_epoch_end(self, epoch, logs=None):\n        raise OSError(1)",
    "record = scaleflow.Record('hydra.run.dir=second', 'tracking=none')\n"
    "model.fit(x, x[:, :1], verbose=0, callbacks=[record, Fail()])",
    "status = record.run.status, record.run.error",
]


class Shell:
    """A shell with the parts of IPython's that are used: its cells, and its event after each cell."""

    def __init__(self) -> None:
        self.events = self
        self.hooks: list[Any] = []
        self.user_ns: dict[str, Any] = {"In": [""], "__name__": "__main__"}

    def register(self, event: str, function: Any) -> None:
        assert event == "post_run_cell"
        self.hooks.append(function)

    def unregister(self, event: str, function: Any) -> None:
        self.hooks.remove(function)

    def run_cell(self, cell: str) -> None:
        result = types.SimpleNamespace(error_before_exec=None, error_in_exec=None)
        self.user_ns["In"].append(cell)
        try:
            exec(cell, self.user_ns)
        except Exception as error:
            result.error_in_exec = error
        for hook in list(self.hooks):
            hook(result)


def run_cells(folder: str) -> tuple[Any, ...]:
    os.chdir(folder)
    shell = Shell()
    sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)  # type: ignore[assignment]
    for cell in CELLS:
        shell.run_cell(cell)
    code = Path("first", "provenance", "code", "notebook_cells.py").read_text()
    return shell.user_ns["history"].run.status, shell.user_ns["status"], code, len(shell.hooks)


def test_a_notebook_records_classes_of_its_cells_and_errors(isolated: Callable[..., Any], tmp_path: Path) -> None:
    status, failed, code, hooks = isolated(run_cells, str(tmp_path))
    assert status == "FINISHED"
    assert failed == ("FAILED", "OSError: 1")
    assert CELLS[1] in code
    assert hooks == 0
