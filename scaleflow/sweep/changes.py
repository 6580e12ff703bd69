"""What the jobs of a sweep read besides their configs: the user's code, and data files.

What a job has read is in the record of its run. Here it is compared with what is there now.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from scaleflow.config.parse import format_value
from scaleflow.config.trust import list_targets
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import Dataset
from scaleflow.interfaces.formatting import join_first
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.data_digest import digest_files, find_data_files, group_by_folder
from scaleflow.runs.identity import compare
from scaleflow.runs.provenance.collect import read_code
from scaleflow.runs.provenance.record import Provenance, read_last_inputs
from scaleflow.sweep.ledger import LedgerEntry

#: The tag of the sweep's run that says which results are older than the code or the data.
CHANGED = "scaleflow.changed"

Config = Mapping[str, Any]

#: Keys of the section `dataset` that are no arguments of the source.
DATASET_OPTIONS = frozenset(each.name for each in fields(Dataset))


class SweepInputs:
    """What the jobs of the sweep in a folder read. Modules of `_target_` are looked for in the folders of `search`."""

    def __init__(self, folder: Path, search: Sequence[str]) -> None:
        self._folder, self._search = folder, search
        self._lock = threading.Lock()
        self._latest: Provenance | None = None

    def note_changes(self, config: Config) -> list[str]:
        """Returns the files that changed since the job before the one with this config began, which begins now."""
        with self._lock:
            before, self._latest = self._latest, self._read(config)
            return list_input_changes(before, self._latest, are_of_one=False) if before else []

    def find_changes(self, entries: Sequence[LedgerEntry], configs: Mapping[int, Config]) -> dict[int, list[str]]:
        """Returns what changed since jobs of earlier commands ran, files or the length, by the number of the job.

        Args:
            configs: the configs of those that this command asks for, by number. Other jobs of the sweep are compared in
                the files that they share with these.
        """
        ran = {entry.number: before for entry in entries if (before := self._read_record(entry))}
        if not ran:
            return {}
        lengths = {entry.number: list_length_changes(self._folder / entry.folder) for entry in entries}
        names = {number: str([*list_targets(config), config.get("dataset")]) for number, config in configs.items()}
        distinct = {names[number]: config for number, config in configs.items()}
        now = {name: self._read(config) for name, config in distinct.items()}
        modules = {name: module for each in now.values() for name, module in each.code.modules.items()}
        files = {path: digest for each in now.values() for path, digest in each.data["files"].items()}
        first = next(iter(now.values()))
        union = replace(first, code=replace(first.code, modules=modules), data={"files": files})
        changes = {
            number: [
                *lengths[number],
                *list_input_changes(before, now.get(names.get(number, ""), union), number in names),
            ]
            for number, before in ran.items()
        }
        return {number: files for number, files in changes.items() if files}

    def _read(self, config: Config) -> Provenance:
        """Returns what a job with this config reads now."""
        section = config.get("dataset")
        arguments = section if isinstance(section, Mapping) else {}
        files = find_data_files({key: each for key, each in arguments.items() if key not in DATASET_OPTIONS})
        digests = group_by_folder(digest_files(files))
        data = {"files": {path: [digest] for path, digest in digests.items()}}
        return Provenance(code=read_code(config, self._search), data=data)

    def _read_record(self, entry: LedgerEntry) -> Provenance | None:
        """Returns what the run of a job has read; None if there is no run."""
        folder = self._folder / entry.folder
        return read_last_inputs(RunFolder(folder)) if entry.is_finished or RunState.read(folder).is_ready else None


def list_length_changes(folder: Path) -> list[str]:
    """Names the length that a command gave the run of a job which resumed it alone: `training.epochs became 3`."""
    if not RunFolder(folder).count_resumes():
        return []
    length = RunState.read(folder).resumed_length
    return [f"{key} became {format_value(value)}" for key, value in length.items()]


def list_input_changes(before: Provenance, now: Provenance, are_of_one: bool) -> list[str]:
    """Names the files that differ now, `nets.py changed`; if they are not those of one job, only files that both have.

    Files that were in an object store or, if none of the data is here, on another machine are not compared.
    """
    files = {path: each for path, each in before.data.get("files", {}).items() if not is_store_address(path)}
    parts = ("code", "files") if now.data["files"] else ("code",)
    changes = compare(replace(before, data={"files": files}), now, parts)
    return [str(each) for each in changes if each.matters and (are_of_one or None not in (each.before, each.now))]


def describe_changes(changes: Mapping[int, Sequence[str]]) -> str:
    """Says what changed since which jobs ran: `nets.py changed since #0, #1 ran`."""
    files = sorted({name for names in changes.values() for name in names})
    return f"{join_first(files)} since {join_first([f'#{number}' for number in changes])} ran"
