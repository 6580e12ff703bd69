"""Identifies the data of a run by digests, and compares data and code with those of the run that goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import DatasetDescribed, Emit, Note, TagsSet
from scaleflow.runs import RunFolder, RunSpec
from scaleflow.runs.code_record import list_code_changes, write_code
from scaleflow.runs.data_digest import digest_files, find_changed_files, find_data_files, group_by_folder
from scaleflow.runs.folder import read_json
from scaleflow.runs.split_digest import ALL_VALUES, SplitDigests, identify_split, list_split_changes, read_split_digests

if TYPE_CHECKING:
    from scaleflow.dataset.pipeline.fingerprint import Fingerprint

#: The most changes that a message names.
MAX_NAMED = 5


def digest_splits(plan: Plan, fingerprints: Mapping[str, Fingerprint]) -> dict[str, dict[str, Any]]:
    """Returns `digest`, `covers` and `version` by split; files count for splits that are not in memory as a whole."""
    others = [each for each in fingerprints.values() if each.covers != ALL_VALUES]
    listed = list_plan_files(plan) if any(not each.paths for each in others) else []
    digests = digest_files(dict.fromkeys([*listed, *(path for each in others for path in each.paths)]))
    found = {}
    for split, each in fingerprints.items():
        files = {path: digests[path] for path in each.paths or listed if path in digests}
        found[split] = identify_split(each.digest, each.covers, files)
    return found


def list_plan_files(plan: Plan) -> list[str]:
    """Returns the files that the dataset's arguments name."""
    return find_data_files(plan.dataset.target.arguments)


def write_data_files(plan: Plan, files: RunFolder) -> None:
    """Writes the digests of the data files to the run's folder."""
    digests = group_by_folder(digest_files(list_plan_files(plan)))
    files.data_files.write_text(json.dumps({"version": 1, "files": digests}, indent=1))


def explain_changed_data(spec: RunSpec, now: SplitDigests) -> str:
    """Says how the data of a resumed run changed since its last command; empty if it did not."""
    changes = list_split_changes(read_split_digests(spec.files), now)
    if not changes:
        return ""
    before = read_json(spec.files.data_files).get("files", {})
    changed = find_changed_files(before, group_by_folder(digest_files(list_plan_files(spec.plan)))) if before else {}
    named = shorten_list([f"{path} {how if how == 'changed' else f'is {how}'}" for path, how in changed.items()], ", ")
    return f"{shorten_list(changes)}; files: {named}" if named else shorten_list(changes)


def shorten_list(texts: list[str], separator: str = "; ") -> str:
    more = f"{separator}{len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return separator.join(texts[:MAX_NAMED]) + more


def report_changes(spec: RunSpec, data: DatasetDescribed, data_changes: str, emit: Emit) -> None:
    """Says in a resumed run that it continues with changed data or code, and keeps the new digests."""
    if data_changes:
        report_change("resume_data", data_changes, emit)
        emit(data)
        write_data_files(spec.plan, spec.files)
    if code_changes := list_code_changes(spec.plan, spec.files):
        report_change("resume_code", shorten_list(code_changes), emit)
        write_code(spec.plan, spec.files)


def report_change(key: str, changes: str, emit: Emit) -> None:
    emit(Note(f"{key}=changed: {changes}"))
    emit(TagsSet({f"scaleflow.{key}": "changed"}))


def report_other_data(before: SplitDigests, now: SplitDigests, emit: Emit) -> None:
    """Says in a run that repeats another one that its data is not that of the other."""
    if before and (changes := list_split_changes(before, now)):
        emit(Note(f"rerun: the data is not that of the first run: {shorten_list(changes)}"))
