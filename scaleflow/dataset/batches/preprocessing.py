"""Preprocessing: the chief learns it, and the input pipeline applies it.

A cache keeps the preprocessed examples of a split as arrays, in memory or in a temporary file, for access by index.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import keras
import numpy as np
import psutil
import tensorflow as tf

from scaleflow.dataset.batches.blocks import Blocks, make_blocks
from scaleflow.dataset.batches.records import StreamRows, prefetch, static_bytes
from scaleflow.dataset.batches.rows import ArrayRows
from scaleflow.dataset.batches.unreadable import refuse_unreadable
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Arrays,
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
    map_named,
    name_class,
    name_leaves,
)
from scaleflow.interfaces.data import MAX_ROUNDING
from scaleflow.interfaces.data import ROUNDING as HALF_SPACING
from scaleflow.interfaces.events import Emit, Note

#: A channel is a constant, and not amplified, if its deviation is at most this share of its mean.
ROUNDING = 1e-14


def can_be_normalised(inputs: Inputs) -> bool:
    """Returns whether an input of several is a quantity: floats, or raw values with a `scale`, such as images."""
    return inputs.dtype.startswith(("float", "bfloat")) or inputs.scale is not None


class Normalise:
    """Preprocesses numbers: (x - mean) / deviation, along the last axis.

    It is a part of the saved model, because all examples need it: for training, validation, tests and serving.

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
        count = 0
        mean = np.zeros(channels)
        squares = np.zeros(channels)
        for batch in batches:
            values = batch.reshape(-1, channels).astype(np.float64)
            batch_mean = values.mean(axis=0)
            delta = batch_mean - mean
            total = count + len(values)
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
        mean = np.reshape(learned["mean"], self._inputs.shape[-1:])
        deviation = np.reshape(learned["deviation"], self._inputs.shape[-1:])
        if np.all(np.abs(mean) * HALF_SPACING <= MAX_ROUNDING * deviation) and self._inputs.dtype != "float64":
            scale = (1 / deviation).tolist()
            offset = (-mean / deviation).tolist()
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
    preprocessings = {}
    for name, preprocessing in name_leaves(own).items():
        if preprocessing is not None:
            preprocessings[name] = preprocessing
    unknown = set(preprocessings) - set(inputs)
    if unknown:
        raise ConfigError(
            f"dataset: {type(source).__name__}.preprocessing: names {', '.join(sorted(unknown)) or 'one tensor'}, but "
            f"the inputs {describe_keys(source.inputs)}"
        )
    if not options.normalise:
        return preprocessings
    if preprocessings:
        kinds = ", ".join(sorted({type(preprocessing).__name__ for preprocessing in preprocessings.values()}))
        raise ConfigError(
            f"dataset.normalise=true: {type(source).__name__} preprocesses its inputs itself, with {kinds}; remove "
            "dataset.normalise"
        )
    if "" in inputs:
        return {"": Normalise(inputs[""])}
    chosen = {name: Normalise(described) for name, described in inputs.items() if can_be_normalised(described)}
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
    known = {name: find_learned(name, preprocessing, earlier) for name, preprocessing in preprocessings.items()}
    counts = earlier is not None and earlier.counts_words
    extends = counts or (earlier is not None and earlier.extends)
    new = {}
    for name, preprocessing in preprocessings.items():
        if known[name] is None or (extends and hasattr(preprocessing, "extend")):
            new[name] = preprocessing

    def learn() -> dict[str, Any]:
        with refuse_unreadable("train", train):
            return {name: preprocessing.learn(train.read_to_learn(name)) for name, preprocessing in new.items()}

    def recall() -> dict[str, Any]:
        options = describe_options(new)
        results: dict[str, Any] = learn() if options is None else train.recall("statistics", options, learn)
        return results

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
    """Yields a text about values that an earlier run had not learned, and their treatment."""
    extension = describe_extension(old, extended)
    if extension:
        treatment = "taken as unknown ones" if isinstance(extended, list) else "taken as means"
        yield f"{label_leaf('inputs', name)}: {extension}, {treatment}"


def find_learned(name: str, preprocessing: Preprocessing, earlier: EarlierState | None) -> LearnedPreprocessing | None:
    """Returns the preprocessing that an earlier run learned for an input; None if it must be learned now.

    Raises ConfigError if the earlier run preprocessed this input in another way, unless new columns are allowed.
    """
    earlier_preprocessing = None if earlier is None else earlier.state.preprocessing.get(name)
    if earlier is None:
        return None
    if earlier_preprocessing is not None and earlier_preprocessing.path == name_class(preprocessing):
        return earlier_preprocessing
    if earlier.extends and not earlier.counts_words:
        return None
    before = "not at all" if earlier_preprocessing is None else f"with {earlier_preprocessing.path.rpartition('.')[2]}"
    raise ConfigError(
        f"dataset: {label_leaf('inputs', name)} is preprocessed with {type(preprocessing).__name__}, and the earlier "
        f"run preprocessed it {before}; use the dataset options of that run"
        + (", or model.init_from_preprocessing=new" if earlier.counts_words else "")
    )


def describe_options(preprocessings: Preprocessings) -> list[Any] | None:
    """Returns the classes and options of preprocessings; None if one is a user's own, because its code may change."""
    options: list[Any] = []
    for name, preprocessing in preprocessings.items():
        if not type(preprocessing).__module__.startswith("scaleflow."):
            return None
        options.append((name, type(preprocessing).__qualname__, vars(preprocessing)))
    return options


def group_names(preprocessings: Preprocessings) -> list[tuple[str, ...]]:
    """Returns groups of inputs that one layer preprocesses.

    Inputs with the same class of preprocessing are a group if the class has `layer_of_all`. The others are alone.
    """
    groups: dict[Any, list[str]] = {}
    for name, preprocessing in preprocessings.items():
        key = type(preprocessing) if hasattr(preprocessing, "layer_of_all") else name
        groups.setdefault(key, []).append(name)
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
) -> Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]:
    """Returns the preprocessing function of the input pipeline for some inputs, on the CPU.

    Raises ConfigError if the layer turns the samples (raw inputs) into another shape or dtype than its features.
    """
    with tf.device("CPU:0"), use_float32():
        layer = make_layer(preprocessings, learned, names)
        raw = [tf.constant(samples[name]) for name in names]
        # Traced once: each split, and the description of its features, would trace it again.
        specs = [tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in raw]
        run = tf.function(lambda inputs: apply_layer(layer, inputs), input_signature=[specs], autograph=False)
        outputs = run(raw)
    features = {name: preprocessings[name].features(learned[name]) for name in names}
    for name, output in zip(names, outputs, strict=True):
        wanted = features[name]
        if (tuple(output.shape[1:]), output.dtype.name) != (tuple(wanted.shape), wanted.dtype):
            raise ConfigError(
                f"dataset: {type(preprocessings[name]).__name__}.layer returns {output.dtype.name} of shape "
                f"{tuple(output.shape[1:])}, but its features say {wanted.dtype} of shape {tuple(wanted.shape)}"
            )

    def transform(inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        count = inputs[0].shape[0]
        transformed: list[tf.Tensor] = []
        for name, output in zip(names, run(list(inputs)), strict=True):
            transformed.append(tf.ensure_shape(output, [count, *features[name].shape]))
        return transformed

    return transform


READ_BATCH_SIZE = 256

#: The same for arrays of single values, such as the columns of a table, where the time of a call dominates.
VALUES_BATCH_SIZE = 32768

AnyArrays = TypeVar("AnyArrays", bound=Arrays)

#: Preprocessing by the names of inputs: raw [b, ...] of each -> the model's inputs [b, ...]. Traced.
Transforms = Mapping[tuple[str, ...], Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]]


def cache_split(split: str, examples: Rows, cache: str, transforms: Transforms, workers: Workers) -> Rows:
    """Applies `dataset.cache` to a split.

    A cached stream becomes arrays of preprocessed inputs. Arrays are always preprocessed here. Memory-mapped arrays are
    copied into memory if a stream of their size would be, and stay mapped otherwise.

    Args:
        split: the name of the split, for messages.
        examples: the split.
        cache: `dataset.cache`.
        transforms: the preprocessing.
        workers: all workers of the run. They decide together.

    Raises:
        ConfigError: if an example cannot be read, or if examples to be cached are text or differ in shape.
    """
    if isinstance(examples, ArrayRows):
        return preprocess_arrays(read_mapped(examples, cache, workers), transforms)
    stream = cast(StreamRows, examples)
    spec = batch_spec(examples, transforms)
    size = static_bytes(spec) * len(stream)
    if cache == "auto":
        size = static_bytes(spec) * stream.kept_together
        cache = "memory" if workers.all(is_small(size, stream.auto_bytes)) else "none"
    if cache == "none":
        return examples
    if size == float("inf"):
        raise ConfigError(
            f"dataset.cache={cache}: the examples of {split!r} are text or differ in shape, and such examples cannot "
            "be cached; use dataset.cache=none"
        )
    arrays = tf.nest.map_structure(lambda leaf: allocate([len(examples), *leaf.shape], leaf.dtype, cache), spec)
    return fill_arrays(split, stream, transforms, arrays=ArrayRows(*arrays))


def cache_blocks(splits: Sequence[Blocks], cache: str, transforms: Transforms, workers: Workers) -> list[Rows]:
    """Applies `dataset.cache` to splits of the same rows, which are read once."""
    keeps = [blocks.keep for blocks in splits]
    masks = [keep for keep in keeps if keep is not None]
    union = np.logical_or.reduce(masks) if len(masks) == len(keeps) else None
    together = make_blocks(splits[0].rows, union)
    examples = cache_split("train", together, cache, transforms=transforms, workers=workers)
    if examples.place == "stream":
        return list(splits)
    cached = cast(ArrayRows, examples)

    def select(keep: np.ndarray[Any, Any]) -> ArrayRows:
        places = np.flatnonzero(keep if union is None else keep[union])
        return cached.map(lambda array: array[places])

    return [cached if keep is None else select(keep) for keep in keeps]


def is_small(size: float, limit: int) -> bool:
    """Returns whether `dataset.cache=auto` caches `size` bytes in memory."""
    return size <= min(limit, available_bytes() / 4)


def read_mapped(arrays: ArrayRows, cache: str, workers: Workers) -> ArrayRows:
    """Copies memory-mapped arrays into memory if `dataset.cache` asks for it."""
    if arrays.place == "memory":
        return arrays
    if cache == "memory" or (cache == "auto" and workers.all(is_small(arrays.nbytes, StreamRows.auto_bytes))):
        return arrays.map(lambda array: np.array(array) if isinstance(array, np.memmap) else array)
    return arrays


def batch_spec(examples: Rows, transforms: Transforms) -> Any:
    """Returns the specs of one example after preprocessing. Arrays are preprocessed already."""
    inputs, *rest = examples.spec
    if examples.place != "stream" or not transforms:
        return inputs, *rest
    batch = tf.nest.map_structure(lambda spec: tf.TensorSpec([1, *spec.shape], spec.dtype), inputs)
    traced = tf.function(lambda raw: preprocess_inputs(raw, transforms), autograph=False).get_concrete_function(batch)
    input_specs = tf.nest.map_structure(
        lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), traced.structured_outputs
    )
    return input_specs, *rest


def fill_arrays(split: str, stream: StreamRows, transforms: Transforms, arrays: ArrayRows) -> ArrayRows:
    """Fills empty arrays with the examples of a stream, and returns them."""
    flat = tf.nest.flatten(arrays.parts)
    count = len(arrays)
    done = 0
    batches: Iterable[Any]
    if isinstance(stream, Blocks):
        batches = (preprocess_arrays(slab, transforms).parts for slab in stream.read_slabs())
    else:
        batches = prefetch(preprocess_batches(stream.batch(READ_BATCH_SIZE), transforms)).as_numpy_iterator()
    with refuse_unreadable(split, stream):
        for batch in batches:
            values = tf.nest.flatten(batch)
            end = min(done + len(values[0]), count)
            for array, new in zip(flat, values, strict=True):
                array[done:end] = new[: end - done]
            done = end
            if done == count:
                break
    if done < count:
        raise ConfigError(f"dataset: the stream of {split!r} holds {done} examples, but the source says {count}")
    return arrays


def preprocess_batches(batches: tf.data.Dataset, transforms: Transforms) -> tf.data.Dataset:
    if not transforms:
        return batches
    return batches.map(
        lambda inputs, *rest: (preprocess_inputs(inputs, transforms), *rest),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def preprocess_inputs(inputs: Any, transforms: Transforms) -> Any:
    """Converts raw inputs [b, ...] to the model's inputs."""
    named = dict(name_leaves(inputs))
    for names, transform in transforms.items():
        named.update(zip(names, transform([named[name] for name in names]), strict=True))
    return map_named(lambda name, _: named[name], inputs)


def preprocess_arrays(arrays: AnyArrays, transforms: Transforms) -> AnyArrays:
    """Preprocesses inputs in memory, on the CPU."""
    if not transforms:
        return arrays
    named = dict(name_leaves(arrays.inputs))
    for names, transform in transforms.items():
        raw = [named[name] for name in names]
        size = VALUES_BATCH_SIZE if raw[0].ndim == 1 else READ_BATCH_SIZE
        parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in names}
        with tf.device("CPU:0"):
            for first in range(0, len(arrays), size):
                outputs = transform([tf.constant(array[first : first + size]) for array in raw])
                for name, output in zip(names, outputs, strict=True):
                    parts[name].append(output.numpy())
        for name in names:
            named[name] = np.concatenate(parts[name])
    return replace(arrays, inputs=map_named(lambda name, _: named[name], arrays.inputs))


def sample_rows(examples: Rows, count: int, transforms: Transforms, reads_first: bool = False) -> Any:
    """Returns up to `count` preprocessed examples from all over a split, as `Arrays`.

    If the examples are neither in memory nor rows of a table, it returns the first ones if `reads_first`, else None.
    """
    if examples.place == "stream" and not examples.blocks and not reads_first:
        return None
    with refuse_unreadable("train", examples):
        sample = Arrays(*examples.read_spread(count)[1])
    return preprocess_arrays(sample, {} if isinstance(examples, Arrays) else transforms)


def allocate(shape: list[int], dtype: tf.DType, cache: str) -> np.ndarray[Any, Any]:
    """Allocates an array in memory, or in a temporary file that disappears with this process."""
    if cache == "memory":
        return np.empty(shape, dtype.as_numpy_dtype)
    try:
        with tempfile.NamedTemporaryFile(prefix="scaleflow-cache-") as file:  # unlinked on exit, still mapped
            return np.memmap(file, dtype.as_numpy_dtype, "w+", shape=tuple(shape) or (1,))
    except OSError as error:
        raise ConfigError(
            f"dataset.cache=file: cannot write to {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to "
            "another folder"
        ) from error


def available_bytes() -> float:
    """Returns the memory that this process can still allocate, within the limit of its container (cgroup v2)."""
    available = psutil.virtual_memory().available
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return available
    return min(available, limit - used)
