"""A script that was interrupted: `resume` continues its run, with the bits of one that was not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command

#: Three fits. A callback ends the process, or waits for a request to stop, at batches that no earlier process reached.
TRAIN = """
import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

DATA = "arrays"
SIGNALS = [[0, 0]]  # each is a batch and a signal; 0: wait for the request to stop

class Interrupt(keras.callbacks.Callback):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers
        self.drawn = drawn

    def on_train_batch_end(self, batch, logs=None):
        count = len(self.numbers) + 1
        self.numbers.append(count)
        for at, number in SIGNALS:
            mark = Path(f"sent-{at}")
            if count == at and not mark.exists():
                mark.touch()
                if number:
                    os.kill(os.getpid(), number)
                while not Path("go-on").exists():
                    time.sleep(0.05)
                time.sleep(3)  # the request to stop arrives

    def on_epoch_end(self, epoch, logs=None):
        if DATA in ("arrays", "tf.data"):  # other data draws from the same generator, ahead of the training
            drawn.append(float(np.random.rand() + tf.random.uniform([])))

drawn = []

keras.utils.set_random_seed(7)
x = np.random.rand(96, 4).astype("float32")
y = (x.sum(1) > 2).astype("int32")

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        return x[number * 16 : number * 16 + 16], y[number * 16 : number * 16 + 16]

def draw_batches():
    generator = np.random.default_rng(3)  # NumPy's global one would depend on how far the data is read ahead
    while True:
        places = generator.integers(0, 96, 16)
        yield x[places], y[places]

def add_noise(row, target):
    return row + tf.random.normal([4]) * 0.1, target

if DATA == "arrays":
    data = {"x": x, "y": y, "batch_size": 16, "validation_split": 0.25}
elif DATA == "tf.data":
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96).map(add_noise).batch(16)
    data = {"x": rows, "validation_data": rows.take(2)}
elif DATA == "generator":
    data = {"x": draw_batches(), "steps_per_epoch": 5, "validation_data": (x, y)}
else:
    data = {"x": Batches(), "validation_data": (x, y)}

model = keras.Sequential([
    keras.layers.Dense(8, activation="relu"),
    keras.layers.Dropout(0.3),
    keras.layers.BatchNormalization(),
    keras.layers.Dense(2, activation="softmax"),
])
model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
numbers = []
slower = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5)
interrupt = Interrupt(numbers)
first = model.fit(epochs=3, callbacks=[interrupt, slower], **data)
between = model.evaluate(x, y)
model.layers[0].trainable = False
rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
model.compile(keras.optimizers.SGD(rate, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
early = keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=10, restore_best_weights=True)
second = model.fit(x, y, epochs=5, callbacks=[interrupt, early])
third = model.fit(x, y, epochs=1)
results = {
    "histories": [fit.history for fit in (first, second, third)],
    "between": between,
    "batches": len(numbers),
    "drawn": [*drawn, float(np.random.rand()), float(tf.random.normal([])), float(keras.random.normal([]))],
    "weights": [np.sum(weights) for weights in model.get_weights()],
}
Path(sys.argv[1]).write_text(json.dumps(results, default=float))
"""


def wait_for(condition: Callable[[], bool], timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_store(folder: str) -> dict[str, Any]:
    """What the store has of the only run there."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    client = mlflow.MlflowClient()
    steps = {}
    for name in ("train/loss", "val/accuracy", "evaluate_1/loss"):
        steps[name] = [point.step for point in client.get_metric_history(run.info.run_id, name)]
    return {"status": run.info.status, "steps": steps}


def test_a_killed_and_a_stopped_script_have_the_bits_of_one_that_was_not(
    command: Command, isolated: Callable[..., Any], empty_store: Path
) -> None:
    (command.folder / "train.py").write_text(TRAIN)
    (command.folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    plain = command.cold("train.py", "plain.json")
    assert plain.returncode == 0, plain.stderr
    words = ("tracking.uri=sqlite:///mlflow.db", "checkpoint.every_seconds=0.00001", "hydra.run.dir=run")
    # Batches 1 to 15 are those of the first fit, and 16 to 21 those of the second one.
    killed = command("train.py", "script.SIGNALS=[[8,9],[17,0]]", *words, "--", "resumed.json")
    assert killed.returncode == 1, killed.stdout
    assert "resume=run" in killed.stdout
    with command.start("resume=run") as stopped:
        wait_for(lambda: (command.folder / "sent-17").exists() or stopped.poll() is not None)
        stopped.terminate()
        (command.folder / "go-on").touch()
        _, errors = stopped.communicate(timeout=240)
    assert stopped.returncode == 143, errors
    finished = command("resume=run")
    assert finished.returncode == 0, finished.stderr
    results = [json.loads((command.folder / name).read_text()) for name in ("plain.json", "resumed.json")]
    assert results[0] == results[1]
    stored = isolated(read_store, str(command.folder))
    assert stored["status"] == "FINISHED"
    assert stored["steps"] == {
        "train/loss": [5, 10, 15, 18, 21, 24],
        "val/accuracy": [5, 10, 15],
        "evaluate_1/loss": [15],
    }
    assert not (command.folder / "run" / "checkpoints").exists()
    again = command("resume=run")
    assert again.returncode == 0
    assert "the run is finished" in again.stdout
    assert "rerun run runs it again" in again.stdout


def test_a_script_that_was_edited_is_not_resumed_in_silence(command: Command) -> None:
    script = command.folder / "train.py"
    script.write_text(TRAIN)
    killed = command("train.py", "script.SIGNALS=[[8,9]]", "tracking=none", "hydra.run.dir=run", "--", "a.json")
    assert killed.returncode == 1, killed.stdout
    script.write_text(TRAIN.replace("Dropout(0.3)", "Dropout(0.4)"))
    refused = command("resume=run")
    assert refused.returncode == 2
    assert "the code is not what the run was trained with: train.py" in refused.stderr
    assert command("train.py", "resume=run").returncode == 2
    script.unlink()
    gone = command("resume=run", "resume_code=changed")
    assert gone.returncode == 2
    assert "its script train.py is not here" in gone.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "number", "setting"),
    [
        ("tf.data", 3, ()),
        ("tf.data", 11, ("strategy=mirrored", "hardware.logical_devices=2")),
        ("generator", 8, ()),
        ("PyDataset", 14, ()),
    ],
)
def test_every_kind_of_data_continues_with_the_same_bits(
    command: Command, data: str, number: int, setting: tuple[str, ...]
) -> None:
    (command.folder / "train.py").write_text(TRAIN)
    words = ("tracking=none", f"script.DATA={data}", *setting)
    plain = command("train.py", *words, "--", "plain.json")
    assert plain.returncode == 0, plain.stderr
    saving = ("checkpoint.every_seconds=0.00001", "hydra.run.dir=run")
    killed = command("train.py", *words, f"script.SIGNALS=[[{number},9]]", *saving, "--", "resumed.json")
    assert killed.returncode == 1, killed.stdout
    finished = command("resume=run")
    assert finished.returncode == 0, finished.stderr
    results = [json.loads((command.folder / name).read_text()) for name in ("plain.json", "resumed.json")]
    assert results[0] == results[1]


def restore_callback() -> tuple[list[float], float]:
    """Restores the attributes of a callback, one of which is a list that the script has as well."""
    import pickle
    from types import SimpleNamespace

    from scaleflow.features.script.fit_state import restore_attributes

    losses: list[float] = []
    callback = SimpleNamespace(losses=losses, best=0.0)
    restore_attributes(callback, {"losses": pickle.dumps([0.5]), "best": pickle.dumps(0.5), "gone": b"no pickle"})
    return losses, callback.best


def test_a_list_of_a_callback_stays_the_one_that_the_script_has(isolated: Callable[..., Any]) -> None:
    assert isolated(restore_callback) == ([0.5], 0.5)
