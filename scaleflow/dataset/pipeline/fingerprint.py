"""Fingerprints of splits from the whole of what is in memory, or a sample."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleflow.dataset.pipeline.rows import ALL_VALUES
from scaleflow.interfaces import OutputStructure, Rows, name_leaves

#: What a digest covers if it is of all records of a stream, before they are decoded.
ALL_RECORDS = "all records"

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


def fingerprint_split(split: str, examples: Rows, outputs: OutputStructure | None = None) -> Fingerprint:
    """Computes the fingerprint of a split from its raw examples in memory, or from a sample without unreadable ones.

    The names of the classes in `outputs` count: targets are numbers, which stay the same if a class is renamed.
    """
    covers, portions = examples.read_to_digest()
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
    contents = [values for values in examples.records if not are_paths(values)]
    covers = ALL_RECORDS if contents and len(contents) == len(examples.records) else covers
    for values in contents:
        update_digest(digest, values)
    inputs, targets = (each.get("", each) for each in specs)
    return Fingerprint(len(examples), digest.hexdigest(), inputs, targets, covers, examples.paths)


def are_paths(values: Array) -> bool:
    """Returns whether texts are paths of files, whose names do not count: the folder of the data can be moved."""
    return dtype_name(values) == "string" and values.size > 0 and os.path.isfile(values.flat[0])  # noqa: PTH113


def describe_values(values: Array) -> tuple[str, Sequence[int]]:
    return dtype_name(values), list(values.shape[1:])


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
