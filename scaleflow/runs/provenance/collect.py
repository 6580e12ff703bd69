"""Collects the ingredients of a run when it begins, while its processes start."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.secret_masking import is_secret_file, mask_code
from scaleflow.runs.code_digest import VERSION, CodeFile, find_code
from scaleflow.runs.data_digest import MAX_NAMED, digest_files, new_digest
from scaleflow.runs.folder import RunFolder
from scaleflow.runs.identity import compare, compare_known
from scaleflow.runs.provenance.git import GONE, make_patch, read_git
from scaleflow.runs.provenance.machine import Package, describe_machine, list_packages, list_relevant_variables
from scaleflow.runs.provenance.record import (
    CodeRecord,
    Provenance,
    read_last_inputs,
    read_states,
    write_launch_state,
)
from scaleflow.runs.provenance.tags import command_line, make_run_tags, write_run_tags
from scaleflow.runs.spec import RunSpec

#: The maximum total size of the copied modules.
CODE_BYTES = 384 << 10

#: Changed files are digested up to this total size, small ones first. For the others only names and sizes are compared.
DIGESTED_BYTES = 256 << 20


@dataclass(frozen=True)
class GitChanges:
    """The uncommitted changes: digests by path, the patch, and the reason why each missing file is not in it."""

    digests: Mapping[str, str] = field(default_factory=dict)
    patch: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)


class LaunchFacts:
    """The facts that all runs of one command share. Git is read once per state of the user's code, the rest once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._git: dict[object, CodeRecord | None] = {}
        self._changes: dict[object, GitChanges] = {}

    @functools.cached_property
    def packages(self) -> dict[str, Package]:
        return list_packages()

    @functools.cached_property
    def machine(self) -> dict[str, str]:
        return describe_machine()

    def read_git(self, code: object = None) -> CodeRecord | None:
        """Returns the state of the current folder's repository. `code` identifies the user's code."""
        with self._lock:
            if code not in self._git:
                self._git[code] = read_git(Path.cwd())
            return self._git[code]

    def read_changes(self, code: object, state: CodeRecord | None) -> GitChanges:
        with self._lock:
            if code not in self._changes:
                self._changes[code] = GitChanges() if state is None else collect_changes(state)
            return self._changes[code]


def record_provenance(spec: RunSpec, facts: LaunchFacts) -> None:
    """Writes the tags, the packages and the record into the folder of a run that begins or resumes.

    A resumed run keeps its first record; a new state is added if something that matters changed. Raises OSError if the
    files cannot be written.
    """
    files = spec.files
    plan = spec.plan
    code = find_code(plan.config, plan.search)
    key = tuple((name, file.digest, file.path) for name, file in code.items())
    git = facts.read_git(key)
    packages = facts.packages
    write_run_tags(spec.folder, make_run_tags(git, packages) | dict(spec.tags))
    versions = {"python": facts.machine["python"], **{each.name: each.version for each in packages.values()}}
    files.environment.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    changes = facts.read_changes(key, git) if plan.tracking.code else GitChanges()
    now = collect_launch(spec, facts, code, git=git, changes=changes)
    earlier = read_states(files) if now.resume else []
    if earlier and not any(each.matters for each in compare_known(earlier[-1], now)):
        return
    files.provenance_folder.mkdir(exist_ok=True)
    left_out = keep_modules(code, files.kept_code(now.resume)) if plan.tracking.code else {}
    if changes.patch:
        files.changes(now.resume).write_bytes(os.fsencode(changes.patch))
    files.requirements.write_text("".join(f"{each.requirement}\n" for each in packages.values()))
    left_out = {**changes.left_out, **left_out}
    write_launch_state(files, replace(now, code=replace(now.code, left_out=left_out)))


def collect_launch(
    spec: RunSpec, facts: LaunchFacts, code: Mapping[str, CodeFile], git: CodeRecord | None, changes: GitChanges
) -> Provenance:
    """Returns the launcher's part of the provenance of a run that begins."""
    plan = spec.plan
    modules = {name: describe_module(file, git) for name, file in code.items()}
    record = replace(
        git or CodeRecord(),
        is_kept=plan.tracking.code,
        version=VERSION,
        modules=modules,
        changed=changes.digests,
    )
    return Provenance(
        spec.files.count_resumes() if plan.resume is not None else 0,
        record,
        {name: each.identity for name, each in facts.packages.items()},
        editable={name: each.path for name, each in facts.packages.items() if each.path},
        machine=facts.machine,
        variables=list_relevant_variables({**os.environ, **spec.environment}),
        command=str(command_line(sys.orig_argv)),
        folder=str(Path.cwd()),
        seed=plan.seed,
    )


def describe_module(file: CodeFile, git: CodeRecord | None) -> list[str]:
    """Returns the two digests of a module and its path in the repository; see `CodeRecord`."""
    path = os.path.realpath(file.path)
    is_inside = git is not None and Path(path).is_relative_to(os.path.realpath(git.root))
    return [
        file.digest,
        new_digest(file.path.read_bytes()).hexdigest(),
        os.path.relpath(path, os.path.realpath(git.root)) if git and is_inside else "",
    ]


def keep_modules(code: Mapping[str, CodeFile], folder: Path) -> dict[str, str]:
    """Copies the user's modules, with secrets masked. Returns the reason for each module that is left out."""
    left_out = {}
    total = 0
    for name, file in sorted(code.items(), key=lambda item: item[1].path.stat().st_size):
        text = mask_code(os.fsdecode(file.path.read_bytes()), name)
        total += len(text)
        if is_secret_file(name) or total > CODE_BYTES:
            left_out[name] = "it looks like a secret" if is_secret_file(name) else "the modules are too large"
            continue
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(os.fsencode(text))
    return left_out


def collect_changes(state: CodeRecord) -> GitChanges:
    """Returns the uncommitted changes. If git fails, they have no patch."""
    digests = digest_changes(state)
    try:
        return GitChanges(digests, *make_patch(state))
    except (OSError, subprocess.SubprocessError) as error:
        return GitChanges(digests, "", {"changes.patch": f"git failed: {type(error).__name__}"})


def digest_changes(state: CodeRecord) -> dict[str, str]:
    """Returns the digests of the smallest changed files, and one digest of the names and sizes of all others."""
    sizes = {}
    for path, how in ((path, how) for path, how in state.changed.items() if not is_secret_file(path)):
        with contextlib.suppress(OSError):
            sizes[path] = 0 if how == GONE else os.lstat(f"{state.root}/{path}").st_size
    small = list[str]()
    total = 0
    for path, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
        if len(small) < MAX_NAMED and total + size <= DIGESTED_BYTES:
            small.append(path)
            total += size
    found = digest_files([str(state.root / path) for path in small])
    digests = {path: GONE if state.changed[path] == GONE else found.get(str(state.root / path), "") for path in small}
    others = {path: size for path, size in sizes.items() if path not in digests}
    if others:
        names = new_digest(repr(sorted(others.items())).encode()).hexdigest()
        digests[f"{len(others):,} more files of {sum(others.values()):,} bytes"] = f"names:{names}"
    return digests


def read_code(config: Mapping[str, Any], search: Sequence[str]) -> CodeRecord:
    """Returns the current code that a config names, without facts from git."""
    modules = {name: describe_module(file, None) for name, file in find_code(config, search).items()}
    return CodeRecord(version=VERSION, modules=modules)


def list_code_changes(plan: Plan, files: RunFolder, resume: int) -> list[str]:
    """Lists the modules that differ from the run's last recorded code before the command with the number `resume`."""
    before = read_last_inputs(files, resume)
    changes = compare(before, Provenance(code=read_code(plan.config, plan.search)), ("code",)) if before else ()
    return [str(each) for each in changes if each.matters]


def refuse_changed_code(plan: Plan, files: RunFolder) -> None:
    """Raises ConfigError if code changed since the run was begun, unless `resume_code=changed`."""
    if plan.resume_code == "same" and (changes := list_code_changes(plan, files, 1 + files.count_resumes())):
        raise ConfigError(
            f"resume={plan.resume}: the code is not what the run was trained with: {', '.join(changes)}; restore it, "
            "or add resume_code=changed to continue with it"
        )
