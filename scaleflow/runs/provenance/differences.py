"""Says in what two runs differ: their code, packages, data and machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleflow.runs.data_digest import find_changed_files
from scaleflow.runs.provenance.record import CodeRecord, Provenance
from scaleflow.runs.split_digest import list_split_changes

#: What can differ, in the order in which it is listed.
CATEGORIES = ("code", "packages", "data", "machine")

#: The name of the difference between two commits.
COMMIT = "commit"

#: What a file is like that differs from the commit in another run only.
AS_COMMITTED = "as committed"

#: A digest or commit is shown with so many letters.
SHOWN = 12


@dataclass(frozen=True)
class Difference:
    """Something in which two runs differ.

    Attributes:
        category: one of `CATEGORIES`.
        name: of a file, a package, a split or a part of the machine.
        before, now: its version, value or digest; None: it is not there; empty: `name` says what differs.
        matters: whether it can change the results.
    """

    category: str
    name: str
    before: str | None
    now: str | None
    matters: bool = True

    def __str__(self) -> str:
        if self.category != "machine" and (self.before is None or self.now is None):
            return f"{self.name} is {'new' if self.before is None else 'gone'}"
        if self.category in ("packages", "machine") or self.name == COMMIT:
            return f"{self.name} {self.before or 'none'} -> {self.now or 'none'}"
        return f"{self.name} changed" if self.before or self.now else self.name


def list_unknown(state: Provenance) -> list[str]:
    """Returns the categories of which a record says nothing."""
    known = (state.code.version, state.packages, state.data, state.machine)
    return [category for category, each in zip(CATEGORIES, known, strict=True) if not each]


def compare_launch(before: Provenance, now: Provenance) -> list[Difference]:
    """Returns the differences in code, packages and machine. A category that a record does not know is not compared."""
    unknown = {*list_unknown(before), *list_unknown(now)}
    found = [*compare_code(before.code, now.code), *compare_packages(before, now)]
    for machine in ((before.machine, now.machine), (before.variables, now.variables)):
        found += list_value_changes("machine", *machine)
    return [each for each in found if each.category not in unknown]


def compare_code(before: CodeRecord, now: CodeRecord) -> Iterator[Difference]:
    """Yields the differences in modules, which matter, and in the commit and other files, which do not."""
    for name in sorted({*before.modules, *now.modules}):
        old, new = before.modules.get(name, ("", "", "")), now.modules.get(name, ("", "", ""))
        if old[1] != new[1]:
            is_same = before.version == now.version and old[0] == new[0]
            yield Difference("code", name, old[1][:SHOWN] or None, new[1][:SHOWN] or None, matters=not is_same)
    if before.commit != now.commit:
        yield Difference("code", COMMIT, before.commit[:SHOWN], now.commit[:SHOWN], matters=False)
    elif before.is_kept and now.is_kept:
        modules = {module[2] for module in (*before.modules.values(), *now.modules.values())}
        for path in sorted({*before.changed, *now.changed} - modules):
            states = [each.changed.get(path, AS_COMMITTED).rpartition(":")[2][:SHOWN] for each in (before, now)]
            if states[0] != states[1]:
                yield Difference("code", path, states[0], states[1], matters=False)


def compare_packages(before: Provenance, now: Provenance) -> Iterator[Difference]:
    """Yields the packages of other versions.

    The commit of one that is installed for editing does not matter: its modules are compared as the user's code.
    """
    for each in list_value_changes("packages", before.packages, now.packages):
        versions = [str(value).partition(" ")[0] for value in (each.before, each.now)]
        is_edited = each.name in before.editable and each.name in now.editable and each.name != "scaleflow"
        yield (
            Difference(*vars(each).values())
            if not (is_edited and versions[0] == versions[1])
            else Difference(each.category, each.name, each.before, each.now, matters=False)
        )


def compare_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Returns the differences in the files of the data and in its splits."""
    splits = list_split_changes(before.get("splits", {}), now.get("splits", before.get("splits", {})))
    return [*compare_files(before, now), *(Difference("data", text, "", "") for text in splits)]


def compare_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Returns the files of the data whose digests differ, if they cover the same. Their folder does not count."""
    if "files" not in before or "files" not in now:
        return []
    old, new = (name_files(each["files"]) for each in (before, now))
    shown = [{path: digest.rpartition(":")[2][:SHOWN] for path, digest in each.items()} for each in (old, new)]
    return [Difference("data", path, shown[0].get(path), shown[1].get(path)) for path in find_changed_files(old, new)]


def name_files(files: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Returns the digests of files by their paths from the folder that they share."""
    shared = os.path.commonpath([os.path.dirname(path) for path in files]) if files else ""  # noqa: PTH120
    return {os.path.relpath(path, shared or "."): str(each[0]) for path, each in files.items()}


def list_value_changes(category: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    names = (name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name))
    return [Difference(category, name, before.get(name), now.get(name)) for name in names]
