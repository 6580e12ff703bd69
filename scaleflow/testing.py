"""For tests of your own datasets, models and training steps: seconds, no store, no worker process.

    from scaleflow.interfaces import Inputs, Outputs
    from scaleflow.testing import check_dataset, check_model, check_step, one_step

    def test_my_parts():
        check_dataset(Waves(examples=50))
        check_model(build, Inputs((64,)), Outputs("binary", (1,)), units=8)
        check_step(my_step, weight=0.3)
        events = one_step("dataset=mine", "model=mine", config_dir="my_conf")
        assert events.last("train/loss") < 1.0

What is wrong is raised as `scaleflow.ConfigError`, in the words in which a run would refuse it. TensorFlow is used in
this
very process: what is set up once in a process (devices, threads) stays.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.events import Event, EventReader
from scaleflow.interfaces import Arrays, Batching, Dataset, Inputs, Outputs, Source, Target

if TYPE_CHECKING:
    import keras

#: Examples to a batch in what is tried here.
BATCH = 4

WORDS = ("a", "few", "words", "of", "text", "")


class Events:
    """What a worker tells, kept in memory: an `Emit` for tests, and a reader of what a run has told.

    Attributes:
        all: the events, in their order.
    """

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.all: list[Event] = list(events)

    def __call__(self, event: str, /, **fields: Any) -> None:
        self.all.append({"event": event, **fields})

    @classmethod
    def of(cls, folder: str | Path) -> Events:
        """Those of a run's folder."""
        return cls(list(EventReader(Path(folder, "events.jsonl")).read()))

    def named(self, event: str) -> list[Event]:
        """All of one kind: `metrics`, `note`, `artifact`."""
        return [each for each in self.all if each["event"] == event]

    @property
    def notes(self) -> list[str]:
        return [event["text"] for event in self.named("note")]

    @property
    def params(self) -> Mapping[str, str]:
        """As a store would get them."""
        return {key: value for event in self.named("ready") for key, value in event["params"].items()}

    @property
    def status(self) -> str | None:
        """How it ended; None where it has not."""
        return next((event["status"] for event in reversed(self.named("end"))), None)

    def history(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric's points."""
        found = [event for event in self.named("metrics") if metric in event["values"]]
        return [(event["step"], event["values"][metric]) for event in found]

    def last(self, metric: str) -> float:
        """A metric's last value; a KeyError names those that there are."""
        points = self.history(metric)
        if not points:
            there = sorted({key for event in self.named("metrics") for key in event["values"]})
            raise KeyError(f"{metric}; there is {', '.join(there)}")
        return points[-1][1]


@dataclass(frozen=True)
class Checked:
    """What a dataset was found to be.

    Attributes:
        counts: examples of each of the splits train, validation and test; at most `limit` of a split are read.
        inputs: what a model is built for, behind the preprocessing.
        outputs: what it has to return.
        batch: (inputs, targets) of the first batch as a model gets it.
    """

    counts: Mapping[str, int]
    inputs: Inputs
    outputs: Outputs
    batch: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Tiny:
    """A dataset in memory whose targets follow from its inputs, for a model's or a step's test.

    Args:
        inputs: float32, uint8, int32 or string.
        outputs: what the targets are of.
        examples: of the training split; the test split has a quarter of them.
    """

    splits = ("train", "test")

    def __init__(self, inputs: Inputs | None = None, outputs: Outputs | None = None, examples: int = 32) -> None:
        self.inputs = inputs or Inputs((4,))
        self.outputs = outputs or Outputs("classification", (3,))
        self._examples = examples

    def load(self, split: str) -> Arrays:
        count, seed = (self._examples, 0) if split == "train" else (max(1, self._examples // 4), 1)
        x = made_up(self.inputs, count, seed)
        return Arrays(x, targets_for(x, self.outputs))


def made_up(inputs: Inputs, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Inputs [count, *shape] of a dtype, the same ones for a seed."""
    random = np.random.default_rng(seed)
    shape = (count, *inputs.shape)
    if inputs.dtype == "string":
        return random.choice(np.array(WORDS), shape)
    if np.issubdtype(np.dtype(inputs.dtype), np.integer):
        highest = inputs.vocabulary or (256 if inputs.dtype == "uint8" else 10)
        return random.integers(0, highest, shape).astype(inputs.dtype)
    return random.normal(size=shape).astype(inputs.dtype)


def targets_for(x: np.ndarray[Any, Any], outputs: Outputs) -> np.ndarray[Any, Any]:
    """Targets that can be learned: of the mean of the inputs (of text, of its length)."""
    numbers = np.char.str_len(x) if x.dtype.kind == "U" else x
    means = np.reshape(numbers, [len(x), -1]).astype("float64").mean(axis=1)
    places = np.argsort(np.argsort(means)) / max(1, len(x))
    if outputs.kind == "classification":
        return (places * outputs.shape[-1]).astype("int64")
    wide = np.broadcast_to(places.reshape([len(x)] + [1] * len(outputs.shape)), (len(x), *outputs.shape))
    return (wide if outputs.kind == "regression" else wide >= 0.5).astype("float32")


def check_dataset(source: Source, limit: int = 64, options: Dataset | None = None) -> Checked:
    """Reads a few examples of a dataset as a run would, twice.

    Args:
        source: an object of your class.
        limit: examples of each split.
        options: as the config's group `dataset`; its `limit` counts then.

    Raises:
        ConfigError: if it does not keep the contract `scaleflow.interfaces.Source`; if loading it again gives other
            examples, which each worker of several has to see alike; or if an input or a target is not finite.
    """
    import tensorflow as tf

    from scaleflow import dataset

    chosen = options or Dataset(Target("dataset", type(source).__name__), limit=limit, validation=None)
    splits, again = (dataset.prepare_splits(source, chosen, 0) for _ in range(2))
    for name, look in splits.fingerprints.items():
        if look != again.fingerprints[name]:
            raise ConfigError(
                f"dataset: load({name!r}) gives other examples when it is called again; seed what is random"
            )
    feed = functools.partial(dataset.make_feed, transform=splits.transform)
    first: tuple[Any, Any] | None = None
    for name, examples in splits.by_name().items():
        size = Batching(min(BATCH, len(examples)), 1, 1)
        batches = feed(examples, size, tf.distribute.get_strategy()).batches(1, size.steps(len(examples)))
        for x, y, _ in batches.as_numpy_iterator():
            refuse_not_finite(name, x, y)
            first = first or (x, y)
    assert first is not None
    return Checked(splits.counts(), splits.inputs, source.outputs, first)


def refuse_not_finite(split: str, *batch: np.ndarray[Any, Any]) -> None:
    for what, values in zip(("inputs", "targets"), batch, strict=True):
        if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            raise ConfigError(f"dataset: {what} of {split!r} hold NaN or Inf")


def check_model(
    factory: Callable[..., Any], inputs: Inputs | None = None, outputs: Outputs | None = None, **arguments: Any
) -> keras.Model:
    """Builds a model as a run would, and uses, trains and exports it on made-up inputs.

    Args:
        factory: (inputs, outputs, **arguments) -> a Keras model.
        inputs, outputs: what a dataset would say; four numbers and three classes where they are left out.
        arguments: as those beside `_target_`.

    Returns:
        The model.

    Raises:
        ConfigError: if it does not take the inputs or returns another shape, if a trainable weight has no influence on
            what it returns, or if its outputs are not finite.
        ExportError: if the saved model does not do what this one does.
    """
    import keras
    import tensorflow as tf

    from scaleflow import model
    from scaleflow.config.targets import check_arguments

    takes, returns = inputs or Inputs((4,)), outputs or Outputs("classification", (3,))
    name = getattr(factory, "__name__", "the factory")
    check_arguments(Target("model", name, arguments), factory, 2, dict(arguments))
    made: keras.Model = model.make_model(functools.partial(factory, **arguments), takes, returns)
    batch = made_up(takes, BATCH)
    with tf.GradientTape() as tape:
        found = made(tf.constant(batch), training=True)
        total = tf.reduce_sum(found)
    if not np.isfinite(found.numpy()).all():
        raise ConfigError(f"model: {name} returns NaN or Inf")
    gradients = tape.gradient(total, [variable.value for variable in made.trainable_variables])
    idle = [v.path for v, gradient in zip(made.trainable_variables, gradients, strict=True) if gradient is None]
    if idle:
        raise ConfigError(f"model: {', '.join(idle)} of {name} have no influence on what it returns")
    with tempfile.TemporaryDirectory() as folder:
        model.write_model(made, takes, returns, batch, keras.config.dtype_policy().name, Path(folder, "model"))
    return made


def check_step(
    step: Callable[..., Any],
    factory: Callable[..., Any] | None = None,
    inputs: Inputs | None = None,
    outputs: Outputs | None = None,
    **arguments: Any,
) -> float:
    """Calls a training step's function on a tiny batch, and again with padding.

    Args:
        step: (model, batch, weights, **arguments) -> (loss, outputs). A class that applies its own optimizers needs all
            that is around it: `one_step("training.step={_target_: my_steps.Mine}")`.
        factory: of the model; one dense layer where it is left out.
        inputs, outputs: what a dataset would say; four numbers and three classes where they are left out.
        arguments: as those beside `_target_`.

    Returns:
        The loss.

    Raises:
        ConfigError: if it does not return a scalar loss and outputs, if the loss is not finite, has no gradient, or
        changes
            with examples whose weight is 0: they are padding.
    """
    import tensorflow as tf

    from scaleflow import model, training
    from scaleflow.config.targets import check_arguments
    from scaleflow.model.mlp import build

    if inspect.isclass(step):
        raise ConfigError(
            f"training.step: {step.__name__} is a class; try it by one_step('training.step={{_target_: ...}}')"
        )
    name = getattr(step, "__name__", "the step")
    check_arguments(Target("training.step", name, arguments), step, 3, dict(arguments))
    source = Tiny(inputs, outputs, BATCH)
    net = model.make_model(factory or functools.partial(build, units=[]), source.inputs, source.outputs)
    whole = training.add_checks(functools.partial(step, **arguments), name, source.outputs)
    examples = source.load("train")
    x, y = examples.inputs, examples.targets

    @tf.function(autograph=False)
    def loss_of(x: Any, y: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, _ = whole(net, (x, y), weights)
        return loss, tape.gradient(loss, [variable.value for variable in net.trainable_variables])

    weights = np.full([BATCH], 1 / BATCH, "float32")
    loss, gradients = loss_of(tf.constant(x), tf.constant(y), weights)
    if not np.isfinite(float(loss)):
        raise ConfigError(f"training.step: the loss of {name} is {float(loss)}")
    if all(gradient is None for gradient in gradients):
        raise ConfigError(f"training.step: the loss of {name} does not depend on the model's weights")
    for padding in (slice(0, 1), slice(-1, None)):  # one alone may have just the loss that the others have
        padded_x, padded_y = (tf.constant(np.concatenate([each, each[padding]])) for each in (x, y))
        padded, _ = loss_of(padded_x, padded_y, np.append(weights, np.float32(0)))
        check_padded(name, float(loss), float(padded))
    return float(loss)


def check_padded(name: str, loss: float, padded: float) -> None:
    """Refuses a step whose loss is another one with an example that does not count."""
    if abs(loss - padded) > 1e-4 * max(1.0, abs(loss)):
        raise ConfigError(
            f"training.step: with an example of weight 0, padding, the loss of {name} is {padded:.6g}, not {loss:.6g}; "
            "multiply each example's loss by its weight, and sum"
        )


def one_step(*overrides: str, config_dir: str | Path | Sequence[str | Path] = ()) -> Events:
    """Builds a config's run whole and takes one step of everything: training, validation, test, export.

    Args:
        overrides: as on the command line.
        config_dir: a folder, or several, with options of your own.

    Returns:
        What the worker has told.

    Raises:
        ConfigError: if it cannot work.
        RunFailed: if the step fails.
    """
    from scaleflow.api import run

    alone = ("tracking=none", "checkpoint=none", "debug=fast", "debug.inline=true")
    with tempfile.TemporaryDirectory() as folder:
        result = run(*overrides, *alone, config_dir=config_dir, folder=Path(folder, "run"))
        return Events.of(result.folder)


__all__ = ["Checked", "Events", "Tiny", "check_dataset", "check_model", "check_step", "made_up", "one_step"]
