"""Digests of the splits of a run, as the event `data` has them, and what differs between two runs. No TensorFlow."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scaleflow.interfaces.events import DatasetDescribed
from scaleflow.runs.data_digest import MAX_FILES, WHOLE
from scaleflow.runs.event_log import EventReader
from scaleflow.runs.folder import RunFolder

#: Digests of other versions are not compared. Those without a version were computed from a sample of each split,
#: those of version 2 from numbers of tables in float32.
DIGEST_VERSION = 3

#: What a digest covers if it is of the whole split, and of the files that it is read from.
ALL_VALUES, FILES = "all", "files"

#: By the name of a split: `examples`, `digest`, `covers`, `version` and more.
SplitDigests = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Repetition:
    """What a run knows of the one that it repeats."""

    splits: SplitDigests = field(default_factory=dict)  # the digests of that run's data
    is_exact: bool = False  # whether the run is refused if its data is another


def identify_split(digest: str, covers: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Returns the digest of a split, what it covers, and its version.

    Args:
        digest: of the examples that `covers` names.
        covers: `all`, or what of the split.
        files: the digests of the files that the split is read from, by path. Their names count relative to the folder
            that they share, so that the folder can be moved.
    """
    if covers != ALL_VALUES and files:
        shared = os.path.commonpath(files)
        named = sorted((os.path.relpath(path, shared), each) for path, each in files.items())
        covers = describe_coverage(files)
        digest = hashlib.blake2b(json.dumps([digest, named]).encode(), digest_size=8).hexdigest()
    return {"digest": digest, "covers": covers, "version": DIGEST_VERSION}


def describe_coverage(files: Mapping[str, str]) -> str:
    """Says in words what the digests of files cover."""
    if any(not digest.startswith(f"{WHOLE}:") for digest in files.values()):
        return "a sample of each large file"
    return FILES if len(files) < MAX_FILES else f"the first {MAX_FILES:,} files"


def read_split_digests(files: RunFolder) -> SplitDigests:
    """Returns the digests of the data that a run was last trained on; empty if it has none."""
    described = [event for event in EventReader(files.events).read() if isinstance(event, DatasetDescribed)]
    return described[-1].splits if described else {}


def list_split_changes(before: SplitDigests, now: SplitDigests) -> list[str]:
    """Says which splits differ, and in what; digests that were computed in different ways are not compared."""
    changes = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            changes.append(f"the split {name} {'is new' if old is None else 'is gone'}")
        elif old.get("version") != new.get("version"):
            continue
        elif old["examples"] != new["examples"]:
            changes.append(f"{name} had {old['examples']:,} examples and has {new['examples']:,}")
        elif old["covers"] == new["covers"] and old["digest"] != new["digest"]:
            what = f"the files of {name} changed" if "file" in new["covers"] else f"values of {name} changed"
            changes.append(f"{what} ({new['examples']:,} examples as before)")
    return changes
