"""Finds inputs of a sweep's jobs that have changed: the user's code and the data files.

The record of a run has the inputs that its job read. Here they are compared with the current ones.
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

#: The tag of the sweep's run that names code or data newer than some results.
CHANGED = "scaleflow.changed"

Config = Mapping[str, Any]

#: Keys of the section `dataset` that are not arguments of the source.
DATASET_OPTIONS = frozenset(field.name for field in fields(Dataset))


class SweepInputs:
    """Reads the code and the data files of the jobs of a sweep.

    Args:
        folder: the folder of the sweep.
        search: the folders that may have the modules of `_target_`.
    """

    def __init__(self, folder: Path, search: Sequence[str]) -> None:
        self._folder = folder
        self._search = search
        self._lock = threading.Lock()
        self._latest: Provenance | None = None

    def note_changes(self, config: Config) -> list[str]:
        """Returns the files that have changed since the last call. Call it when a job with this config begins."""
        with self._lock:
            before = self._latest
            self._latest = self._read(config)
            if before is None:
                return []
            return list_input_changes(before, self._latest, is_same_job=False)

    def find_changes(self, entries: Sequence[LedgerEntry], configs: Mapping[int, Config]) -> dict[int, list[str]]:
        """Returns the files and lengths that changed since the jobs of earlier commands ran, by job number.

        Args:
            configs: the configs of the jobs that this command requests, by number. Other jobs of the sweep are compared
                only in files that they share with these jobs.
        """
        records: dict[int, Provenance] = {}
        folders: dict[int, Path] = {}
        for entry in entries:
            record = self._read_record(entry)
            if record is not None:
                records[entry.number] = record
                folders[entry.number] = self._folder / entry.folder
        if not records:
            return {}
        current = self._read_current(configs)
        shared = merge_inputs(list(current.values()))
        changes: dict[int, list[str]] = {}
        for number, record in records.items():
            names = list_length_changes(folders[number])
            names += list_input_changes(record, current.get(number, shared), is_same_job=number in current)
            if names:
                changes[number] = names
        return changes

    def _read_current(self, configs: Mapping[int, Config]) -> dict[int, Provenance]:
        """Reads the current inputs of jobs. Jobs with the same objects and data share them, because it takes time."""
        inputs: dict[str, Provenance] = {}
        current: dict[int, Provenance] = {}
        for number, config in configs.items():
            key = str([*list_targets(config), config.get("dataset")])
            if key not in inputs:
                inputs[key] = self._read(config)
            current[number] = inputs[key]
        return current

    def _read(self, config: Config) -> Provenance:
        """Reads the current inputs of a job with this config."""
        section = config.get("dataset")
        arguments: dict[str, Any] = {}
        if isinstance(section, Mapping):
            arguments = {key: value for key, value in section.items() if key not in DATASET_OPTIONS}
        digests = group_by_folder(digest_files(find_data_files(arguments)))
        files = {path: [digest] for path, digest in digests.items()}
        return Provenance(code=read_code(config, self._search), data={"files": files})

    def _read_record(self, entry: LedgerEntry) -> Provenance | None:
        """Returns the recorded inputs of a job; None if it has no run."""
        folder = self._folder / entry.folder
        if entry.is_finished or RunState.read(folder).has_begun:
            return read_last_inputs(RunFolder(folder))
        return None


def merge_inputs(inputs: Sequence[Provenance]) -> Provenance:
    """Combines the modules and the data files of several jobs."""
    first = inputs[0]
    modules: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for job_inputs in inputs:
        modules.update(job_inputs.code.modules)
        files.update(job_inputs.data["files"])
    return replace(first, code=replace(first.code, modules=modules), data={"files": files})


def list_length_changes(folder: Path) -> list[str]:
    """Describes a job's new length, if a command resumed only this job's run: `training.epochs became 3`."""
    if not RunFolder(folder).count_resumes():
        return []
    length = RunState.read(folder).resumed_length
    return [f"{key} became {format_value(value)}" for key, value in length.items()]


def list_input_changes(before: Provenance, now: Provenance, is_same_job: bool) -> list[str]:
    """Names the files that differ now: `nets.py changed`.

    Files that were in an object store are not compared. If all data is elsewhere, no data files are compared.

    Args:
        is_same_job: whether both inputs belong to one job. Otherwise only files that both have are compared.
    """
    recorded = before.data.get("files", {})
    local = {path: digest for path, digest in recorded.items() if not is_store_address(path)}
    parts = ("code", "files") if now.data["files"] else ("code",)
    names = []
    for change in compare(replace(before, data={"files": local}), now, parts):
        is_in_both = change.before is not None and change.now is not None
        if change.matters and (is_same_job or is_in_both):
            names.append(str(change))
    return names


def describe_changes(changes: Mapping[int, Sequence[str]]) -> str:
    """Names the changed files, and the jobs that ran before the change: `nets.py changed since #0, #1 ran`."""
    names = sorted(set().union(*changes.values()))
    jobs = [f"#{number}" for number in changes]
    return f"{join_first(names)} since {join_first(jobs)} ran"
