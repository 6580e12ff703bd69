"""Computes fingerprints of splits: digests of their values, by which later commands find out if the data changed."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from scaleflow.dataset.batches.rows import ALL_VALUES, Array
from scaleflow.interfaces import OutputStructure, Rows, name_leaves

#: The `covers` of a digest of all records of a stream, before they are decoded.
ALL_RECORDS = "all records"


@dataclass(frozen=True)
class Fingerprint:
    """Identifies a split."""

    examples: int  # their number
    digest: str  # 16 hexadecimal digits: a hash of the split's name and size, and of the values named by `covers`
    inputs: Any  # (dtype, shape of one example), or a dict of these by name
    targets: Any  # likewise
    #: `all`, `all records` (of a stream, before they are decoded) or `a sample of 32 examples`. A sample is spread
    #: evenly over the split, or has the first records of a stream that is not in memory.
    covers: str = ALL_VALUES
    paths: tuple[str, ...] = ()  # the files of the split, if the source names them


def fingerprint_split(split: str, examples: Rows, outputs: OutputStructure | None = None) -> Fingerprint:
    """Computes the fingerprint of a split from its raw examples in memory, or from a sample without unreadable ones.

    The names of the classes in `outputs` count. Targets are numbers, so they stay the same if a class is renamed.
    """
    covers, portions = examples.read_to_digest()
    digest = hashlib.blake2b(f"{split} {len(examples)}".encode(), digest_size=8)
    class_names: dict[str, Any] = {}
    if outputs is not None:
        for name, described in name_leaves(outputs).items():
            if described.names:
                class_names[name] = described.names
    digest.update(repr(class_names).encode())
    inputs: Any = None
    targets: Any = None
    for parts in portions:
        for part in parts:
            for name, values in name_leaves(part).items():
                digest.update(f"{name} {dtype_name(values)} {values.shape}".encode())
                update_digest(digest, values)
        if inputs is None:
            inputs = describe_examples(parts[0])
            targets = describe_examples(parts[1])
    contents = [values for values in examples.records if not are_paths(values)]
    if contents and len(contents) == len(examples.records):
        covers = ALL_RECORDS
    for values in contents:
        update_digest(digest, values)
    return Fingerprint(len(examples), digest.hexdigest(), inputs, targets=targets, covers=covers, paths=examples.paths)


def describe_examples(part: Any) -> Any:
    """Returns the dtype and shape of one example, or a dict of these by name."""
    described = {name: (dtype_name(values), list(values.shape[1:])) for name, values in name_leaves(part).items()}
    return described.get("", described)


def are_paths(values: Array) -> bool:
    """Returns whether texts are paths of files, judged by the first one.

    A digest leaves out such texts, because the folder of the data can move.
    """
    return dtype_name(values) == "string" and values.size > 0 and os.path.isfile(values.flat[0])  # noqa: PTH113


def dtype_name(values: Array) -> str:
    return name_dtype(values.dtype)


@cache
def name_dtype(dtype: np.dtype[Any]) -> str:
    return "string" if dtype.kind in "OSU" else dtype.name


def update_digest(digest: hashlib.blake2b, values: Array) -> None:
    """Adds all values to a digest. `str` and `bytes` count the same."""
    if dtype_name(values) != "string":
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in values.ravel().tolist()]
    digest.update(np.fromiter(map(len, texts), np.int64, len(texts)).data)
    digest.update(b"".join(texts))
