"""strategy=tpu as far as a machine without a TPU goes: the calls and their order, XLA, what is refused.

A double answers the calls. Nothing here says that a TPU trains.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.cluster import tpu
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching, Hardware, Plan, Precision, Stream
from tests.conftest import Command
from tests.dataset.reading import as_stream, numbered, reader, spread_over
from tests.processes import ROOT, CommandProcess
from tests.training.fake_engine import assemble, dense, random_arrays

CORES = 2


def put_double(calls: list[str]) -> None:
    """Replaces TensorFlow's way to a TPU: two logical CPUs stand for its cores."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    def started() -> bool:
        return context.context()._initialized

    class Resolver:
        def __init__(self, tpu: str) -> None:
            calls.append(f"resolve {tpu}, runtime started: {started()}")

    class Strategy(tf.distribute.MirroredStrategy):  # type: ignore[misc]
        def __init__(self, resolver: Resolver) -> None:
            calls.append(f"strategy over {type(resolver).__name__}")
            super().__init__([f"CPU:{i}" for i in range(CORES)])

    def connect(resolver: Resolver) -> None:
        calls.append(f"connect, runtime started: {started()}")

    def initialize(resolver: Resolver) -> None:
        calls.append(f"initialize, runtime started: {started()}")
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * CORES)

    tf.distribute.cluster_resolver.TPUClusterResolver = Resolver
    tf.distribute.TPUStrategy = Strategy
    tf.config.experimental_connect_to_cluster = connect
    tf.tpu.experimental.initialize_tpu_system = initialize
    tf.config.list_logical_devices = lambda kind: [f"{kind}:{i}" for i in range(CORES)]


def whole_run(plan: Plan, folder: Path) -> tuple[list[str], list[dict[str, Any]], str]:
    """A whole run of a worker on the double: the calls, the events, and the feed that was used."""
    from scaleflow import dataset
    from scaleflow.interfaces.events import to_fields
    from scaleflow.runs import RunSpec
    from scaleflow.worker.process import run_worker
    from scaleflow.worker.tasks import TrainModel

    calls: list[str] = []
    events: list[dict[str, Any]] = []
    feeds: list[str] = []
    put_double(calls)
    make = dataset.make_feed

    def feed(*arguments: Any, **keywords: Any) -> Any:
        made = make(*arguments, **keywords)
        feeds.append(type(made).__name__)
        return made

    dataset.make_feed = feed
    run_worker(RunSpec(plan, folder, time.time(), TrainModel()), lambda event: events.append(to_fields(event)), bool)
    return calls, events, feeds[0]


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the device file of a TPU."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "accel0").write_text("")
    monkeypatch.setattr(tpu, "ROOT", tmp_path)


@pytest.mark.slow
def test_a_run_goes_the_way_to_a_tpu_before_anything_else(
    attached: None, isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    job = plan("strategy=tpu", "precision=mixed", "training.epochs=12", "training.accumulate=2", "training.clip_norm=5")
    calls, events, feed = isolated(whole_run, job, tmp_path)
    assert calls == [
        "resolve local, runtime started: False",
        "connect, runtime started: False",
        "initialize, runtime started: False",
        "strategy over Resolver",
    ]
    kinds = [event["event"] for event in events if event["event"] != "stage"]
    assert kinds[:2] == ["waiting", "met"]
    assert (events[-1]["event"], events[-1]["status"], events[-1]["error"]) == ("end", "FINISHED", "")
    (ready,) = [event for event in events if event["event"] == "ready"]
    resolved = {
        key: ready["params"][f"resolved.{key}"] for key in ("strategy", "hardware", "precision", "replicas", "workers")
    }
    assert resolved == {
        "strategy": "tpu",
        "hardware": "tpu",
        "precision": "mixed_bfloat16",
        "replicas": str(CORES),
        "workers": "1",
    }
    assert feed == "HostArrayFeed"
    last = {key: value for event in events for key, value in event.get("values", {}).items()}
    assert last["test/accuracy"] > 0.85


def policies() -> dict[str, str]:
    from scaleflow.precision import resolve_policy

    return {name: resolve_policy(Precision(name), "TPU") for name in ("float32", "mixed", "mixed_bfloat16")}  # type: ignore[arg-type]


def test_mixed_is_bfloat16_on_a_tpu(isolated: Callable[..., Any]) -> None:
    wanted = {"float32": "float32", "mixed": "mixed_bfloat16", "mixed_bfloat16": "mixed_bfloat16"}
    assert isolated(policies) == wanted


# ---------------------------------------------------------------------------------------------
# What XLA, which compiles for a TPU, asks of the loop
# ---------------------------------------------------------------------------------------------


def host_batches(replicas: int) -> tuple[Any, Any]:
    """What both feeds of arrays give, from a step on and in all."""
    from scaleflow.dataset.batches.feeds import ArrayFeed, HostArrayFeed

    strategy = spread_over(replicas)
    portions = Batching(12 // replicas // 2, 2, replicas)
    found = []
    for form in (ArrayFeed, HostArrayFeed):
        read = reader(strategy, form(numbered(53), portions, strategy, 3))
        found.append([read(0), read(1), read(1, 2)])
    return found[0], found[1]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow
def test_the_batches_put_together_on_the_host_are_the_same(isolated: Callable[..., Any], replicas: int) -> None:
    in_replica, on_host = isolated(host_batches, replicas)
    assert on_host == in_replica


def micro_batch_shapes() -> list[list[tuple[int | None, ...]]]:
    """The static shapes of what the loop gets of each feed, at a partial batch too."""
    import tensorflow as tf

    from scaleflow.dataset.batches.feeds import HostArrayFeed, StreamFeed

    strategy = spread_over(1)
    portions = Batching(4, 3, 1)
    arrays = numbered(29)
    feeds = (
        HostArrayFeed(arrays, portions, strategy, 3),
        StreamFeed(Stream(as_stream(arrays), 29), portions, strategy, 3),
    )
    zero = tf.constant(0, tf.int64)
    found: list[list[tuple[int | None, ...]]] = []

    for feed in feeds:

        @tf.function
        def trace(opened: Any, feed: Any = feed) -> None:
            parts = feed.micro_batch(feed.fetch(opened), zero, zero, zero, tf.constant(1, tf.int64))
            found.append([tuple(part.shape) for part in parts])

        trace.get_concrete_function(feed.open(0, 0))
    return found


def test_every_batch_has_a_static_shape(isolated: Callable[..., Any]) -> None:
    assert isolated(micro_batch_shapes) == [[(4, 2), (4,), (4,)]] * 2


def compiled(policy: str, accumulate: int) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], str]:
    """The weights after a step of the loop without and with XLA, and what it says to `ArrayFeed`."""
    import keras
    import tensorflow as tf

    from scaleflow.dataset.batches.feeds import ArrayFeed, HostArrayFeed

    strategy = spread_over(1)
    arrays = random_arrays(29)
    parts = assemble(
        strategy, arrays, "classification", 3, dense, batch_size=4, policy=policy, optimizer="Adam", clip_norm=0.1
    )
    loop, portions = parts.loop, Batching(4, accumulate, 1)
    keras.config.set_dtype_policy(policy)

    def step(feed: Any, by_xla: bool) -> list[np.ndarray[Any, Any]]:
        @tf.function(autograph=False)
        def one(opened: Any, epoch: tf.Tensor, number: tf.Tensor) -> Any:
            fetched = feed.fetch(opened)

            @tf.function(jit_compile=by_xla, autograph=False)
            def in_replica(fetched: Any, epoch: tf.Tensor, number: tf.Tensor) -> Any:
                ahead = loop._batch(feed, fetched, (epoch, number)) if feed.ahead else ()
                state = (*loop._zero_state(), ahead)
                return loop._step(feed, fetched, (epoch, number, number + 1), state, feed.ahead)

            return strategy.run(in_replica, args=(fetched, epoch, number))

        one(feed.open(0, 1), tf.constant(0, tf.int64), tf.constant(1, tf.int64))
        return [np.asarray(v) for v in loop.model.trainable_variables]

    before = [np.asarray(v) for v in loop.model.variables + loop.optimizer.variables]
    feed = HostArrayFeed(arrays, portions, strategy, 3)
    plain = step(feed, by_xla=False)
    for variable, value in zip(loop.model.variables + loop.optimizer.variables, before, strict=True):
        variable.assign(value)
    by_xla = step(feed, by_xla=True)
    try:
        step(ArrayFeed(arrays, portions, strategy, 3), by_xla=True)
    except tf.errors.OpError as error:
        return plain, by_xla, str(error)
    return plain, by_xla, ""


@pytest.mark.parametrize(("policy", "accumulate"), [("float32", 1), ("float32", 3), ("mixed_bfloat16", 3)])
def test_xla_compiles_a_step_of_the_loop(isolated: Callable[..., Any], policy: str, accumulate: int) -> None:
    plain, by_xla, refusal = isolated(compiled, policy, accumulate)
    for wanted, found in zip(plain, by_xla, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 if policy == "float32" else 2e-2)
    assert "RandomIndexShuffle" in refusal  # where XLA learns it, the feed of arrays will do for a TPU too


def unfit() -> list[str]:
    import tensorflow as tf

    from scaleflow.dataset.batches.feeds import check_static_shapes

    words = Arrays(np.array([["a"], ["b"]]), np.zeros(2))
    lines = Stream(tf.data.Dataset.from_tensor_slices((["a"], [0])), 1)
    ragged = tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int64)
    lengths = Stream(tf.data.Dataset.from_generator(list, output_signature=ragged), 1)
    said = []
    for examples in (words, lines, lengths):
        try:
            check_static_shapes(examples)
        except ConfigError as refusal:
            said.append(str(refusal))
    check_static_shapes(numbered(3))
    check_static_shapes(Stream(as_stream(numbered(3)), 3))
    return said


def test_examples_that_a_tpu_cannot_take_are_refused(isolated: Callable[..., Any]) -> None:
    words, lines, lengths = isolated(unfit)
    assert words == lines
    assert words.startswith("strategy=tpu with a dataset whose inputs are text: ")
    assert "inputs have the shape (None,)" in lengths


# ---------------------------------------------------------------------------------------------
# Without a TPU
# ---------------------------------------------------------------------------------------------


def refusal_of(address: str | None) -> str:
    from scaleflow import hardware

    try:
        hardware.configure_devices(Hardware(name="tpu", tpu=address))
    except ConfigError as refusal:
        return str(refusal)
    return ""


def test_a_machine_on_which_tensorflow_finds_none_refuses(isolated: Callable[..., Any]) -> None:
    message = isolated(refusal_of, "local")
    assert message.startswith("hardware.tpu=local: TensorFlow ")
    assert "TPUs not found in the cluster" in message
    assert len(message.splitlines()) == 1
    assert "hardware.tpu=grpc://HOST:8470" in isolated(refusal_of, None)


@pytest.fixture
def worker_without_tpu(command: Command) -> Iterator[str]:
    """The address of a TensorFlow server that is none of a TPU's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with CommandProcess(("tests.strategy.tensorflow_server", address), ROOT, command.environment) as server:
        assert server.stdout.readline() == "up\n"
        yield address


@pytest.mark.slow
def test_a_server_without_a_tpu_is_connected_to_and_refused(command: Command, worker_without_tpu: str) -> None:
    ended = command("strategy=tpu", f"hardware.tpu=grpc://{worker_without_tpu}", "tracking=none")
    assert ended.returncode == 2, ended.stderr
    assert f"scaleflow: hardware.tpu=grpc://{worker_without_tpu}: TensorFlow " in ended.stderr
    assert "TPUs not found in the cluster" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (command.folder / "outputs").exists()


def test_something_that_is_no_server_of_tensorflow_s_is_given_up(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        ended = command("strategy=tpu", f"hardware.tpu={address}", "tracking=none", "cluster.start_seconds=2")
    assert time.monotonic() - began < 200
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[0].startswith(
        f"scaleflow: hardware.tpu={address}: no TPU answers there within cluster.start_seconds=2"
    )
    assert "Traceback" not in ended.stderr
