"""What can be told of a split without going through all of it: its digest, its targets where they are at hand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.records import Records, decode, decode_records, to_record
from scaleflow.interfaces import Arrays, Examples, Stream

#: A digest is made of so many examples, and of arrays of so many bytes at most.
SAMPLE = 32
SAMPLE_BYTES = 1 << 20

#: How long looking for targets may take.
SECONDS = 5.0

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fingerprint:
    """What a split looks like.

    Attributes:
        examples: how many.
        digest: 16 hexadecimal digits; of the number of examples, and the values of some that are spread over the
            split (of a stream whose records are not in memory: the first ones).
        inputs, targets: (dtype, shape of one example).
    """

    examples: int
    digest: str
    inputs: tuple[str, Sequence[int]]
    targets: tuple[str, Sequence[int]]


def fingerprint_split(split: str, examples: Examples) -> Fingerprint:
    """Looks at a few raw examples of a split; of those that can be read."""
    inputs, targets = sample_examples(examples)
    seen = hashlib.blake2b(f"{split} {len(examples)}".encode(), digest_size=8)
    for values in (inputs, targets):
        seen.update(f"{dtype_name(values)} {values.shape}".encode())
        seen.update(to_bytes(values))
    of_one = ((dtype_name(values), list(values.shape[1:])) for values in (inputs, targets))
    return Fingerprint(len(examples), seen.hexdigest(), *of_one)


def sample_examples(examples: Examples) -> tuple[Array, Array]:
    """A few examples: (inputs, targets), each [n, ...]."""
    if isinstance(examples, Arrays):
        of_one = max(1, (examples.inputs.nbytes + examples.targets.nbytes) // len(examples))
        at = spread_evenly(len(examples), max(SAMPLE, SAMPLE_BYTES // of_one))
        return examples.inputs[at], examples.targets[at]
    few = examples.select(spread_evenly(len(examples), SAMPLE)) if isinstance(examples, Records) else examples
    readable = decode_records(few, few.dataset.take(SAMPLE)).ignore_errors()  # what is bad is for others to tell of
    pairs = list(readable.as_numpy_iterator())
    if not pairs:
        of_inputs, of_targets = decode_records(examples).element_spec
        return empty_examples(of_inputs), empty_examples(of_targets)
    inputs, targets = zip(*pairs, strict=True)
    return stack_values(inputs), stack_values(targets)


def empty_examples(spec: tf.TensorSpec) -> Array:
    """No example."""
    return np.empty([0, *(size or 0 for size in spec.shape)], spec.dtype.as_numpy_dtype)


def spread_evenly(length: int, count: int) -> Array:
    """Places from the first to the last, as evenly as can be."""
    return np.unique(np.linspace(0, length - 1, min(length, count)).astype(np.int64))


def stack_values(values: Sequence[Any]) -> Array:
    """[n, ...]; of examples that differ in shape their values one after the other."""
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


def read_cheap_targets(examples: Examples) -> Array | None:
    """All targets of a split [n, ...]; None where they are had only by reading it, or not in a few seconds.

    Of records in memory the decoding is traced and its graph pruned to what makes the target: a file
    that only the input comes from is not read.
    """
    if isinstance(examples, Arrays):
        return examples.targets
    if not isinstance(examples, Records):
        return None
    stream: Stream = examples
    alone = stream.dataset.map(lambda *record: decode(stream, to_record(record))[1], num_parallel_calls=2)
    deadline = time.monotonic() + SECONDS
    found = []
    try:
        for batch in alone.batch(1024).as_numpy_iterator():
            found.append(batch)
            if time.monotonic() > deadline:
                return None
    except tf.errors.OpError:  # an example that is bad is for training to tell of
        return None
    return np.concatenate(found)


def fingerprint_splits(splits: Mapping[str, Examples]) -> dict[str, Fingerprint]:
    """Of each split, by its name."""
    return {name: fingerprint_split(name, examples) for name, examples in splits.items()}
