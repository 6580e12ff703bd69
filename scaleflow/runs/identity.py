"""Decides whether two runs compute the same: which config values count, and how two records differ.

`compare` compares runs, jobs of a sweep and stages of a pipeline. Each caller names the parts that count for it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scaleflow.config.parse import flatten_config, is_under
from scaleflow.interfaces.features import list_ignored_keys
from scaleflow.runs.code_digest import VERSION
from scaleflow.runs.data_digest import list_split_changes
from scaleflow.runs.folder import is_object_file
from scaleflow.runs.provenance.record import CodeRecord, Provenance

#: Core sections and keys that do not change what a run computes. With other values it is still the same run.
CORE_IGNORED_KEYS = (
    "tracking",
    "checkpoint",
    "evaluation",
    "profiler",
    "sweep",
    "resume",
    "resume_data",
    "resume_code",
    "cluster.max_restarts",
    "cluster.stall_seconds",
    "cluster.start_seconds",
    "debug.inline",
)

#: Keys in these sections that choose the model that a run tests and exports.
MODEL_KEYS = ("checkpoint.best", "checkpoint.export")


def is_ignored(key: str) -> bool:
    """Whether a config key or section does not change what a run computes."""
    return is_under(key, (*CORE_IGNORED_KEYS, *list_ignored_keys()))


def is_computed_by(key: str) -> bool:
    """Whether a config key decides what a run computes. The values resolved from `auto` do not."""
    return not is_under(key, ("resolved",)) and not is_ignored(key)


def list_job_leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config values that decide what a job computes, by their dotted keys."""
    leaves = {}
    for key, value in flatten_config(config).items():
        if key.startswith(MODEL_KEYS) or is_computed_by(key):
            leaves[key] = value
    return leaves


#: The categories of a record, in the order of listed differences.
CATEGORIES = ("code", "packages", "data", "machine")

#: The name of a difference between commits.
COMMIT = "commit"

#: Stands for the digest of a file that differs from the commit in only one of two runs.
AS_COMMITTED = "as committed"

#: Maximum lengths of a shown digest or commit, and of a shown setting, in characters.
SHOWN = 12
SHOWN_SETTING = 60


@dataclass(frozen=True)
class Difference:
    """A difference between two runs.

    Attributes:
        name: the key, file, package, split or part of the machine that differs.
        before, now: the version, value or digest; None: absent in that run; empty in both: `name` describes the change.
        matters: whether the difference can change results.
    """

    category: str
    name: str
    before: str | None
    now: str | None
    matters: bool = True

    def __str__(self) -> str:
        if self.category in ("code", "data", "packages"):
            if self.before is None:
                return f"{self.name} is new"
            if self.now is None:
                return f"{self.name} is gone"
        if self.category in ("packages", "machine", "settings") or self.name == COMMIT:
            return f"{self.name} {shorten_setting(self.before or 'none')} -> {shorten_setting(self.now or 'none')}"
        return f"{self.name} changed" if self.before or self.now else self.name


def shorten_setting(text: str) -> str:
    return text if len(text) <= SHOWN_SETTING else f"{text[: SHOWN_SETTING - 3]}..."


def list_unknown(*states: Provenance) -> list[str]:
    """Returns the categories that are empty in at least one record."""
    unknown: set[str] = set()
    for state in states:
        contents = {
            "code": state.code.version,
            "packages": state.packages,
            "data": state.data,
            "machine": state.machine,
        }
        unknown.update(category for category, content in contents.items() if not content)
    return [category for category in CATEGORIES if category in unknown]


def compare(before: Provenance, now: Provenance, parts: Iterable[str] = CATEGORIES) -> list[Difference]:
    """Lists differences in some parts: `settings`, `code`, `packages`, `machine`, and `data` or only its `files`."""
    differences: list[Difference] = []
    for part in parts:
        differences += COMPARED[part](before, now)
    return differences


def compare_known(before: Provenance, now: Provenance) -> list[Difference]:
    """Lists the differences in the categories that both records cover."""
    unknown = list_unknown(before, now)
    return compare(before, now, [category for category in CATEGORIES if category not in unknown])


def compare_code(before: Provenance, now: Provenance) -> Iterator[Difference]:
    """Yields the differences in modules, which matter, and in the commit and other files, which do not."""
    first = before.code
    second = now.code
    yield from compare_modules(first, second)
    if first.commit != second.commit:
        yield Difference("code", COMMIT, before=first.commit[:SHOWN], now=second.commit[:SHOWN], matters=False)
    elif first.is_kept and second.is_kept:
        yield from compare_other_files(first, second)


def compare_modules(before: CodeRecord, now: CodeRecord) -> Iterator[Difference]:
    """Yields the modules whose files differ. They matter unless only comments or the formatting differ."""
    for name in sorted({*before.modules, *now.modules}):
        old_code, old_file, _ = before.modules.get(name, ("", "", ""))
        new_code, new_file, _ = now.modules.get(name, ("", "", ""))
        if old_file != new_file:
            is_same_code = before.version == now.version and old_code == new_code
            yield Difference(
                "code",
                name,
                before=old_file[:SHOWN] or None,
                now=new_file[:SHOWN] or None,
                matters=not is_same_code,
            )


def compare_other_files(before: CodeRecord, now: CodeRecord) -> Iterator[Difference]:
    """Yields the changed files of the repository that differ and are no modules of the config."""
    modules = {path for _, _, path in (*before.modules.values(), *now.modules.values())}
    for path in sorted({*before.changed, *now.changed} - modules):
        old = before.changed.get(path, AS_COMMITTED).rpartition(":")[2][:SHOWN]
        new = now.changed.get(path, AS_COMMITTED).rpartition(":")[2][:SHOWN]
        if old != new:
            yield Difference("code", path, before=old, now=new, matters=False)


def compare_packages(before: Provenance, now: Provenance) -> Iterator[Difference]:
    """Yields the packages whose versions differ.

    If a package is installed for editing, its commit does not matter: its modules are compared as user code.
    """
    for change in list_value_changes("packages", before.packages, now.packages):
        old_version = str(change.before).partition(" ")[0]
        new_version = str(change.now).partition(" ")[0]
        is_edited = change.name in before.editable and change.name in now.editable and change.name != "scaleflow"
        yield replace(change, matters=not is_edited or old_version != new_version)


def compare_files(before: Provenance, now: Provenance) -> Iterator[Difference]:
    """Yields the data files whose digests differ, if both digests cover the same."""
    if "files" not in before.data or "files" not in now.data:
        return
    old = read_file_digests(before)
    new = read_file_digests(now)
    for path in sorted({*old, *new}):
        old_covers, _, old_digest = old.get(path, "").partition(":")
        new_covers, _, new_digest = new.get(path, "").partition(":")
        is_in_both = path in old and path in new
        has_changed = old_digest != new_digest and old_covers == new_covers
        if has_changed or not is_in_both:
            yield Difference("data", path, before=old_digest[:SHOWN] or None, now=new_digest[:SHOWN] or None)


def read_file_digests(state: Provenance) -> dict[str, str]:
    """Returns the digest of each data file by the name under which it is compared."""
    return {name_data_file(path): str(record[0]) for path, record in state.data["files"].items()}


def name_data_file(path: str) -> str:
    """Returns the name under which a data file is compared: its path; for a program's object, its file name."""
    name = Path(path).name
    return name if is_object_file(name) else path


def compare_data(before: Provenance, now: Provenance) -> list[Difference]:
    """Returns the differences in the data's files and splits. Where the files are stored does not matter."""
    differences = list(compare_files(name_files(before), name_files(now)))
    splits = before.data.get("splits", {})
    for change in list_split_changes(splits, now.data.get("splits", splits)):
        differences.append(Difference("data", change, before="", now=""))
    return differences


def name_files(state: Provenance) -> Provenance:
    """Returns a record whose data files are named relative to their common folder."""
    files: Mapping[str, Any] = state.data.get("files", {})
    if not files:
        return state
    shared = os.path.commonpath([os.path.dirname(path) for path in files])  # noqa: PTH120
    named = {os.path.relpath(path, shared or "."): record for path, record in files.items()}
    return replace(state, data={**state.data, "files": named})


def list_value_changes(category: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """Returns a difference for each name whose value differs."""
    differences = []
    for name in dict.fromkeys((*before, *now)):
        old = before.get(name)
        new = now.get(name)
        if old != new:
            differences.append(Difference(category, name, before=old, now=new))
    return differences


def compare_settings(before: Provenance, now: Provenance) -> list[Difference]:
    return list_value_changes("settings", before.settings, now.settings)


def compare_machines(before: Provenance, now: Provenance) -> list[Difference]:
    """Returns the differences in the machines and in the environment variables."""
    old = {**before.machine, **before.variables}
    new = {**now.machine, **now.variables}
    return list_value_changes("machine", old, new)


#: The comparison of each part.
COMPARED: Mapping[str, Callable[[Provenance, Provenance], Iterable[Difference]]] = {
    "settings": compare_settings,
    "code": compare_code,
    "packages": compare_packages,
    "data": compare_data,
    "files": compare_files,
    "machine": compare_machines,
}


def record_parts(
    code: Mapping[str, str],
    files: Mapping[str, str],
    settings: Mapping[str, str] = MappingProxyType({}),
    packages: Mapping[str, str] = MappingProxyType({}),
) -> Provenance:
    """Returns a record made of the digests of modules and data files."""
    modules = {name: (digest, digest, "") for name, digest in code.items()}
    data = {"files": {path: [digest] for path, digest in files.items()}}
    record = CodeRecord(version=VERSION, modules=modules)
    return Provenance(code=record, packages=packages, data=data, settings=settings)
