"""Fingerprints of splits from the whole of what is in memory, or a sample; and targets that are cheap to read."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.blocks import Blocks
from scaleflow.dataset.pipeline.records import Records, decode, decode_records, to_record
from scaleflow.interfaces import Arrays, Examples, OutputStructure, Stream, map_leaves, name_leaves

#: A digest of a stream that is not in memory covers this many examples.
SAMPLE = 32

#: Arrays are digested whole up to this size: a core takes 2 s for it. Of larger ones, so many bytes are a sample.
WHOLE_BYTES = 2 << 30
SAMPLE_BYTES = 64 << 20

#: What a digest covers if it is of all values of the split.
ALL_VALUES = "all"

#: What a digest covers if it is of all records of a stream, before they are decoded.
ALL_RECORDS = "all records"

#: Time limit for reading targets.
SECONDS = 5.0

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a split."""

    examples: int  # their number
    digest: str  # 16 hexadecimal digits: a hash of the split's name and size, and of what `covers` says
    #: (dtype, shape of one example), or a dict of them by name
    inputs: Any
    targets: Any
    #: `all`, `all records` (of a stream, before they are decoded) or `a sample of 32 examples`, spread evenly over the
    #: split (of a stream whose records are not in memory, its first ones)
    covers: str = ALL_VALUES
    paths: tuple[str, ...] = ()  # the files that the split is read from, as far as the source says


def fingerprint_split(split: str, examples: Examples, outputs: OutputStructure | None = None) -> Fingerprint:
    """Computes the fingerprint of a split from its raw examples in memory, or from a sample without unreadable ones.

    The names of the classes in `outputs` count: targets are numbers, which stay the same if a class is renamed.
    """
    covers, portions = choose_portions(examples)
    digest = hashlib.blake2b(f"{split} {len(examples)}".encode(), digest_size=8)
    names = {} if outputs is None else {name: each.names for name, each in name_leaves(outputs).items() if each.names}
    digest.update(repr(names).encode())
    specs: list[Any] = []
    for parts in portions:
        for name, values in (named for part in parts for named in name_leaves(part).items()):
            digest.update(f"{name} {dtype_name(values)} {values.shape}".encode())
            update_digest(digest, values)
        specs = specs or [
            {name: describe_values(each) for name, each in name_leaves(part).items()} for part in parts[:2]
        ]
    if isinstance(examples, Records):
        components = [values.numpy() for values in examples.components]
        contents = [values for values in components if not are_paths(values)]
        covers = ALL_RECORDS if len(contents) == len(components) else covers
        for values in contents:
            update_digest(digest, values)
    paths = tuple(dict.fromkeys(examples.rows.paths)) if isinstance(examples, Blocks) else ()
    inputs, targets = (each.get("", each) for each in specs)
    return Fingerprint(len(examples), digest.hexdigest(), inputs, targets, covers, paths)


def are_paths(values: Array) -> bool:
    """Returns whether texts are paths of files, whose names do not count: the folder of the data can be moved."""
    return dtype_name(values) == "string" and values.size > 0 and os.path.isfile(values.flat[0])  # noqa: PTH113


def choose_portions(examples: Examples) -> tuple[str, Iterator[tuple[Any, ...]]]:
    """Returns what a digest covers, and that in portions: (inputs, targets), or with weights, each [n, ...]."""
    if isinstance(examples, Arrays) and examples.nbytes <= WHOLE_BYTES:
        return ALL_VALUES, iter([examples.parts])
    if isinstance(examples, Blocks) and is_in_memory(examples):
        blocks = (block for block, length in enumerate(examples.lengths()) if length)
        return ALL_VALUES, (examples.load(block).parts for block in blocks)
    sample = sample_examples(examples)
    return f"a sample of {len(next(iter(name_leaves(sample[0]).values())))} examples", iter([sample])


def is_in_memory(blocks: Blocks) -> bool:
    """Returns whether all rows are kept in memory, because all are learned from."""
    return len(blocks.rows.sampled) == sum(blocks.rows.lengths)


def describe_values(values: Array) -> tuple[str, Sequence[int]]:
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
    found = list(read_readable(decode_records(subset, subset.dataset.take(SAMPLE)), SAMPLE))
    if not found:
        return tuple(map_leaves(empty_examples, spec) for spec in decode_records(examples).element_spec)
    return tuple(map_leaves(lambda *values: stack_values(values), *parts) for parts in zip(*found, strict=True))


def read_readable(dataset: tf.data.Dataset, count: int) -> Iterator[Any]:
    """Yields what can be read of the first `count` elements, as numpy values; other checks report the rest.

    `ignore_errors` would not end if every further call fails: a generator that raised, of which more is expected.
    """
    elements = dataset.as_numpy_iterator()
    for _ in range(count):
        try:
            yield next(elements)
        except StopIteration:
            return
        except tf.errors.OpError:
            continue


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


def update_digest(digest: hashlib.blake2b, values: Array) -> None:
    """Adds all values. Texts that are `str` and `bytes` count the same."""
    if dtype_name(values) != "string":
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in values.ravel().tolist()]
    digest.update(np.fromiter(map(len, texts), np.int64, len(texts)).data)
    digest.update(b"".join(texts))


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
