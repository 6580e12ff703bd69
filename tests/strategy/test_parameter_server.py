"""A coordinator, workers and parameter servers, as real processes on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from scaleflow.interfaces import Partitioner
from tests.conftest import Command
from tests.launcher.test_supervisor import LongRun, assert_all_points_are_kept, only_run, wait_for
from tests.strategy.test_multi_worker import CPU, SAME, course

SERVED = ("strategy=parameter_server", "evaluation=none", *CPU)
ALONE = ("strategy=parameter_server", "cluster.workers=1", "evaluation=none")
IN_SHARDS = (
    *ALONE,
    "cluster.servers=2",
    "strategy.partitioner.max_shards=3",
    "strategy.partitioner.min_shard_bytes=null",
)
NORMALIZED = ("model=cnn", "model.batch_norm=true", "training.accumulate=2")

#: Epochs of 9 steps, of which each takes a worker a fifth of a second until there is a file `go`. A call of 9 steps is
#: divided into portions of 2.
SLOW = (
    *("dataset.examples=400", "training.steps_per_loop=9"),
    *("training.callbacks=null", "training.step={_target_: mine.slow}"),
)
PORTION = 2

#: The digits again, read as a stream: whoever trains on them has to be sent them. And steps to train with.
MINE = """
import os

import keras
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing
from scaleflow.dataset.digits import Digits
from scaleflow.interfaces import Stream

class Streamed(Digits):
    def load(self, split):
        arrays = super().load(split)
        return Stream(tf.data.Dataset.from_tensor_slices((arrays.inputs, arrays.targets)), len(arrays))

def halved(model, batch, weights):
    outputs = model(batch[0], training=True)
    losses = keras.losses.sparse_categorical_crossentropy(batch[1], outputs, from_logits=True)
    return tf.reduce_sum(losses * weights) / 2, outputs

def slow(model, batch, weights):
    # The file's name depends on the batch, so that it is looked for in each step.
    name = tf.strings.join([os.path.abspath("go"), tf.where(tf.reduce_sum(weights) >= 0.0, "", "?")])
    pause = tf.where(tf.size(tf.io.matching_files(name)) > 0, tf.constant(0, tf.int64), tf.constant(200_000, tf.int64))
    slept = tf.data.Dataset.range(1).apply(testing.sleep(pause)).reduce(tf.constant(0, tf.int64), tf.add)
    with tf.control_dependencies([slept]):
        inputs = tf.identity(batch[0])
    outputs = model(inputs, training=True)
    losses = keras.losses.sparse_categorical_crossentropy(batch[1], outputs, from_logits=True)
    return tf.reduce_sum(losses * weights), outputs

class Own:
    def build(self, model, make_optimizer): ...
    def update(self, model, batch, weights): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "alone"),
    [(NORMALIZED, ALONE), (("training.clip_norm=1.0",), IN_SHARDS)],
    ids=["cnn normalized by micro-batches", "mlp in shards"],
)
def test_a_single_worker_gives_the_losses_and_weights_of_one_device(
    tmp_path: Path, isolated: Callable[..., Any], words: tuple[str, ...], alone: tuple[str, ...]
) -> None:
    losses, weights = course(tmp_path / "one", isolated, *SAME, *words, "strategy=one_device")
    found, found_weights = course(tmp_path / "served", isolated, *SAME, *words, *alone)
    assert found == pytest.approx(losses, abs=1e-5)
    assert max(float(np.abs(a - b).max()) for a, b in zip(found_weights, weights, strict=True)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "more"), [("none", ()), ("file", ("dataset.augment={crop: 1}", "dataset.normalise=true"))]
)
def test_a_stream_is_sent_to_the_workers_every_example_once_and_a_step_of_ones_own_is_taken(
    command: Command, cache: str, more: tuple[str, ...]
) -> None:
    (command.folder / "mine.py").write_text(MINE)
    words = ("dataset._target_=mine.Streamed", "training.step={_target_: mine.halved}", "training.epochs=3")
    ended = command(*SERVED, *words, f"dataset.cache={cache}", *more, "tracking=none", timeout=240)
    assert ended.returncode == 0, ended.stderr
    epochs = [event for event in command.events() if event["event"] == "epoch"]
    steps = -(-1294 // 32)
    assert [event["step"] for event in epochs] == [steps, 2 * steps, 3 * steps]
    assert epochs[-1]["values"]["val/accuracy"] > (0.6 if more else 0.8)
    assert epochs[0]["values"]["train/loss"] < 1.3  # half of what it would be


@pytest.mark.slow
def test_it_is_one_run_in_which_every_update_is_counted(command: Command) -> None:
    words = ("cluster.workers=3", "cluster.servers=2", "precision=mixed_float16", "training.epochs=3")
    ended = command(*SERVED, *words, timeout=240)
    assert ended.returncode == 0, ended.stderr
    run = only_run(command.folder)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits-mlp-parameter_server-mixed_float16")
    resolved = {
        key: run.data.params[f"resolved.{key}"] for key in ("workers", "replicas", "global_batch_size", "steps")
    }
    assert resolved == {"workers": "3", "replicas": "1", "global_batch_size": "32", "steps": "123"}
    assert max(event["step"] for event in command.events() if event["event"] == "metrics") == 123
    assert len(run.outputs.model_outputs) == 1
    assert_all_points_are_kept(command, run)
    logs = sorted(path.name for path in command.run_folder().glob("*.log"))
    assert logs == ["coordinator.log", *(f"server-{i}.log" for i in range(2)), *(f"worker-{i}.log" for i in range(3))]


def listens(process: psutil.Process) -> bool:
    return any(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp"))


def lines(command: Command, word: str) -> int:
    return sum(word in event.get("text", "") for event in command.events())


@pytest.mark.slow
def test_workers_that_die_are_started_again_and_the_run_goes_on(command: Command) -> None:
    (command.folder / "mine.py").write_text(MINE)
    long = LongRun(command, *SERVED, *SLOW, "training.epochs=20").until("epoch")
    before = long.children()
    os.kill(before[1].pid, signal.SIGKILL)
    long.wait_for(lambda: lines(command, "worker 0 was killed by SIGKILL; it is restarted (1 of at most 10)"))
    (again,) = wait_for(lambda: set(long.children()) - set(before))
    wait_for(lambda: listens(again))
    os.kill(before[2].pid, signal.SIGKILL)  # from here on there is nobody but the one that was started again
    long.wait_for(lambda: lines(command, "worker 1 was killed by SIGKILL; it is restarted (2 of at most 10)"))
    (command.folder / "go").touch()
    assert long.end(240) == 0, long.err.read_text()
    run = only_run(command.folder)
    assert run.info.status == "FINISHED"
    steps = int(run.data.params["resolved.steps"])
    applied = max(event["step"] for event in command.events() if event["event"] == "metrics")
    assert steps <= applied <= steps + 2 * PORTION
    assert_all_points_are_kept(command, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name"),
    [(3, "server 0"), (1, "worker 0")],
)
def test_a_process_that_may_not_restart_ends_all_with_its_name(command: Command, number: int, name: str) -> None:
    (command.folder / "mine.py").write_text(MINE)
    long = LongRun(command, *SERVED, *SLOW, "cluster.max_restarts=0").until("epoch")
    processes = long.children()
    assert len(processes) == 4
    os.kill(processes[number].pid, signal.SIGKILL)
    assert long.end() == 1
    assert not any(process.is_running() for process in processes)
    run = only_run(command.folder)
    assert run.info.status == "FAILED"
    assert f"{name} was killed by SIGKILL" in run.data.tags["scaleflow.error"]
    assert_all_points_are_kept(command, run)


RESTART = "restart from the last checkpoint"


def has_checkpoint_after_restart(command: Command) -> bool:
    events = command.events()
    begun = max(number for number, event in enumerate(events) if RESTART in event.get("text", ""))
    return any(event["event"] == "checkpoint" for event in events[begun:])


@pytest.mark.slow
def test_the_loss_of_the_coordinator_or_a_server_restarts_all_from_the_checkpoint(
    command: Command, isolated: Callable[..., Any]
) -> None:
    """The variables are in shards; every step is counted once, and the run goes on on one device."""
    shards = ("strategy.partitioner.max_shards=2", "strategy.partitioner.min_shard_bytes=null")
    words = (*SERVED, *shards, *SLOW, "training.epochs=12")
    (command.folder / "mine.py").write_text(MINE)
    long = LongRun(command, *words).until("checkpoint")
    for number, name in ((3, "server 0"), (0, "coordinator")):
        restarts = lines(command, RESTART)
        os.kill(long.children()[number].pid, signal.SIGKILL)
        long.wait_for(lambda restarts=restarts: lines(command, RESTART) > restarts)
        assert lines(command, f"{name} was killed by SIGKILL; ")
        long.wait_for(lambda: has_checkpoint_after_restart(command))
    (command.folder / "go").touch()
    assert long.end(240) == 0, long.err.read_text()
    run = only_run(command.folder)
    assert run.info.status == "FINISHED"
    assert run.data.tags["scaleflow.restarts"] == "2"
    steps = int(run.data.params["resolved.steps"])
    reported = [e["step"] for e in command.events() if "train/loss" in e.get("values", {}) and e["event"] == "metrics"]
    assert reported == sorted(set(reported))
    assert reported[-1] == steps
    ended = command(f"resume={command.run_folder()}", "strategy=one_device", "training.epochs=13")
    assert ended.returncode == 0, ended.stderr
    assert f"resumed at step {steps}" in ended.stdout


@pytest.mark.slow
def test_a_signal_stops_the_run_and_every_process(command: Command) -> None:
    (command.folder / "mine.py").write_text(MINE)
    long = LongRun(command, *SERVED, *SLOW).until("epoch")
    processes: list[psutil.Process] = long.children()
    os.kill(long.launcher.pid, signal.SIGTERM)
    assert long.end() == 143
    assert only_run(command.folder).info.status == "KILLED"
    assert "stopped at step" in command.events()[-1]["error"]
    assert not any(process.is_running() for process in processes)


@pytest.mark.slow
def test_refusal_of_the_coordinator_is_a_refusal(command: Command) -> None:
    (command.folder / "mine.py").write_text(MINE)
    ended = command(*SERVED, "training.step={_target_: mine.Own}")
    assert ended.returncode == 2
    assert ended.stderr.startswith("scaleflow: training.step._target_=mine.Own with strategy=parameter_server: ")
    assert len(ended.stderr.splitlines()) == 1
    assert not (command.folder / "outputs").exists()


def shards(cases: list[tuple[Partitioner, tuple[int, ...]]]) -> list[list[int]]:
    """Into how many parts variables of float32 are divided along each axis."""
    import tensorflow as tf

    from scaleflow.strategy.make import partition

    divide = [(partition(options), tf.TensorShape(shape)) for options, shape in cases]
    return [[] if rule is None else list(rule(shape, tf.float32)) for rule, shape in divide]


def test_a_partitioner_divides_large_variables_along_their_first_axis(isolated: Callable[..., Any]) -> None:
    kib = 1 << 10
    cases = {
        (Partitioner(), (4096, 1024)): [],
        (Partitioner(4), (4096, 1024)): [4, 1],
        (Partitioner(4), (8, 8)): [1, 1],
        (Partitioner(4, 2 * kib), (64, 16)): [2, 1],
        (Partitioner(4, None), (8, 8)): [4, 1],
        (Partitioner(4, None), (3, 8)): [3, 1],
    }
    assert isolated(shards, list(cases)) == list(cases.values())


def refuse_constraint() -> str:
    import keras

    from scaleflow.errors import ConfigError
    from scaleflow.worker.engine import check_no_constraints

    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, kernel_constraint="non_neg", name="first")])
    with pytest.raises(ConfigError) as refusal:
        check_no_constraints(net)
    return str(refusal.value)


def test_constraints_of_weights_are_refused(isolated: Callable[..., Any]) -> None:
    assert isolated(refuse_constraint) == (
        "model: sequential/first/kernel has a constraint (NonNeg), which strategy=parameter_server does not apply; "
        "use another strategy, or remove the constraint"
    )
