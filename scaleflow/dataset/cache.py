"""Keeps the examples of a stream, once they were read, in memory or in a file: they are gathered by index then."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.records import decode_records, static_bytes
from scaleflow.dataset.unreadable import FAILURES, find_first_unreadable, unreadable_message
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Examples, Stream, Workers

#: `dataset.cache=auto` keeps a split in memory up to this size, if that is a quarter of what is free at most.
AUTO_BYTES = 1 << 30

READ_BATCH_SIZE = 256

#: raw inputs [b, ...] -> what the model takes [b, ...]; traced.
Transform = Callable[[tf.Tensor], tf.Tensor]


def cache_split(split: str, examples: Examples, cache: str, transform: Transform | None, workers: Workers) -> Examples:
    """A split as `dataset.cache` says: a stream as arrays where it is to be kept. Arrays are transformed.

    Arrays that are mapped from a file are read into memory as a stream would be, and stay mapped otherwise.

    Args:
        split: its name, for messages.
        examples: raw.
        cache: auto, memory, file or none.
        transform: the preprocessing of its inputs.
        workers: all of them keep it, or none: they have to read alike.

    Raises:
        ConfigError: for an example that cannot be read, or examples that differ in shape and are to be kept.
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
    """Whether `dataset.cache=auto` keeps so many bytes in memory."""
    return size <= min(AUTO_BYTES, available_bytes() / 4)


def read_mapped(arrays: Arrays, cache: str, workers: Workers) -> Arrays:
    """Arrays that are mapped from a file, in memory if `dataset.cache` says so."""
    if not isinstance(arrays.inputs, np.memmap):
        return arrays
    if cache == "memory" or (cache == "auto" and workers.all(is_small(arrays.inputs.nbytes))):
        return Arrays(np.array(arrays.inputs), arrays.targets)
    return arrays


def batch_spec(stream: Stream, transform: Transform | None) -> Any:
    """(input, target) of one example, behind the preprocessing."""
    examples = decode_records(stream)
    inputs, targets = examples.element_spec
    if transform is not None:
        batched = examples.batch(1, drop_remainder=True).map(lambda x, y: (transform(x), y)).element_spec[0]
        inputs = tf.TensorSpec(batched.shape[1:], batched.dtype)
    return inputs, targets


def fill_arrays(
    split: str, stream: Stream, transform: Transform | None, inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]
) -> Arrays:
    """The arrays, with the stream's examples in them."""
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
    """Around what reads a split: where that fails, the first example that cannot be read is named.

    Raises:
        ConfigError: that names it.
    """
    try:
        yield
    except FAILURES as error:
        bad = find_first_unreadable(examples) if isinstance(examples, Stream) else None
        if bad is None:
            raise
        raise ConfigError(unreadable_message(split, bad)) from error


def preprocess_batches(batches: tf.data.Dataset, transform: Transform | None) -> tf.data.Dataset:
    """Batches (inputs, ...) with their inputs preprocessed."""
    if transform is None:
        return batches
    return batches.map(lambda x, *rest: (transform(x), *rest), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def transform_inputs(inputs: np.ndarray[Any, Any], transform: Transform) -> np.ndarray[Any, Any]:
    """Inputs in memory behind the preprocessing."""
    parts = []
    with tf.device("CPU:0"):
        for first in range(0, len(inputs), READ_BATCH_SIZE):
            parts.append(np.asarray(transform(tf.constant(inputs[first : first + READ_BATCH_SIZE]))))
    return np.concatenate(parts)


def allocate(shape: list[int], dtype: tf.DType, cache: str) -> np.ndarray[Any, Any]:
    """Room for examples: in memory, or in a file that is gone with this process."""
    if cache == "memory":
        return np.empty(shape, dtype.as_numpy_dtype)
    try:
        with tempfile.NamedTemporaryFile(prefix="scaleflow-cache-") as file:  # its name goes, its room stays in use
            return np.memmap(file, dtype.as_numpy_dtype, "w+", shape=tuple(shape) or (1,))
    except OSError as error:
        raise ConfigError(
            f"dataset.cache=file: cannot write {tempfile.gettempdir()}: {error.strerror}; TMPDIR names another folder"
        ) from error


def available_bytes() -> float:
    """Memory that this process could still take; a container's limit counts."""
    free = read_kernel_number(Path("/proc/meminfo"), "MemAvailable:") * 1024
    limit, used = (read_kernel_number(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    return free if limit == float("inf") else min(free, limit - used)


def read_kernel_number(file: Path, label: str = "") -> float:
    """The number behind a label; infinite where there is none."""
    try:
        line = next(line for line in file.read_text().splitlines() if line.startswith(label))
        return float(line[len(label) :].split()[0])
    except (OSError, StopIteration, ValueError, IndexError):
        return float("inf")
