"""Caches the examples of a split as arrays, in memory or in a temporary file, for access by index."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from scaleflow.dataset.records import decode_records, static_bytes
from scaleflow.dataset.unreadable import FAILURES, find_first_unreadable, unreadable_message
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Examples, Stream, Workers

#: `dataset.cache=auto` caches a split in memory up to this size, and up to a quarter of the available memory.
AUTO_BYTES = 1 << 30

READ_BATCH_SIZE = 256

#: Preprocessing: raw inputs [b, ...] -> the model's inputs [b, ...]. Traced.
Transform = Callable[[tf.Tensor], tf.Tensor]


def cache_split(split: str, examples: Examples, cache: str, transform: Transform | None, workers: Workers) -> Examples:
    """Applies `dataset.cache` to a split.

    A cached stream becomes arrays of preprocessed inputs. Arrays are always preprocessed here. Memory-mapped arrays
    are copied into memory if a stream of their size would be, and stay mapped otherwise.

    Args:
        split: name of the split, for messages.
        examples: raw.
        cache: `auto`, `memory`, `file` or `none`.
        transform: preprocessing of the inputs.
        workers: decide together, because all of them must read in the same way.

    Raises:
        ConfigError: if an example cannot be read, or if examples to be cached are text or differ in shape.
    """
    if isinstance(examples, Arrays):
        examples = read_mapped(examples, cache, workers)
        return examples if transform is None else Arrays(transform_inputs(examples.inputs, transform), examples.targets)
    spec = batch_spec(examples, transform)
    size = static_bytes(spec) * len(examples)
    if cache == "auto":
        cache = "memory" if workers.all(is_small(size)) else "none"
    if cache == "none":
        return examples
    if size == float("inf"):
        raise ConfigError(f"dataset.cache={cache}: the examples of {split!r} are text or differ in shape; use none")
    return fill_arrays(split, examples, transform, *(allocate([len(examples), *s.shape], s.dtype, cache) for s in spec))


def is_small(size: float) -> bool:
    """Returns whether `dataset.cache=auto` caches so many bytes in memory."""
    return size <= min(AUTO_BYTES, available_bytes() / 4)


def read_mapped(arrays: Arrays, cache: str, workers: Workers) -> Arrays:
    """Copies memory-mapped inputs into memory if `dataset.cache` asks for it."""
    if not isinstance(arrays.inputs, np.memmap):
        return arrays
    if cache == "memory" or (cache == "auto" and workers.all(is_small(arrays.inputs.nbytes))):
        return Arrays(np.array(arrays.inputs), arrays.targets)
    return arrays


def batch_spec(stream: Stream, transform: Transform | None) -> Any:
    """Returns the specs (input, target) of one example after preprocessing."""
    examples = decode_records(stream)
    inputs, targets = examples.element_spec
    if transform is not None:
        batched = examples.batch(1, drop_remainder=True).map(lambda x, y: (transform(x), y)).element_spec[0]
        inputs = tf.TensorSpec(batched.shape[1:], batched.dtype)
    return inputs, targets


def fill_arrays(
    split: str, stream: Stream, transform: Transform | None, inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]
) -> Arrays:
    """Fills `inputs` and `targets` with the examples of a stream."""
    done = 0
    batches = preprocess_batches(decode_records(stream).batch(READ_BATCH_SIZE), transform).prefetch(tf.data.AUTOTUNE)
    with refuse_unreadable(split, stream):
        for x, y in batches:
            end = min(done + len(x), len(inputs))
            inputs[done:end], targets[done:end] = x.numpy()[: end - done], y.numpy()[: end - done]
            done = end
            if done == len(inputs):
                break
    if done < len(inputs):
        raise ConfigError(f"dataset: the stream of {split!r} holds {done} examples, and the source says {len(inputs)}")
    return Arrays(inputs, targets)


@contextlib.contextmanager
def refuse_unreadable(split: str, examples: Examples) -> Iterator[None]:
    """Wraps code that reads a split: if reading fails, names the first unreadable example.

    Raises:
        ConfigError: names that example. If there is none, the original error passes through.
    """
    try:
        yield
    except FAILURES as error:
        bad = find_first_unreadable(examples) if isinstance(examples, Stream) else None
        if bad is None:
            raise
        raise ConfigError(unreadable_message(split, bad)) from error


def preprocess_batches(batches: tf.data.Dataset, transform: Transform | None) -> tf.data.Dataset:
    """Preprocesses the inputs of batches (inputs, ...)."""
    if transform is None:
        return batches
    return batches.map(lambda x, *rest: (transform(x), *rest), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def transform_inputs(inputs: np.ndarray[Any, Any], transform: Transform) -> np.ndarray[Any, Any]:
    """Preprocesses inputs in memory, on the CPU."""
    parts = []
    with tf.device("CPU:0"):
        for first in range(0, len(inputs), READ_BATCH_SIZE):
            parts.append(np.asarray(transform(tf.constant(inputs[first : first + READ_BATCH_SIZE]))))
    return np.concatenate(parts)


def allocate(shape: list[int], dtype: tf.DType, cache: str) -> np.ndarray[Any, Any]:
    """Allocates an array in memory, or in a temporary file that disappears with this process."""
    if cache == "memory":
        return np.empty(shape, dtype.as_numpy_dtype)
    try:
        with tempfile.NamedTemporaryFile(prefix="scaleflow-cache-") as file:  # unlinked on exit, still mapped
            return np.memmap(file, dtype.as_numpy_dtype, "w+", shape=tuple(shape) or (1,))
    except OSError as error:
        raise ConfigError(
            f"dataset.cache=file: cannot write {tempfile.gettempdir()}: {error.strerror}; TMPDIR names another folder"
        ) from error


def available_bytes() -> float:
    """Returns the memory that this process can still allocate, within the limit of its container (cgroup v2)."""
    available = psutil.virtual_memory().available
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return available
    return min(available, limit - used)
