"""`debug`: what each option lets one see, on a run of a few steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Arrays, Batching, Inputs, Outputs, Stream
from scaleflow.interfaces.events import CheckpointSaved, Event, FaultReported, MetricsLogged, ModelExported, RunEnded
from scaleflow.runs import RunSpec
from scaleflow.worker.tasks import TrainModel

BASE = ("hardware=cpu", "tracking=none", "dataset.limit=100", "dataset.validation=0.2", "model.units=8")
SIZE = "training.global_batch_size=16"  # 80 examples make 5 steps
TWO = ("strategy=mirrored", "hardware.logical_devices=2")


def train(plan: Any, folder: str) -> list[Event]:
    """All events of a worker."""
    from scaleflow.worker.process import run_worker

    events: list[Event] = []
    run_worker(RunSpec(plan, Path(folder), time.time(), TrainModel()), events.append, bool)
    return events


def points(events: list[Event], key: str) -> list[tuple[int, float]]:
    return [(e.step, e.values[key]) for e in events if isinstance(e, MetricsLogged) and key in e.values]


def test_overfit_trains_on_one_batch_and_validates_on_it(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    made = plan(*BASE, SIZE, "debug=overfit", "training.epochs=20", "optimizer.learning_rate=0.03", "checkpoint=none")
    events = isolated(train, made, str(tmp_path))
    assert points(events, "val/loss")[-1][0] == 100  # an epoch is as long as it was
    assert points(events, "val/accuracy")[-1] == (100, 1.0)
    assert points(events, "val/loss")[-1][1] < 0.05
    assert not points(events, "test/loss")
    assert not points(events, "val/accuracy_low"), "no report of examples that are not those of the split"


def test_fast_takes_one_step_of_everything(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    events = isolated(train, plan(*BASE, SIZE, "debug=fast", "training.steps_per_loop=7"), str(tmp_path))
    for key in ("train/loss", "val/loss", "test/loss"):
        assert [step for step, _ in points(events, key)] == [1], key
    kinds = [type(event) for event in events]
    assert CheckpointSaved in kinds
    assert kinds.index(ModelExported) < kinds.index(RunEnded)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status == "FINISHED"


@pytest.mark.parametrize("engine", ["loop", pytest.param("fit", marks=pytest.mark.slow)])
def test_nan_names_the_operation(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, engine: str
) -> None:
    wild = ("optimizer=sgd", "optimizer.learning_rate=1e30", f"training.engine={engine}")
    events = isolated(train, plan(*BASE, SIZE, "debug='nan'", *wild), str(tmp_path))
    (error,) = (event.error for event in events if isinstance(event, FaultReported))
    assert error.startswith("debug.nan: the operation ")
    assert "/MatMul returned NaN or Inf; " in error


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_wrong(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    events = isolated(train, plan(*BASE, SIZE, *TWO, "debug='nan'", "training.epochs=1"), str(tmp_path))
    assert events[-1] == RunEnded("FINISHED", time=events[-1].time)


def eager_and_compiled(eager: Any, compiled: Any) -> tuple[list[float], list[float], bool]:
    """The losses of both, and whether the model saw values as Python came to it."""
    import tensorflow as tf

    from scaleflow.worker.build import build_training
    from tests.training.fake_engine import ignore, take

    losses = [take(built.engine, built.feeds.train, 4).losses for built in [build_training(compiled, ignore)]]
    built = build_training(eager, ignore)
    seen: list[bool] = []
    inner = built.engine.model.call
    built.engine.model.call = lambda *a, **k: (seen.append(tf.executing_eagerly()), inner(*a, **k))[1]
    losses.append(take(built.engine, built.feeds.train, 4).losses)
    return losses[0], losses[1], bool(seen) and all(seen)


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=one_device",),
        pytest.param(("strategy=pipeline", "hardware.logical_devices=2", "model.units=[8,8]"), marks=pytest.mark.slow),
    ],
)
def test_eager_takes_the_same_steps_uncompiled(
    isolated: Callable[..., Any], plan: Callable[..., Any], words: tuple[str, ...]
) -> None:
    base = (word for word in BASE if "units" not in word or "pipeline" not in words[0])
    common = (*base, SIZE, *words, "training.accumulate=2")
    compiled, eager, was_eager = isolated(eager_and_compiled, plan(*common, "debug=eager"), plan(*common))
    np.testing.assert_allclose(eager, compiled, rtol=1e-5)
    assert was_eager or words[0] == "strategy=pipeline"  # whose stages call the layers themselves


def test_placement_goes_to_the_workers_log(command: Any) -> None:
    small = ("tracking=none", "checkpoint=none", "hardware=cpu", "dataset.limit=50", "training.max_steps=1")
    done = command(*small, "debug=placement")
    log = command.run_folder() / "worker-0.log"
    assert f"debug.placement: the device of each operation is in {log}" in done.stdout
    assert "(MatMul): /job:localhost/replica:0/task:0/device:CPU:0" in log.read_text()


def overfitted() -> tuple[int, list[list[int]]]:
    import tensorflow as tf

    from scaleflow.dataset import Splits, repeat_first_batch
    from scaleflow.dataset.batches.feeds import ShuffledOrder
    from scaleflow.dataset.batches.orders import Permutation
    from scaleflow.dataset.batches.records import make_records
    from scaleflow.dataset.batches.rows import to_rows

    stream = to_rows(Stream(tf.data.Dataset.range(10).map(lambda i: (i, i)), 10))
    arrays = to_rows(Arrays(np.arange(10), np.arange(10)))
    described = Inputs((), "int64"), Outputs("regression", (1,)), np.arange(2)
    from_stream = repeat_first_batch(Splits(stream, None, None, *described), Batching(2, 2, 1))
    from_arrays = repeat_first_batch(Splits(arrays, arrays, arrays, *described), Batching(2, 2, 1))
    assert isinstance(from_stream.train, Stream)
    assert isinstance(from_arrays.train, Arrays)
    seen = [int(x) for x, _ in from_stream.train.dataset.as_numpy_iterator()]
    in_memory = make_records(stream, (tf.range(10), tf.range(10)))
    from_memory = repeat_first_batch(Splits(in_memory, None, None, *described), Batching(2, 2, 1)).train
    read = ShuffledOrder(from_memory, None, None, Permutation(12)).examples(
        tf.constant(0, tf.int64), tf.constant(0, tf.int64), 12
    )
    read_by_index = [int(x) for x, _ in read.as_numpy_iterator()]
    return len(from_stream.train), [seen, read_by_index, from_arrays.train.inputs.tolist()]


def test_a_stream_repeats_its_first_batch_as_arrays_do(isolated: Callable[..., Any]) -> None:
    length, examples = isolated(overfitted)
    assert length == 12
    assert examples == [[0, 1, 2, 3] * 3] * 3
