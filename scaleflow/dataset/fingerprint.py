"""Fingerprints of splits from a sample of their examples, and targets that are cheap to read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.blocks import Blocks
from scaleflow.dataset.records import Records, decode, decode_records, to_record
from scaleflow.interfaces import Arrays, Examples, Stream, map_leaves, name_leaves

#: A digest covers this many examples; of arrays more, if they fit in so many bytes.
SAMPLE = 32
SAMPLE_BYTES = 1 << 20

#: Time limit for reading targets.
SECONDS = 5.0

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a split."""

    examples: int  # their number
    #: 16 hexadecimal digits: a hash of the split's name and size, and of a sample spread evenly over it (of a stream
    #: whose records are not in memory, its first examples)
    digest: str
    #: (dtype, shape of one example), or a dict of them by name
    inputs: Any
    targets: Any


def fingerprint_split(split: str, examples: Examples) -> Fingerprint:
    """Computes the fingerprint of a split from a sample of its raw examples, except unreadable ones."""
    parts = sample_examples(examples)
    digest = hashlib.blake2b(f"{split} {len(examples)}".encode(), digest_size=8)
    for name, values in (named for part in parts for named in name_leaves(part).items()):
        label = f"{name} " if name else ""  # a single tensor has the digest that it had before there were names
        digest.update(f"{label}{dtype_name(values)} {values.shape}".encode())
        digest.update(to_bytes(values))
    specs = ({name: to_spec(values) for name, values in name_leaves(part).items()} for part in parts[:2])
    return Fingerprint(len(examples), digest.hexdigest(), *(spec.get("", spec) for spec in specs))


def to_spec(values: Array) -> tuple[str, Sequence[int]]:
    return dtype_name(values), list(values.shape[1:])


def sample_examples(examples: Examples) -> tuple[Any, ...]:
    """Returns a sample of the examples: (inputs, targets), or with weights, each [n, ...]."""
    if isinstance(examples, Arrays):
        example_bytes = max(1, examples.nbytes // len(examples))
        indices = spread_evenly(len(examples), max(SAMPLE, SAMPLE_BYTES // example_bytes))
        return examples.map(lambda array: array[indices]).parts
    if isinstance(examples, Blocks):
        return examples.head(SAMPLE).parts
    subset = examples.select(spread_evenly(len(examples), SAMPLE)) if isinstance(examples, Records) else examples
    readable = decode_records(
        subset, subset.dataset.take(SAMPLE)
    ).ignore_errors()  # bad examples are reported elsewhere
    found = list(readable.as_numpy_iterator())
    if not found:
        return tuple(map_leaves(empty_examples, spec) for spec in decode_records(examples).element_spec)
    return tuple(map_leaves(lambda *values: stack_values(values), *parts) for parts in zip(*found, strict=True))


def empty_examples(spec: tf.TensorSpec) -> Array:
    return np.empty([0, *(size or 0 for size in spec.shape)], spec.dtype.as_numpy_dtype)


def spread_evenly(length: int, count: int) -> Array:
    """Returns up to `count` indices, spread evenly from the first to the last."""
    return np.unique(np.linspace(0, length - 1, min(length, count)).astype(np.int64))


def stack_values(values: Sequence[Any]) -> Array:
    """Returns [n, ...]; flattens and concatenates examples that differ in shape."""
    if len({np.shape(value) for value in values}) == 1:
        return np.asarray(values)
    return np.concatenate([np.ravel(value) for value in values])


def dtype_name(values: Array) -> str:
    return "string" if values.dtype.kind in "OSU" else values.dtype.name


def to_bytes(values: Array) -> bytes:
    if dtype_name(values) != "string":
        return np.ascontiguousarray(values).tobytes()
    texts = (v if isinstance(v, bytes) else str(v).encode() for v in values.ravel())
    return b"\0".join(texts)


def read_cheap_targets(examples: Examples) -> tuple[Any, Array | None] | None:
    """Returns all targets of a split, [n, ...] each, and the weights [n] of its examples if it has some.

    Returns None if they can't be read within `SECONDS` or without reading the split. For records in memory, tf.data
    traces `decode` and prunes its graph to what the targets need: a file that only the inputs come from is not read.
    """
    if isinstance(examples, Arrays):
        return examples.targets, examples.weights
    if not isinstance(examples, Records):
        return None
    stream: Stream = examples
    targets = stream.dataset.map(lambda *record: decode(stream, to_record(record))[1:], num_parallel_calls=2)
    deadline = time.monotonic() + SECONDS
    batches = []
    try:
        for batch in targets.batch(1024).as_numpy_iterator():
            batches.append(batch)
            if time.monotonic() > deadline:
                return None
    except tf.errors.OpError:  # training reports bad examples
        return None
    read, *weights = (
        map_leaves(lambda *values: np.concatenate(values), *parts) for parts in zip(*batches, strict=True)
    )
    return read, weights[0] if weights else None
