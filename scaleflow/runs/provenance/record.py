"""Writes and reads the record of what a run was made of: the folder `provenance/` there and in MLflow.

`record.json` is written by the launcher and `data.json` by the worker. Each has a list of states: that of the first
command, and one more of each command that resumed the run with something else.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.runs.folder import RunFolder, read_json, replace_text

#: The version of both files. A reader refuses newer ones.
FORMAT = 1


@dataclass(frozen=True)
class CodeRecord:
    """The code of a run, and what git knows of the repository of the current folder.

    Attributes:
        is_kept: whether the code was looked at and copied; false with `tracking.code=false`.
        version: how the digests of modules were computed; others are not comparable.
        modules: the user's modules that the config names and those that they import, by the path from the folder in
            which they were found: the digest of the code without comments, that of the content, and the path from the
            repository's top folder (empty outside of it).
        commit: the commit that is checked out, 40 or 64 hexadecimal digits; empty without git, as what follows.
        branch: the name of the branch; `HEAD` if none is checked out.
        origin: the address of the remote `origin`, with credentials masked; empty if there is none.
        changed: the digests of the files that differ from the commit, by path from the repository's top folder, those
            of submodules, too; `gone` for one that was deleted. Until they are computed, `changed` and `new` stand for
            digests.
        submodules: the commits of submodules that differ from the commit, by path.
        left_out: why a changed file is not in the patch, or a module not among the copies.
        root: the repository's top folder. It is not recorded.
        is_dirty: whether tracked files differ from the commit. It is not recorded: a tag has it.
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
    root: Path = Path()
    is_dirty: bool = False


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
        settings: the values that count, as text by their dotted keys; a run's are its params.
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
    settings: Mapping[str, str] = field(default_factory=dict)


def write_launch_state(files: RunFolder, state: Provenance) -> None:
    """Adds what the launcher knows when a command begins."""
    values = asdict(state)
    del values["data"], values["settings"], values["code"]["root"], values["code"]["is_dirty"]
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


def read_last_inputs(files: RunFolder, resume: int | None = None) -> Provenance | None:
    """Returns what a run was made of last, or before it was resumed by the command with the number `resume`.

    It has no commit. None: that is not known.
    """
    states = [each for each in read_states(files) if resume is None or each.resume < resume]
    return replace(states[-1], code=replace(states[-1].code, commit="")) if states else None


def read_data_files(files: RunFolder) -> Mapping[str, Sequence[Any]]:
    """Returns the digests of the files that a run last read; {} if it has none."""
    states = load_states(files.data_record)
    return dict(states[-1].get("files", {})) if states else {}


def load_states(path: Path) -> list[dict[str, Any]]:
    content = read_json(path)
    if content.get("format", 0) > FORMAT:
        raise ValueError(f"it has the format {content['format']}, and this version reads up to {FORMAT}")
    return list(content.get("states", []))


def parse_state(values: Mapping[str, Any]) -> Provenance:
    return Provenance(**{**values, "code": CodeRecord(**values["code"])})
