"""Writes, reads and compares the record of what a run was made of: the folder `provenance/` there and in MLflow.

`record.json` is written by the launcher and `data.json` by the worker. Each has a list of states: that of the first
command, and one more of each command that resumed the run with something else.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.runs.data_digest import find_changed_files, list_split_changes
from scaleflow.runs.folder import RunFolder, read_json, replace_text

#: The version of both files. A reader refuses newer ones.
FORMAT = 1


@dataclass(frozen=True)
class CodeRecord:
    """The code of a run.

    Attributes:
        is_kept: whether the code was looked at and copied; false with `tracking.code=false`.
        version: how the digests of modules were computed; others are not comparable.
        modules: the user's modules that the config names and those that they import, by the path from the folder in
            which they were found: the digest of the code without comments, that of the content, and the path from the
            repository's top folder (empty outside of it).
        commit, branch, origin: of the repository of the current folder; empty without git.
        changed: the digests of the files that differ from the commit, by path, `gone` for one that was deleted.
        submodules: the commits of submodules that differ from the commit, by path.
        left_out: why a changed file is not in the patch, or a module not among the copies.
    """

    is_kept: bool = False
    version: str = ""
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    commit: str = ""
    branch: str = ""
    origin: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)
    submodules: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Provenance:
    """What a run was made of, when one of its commands began.

    Attributes:
        resume: the number of the command that resumed the run; 0: it began.
        packages: the versions of all installed packages by name, with the commit of those that have one.
        editable: the folders of those that are installed for editing, by name.
        machine: what of the machine can change results, such as the CPU's features.
        variables: the environment variables that can, with secrets masked.
        command: the command line, with secrets masked.
        data: `splits` as the event `data` has them, `kind`, `classes`, and `files`: the digest, the size in bytes and
            the time of the last change of each file by its path. Empty until the worker has read the data.
    """

    resume: int = 0
    code: CodeRecord = field(default_factory=CodeRecord)
    packages: Mapping[str, str] = field(default_factory=dict)
    editable: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    folder: str = ""
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


def write_launch_state(files: RunFolder, state: Provenance) -> None:
    """Adds what the launcher knows when a command begins."""
    values = asdict(state)
    del values["data"]
    append_state(files.provenance_record, values)


def write_data_state(files: RunFolder, resume: int, data: Mapping[str, Any]) -> None:
    """Adds what the worker has read."""
    append_state(files.data_record, {"resume": resume, **data})


def remove_launch_state(files: RunFolder, resume: int) -> None:
    """Removes what the launcher added for a command that resumed the run and was refused, if it added anything."""
    states = read_json(files.provenance_record).get("states", [])
    if resume and states and states[-1]["resume"] == resume:
        write_states(files.provenance_record, states[:-1])
        files.changes(resume).unlink(missing_ok=True)
        shutil.rmtree(files.kept_code(resume), ignore_errors=True)


def append_state(path: Path, state: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    states = [each for each in read_json(path).get("states", []) if each["resume"] < state["resume"]]
    write_states(path, [*states, state])


def write_states(path: Path, states: Sequence[Mapping[str, Any]]) -> None:
    replace_text(path, json.dumps({"format": FORMAT, "states": states}, indent=1, default=str))


def read_states(files: RunFolder) -> list[Provenance]:
    """Reads the states of a run's record in the order of its commands; none if it has no record.

    Raises ConfigError if it cannot be read, or is of a newer version.
    """
    try:
        launched, read = (load_states(path) for path in (files.provenance_record, files.data_record))
        data = {each["resume"]: {key: each[key] for key in each if key != "resume"} for each in read}
        states = {each["resume"]: parse_state(each) for each in launched}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{files.provenance_folder}: this record of a run cannot be read: {error}") from error
    found: list[Provenance] = []
    for number in sorted({*states, *data} if states else ()):
        before = found[-1] if found else states[min(states)]
        state = states.get(number, before)
        found.append(replace(state, resume=number, data=data.get(number, before.data)))
    return found


def load_states(path: Path) -> list[dict[str, Any]]:
    content = read_json(path)
    if content.get("format", 0) > FORMAT:
        raise ValueError(f"it has the format {content['format']}, and this version reads up to {FORMAT}")
    return list(content.get("states", []))


def parse_state(values: Mapping[str, Any]) -> Provenance:
    state = Provenance(**{each.name: values[each.name] for each in fields(Provenance) if each.name in values})
    code = {each.name: values["code"][each.name] for each in fields(CodeRecord) if each.name in values["code"]}
    return replace(state, code=CodeRecord(**code))


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
