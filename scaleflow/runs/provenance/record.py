"""Writes and reads the record of a run's ingredients: the folder `provenance/` in the run's folder and in MLflow.

The launcher writes `record.json`, the worker writes `data.json`. Each contains a list of states: the first command's,
and one for each resume that changed something.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.runs.folder import RunFolder, read_json, replace_text

#: The format version of both files. A newer version is an error.
FORMAT = 1


@dataclass(frozen=True)
class CodeRecord:
    """The code of a run, and git's facts about the repository of the current folder.

    Attributes:
        is_kept: whether the code was read and copied; false with `tracking.code=false`.
        version: how the digests of modules were computed. Digests of different versions are not compared.
        modules: the user's modules that the config names, and the modules that these import. The key is the path
            relative to the search folder. The value has the digest of the code without comments, the digest of the
            file's content, and the path in the repository (empty if the file is outside).
        commit: the commit that is checked out, 40 or 64 hexadecimal digits. Without git it and all following are empty.
        branch: the name of the branch; `HEAD` if no branch is checked out.
        origin: the address of the remote `origin`, with credentials masked; empty without a remote.
        changed: the digests of the files that differ from the commit, including files of submodules, by path in the
            repository; `gone` for a deleted file. Before the digests are computed, the values are `changed` and `new`.
        submodules: the commits of submodules that differ from the commit, by path.
        left_out: why a changed file is not in the patch, or a module is not among the copies.
        root: the repository's top folder. Not recorded.
        is_dirty: whether tracked files differ from the commit. Not recorded, because a tag holds it.
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
    """The ingredients of a run when one of its commands began.

    Attributes:
        resume: the number of the command that resumed the run; 0: the first command.
        packages: the versions of all installed packages by name, each with its commit if it has one.
        editable: the folders of packages that are installed for editing, by name.
        machine: the properties of the machine that can change results, such as the CPU's features.
        variables: the environment variables that can change results, with secrets masked.
        command: the command line, with secrets masked.
        settings: the values to compare, as text by their dotted keys. For a run they are its params.
        data: `splits` as in the event `data`, `kind`, `classes`, and `files`: the digest, the size in bytes and the
            last change of each file by path. Empty until the worker has read the data.
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
    """Adds the launcher's state when a command begins."""
    values = asdict(state)
    del values["data"]
    del values["settings"]
    del values["code"]["root"]
    del values["code"]["is_dirty"]
    append_state(files.provenance_record, values)


def write_data_state(files: RunFolder, resume: int, data: Mapping[str, Any]) -> None:
    """Adds the worker's state after it has read the data."""
    append_state(files.data_record, {"resume": resume, **data})


def remove_launch_state(files: RunFolder, resume: int) -> None:
    """Removes the launcher's state of a refused resume, if there is one."""
    states = read_json(files.provenance_record).get("states", [])
    if resume and states and states[-1]["resume"] == resume:
        write_states(files.provenance_record, states[:-1])
        files.changes(resume).unlink(missing_ok=True)
        shutil.rmtree(files.kept_code(resume), ignore_errors=True)


def append_state(path: Path, state: Mapping[str, Any]) -> None:
    """Adds a state to a record. It replaces the states of the same command and of later ones."""
    path.parent.mkdir(exist_ok=True)
    states = read_json(path).get("states", [])
    earlier = [other for other in states if other["resume"] < state["resume"]]
    write_states(path, [*earlier, state])


def write_states(path: Path, states: Sequence[Mapping[str, Any]]) -> None:
    replace_text(path, json.dumps({"format": FORMAT, "states": states}, indent=1, default=str))


def read_states(files: RunFolder) -> list[Provenance]:
    """Reads the states of a run's record in the order of its commands; empty if there is no record.

    Raises ConfigError if the record cannot be read or its format is newer.
    """
    try:
        launcher_states = {values["resume"]: parse_state(values) for values in load_states(files.provenance_record)}
        data = {values.pop("resume"): values for values in load_states(files.data_record)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{files.provenance_folder}: this record of a run cannot be read: {error}") from error
    if not launcher_states:
        return []
    states: list[Provenance] = []
    before = launcher_states[min(launcher_states)]
    for number in sorted({*launcher_states, *data}):
        state = launcher_states.get(number, before)
        before = replace(state, resume=number, data=data.get(number, before.data))
        states.append(before)
    return states


def read_last_inputs(files: RunFolder, resume: int | None = None) -> Provenance | None:
    """Returns the run's last state, or the last one before the command with the number `resume`; None if unknown.

    Its commit is empty.
    """
    states = [state for state in read_states(files) if resume is None or state.resume < resume]
    if not states:
        return None
    last = states[-1]
    return replace(last, code=replace(last.code, commit=""))


def read_data_files(files: RunFolder) -> Mapping[str, Sequence[Any]]:
    """Returns the digests of the files that a run read last; {} without a record."""
    states = load_states(files.data_record)
    return dict(states[-1].get("files", {})) if states else {}


def load_states(path: Path) -> list[dict[str, Any]]:
    """Reads the states in a file of a record. Raises ValueError if its format is newer."""
    content = read_json(path)
    if content.get("format", 0) > FORMAT:
        raise ValueError(f"it has the format {content['format']}, and this version reads up to {FORMAT}")
    return list(content.get("states", []))


def parse_state(values: Mapping[str, Any]) -> Provenance:
    return Provenance(**{**values, "code": CodeRecord(**values["code"])})
