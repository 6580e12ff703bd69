"""What the jobs of a sweep read besides their configs: the user's code, and data files.

The digests are in a file beside the ledger, which is written too often for them. Each job in the ledger has the key of
what it ran with.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleflow.config.trust import list_targets
from scaleflow.errors import ConfigError
from scaleflow.interfaces.formatting import join_first
from scaleflow.runs import RunFolder
from scaleflow.runs.code_digest import digest_code
from scaleflow.runs.data_digest import digest_files, find_data_files, group_by_folder
from scaleflow.runs.folder import replace_json
from scaleflow.runs.identity import Difference, compare, record_parts
from scaleflow.runs.provenance.record import Provenance
from scaleflow.sweep.ledger import LedgerEntry

#: The tag of the sweep's run that says which results are older than the code or the data.
CHANGED = "scaleflow.changed"

Config = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class JobInputs:
    """The digests of what a job reads. It compares by identity, so that many jobs can share a comparison."""

    code: Mapping[str, str]  # by file; see `digest_code`
    data: Mapping[str, str]  # by file, or by folder if there are many; see `group_by_folder`

    @functools.cached_property
    def key(self) -> str:
        text = json.dumps([self.code, self.data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @functools.cached_property
    def record(self) -> Provenance:
        return record_parts(self.code, self.data)

    def list_changes(self, now: JobInputs) -> list[str]:
        """Names the files that differ now: `nets.py changed`."""
        return [str(each) for each in self._compare(now)]

    def list_shared_changes(self, now: JobInputs) -> list[str]:
        """Names those that both have."""
        return [str(each) for each in self._compare(now) if None not in (each.before, each.now)]

    def _compare(self, now: JobInputs) -> list[Difference]:
        return compare(self.record, now.record, ("code", "files"))


class SweepInputs:
    """What the jobs of a sweep read, of all its commands.

    Args:
        search: the folders in which modules of `_target_` are looked for.

    Raises ConfigError if the file with the digests cannot be read.
    """

    def __init__(self, files: RunFolder, search: Sequence[str]) -> None:
        self._path = files.sweep_inputs
        self._search = search
        self._lock = threading.Lock()
        self._latest: JobInputs | None = None
        try:
            known = json.loads(self._path.read_text()) if self._path.exists() else {}
            self._known = {key: JobInputs(**digests) for key, digests in known.items()}
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"hydra.sweep.dir={files.path}: its {self._path.name} can't be read: {error}; choose another folder"
            ) from error

    def record(self, config: Config) -> tuple[str, list[str]]:
        """Records what a job reads that begins now.

        Returns its key, and the files that changed since the job before it began.
        """
        with self._lock:
            now = self._read(config)
            if now.key not in self._known:
                self._known[now.key] = now
                self._save()
            changes = self._latest.list_shared_changes(now) if self._latest else []
            self._latest = now
            return now.key, changes

    def find_changes(self, entries: Sequence[LedgerEntry], configs: Mapping[int, Config]) -> dict[int, list[str]]:
        """Returns the files that changed since jobs of earlier commands ran, by the number of the job.

        Args:
            configs: the configs of those that this command asks for, by number. Other jobs of the sweep are compared in
                the files that they share with these.
        """
        ran = {entry.number: before for entry in entries if (before := self._known.get(entry.inputs))}
        if not ran:
            return {}
        names = {number: str([*list_targets(config), config.get("dataset")]) for number, config in configs.items()}
        distinct = {names[number]: config for number, config in configs.items()}
        now = {name: self._read(config) for name, config in distinct.items()}
        union = JobInputs(
            {file: digest for each in now.values() for file, digest in each.code.items()},
            {file: digest for each in now.values() for file, digest in each.data.items()},
        )
        compare = functools.cache(JobInputs.list_changes)
        compare_shared = functools.cache(JobInputs.list_shared_changes)
        changes = {
            number: compare(before, now[names[number]]) if number in names else compare_shared(before, union)
            for number, before in ran.items()
        }
        return {number: files for number, files in changes.items() if files}

    def _read(self, config: Config) -> JobInputs:
        """Computes the digests of what a job with this config reads now."""
        section = config.get("dataset")
        files = find_data_files(section) if isinstance(section, Mapping) else []
        return JobInputs(digest_code(config, self._search), group_by_folder(digest_files(files)))

    def _save(self) -> None:
        digests = {key: {"code": each.code, "data": each.data} for key, each in self._known.items()}
        replace_json(self._path, digests)


def choose_jobs_to_restart(
    changes: Mapping[int, Sequence[str]], entries: Sequence[LedgerEntry], policy: str, folder: Path
) -> dict[int, Sequence[str]]:
    """Chooses the jobs that run again because code or data changed. Unfinished jobs do: a run has one code and data.

    Args:
        changes: the files that changed, by the number of the job.

    Returns their changes. Raises ConfigError if there are changes and the policy is neither `rerun` nor `keep`.
    """
    if changes and policy not in ("rerun", "keep"):
        raise ConfigError(
            f"hydra.sweep.dir={folder}: {describe_changes(changes)}\nuse sweep.on_change=rerun to run such jobs again, "
            "sweep.on_change=keep to keep the results of finished ones, or choose another folder"
        )
    chosen = [entry.number for entry in entries if policy == "rerun" or not entry.is_finished]
    return {number: changes[number] for number in chosen if number in changes}


def mark_changes(kept: Mapping[int, Sequence[str]], entries: Sequence[LedgerEntry]) -> None:
    """Notes in the finished jobs of a sweep which files changed since they ran."""
    for entry in entries:
        if entry.is_finished:
            entry.reason = f"{join_first(kept[entry.number])} since it ran" if entry.number in kept else ""


def describe_decisions(again: Mapping[int, Sequence[str]], kept: Mapping[int, Sequence[str]]) -> list[str]:
    """Says which jobs run again, and of which the results are kept."""
    lines = [f"note: {describe_changes(again)}: they run again"] if again else []
    return [*lines, f"note: {describe_changes(kept)}: their results are kept"] if kept else lines


def describe_changes(changes: Mapping[int, Sequence[str]]) -> str:
    """Says what changed since which jobs ran: `nets.py changed since #0, #1 ran`."""
    files = sorted({name for names in changes.values() for name in names})
    return f"{join_first(files)} since {join_first([f'#{number}' for number in changes])} ran"
