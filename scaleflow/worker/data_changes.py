"""Identifies the data of a run by digests, and compares data and code with those of the run that goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import ArtifactWritten, DatasetDescribed, Emit, Note, TagsSet
from scaleflow.runs import RunFolder, RunSpec
from scaleflow.runs.code_record import list_code_changes, write_code
from scaleflow.runs.data_digest import digest_files, find_changed_files, find_data_files, group_by_folder
from scaleflow.runs.folder import read_json
from scaleflow.runs.provenance.record import write_data_state
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


def identify_files(plan: Plan) -> dict[str, list[Any]]:
    """Returns the digest, the size in bytes and the time of the last change of each file that the dataset reads.

    Of more than `data_digest.MAX_NAMED` files, there are only digests of folders. In an object store, the ETag is the
    digest of a file, if the store tells it.
    """
    found: dict[str, list[Any]] = {}
    for path, digest in group_by_folder(digest_files(list_plan_files(plan))).items():
        status = None if path.endswith("/") else Path(path).stat()
        found[path] = [digest, status and status.st_size, status and round(status.st_mtime, 3)]
    address = plan.dataset.target.arguments.get("data_dir")
    return found | identify_objects(str(address)) if is_store_address(address) else found


def identify_objects(address: str) -> dict[str, list[Any]]:
    """Returns the same for files in an object store; empty if it does not answer."""
    from scaleflow.dataset.reading.object_store import identify_in_store, read_etags

    try:
        states = identify_in_store(address)
        tags = read_etags(list(states))
    except ConfigError:  # the source says why, if it needs the store
        return {}
    return {
        path: [f"etag:{tags[path]}" if tags.get(path) else f"state:{size}:{changed}", size, changed and changed / 1e9]
        for path, (size, changed) in states.items()
    }


def write_data_files(plan: Plan, files: RunFolder, data: DatasetDescribed, emit: Emit) -> None:
    """Writes the digests of the data files to the run's folder, and what the data is to the record of the run."""
    found = identify_files(plan)
    digests = {path: each[0] for path, each in found.items()}
    files.data_files.write_text(json.dumps({"version": 1, "files": digests}, indent=1))
    described = {"splits": data.splits, "kind": data.kind, "classes": data.classes, "files": found}
    write_data_state(files, files.count_resumes() if plan.resume is not None else 0, described)
    emit(ArtifactWritten(str(files.data_record), files.provenance_folder.name))


def explain_changed_data(spec: RunSpec, now: SplitDigests) -> str:
    """Says how the data of a resumed run changed since its last command; empty if it did not."""
    changes = list_split_changes(read_split_digests(spec.files), now)
    if not changes:
        return ""
    before = read_json(spec.files.data_files).get("files", {})
    now_found = {path: each[0] for path, each in identify_files(spec.plan).items()} if before else {}
    changed = find_changed_files(before, now_found)
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
        write_data_files(spec.plan, spec.files, data, emit)
    if code_changes := list_code_changes(spec.plan, spec.files):
        report_change("resume_code", shorten_list(code_changes), emit)
        write_code(spec.plan, spec.files)


def report_change(key: str, changes: str, emit: Emit) -> None:
    emit(Note(f"{key}=changed: {changes}"))
    emit(TagsSet({f"scaleflow.{key}": "changed"}))


def explain_other_data(spec: RunSpec, now: SplitDigests) -> str:
    """Says how the data differs from that of the run that must be repeated exactly; empty if it does not."""
    changes = list_split_changes(spec.repeats.splits, now) if spec.repeats.is_exact and spec.repeats.splits else []
    return shorten_list(changes)


def report_other_data(before: SplitDigests, now: SplitDigests, emit: Emit) -> None:
    """Says in a run that repeats another one that its data is not that of the other."""
    if before and (changes := list_split_changes(before, now)):
        emit(Note(f"rerun: the data is not that of the first run: {shorten_list(changes)}"))
