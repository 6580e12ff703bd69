"""What the tests of training share: parts put together for one process, and steps taken one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scaleflow.interfaces import Arrays, Batching, Examples, Feed, Hardware, Inputs, Kind, Outputs, Plan, Stream
from scaleflow.interfaces.events import Emit, Event, to_fields
from tests.conftest import Command
from tests.processes import call as call_isolated

if TYPE_CHECKING:
    import tensorflow as tf

    from scaleflow.training import Loop, Session
    from scaleflow.worker.build import TrainingSetup

T = TypeVar("T")


@dataclass(frozen=True)
class Course:
    """How training went: the loss of each update, and the weights after the last."""

    losses: list[float]
    weights: list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Parts:
    """What a worker would have built."""

    strategy: tf.distribute.Strategy
    feed: Feed
    loop: Loop


def ignore(event: Event) -> None:
    """An `Emit` that drops all events."""


def to_pair(event: Event) -> tuple[str, dict[str, Any]]:
    """Returns an event's name and its fields."""
    return event.event, to_fields(event)


def make_session(
    plan: Plan,
    built: Any,
    emit: Emit,
    should_stop: Callable[[], bool] = lambda: False,
    startup_timer: Any = None,
    **options: Any,
) -> Session:
    """Makes the session of a single worker, which stops after the call at whose end `should_stop` is true."""
    from scaleflow import training

    return training.Session(
        built.engine,
        plan.training,
        built.feeds,
        training.MetricsLog(built.engine, emit, startup_timer),
        training.WorkerSync(built.runtime.strategy, 1, should_stop),
        **options,
    )


def spread_over(replicas: int) -> tf.distribute.Strategy:
    """The process's one strategy: one_device, or mirrored over logical CPUs."""
    from scaleflow import hardware, strategy

    devices = hardware.configure_devices(Hardware(name="cpu", logical_devices=replicas))
    return strategy.create_strategy("mirrored" if replicas > 1 else "one_device", devices.names)[0]


def assemble(
    strategy: tf.distribute.Strategy,
    examples: Examples,
    kind: Kind,
    outputs: int,
    factory: Callable[[Inputs, Outputs], Any],
    *,
    batch_size: int,
    accumulate: int = 1,
    clip_norm: float | None = None,
    policy: str = "float32",
    optimizer: str = "SGD",
    rate: float = 0.1,
    shuffle_seed: int | None = None,
    inputs: Inputs | None = None,
) -> Parts:
    """The parts for examples and a model of the test's own, unshuffled unless asked."""
    import keras

    from scaleflow import dataset, model, objective, precision, training
    from scaleflow.optimizer import create_optimizer

    keras.utils.set_random_seed(7)
    precision.apply_policy(policy)
    feed = dataset.make_feed(
        examples, Batching(batch_size, accumulate, strategy.num_replicas_in_sync), strategy, shuffle_seed
    )
    wanted = Outputs(kind, (outputs,))
    with strategy.scope():
        net = model.make_model(factory, inputs or described(examples), wanted)
        step = create_optimizer(getattr(keras.optimizers, optimizer), rate, loss_scaling=policy == "mixed_float16")
        loop = training.Loop(
            strategy=strategy,
            model=net,
            optimizer=step,
            objective=objective.make_objective(wanted),
            clip_norm=clip_norm,
        )
    return Parts(strategy, feed, loop)


def described(examples: Examples) -> Inputs:
    if isinstance(examples, Stream):
        spec = examples.dataset.element_spec[0]
        return Inputs(tuple(spec.shape), spec.dtype.name)
    return Inputs(examples.inputs.shape[1:], examples.inputs.dtype.name)


def dense(inputs: Inputs, outputs: Outputs) -> Any:
    """The smallest model with a hidden layer."""
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    x = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(raw))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(x))


def random_arrays(count: int, kind: Kind = "classification", size: int = 6, outputs: int = 3) -> Arrays:
    from scaleflow.dataset.synthetic import Synthetic

    whole = Synthetic(count + count // 2, [size], kind, outputs).load("train")
    return Arrays(whole.inputs[:count], whole.targets[:count])


def follow(plan: Plan, steps: int) -> Course:
    """Takes the steps of a plan's run, one a call."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    return take(built.engine, built.feeds.train, steps)


def follow_each(plans: Sequence[Plan], steps: int) -> list[Course]:
    """Takes the steps of one run after another. All need the same devices."""
    return run_apart(follow, ((plan, steps) for plan in plans))


def run_apart(run: Callable[..., T], calls: Iterable[Sequence[Any]]) -> list[T]:
    """Makes one call after another, in each of which a run is built, in this process.

    TensorFlow mixes up the collective operations of two mirrored strategies in a process if they sum other shapes. Its
    own tests give the keys of each strategy's operations another base for that reason. Layers are numbered anew.
    """
    import keras
    import tensorflow as tf

    found = []
    for arguments in calls:
        keras.backend.clear_session()
        tf.distribute.MirroredStrategy._collective_key_base += 100_000
        found.append(run(*arguments))
    return found


def run_each(folder: Path, commands: Mapping[str, Sequence[str]]) -> dict[str, Course]:
    """Trains with one command after another, each in a folder of its name: all values of `train/loss`, and the weights
    of the exported model.
    """
    losses, models = [], []
    for name, words in commands.items():
        command = Command(folder / name)
        command.folder.mkdir()
        ended = command(*words)
        assert ended.returncode == 0, ended.stderr
        losses.append([e["values"]["train/loss"] for e in command.events() if "train/loss" in e.get("values", {})])
        models.append(command.run_folder() / "model" / "model.keras")
    return {
        name: Course(*parts) for name, *parts in zip(commands, losses, call_isolated(load_weights, models), strict=True)
    }


def load_weights(models: Sequence[Path]) -> list[list[np.ndarray[Any, Any]]]:
    import keras

    return [[np.asarray(v) for v in keras.models.load_model(model).trainable_variables] for model in models]


def take(loop: Loop, feed: Feed, steps: int) -> Course:
    """Takes steps one a call, from the first of the first epoch on."""
    per_epoch = feed.batching.steps(feed.examples)
    losses: list[float] = []
    opened, seen, total = None, 0, 0.0
    for done in range(steps):
        epoch, first = divmod(done, per_epoch)
        if first == 0:
            opened, seen, total = feed.open(epoch, 0), 0, 0.0
            loop.start_epoch()
        mean = loop.train(feed, opened, epoch, first, 1, done)["loss"]
        count = min((first + 1) * feed.batching.global_size, feed.examples)
        losses.append((mean * count - total) / (count - seen))
        seen, total = count, mean * count
    return Course(losses, weights(loop))


def train_epochs(parts: Parts, epochs: int) -> None:
    """Trains whole epochs, each in one call."""
    steps = parts.feed.batching.steps(parts.feed.examples)
    for epoch in range(epochs):
        parts.loop.start_epoch()
        parts.loop.train(parts.feed, parts.feed.open(epoch, 0), epoch, 0, steps, epoch * steps)


def weights(loop: Loop) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(v) for v in loop.model.trainable_variables]


def on_each_replica(parts: Parts) -> list[list[np.ndarray[Any, Any]]]:
    """The weights as each replica holds them."""
    return [
        [np.asarray(v) for v in parts.strategy.experimental_local_results(variable.value)]
        for variable in parts.loop.model.trainable_variables
    ]


def far(found: list[np.ndarray[Any, Any]], wanted: list[np.ndarray[Any, Any]]) -> float:
    """The largest difference."""
    return max(float(np.max(np.abs(f - w))) for f, w in zip(found, wanted, strict=True))


def build_untested(plan: Plan) -> TrainingSetup:
    """Builds a run, and leaves its test split out."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    return replace(built, feeds=replace(built.feeds, test=None))
