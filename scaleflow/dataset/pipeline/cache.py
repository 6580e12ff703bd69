"""Caches the examples of a split as arrays, in memory or in a temporary file, for access by index."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import psutil
import tensorflow as tf

from scaleflow.dataset.pipeline.blocks import Blocks, make_blocks
from scaleflow.dataset.pipeline.records import StreamRows, static_bytes
from scaleflow.dataset.pipeline.rows import ArrayRows
from scaleflow.dataset.pipeline.unreadable import refuse_unreadable
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Rows, Workers, map_named, name_leaves

READ_BATCH_SIZE = 256

#: The same for arrays of single values, such as the columns of a table, where the time of a call dominates.
VALUES_BATCH_SIZE = 4096

AnyArrays = TypeVar("AnyArrays", bound=Arrays)

#: Preprocessing by the names of inputs: raw [b, ...] of each -> the model's inputs [b, ...]. Traced.
Transforms = Mapping[tuple[str, ...], Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]]


def cache_split(split: str, examples: Rows, cache: str, transforms: Transforms, workers: Workers) -> Rows:
    """Applies `dataset.cache` to a split; `split` is its name, for messages, and all `workers` decide together.

    A cached stream becomes arrays of preprocessed inputs. Arrays are always preprocessed here. Memory-mapped arrays are
    copied into memory if a stream of their size would be, and stay mapped otherwise. Raises ConfigError if an example
    cannot be read, or if examples to be cached are text or differ in shape.
    """
    if isinstance(examples, ArrayRows):
        return preprocess_arrays(read_mapped(examples, cache, workers), transforms)
    stream, spec = cast(StreamRows, examples), batch_spec(examples, transforms)
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
    arrays = tf.nest.map_structure(lambda each: allocate([len(examples), *each.shape], each.dtype, cache), spec)
    return fill_arrays(split, stream, transforms, ArrayRows(*arrays))


def cache_blocks(splits: Sequence[Blocks], cache: str, transforms: Transforms, workers: Workers) -> list[Rows]:
    """Applies `dataset.cache` to splits of the same rows, which are read once."""
    keeps = [each.keep for each in splits]
    masks = [keep for keep in keeps if keep is not None]
    union = np.logical_or.reduce(masks) if len(masks) == len(keeps) else None
    together = make_blocks(splits[0].rows, union)
    examples = cache_split("train", together, cache, transforms, workers)
    if examples.place == "stream":
        return list(splits)
    cached = cast(ArrayRows, examples)

    def select(keep: np.ndarray[Any, Any]) -> ArrayRows:
        places = np.flatnonzero(keep if union is None else keep[union])
        return cached.map(lambda array: array[places])

    return [cached if keep is None else select(keep) for keep in keeps]


def is_small(size: float, most: int) -> bool:
    """Returns whether `dataset.cache=auto` caches so many bytes in memory."""
    return size <= min(most, available_bytes() / 4)


def read_mapped(arrays: ArrayRows, cache: str, workers: Workers) -> ArrayRows:
    """Copies memory-mapped arrays into memory if `dataset.cache` asks for it."""
    if arrays.place == "memory":
        return arrays
    if cache == "memory" or (cache == "auto" and workers.all(is_small(arrays.nbytes, StreamRows.auto_bytes))):
        return arrays.map(lambda array: np.array(array) if isinstance(array, np.memmap) else array)
    return arrays


def batch_spec(examples: Rows, transforms: Transforms) -> Any:
    """Returns the specs of one example after preprocessing, which arrays have had."""
    inputs, *rest = examples.spec
    if examples.place != "stream" or not transforms:
        return inputs, *rest
    batch = tf.nest.map_structure(lambda spec: tf.TensorSpec([1, *spec.shape], spec.dtype), inputs)
    traced = tf.function(lambda raw: preprocess_inputs(raw, transforms)).get_concrete_function(batch)
    made = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), traced.structured_outputs)
    return made, *rest


def fill_arrays(split: str, stream: StreamRows, transforms: Transforms, arrays: ArrayRows) -> ArrayRows:
    """Fills empty arrays with the examples of a stream, and returns them."""
    flat, count, done = tf.nest.flatten(arrays.parts), len(arrays), 0
    batches = preprocess_batches(stream.batch(READ_BATCH_SIZE), transforms).prefetch(tf.data.AUTOTUNE)
    with refuse_unreadable(split, stream):
        for batch in batches:
            tensors = tf.nest.flatten(batch)
            end = min(done + len(tensors[0]), count)
            for array, tensor in zip(flat, tensors, strict=True):
                array[done:end] = tensor.numpy()[: end - done]
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
    """Returns the model's inputs for raw ones [b, ...]."""
    named = dict(name_leaves(inputs))
    for names, transform in transforms.items():
        named.update(zip(names, transform([named[name] for name in names]), strict=True))
    return map_named(lambda name, _: named[name], inputs)


def preprocess_arrays(arrays: AnyArrays, transforms: Transforms) -> AnyArrays:
    """Preprocesses inputs in memory, on the CPU."""
    named = dict(name_leaves(arrays.inputs))
    for names, transform in transforms.items():
        raw = [named[name] for name in names]
        size = VALUES_BATCH_SIZE if raw[0].ndim == 1 else READ_BATCH_SIZE
        with tf.device("CPU:0"):
            parts = [
                [x.numpy() for x in transform([tf.constant(array[first : first + size]) for array in raw])]
                for first in range(0, len(arrays), size)
            ]
        named.update(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))
    return replace(arrays, inputs=map_named(lambda name, _: named[name], arrays.inputs)) if transforms else arrays


def sample_rows(examples: Rows, count: int, transforms: Transforms, reads_first: bool = False) -> Any:
    """Returns up to `count` examples that are spread over a split, after the preprocessing, as `Arrays`.

    If they are neither in memory nor rows of a table, the first ones if `reads_first`, else None.
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
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return available
    return min(available, limit - used)
