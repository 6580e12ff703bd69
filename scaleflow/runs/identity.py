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
    *("tracking", "checkpoint", "evaluation", "profiler", "sweep"),
    *("resume", "resume_data", "resume_code"),
    *("cluster.max_restarts", "cluster.stall_seconds", "cluster.start_seconds", "debug.inline"),
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
    leaves = flatten_config(config)
    return {key: value for key, value in leaves.items() if key.startswith(MODEL_KEYS) or is_computed_by(key)}


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
        if self.category in ("code", "data", "packages") and (self.before is None or self.now is None):
            return f"{self.name} is {'new' if self.before is None else 'gone'}"
        if self.category in ("packages", "machine", "settings") or self.name == COMMIT:
            return f"{self.name} {shorten_setting(self.before or 'none')} -> {shorten_setting(self.now or 'none')}"
        return f"{self.name} changed" if self.before or self.now else self.name


def shorten_setting(text: str) -> str:
    return text if len(text) <= SHOWN_SETTING else f"{text[: SHOWN_SETTING - 3]}..."


def list_unknown(*states: Provenance) -> list[str]:
    """Returns the categories that are empty in at least one record."""
    known = [(each.code.version, each.packages, each.data, each.machine) for each in states]
    return [category for category, *each in zip(CATEGORIES, *known, strict=True) if not all(each)]


def compare(before: Provenance, now: Provenance, parts: Iterable[str] = CATEGORIES) -> list[Difference]:
    """Lists differences in some parts: `settings`, `code`, `packages`, `machine`, and `data` or only its `files`."""
    return [each for part in parts for each in COMPARED[part](before, now)]


def compare_known(before: Provenance, now: Provenance) -> list[Difference]:
    """Lists the differences in the categories that both records cover."""
    return compare(before, now, [each for each in CATEGORIES if each not in list_unknown(before, now)])


def compare_code(before: Provenance, now: Provenance) -> Iterator[Difference]:
    """Yields the differences in modules, which matter, and in the commit and other files, which do not."""
    first = before.code
    second = now.code
    for name in sorted({*first.modules, *second.modules}):
        old, new = (each.modules.get(name, ("", "", "")) for each in (first, second))
        if old[1] != new[1]:
            is_same = first.version == second.version and old[0] == new[0]
            yield Difference("code", name, old[1][:SHOWN] or None, now=new[1][:SHOWN] or None, matters=not is_same)
    if first.commit != second.commit:
        yield Difference("code", COMMIT, before=first.commit[:SHOWN], now=second.commit[:SHOWN], matters=False)
    elif first.is_kept and second.is_kept:
        modules = {module[2] for module in (*first.modules.values(), *second.modules.values())}
        for path in sorted({*first.changed, *second.changed} - modules):
            states = [each.changed.get(path, AS_COMMITTED).rpartition(":")[2][:SHOWN] for each in (first, second)]
            if states[0] != states[1]:
                yield Difference("code", path, before=states[0], now=states[1], matters=False)


def compare_packages(before: Provenance, now: Provenance) -> Iterator[Difference]:
    """Yields the packages whose versions differ.

    If a package is installed for editing, its commit does not matter: its modules are compared as user code.
    """
    for each in list_value_changes("packages", before.packages, now.packages):
        versions = [str(value).partition(" ")[0] for value in (each.before, each.now)]
        is_edited = each.name in before.editable and each.name in now.editable and each.name != "scaleflow"
        yield replace(each, matters=not is_edited or versions[0] != versions[1])


def compare_files(before: Provenance, now: Provenance) -> Iterator[Difference]:
    """Yields the data files whose digests differ, if both digests cover the same."""
    if "files" not in before.data or "files" not in now.data:
        return
    old, new = (
        {name_data_file(path): str(each[0]) for path, each in state.data["files"].items()} for state in (before, now)
    )
    for path in sorted({*old, *new}):
        covers, digests = zip(*(each.get(path, "").partition(":")[::2] for each in (old, new)), strict=True)
        if path not in old or path not in new or (digests[0] != digests[1] and covers[0] == covers[1]):
            yield Difference("data", path, before=digests[0][:SHOWN] or None, now=digests[1][:SHOWN] or None)


def name_data_file(path: str) -> str:
    """Returns the name under which a data file is compared: its path; for a program's object, its file name."""
    name = Path(path).name
    return name if is_object_file(name) else path


def compare_data(before: Provenance, now: Provenance) -> list[Difference]:
    """Returns the differences in the data's files and splits. Where the files are stored does not matter."""
    splits = list_split_changes(before.data.get("splits", {}), now.data.get("splits", before.data.get("splits", {})))
    files = compare_files(name_files(before), name_files(now))
    return [*files, *(Difference("data", text, before="", now="") for text in splits)]


def name_files(state: Provenance) -> Provenance:
    """Returns a record whose data files are named relative to their common folder."""
    files: Mapping[str, Any] = state.data.get("files", {})
    shared = os.path.commonpath([os.path.dirname(path) for path in files]) if files else ""  # noqa: PTH120
    named = {os.path.relpath(path, shared or "."): each for path, each in files.items()}
    return replace(state, data={**state.data, "files": named}) if files else state


def list_value_changes(category: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    names = (name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name))
    return [Difference(category, name, before=before.get(name), now=now.get(name)) for name in names]


#: The comparison of each part.
COMPARED: Mapping[str, Callable[[Provenance, Provenance], Iterable[Difference]]] = {
    "settings": lambda first, second: list_value_changes("settings", first.settings, second.settings),
    "code": compare_code,
    "packages": compare_packages,
    "data": compare_data,
    "files": compare_files,
    "machine": lambda first, second: list_value_changes(
        "machine", {**first.machine, **first.variables}, {**second.machine, **second.variables}
    ),
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
