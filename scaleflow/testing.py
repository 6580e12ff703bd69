"""Tests your own datasets, models and training steps in seconds, without a store or worker processes.

    from scaleflow.interfaces import Inputs, Outputs
    from scaleflow.testing import check_dataset, check_model, check_step, one_step

    def test_my_parts():
        check_dataset(Waves(examples=50))
        check_model(build, Inputs((64,)), Outputs("binary", (1,)), units=8)
        check_step(my_step, weight=0.3)
        events = one_step("dataset=mine", "model=mine", config_dir="my_conf")
        assert events.last("train/loss") < 1.0

Errors are raised as `scaleflow.ConfigError` with the message of a run. TensorFlow runs in this process, so settings
that can be made only once per process (devices, threads) stay in effect.
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
from scaleflow.interfaces import (
    Arrays,
    Batching,
    Dataset,
    Inputs,
    InputStructure,
    Outputs,
    OutputStructure,
    Source,
    Target,
    label_leaf,
    map_leaves,
    map_named,
    name_leaves,
)
from scaleflow.interfaces.events import Event, to_fields
from scaleflow.runs import EventReader, RunFolder

if TYPE_CHECKING:
    import keras

#: Examples per batch in these tests.
BATCH = 4

WORDS = ("a", "few", "words", "of", "text", "")


class Events:
    """A list of events in the form of `events.jsonl`. Use it as an `Emit` in tests, or to read the events of a run."""

    def __init__(self, events: Sequence[Mapping[str, Any]] = ()) -> None:
        self.all: list[Mapping[str, Any]] = list(events)

    def __call__(self, event: Event) -> None:
        self.all.append(to_fields(event))

    @classmethod
    def of(cls, folder: str | Path) -> Events:
        """Reads the events in a run's folder."""
        return cls([to_fields(event) for event in EventReader(RunFolder(Path(folder)).events).read()])

    def named(self, event: str) -> list[Mapping[str, Any]]:
        """Returns all events of one kind, such as `metrics`, `note` or `artifact`."""
        return [entry for entry in self.all if entry["event"] == event]

    @property
    def notes(self) -> list[str]:
        return [event["text"] for event in self.named("note")]

    @property
    def params(self) -> Mapping[str, str]:
        """The params that a store would receive."""
        params: dict[str, str] = {}
        for event in self.named("ready"):
            params |= event["params"]
        return params

    @property
    def status(self) -> str | None:
        """The final status of the run; None if it has not ended."""
        return next((event["status"] for event in reversed(self.named("end"))), None)

    def history(self, metric: str) -> list[tuple[int, float]]:
        """Returns (step, value) of a metric's points."""
        events = [event for event in self.named("metrics") if metric in event["values"]]
        return [(event["step"], event["values"][metric]) for event in events]

    def last(self, metric: str) -> float:
        """Returns a metric's last value. A KeyError names the existing metrics."""
        points = self.history(metric)
        if not points:
            existing: set[str] = set()
            for event in self.named("metrics"):
                existing.update(event["values"])
            raise KeyError(f"{metric}; the metrics are {', '.join(sorted(existing))}")
        return points[-1][1]


@dataclass(frozen=True)
class Checked:
    """The properties of a checked dataset."""

    counts: Mapping[str, int]  # number of examples in the splits train, validation and test, at most `limit` each
    inputs: InputStructure  # shape and dtype of a model's inputs, after preprocessing
    outputs: OutputStructure  # kind and shape of a model's outputs
    batch: tuple[Any, Any]  # (inputs, targets) of the first batch that a model gets: arrays, or dicts of arrays


class Tiny:
    """A dataset in memory for tests of a model or a step. Its targets are a function of its inputs.

    Args:
        inputs: shape and dtype (float32, uint8, int32 or string), or a dict of inputs; default: four float32 numbers.
        outputs: kind and shape of the targets, or a dict of outputs; default: three classes.
        examples: number of examples in the training split. The test split has a quarter of them.
    """

    splits = ("train", "test")

    def __init__(
        self, inputs: InputStructure | None = None, outputs: OutputStructure | None = None, examples: int = 32
    ) -> None:
        self.inputs = inputs or Inputs((4,))
        self.outputs = outputs or Outputs("classification", (3,))
        self._examples = examples

    def load(self, split: str) -> Arrays:
        count, seed = (self._examples, 0) if split == "train" else (max(1, self._examples // 4), 1)
        x = made_up(self.inputs, count, seed)
        return Arrays(x, map_leaves(functools.partial(targets_for, x), self.outputs))


def made_up(inputs: InputStructure, count: int, seed: int = 0) -> Any:
    """Returns random inputs [count, *shape] in the inputs' dtype. They depend only on the seed and the names."""

    def make(name: str, described: Inputs) -> np.ndarray[Any, Any]:
        return made_up_tensor(described, count, [seed, *name.encode()])

    return map_named(make, inputs)


def made_up_tensor(inputs: Inputs, count: int, seed: list[int]) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    shape = (count, *inputs.shape)
    if inputs.dtype == "string":
        return random.choice(np.array(WORDS), shape)
    if np.issubdtype(np.dtype(inputs.dtype), np.integer):
        highest = inputs.vocabulary or (256 if inputs.dtype == "uint8" else 10)
        return random.integers(0, highest, shape).astype(inputs.dtype)
    return random.normal(size=shape).astype(inputs.dtype)


def targets_for(x: Any, outputs: Outputs) -> np.ndarray[Any, Any]:
    """Returns learnable targets: they depend on the rank of each example's mean (for text, its mean length)."""
    means = sum(mean_of_each(array) for array in name_leaves(x).values())
    count = len(means)
    ranks = np.argsort(np.argsort(means)) / max(1, count)
    shape = outputs.target_shape
    targets = np.broadcast_to(ranks.reshape([count] + [1] * len(shape)), (count, *shape))
    if outputs.kind == "classification":
        return (targets * outputs.shape[-1]).astype("int64")
    return (targets if outputs.kind == "regression" else targets >= 0.5).astype("float32")


def mean_of_each(array: np.ndarray[Any, Any]) -> Any:
    """Returns the mean of each example [n] float64; for text, the mean length."""
    numbers = np.char.str_len(array) if array.dtype.kind == "U" else array
    return np.reshape(numbers, [len(array), -1]).astype("float64").mean(axis=1)


def check_dataset(source: Source, limit: int = 64, options: Dataset | None = None) -> Checked:
    """Reads a few examples of a dataset twice, as a run would.

    Args:
        source: an instance of your class.
        limit: examples per split.
        options: the config group `dataset`, instead of `limit`.

    Raises:
        ConfigError: if the source violates the contract `scaleflow.interfaces.Source`, if a second load returns other
            examples (all workers must see the same ones), or if an input or a target is not finite.
    """
    import tensorflow as tf

    from scaleflow import dataset

    dataset_options = options or Dataset(Target("dataset", type(source).__name__), limit=limit, validation=None)
    splits = dataset.prepare_splits(source, dataset_options, 0)
    splits_again = dataset.prepare_splits(source, dataset_options, 0)
    for name, fingerprint in splits.fingerprints.items():
        if fingerprint != splits_again.fingerprints[name]:
            raise ConfigError(
                f"dataset: load({name!r}) returns different examples on each call; seed its random operations"
            )
    feed = functools.partial(dataset.make_feed, transforms=splits.transforms)
    first_batch: tuple[Any, Any] | None = None
    for name, examples in splits.by_name().items():
        batching = Batching(min(BATCH, len(examples)), 1, 1)
        batches = feed(examples, batching, tf.distribute.get_strategy()).batches(1, batching.steps(len(examples)))
        for x, y, *_ in batches.as_numpy_iterator():
            refuse_not_finite(name, x, y)
            first_batch = first_batch or (x, y)
    assert first_batch is not None
    return Checked(splits.counts(), splits.inputs, source.outputs, batch=first_batch)


def refuse_not_finite(split: str, *batch: Any) -> None:
    for what, part in zip(("inputs", "targets"), batch, strict=True):
        for name, values in name_leaves(part).items():
            if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
                raise ConfigError(f"dataset: {label_leaf(what, name)} of {split!r} contain NaN or Inf")


def check_model(
    factory: Callable[..., Any],
    inputs: InputStructure | None = None,
    outputs: OutputStructure | None = None,
    **arguments: Any,
) -> keras.Model:
    """Builds a model like a run, then calls it on random inputs, computes gradients and exports it.

    Args:
        factory: (inputs, outputs, **arguments) -> a Keras model.
        inputs: the dataset's inputs, or a dict of them; default: four numbers.
        outputs: the dataset's outputs, or a dict of them; default: three classes.
        arguments: the factory's arguments, which stand next to `_target_` in the config.

    Returns:
        The model.

    Raises:
        ConfigError: if the model does not accept the inputs, returns another shape, has a trainable weight without
            influence on its outputs, or returns NaN or Inf.
        ExportError: if the saved model behaves differently.
    """
    import keras
    import tensorflow as tf

    from scaleflow import model
    from scaleflow.config.targets import check_arguments

    source = Tiny(inputs, outputs)
    name = getattr(factory, "__name__", "the factory")
    check_arguments(Target("model", name, arguments), factory, 2, arguments=dict(arguments))
    net: keras.Model = model.make_model(functools.partial(factory, **arguments), source.inputs, source.outputs)
    batch = made_up(source.inputs, BATCH)
    with tf.GradientTape() as tape:
        results = name_leaves(net(map_leaves(tf.constant, batch), training=True)).values()
        total = tf.add_n([tf.reduce_sum(result) for result in results])
    if not all(np.isfinite(result.numpy()).all() for result in results):
        raise ConfigError(f"model: {name} returns NaN or Inf")
    gradients = tape.gradient(total, [variable.value for variable in net.trainable_variables])
    unused = [v.path for v, gradient in zip(net.trainable_variables, gradients, strict=True) if gradient is None]
    if unused:
        raise ConfigError(f"model: {', '.join(unused)} of {name} have no influence on its output")
    with tempfile.TemporaryDirectory() as folder:
        policy = keras.config.dtype_policy().name
        model.write_model(net, source.inputs, source.outputs, batch=batch, policy=policy, folder=Path(folder, "model"))
    return net


def check_step(
    step: Callable[..., Any],
    factory: Callable[..., Any] | None = None,
    inputs: InputStructure | None = None,
    outputs: OutputStructure | None = None,
    **arguments: Any,
) -> float:
    """Calls a training step's function on a small batch, and again with padding.

    Args:
        step: (model, batch, weights, **arguments) -> (loss, outputs). A class applies its own optimizers; test it with
            a whole run instead: `one_step("training.step={_target_: my_steps.Mine}")`.
        factory: the model's factory; default: one dense layer.
        inputs: the dataset's inputs, or a dict of them; default: four numbers.
        outputs: the dataset's outputs, or a dict of them; default: three classes.
        arguments: the step's arguments, which stand next to `_target_` in the config.

    Returns:
        The loss.

    Raises:
        ConfigError: if the step does not return a scalar loss and outputs, or if the loss is not finite, has no
            gradient, or changes when examples of weight 0 (padding) are added.
    """
    import tensorflow as tf

    from scaleflow import model, training
    from scaleflow.config.targets import check_arguments
    from scaleflow.model.mlp import build

    if inspect.isclass(step):
        raise ConfigError(
            f"training.step: {step.__name__} is a class; test it with one_step('training.step={{_target_: ...}}')"
        )
    name = getattr(step, "__name__", "the step")
    check_arguments(Target("training.step", name, arguments), step, 3, arguments=dict(arguments))
    source = Tiny(inputs, outputs, BATCH)
    make = factory or functools.partial(build, units=[])
    net = model.make_model(make, source.inputs, source.outputs, has_step=True)
    checked_step = training.add_checks(functools.partial(step, **arguments), name, source.outputs)
    examples = source.load("train")
    batch = map_leaves(tf.constant, examples.inputs), map_leaves(tf.constant, examples.targets)

    @tf.function(autograph=False)
    def loss_of(x: Any, y: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, _ = checked_step(net, (x, y), weights)
        return loss, tape.gradient(loss, [variable.value for variable in net.trainable_variables])

    weights = np.full([BATCH], 1 / BATCH, "float32")
    loss, gradients = loss_of(*batch, weights)
    if not np.isfinite(float(loss)):
        raise ConfigError(f"training.step: the loss of {name} is {float(loss)}")
    if all(gradient is None for gradient in gradients):
        raise ConfigError(f"training.step: the loss of {name} does not depend on the model's weights")
    for padding in (slice(0, 1), slice(-1, None)):  # two examples: one may have the mean loss by chance
        padded_batch = tf.nest.map_structure(lambda part, ends=padding: tf.concat([part, part[ends]], axis=0), batch)
        padded, _ = loss_of(*padded_batch, np.append(weights, np.float32(0)))
        refuse_counted_padding(name, float(loss), float(padded))
    return float(loss)


def refuse_counted_padding(name: str, loss: float, padded: float) -> None:
    if abs(loss - padded) > 1e-4 * max(1.0, abs(loss)):
        raise ConfigError(
            f"training.step: with an example of weight 0, padding, the loss of {name} is {padded:.6g}, not "
            f"{loss:.6g}; multiply each example's loss by its weight, and sum"
        )


def one_step(*overrides: str, config_dir: str | Path | Sequence[str | Path] = ()) -> Events:
    """Runs a complete config with one step each of training, validation and test, and exports the model.

    Args:
        overrides: overrides as on the command line.
        config_dir: one or more folders with your own config options.

    Returns:
        The worker's events.

    Raises:
        ConfigError: if the config cannot work.
        RunFailed: if the step fails.
    """
    from scaleflow.api import run

    fixed = ("tracking=none", "checkpoint=none", "debug=fast", "debug.inline=true")
    with tempfile.TemporaryDirectory() as folder:
        result = run(*overrides, *fixed, config_dir=config_dir, folder=Path(folder, "run"))
        return Events.of(result.folder)


__all__ = ["Checked", "Events", "Tiny", "check_dataset", "check_model", "check_step", "made_up", "one_step"]
