"""Preprocessing: the chief learns it from the training split, and the input pipeline applies it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.unreadable import refuse_unreadable
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Dataset,
    EarlierState,
    Inputs,
    LearnedPreprocessing,
    Preprocessing,
    Rows,
    Source,
    Workers,
    apply_layer,
    describe_extension,
    describe_keys,
    label_leaf,
    name_class,
    name_leaves,
)
from scaleflow.interfaces.data import MOST_ROUNDING
from scaleflow.interfaces.data import ROUNDING as HALF_SPACING
from scaleflow.interfaces.events import Emit, Note

#: A channel with a deviation of at most so much of its mean is a constant, which is not amplified.
ROUNDING = 1e-14


def can_be_normalised(inputs: Inputs) -> bool:
    """Returns whether an input of several is a quantity: floats, or raw values with a `scale`, such as images."""
    return inputs.dtype.startswith(("float", "bfloat")) or inputs.scale is not None


class Normalise:
    """Preprocesses numbers: (x - mean) / deviation, along the last axis.

    It is not an augmentation of the training split: validated, tested and served examples need it, too. So it is a
    part of the saved model.

    Args:
        inputs: raw numbers of any shape.

    Raises:
        ConfigError: for text.
    """

    def __init__(self, inputs: Inputs) -> None:
        if inputs.dtype == "string" or inputs.vocabulary is not None:
            raise ConfigError(
                "dataset.normalise=true: the dataset's inputs are text, which has no mean; remove dataset.normalise"
            )
        self._inputs = inputs

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, list[float]]:
        """Returns the mean and the deviation of each channel, over all examples and positions."""
        channels = self._inputs.shape[-1] if self._inputs.shape else 1
        count, mean, squares = 0, np.zeros(channels), np.zeros(channels)
        for batch in batches:
            values = batch.reshape(-1, channels).astype(np.float64)
            batch_mean = values.mean(axis=0)
            delta, total = batch_mean - mean, count + len(values)
            mean = mean + delta * len(values) / total  # Chan, Golub and LeVeque 1979
            squares = squares + ((values - batch_mean) ** 2).sum(axis=0) + delta**2 * count * len(values) / total
            count = total
        deviation = np.sqrt(squares / max(count, 1))
        deviation = np.where(deviation > ROUNDING * np.abs(mean), deviation, 1.0)
        return {"mean": mean.tolist(), "deviation": deviation.tolist()}

    def features(self, learned: Any) -> Inputs:
        """Describes the features: the raw shape, float32, near [-1, 1]."""
        return Inputs(shape=self._inputs.shape, dtype="float32")

    def layer(self, learned: Any) -> keras.Layer:
        """Returns the layer raw inputs [b, ...] -> [b, ...] float32.

        It computes in float64 where float32 would round the inputs before their mean is subtracted.
        """
        mean, deviation = (np.reshape(learned[key], self._inputs.shape[-1:]) for key in ("mean", "deviation"))
        if np.all(np.abs(mean) * HALF_SPACING <= MOST_ROUNDING * deviation) and self._inputs.dtype != "float64":
            scale, offset = (1 / deviation).tolist(), (-mean / deviation).tolist()
            return keras.layers.Rescaling(scale, offset, dtype="float32", name="normalise")
        raw = keras.Input(self._inputs.shape, dtype=self._inputs.dtype)
        features = (keras.ops.cast(raw, "float64") - mean) / deviation
        return keras.Model(raw, keras.ops.cast(features, "float32"), name="normalise")


BATCH = 256

#: The preprocessing of each input that has one, by its name; "" is a single tensor's.
Preprocessings = Mapping[str, Preprocessing]


def choose_preprocessing(source: Source, options: Dataset) -> Preprocessings:
    """Returns the source's own preprocessing, or the one that the config asks for.

    Raises:
        ConfigError: if the source's preprocessing does not fit its inputs, or `dataset.normalise` does not.
    """
    inputs = name_leaves(source.inputs)
    own = getattr(source, "preprocessing", None) or {}
    preprocessings = {name: each for name, each in name_leaves(own).items() if each is not None}
    if unknown := set(preprocessings) - set(inputs):
        raise ConfigError(
            f"dataset: {type(source).__name__}.preprocessing: names {', '.join(sorted(unknown)) or 'one tensor'}, but "
            f"the inputs {describe_keys(source.inputs)}"
        )
    if not options.normalise:
        return preprocessings
    if preprocessings:
        kinds = ", ".join(sorted({type(each).__name__ for each in preprocessings.values()}))
        raise ConfigError(
            f"dataset.normalise=true: {type(source).__name__} preprocesses its inputs itself, with {kinds}; remove "
            "dataset.normalise"
        )
    if "" in inputs:
        return {"": Normalise(inputs[""])}
    chosen = {name: Normalise(each) for name, each in inputs.items() if can_be_normalised(each)}
    if not chosen:
        raise ConfigError(
            f"dataset.normalise=true: none of the dataset's inputs ({', '.join(inputs)}) is float; remove it"
        )
    return chosen


def learn_on_chief(
    preprocessings: Preprocessings,
    train: Rows,
    workers: Workers,
    earlier: EarlierState | None = None,
    emit: Emit | None = None,
) -> Mapping[str, Any]:
    """Learns the preprocessing on the chief, and returns the result of each on every worker.

    What an earlier run learned is taken as it is, or extended if `earlier` says so. If `earlier` says that new words
    are counted, `emit` receives a note.

    Raises ConfigError if an example cannot be read, or the earlier run preprocessed an input in another way.
    """
    known = {name: find_learned(name, each, earlier) for name, each in preprocessings.items()}
    counts = earlier is not None and earlier.counts_words
    extends = counts or (earlier is not None and earlier.extends)
    new = {n: each for n, each in preprocessings.items() if known[n] is None or (extends and hasattr(each, "extend"))}

    def learn() -> dict[str, Any]:
        with refuse_unreadable("train", train):
            return {name: each.learn(train.read_to_learn(name)) for name, each in new.items()}

    def recall() -> dict[str, Any]:
        options = describe_options(new)
        found: dict[str, Any] = learn() if options is None else train.recall("statistics", options, learn)
        return found

    learned: dict[str, Any] = json.loads(workers.from_chief(lambda: json.dumps(recall()))) if new else {}
    unknown: list[str] = []
    for name, old in known.items():
        if old is None:
            continue
        extended = new[name].extend(old.learned, learned[name]) if name in new else old.learned  # type: ignore[attr-defined]
        learned[name] = old.learned if counts else extended
        unknown += describe_unknown(name, old, extended) if counts else []
    if unknown and emit is not None:
        emit(Note(f"dataset: the earlier run did not learn of {'; '.join(unknown)}"))
    return learned


def describe_unknown(name: str, old: LearnedPreprocessing, extended: Any) -> Iterator[str]:
    """Yields what data has that an earlier run did not learn of, and how it is taken."""
    if found := describe_extension(old, extended):
        taken = "taken as unknown ones" if isinstance(extended, list) else "taken as means"
        yield f"{label_leaf('inputs', name)}: {found}, {taken}"


def find_learned(name: str, preprocessing: Preprocessing, earlier: EarlierState | None) -> LearnedPreprocessing | None:
    """Returns what an earlier run learned for an input; None if it must be learned anew.

    Raises ConfigError if the earlier run preprocessed this input in another way, unless new columns are allowed.
    """
    found = None if earlier is None else earlier.state.preprocessing.get(name)
    if earlier is None or (found is not None and found.path == name_class(preprocessing)):
        return found
    if earlier.extends and not earlier.counts_words:
        return None
    before = "not at all" if found is None else f"with {found.path.rpartition('.')[2]}"
    raise ConfigError(
        f"dataset: {label_leaf('inputs', name)} is preprocessed with {type(preprocessing).__name__}, and the earlier "
        f"run preprocessed it {before}; use the dataset options of that run"
        + (", or model.init_from_preprocessing=new" if earlier.counts_words else "")
    )


def describe_options(preprocessings: Preprocessings) -> list[Any] | None:
    """Returns the classes and the options of preprocessings; None if they are a user's, whose code may change."""
    if any(not type(each).__module__.startswith("scaleflow.") for each in preprocessings.values()):
        return None
    return [(name, type(each).__qualname__, vars(each)) for name, each in preprocessings.items()]


def group_names(preprocessings: Preprocessings) -> list[tuple[str, ...]]:
    """Returns the inputs that one layer preprocesses: those of a class with `layer_of_all`, else each by itself."""
    groups: dict[Any, list[str]] = {}
    for name, each in preprocessings.items():
        groups.setdefault(type(each) if hasattr(each, "layer_of_all") else name, []).append(name)
    return [tuple(names) for names in groups.values()]


def make_layer(preprocessings: Preprocessings, learned: Mapping[str, Any], names: Sequence[str]) -> keras.Layer:
    """Returns the layer of some inputs, in float32 whatever the model's dtype policy is."""
    with use_float32():
        first: Any = preprocessings[names[0]]
        if len(names) == 1:
            return first.layer(learned[names[0]])
        return first.layer_of_all([learned[name] for name in names])


@contextlib.contextmanager
def use_float32() -> Iterator[None]:
    """Sets the dtype policy float32 for layers that are made in this context."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)


def make_transform(
    preprocessings: Preprocessings,
    learned: Mapping[str, Any],
    names: Sequence[str],
    samples: Mapping[str, np.ndarray[Any, Any]],
    features: Mapping[str, Inputs],
) -> Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]:
    """Returns the preprocessing function of the input pipeline for some inputs, on the CPU.

    Raises ConfigError if the layer turns the samples (raw inputs) into another shape or dtype than `features`.
    """
    with tf.device("CPU:0"), use_float32():
        layer = make_layer(preprocessings, learned, names)
        raw = [tf.constant(samples[name]) for name in names]
        # Traced once: each split, and the description of its features, would trace it again.
        specs = [tf.TensorSpec([None] * each.shape.rank, each.dtype) for each in raw]
        run = tf.function(lambda inputs: apply_layer(layer, inputs), input_signature=[specs], autograph=False)
        outputs = run(raw)
    for name, output in zip(names, outputs, strict=True):
        wanted = features[name]
        if (tuple(output.shape[1:]), output.dtype.name) != (tuple(wanted.shape), wanted.dtype):
            raise ConfigError(
                f"dataset: {type(preprocessings[name]).__name__}.layer returns {output.dtype.name} of shape "
                f"{tuple(output.shape[1:])}, but its features say {wanted.dtype} of shape {tuple(wanted.shape)}"
            )

    def transform(inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        count = inputs[0].shape[0]
        return [tf.ensure_shape(x, [count, *features[n].shape]) for n, x in zip(names, run(list(inputs)), strict=True)]

    return transform
