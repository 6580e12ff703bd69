"""Disks, files and memory that give out: a clear message, a FAILED run, nothing damaged that was there."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Batching, Inputs, Outputs, Plan, Stream
from scaleflow.interfaces.events import Event, FaultReported, MetricsLogged, Note, RunEnded, RunReady
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.runs import EventReader, EventWriter, RunSpec
from scaleflow.worker.failures import explain_out_of_memory
from scaleflow.worker.runtime import make_evaluation_batching
from scaleflow.worker.tasks import TrainModel
from tests.conftest import Command

OOM = (
    "Graph execution error:\n\nOOM when allocating tensor with shape[64,224,224,256] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc [[{{node x}}]]"
)
ASKED = "out of memory on GPU:1, for a tensor of shape [64,224,224,256] and type float: "
BATCHES = {
    (
        "training.batch_size=64",
    ): "training.batch_size=64 x 2 replica(s) x training.accumulate=1 is a global batch of 128; "
    "training.batch_size=32 training.accumulate=2 or hardware.remat=true (in more time) gives the same with "
    "less memory",
    (
        "training.batch_size=9",
        "training.accumulate=2",
    ): "training.batch_size=9 x 2 replica(s) x training.accumulate=2 is "
    "a global batch of 36; training.batch_size=3 training.accumulate=6 or hardware.remat=true",
    ("training.global_batch_size=8",): "; training.accumulate=2 or hardware.remat=true",
    ("training.batch_size=1",): "; hardware.remat=true (in more time) gives the same with less memory",
    ("training.batch_size=1", "hardware.remat=true"): "; a micro-batch has only one example already; use a smaller "
    "model, or a device with more memory",
    ("hardware.xla=true",): "; training.batch_size=16 training.accumulate=2 gives the same with less memory",
    ("training.engine=fit",): "; training.batch_size=16 training.accumulate=2 training.engine=loop or hardware.remat",
}


@pytest.mark.parametrize("words", BATCHES)
def test_memory_that_is_not_enough_is_told_with_the_numbers_that_would_do(
    plan: Callable[..., Plan], words: tuple[str, ...]
) -> None:
    made = plan("tracking=none", *words)
    training = made.training
    whole = training.global_batch_size or training.batch_size * 2 * training.accumulate
    message = explain_out_of_memory(OOM, made, {"replicas": 2, "global_batch_size": whole})
    assert message.startswith(ASKED)
    assert BATCHES[words] in message


@pytest.mark.parametrize(
    ("kind", "batching", "size"),
    [
        ("GPU", Batching(4, 8, 2), 4),  # with gradients, so it fits without them
        ("TPU", Batching(64, 1, 8), 64),
        ("CPU", Batching(4, 8, 2), 128),
        ("CPU", Batching(512, 2, 2), 1024),
    ],
)
def test_an_evaluation_takes_no_more_of_a_devices_memory_than_a_micro_batch(
    kind: str, batching: Batching, size: int
) -> None:
    assert make_evaluation_batching(batching, kind) == Batching(size, 1, batching.replicas)


def test_a_pipeline_is_told_to_use_more_micro_batches(plan: Callable[..., Plan]) -> None:
    message = explain_out_of_memory("OOM", plan("strategy=pipeline"), {"replicas": 1, "global_batch_size": 32})
    assert message.startswith("out of memory on a device: training.batch_size=32 x 1 replica(s)")
    assert "; strategy.micro_batches=8 or hardware.remat=true (in more time) gives the same" in message


class Files:
    """Examples that lie in a file each, which is opened when it is needed."""

    inputs = Inputs((2,))
    outputs = Outputs("classification", (2,))
    splits = ("train",)

    def __init__(self, folder: str) -> None:
        self._paths = [str(Path(folder, f"{number:02d}.txt")) for number in range(8)]
        for path in self._paths:
            Path(path).write_text("0.5")

    def load(self, split: str) -> Stream:
        import tensorflow as tf

        def read(path: Any) -> Any:
            value = tf.strings.to_number(tf.io.read_file(path))
            return tf.stack([value, value]), tf.constant(0, tf.int64)

        return Stream(tf.data.Dataset.from_tensor_slices(self._paths).map(read), 8)


def train(plan: Plan, folder: str, spoil: Callable[[Any], None]) -> list[Event]:
    """All events of a worker; `spoil` gets what was built once the run is ready."""
    from scaleflow.worker import train as worker
    from scaleflow.worker.process import run_worker

    events: list[Event] = []
    build = worker.build_training
    setups: list[Any] = []

    def build_and_keep(*arguments: Any, **named: Any) -> Any:
        setups.append(build(*arguments, **named))
        return setups[0]

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, RunReady):
            spoil(setups[0])

    worker.build_training = build_and_keep
    try:
        run_worker(RunSpec(plan, Path(folder), time.time(), TrainModel()), emit, bool)
    finally:
        worker.build_training = build
    return events


def vanish(built: Any) -> None:
    Path("data/05.txt").unlink()


def run_out(built: Any) -> None:
    import tensorflow as tf

    def take(*arguments: Any, **steps: int) -> Any:
        raise tf.errors.ResourceExhaustedError(None, None, OOM)

    built.engine._take = take


def be_in_the_way(built: Any) -> None:
    Path("model").write_text("no folder")


def never_answer(built: Any) -> None:
    """From now on whatever is saved is being written."""
    import threading

    from scaleflow.checkpoint import CheckpointStore

    CheckpointStore.write = lambda self, snapshot: threading.Event().wait()  # type: ignore[assignment,return-value,method-assign]


def make_own(inputs: Any, outputs: Any, **options: Any) -> Any:
    """A model that Keras cannot load again, because its class does not take `trainable`."""
    import keras

    @keras.saving.register_keras_serializable("tests")
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(*outputs.shape)

        def call(self, x: Any) -> Any:
            return self.head(keras.ops.reshape(x, (-1, 64)))

    return Own()


def faults(vanishing: Plan, running_out: Plan, unwritable: Plan, stalling: Plan, own: Plan, folder: str) -> list[Any]:
    import os

    os.chdir(folder)
    Path("data").mkdir()
    runs = [train(vanishing, folder, vanish), train(running_out, folder, run_out)]
    Path("own").mkdir()
    runs += [train(unwritable, folder, be_in_the_way), train(stalling, folder, never_answer)]
    errors = [next(event.error for event in events if isinstance(event, FaultReported)) for events in runs]
    steps = [event.step for event in runs[-1] if isinstance(event, MetricsLogged) and "train/loss" in event.values]
    end = train(own, f"{folder}/own", lambda built: None)
    assert isinstance(end[-1], RunEnded)
    return [*errors, steps, [event.text for event in end if isinstance(event, Note)]]


def test_a_worker_names_what_gave_out(isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path) -> None:
    base = ("hardware=cpu", "tracking=none", "model.units=4", "training.epochs=1")
    own = plan(*base, "dataset._target_=tests.worker.test_faults.Files", "+dataset.folder=data",
               "dataset.validation=null", "dataset.cache=none")  # fmt: skip
    few = (*base, "dataset.limit=50", "training.batch_size=25", "training.steps_per_loop=1")
    slow = plan(*few, "training.epochs=3", "checkpoint.every_steps=1", "checkpoint.write_seconds=0.5")
    unloadable = plan(*few, "checkpoint=none", "model._target_=tests.worker.test_faults.make_own")
    known = own, plan(*base, "dataset.limit=50"), plan(*few, "checkpoint=none"), slow, unloadable
    found = isolated(faults, *known, str(tmp_path))
    assert found[0] == "NotFoundError: while data was read: data/05.txt; No such file or directory"
    assert found[1].startswith(
        ASKED + "training.batch_size=32 x 1 replica(s) x training.accumulate=1 is a global batch"
    )
    assert found[2] == f"the model could not be exported to {tmp_path}/model: File exists"
    assert found[3].startswith("a checkpoint was not written within checkpoint.write_seconds=0.5: ")
    assert found[4] == [1, 2, 3, 4, 5, 6]  # training did not wait for it
    assert found[5] == [
        "model: scaleflow evaluate and model.init_from cannot load its .keras file: make_own.<locals>.Own.__init__() "
        "got an unexpected keyword argument 'trainable'; let this __init__ take **options and pass them to "
        "super().__init__(**options)"
    ]


def test_a_disk_that_is_full_for_the_events_ends_the_run_and_says_so(command: Command) -> None:
    """Each call of the loop writes an event, and a file may have so many bytes."""

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    words = ("hardware=cpu", "tracking=none", "checkpoint=none", "training.steps_per_loop=1", "model.units=4")
    done = subprocess.run(
        command.arguments(*words),
        cwd=command.folder,
        env={**command.environment, SERVER_ENV: ""},  # one of its own, which has as little room
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
        preexec_fn=little_room,
    )
    assert done.returncode == 1
    assert "events.jsonl can't be written: File too large; " in done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"^status +FAILED", done.stdout, re.M)
    *whole, _ = (command.run_folder() / "events.jsonl").read_text().split("\n")
    assert len([json.loads(line) for line in whole]) > 20


def test_an_event_after_half_a_line_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = EventWriter(tmp_path / "events.jsonl")
    write(Note("one"))
    with monkeypatch.context() as patched:
        calls = [5]
        real = __import__("os").write

        def short(file: int, data: Any) -> int:
            if not calls:
                raise OSError(28, "No space left on device")
            return int(real(file, bytes(data)[: calls.pop()]))

        patched.setattr("scaleflow.runs.event_log.os.write", short)
        with pytest.raises(OSError, match="No space"):
            write(Note("two"))
    write(Note("three"))
    texts = [event.text for event in EventReader(tmp_path / "events.jsonl").read() if isinstance(event, Note)]
    assert texts == ["one", "three"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hydra.run.dir=/proc/self",), "scaleflow: hydra.run.dir=/proc/self: cannot be written"),
        (("hydra.run.dir=/proc/none",), "scaleflow: hydra.run.dir=/proc/none: No such file"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused(command: Command, words: tuple[str, ...], message: str) -> None:
    done = command("tracking=none", *words)
    assert (done.returncode, done.stderr.startswith(message)) == (2, True), done.stderr
    assert len(done.stderr.splitlines()) == 1


def refusal_of_folder(plan: Plan, folder: str) -> str:
    from scaleflow.checkpoint import CheckpointManager

    try:
        CheckpointManager(plan.checkpoint, folder, lambda event: None).check_writable()
    except ConfigError as refusal:
        return str(refusal)
    return ""


def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_there_is_a_run(
    isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    refusal = isolated(refusal_of_folder, plan("tracking=none", "checkpoint.folder=/proc/none"), "/proc/none")
    assert refusal.startswith("checkpoint.folder=/proc/none: cannot be written (")
    good = str(tmp_path / "a" / "b")
    assert isolated(refusal_of_folder, plan("tracking=none", f"checkpoint.folder={good}"), good) == ""
    assert not list(Path(good).iterdir())
