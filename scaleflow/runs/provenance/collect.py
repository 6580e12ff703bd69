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
from scaleflow.runs.provenance.git import GONE, make_patch, read_git, sort_by_size
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
        """The installed packages by name."""
        return list_packages()

    @functools.cached_property
    def machine(self) -> dict[str, str]:
        """The properties of the machine that can change results."""
        return describe_machine()

    def read_git(self, code: object = None) -> CodeRecord | None:
        """Returns the state of the current folder's repository. `code` identifies the user's code."""
        with self._lock:
            if code not in self._git:
                self._git[code] = read_git(Path.cwd())
            return self._git[code]

    def read_changes(self, code: object, state: CodeRecord | None) -> GitChanges:
        """Returns the uncommitted changes; none without a repository. `code` identifies the user's code."""
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
    versions = {"python": facts.machine["python"]}
    for package in packages.values():
        versions[package.name] = package.version
    files.environment.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    changes = facts.read_changes(key, git) if plan.tracking.code else GitChanges()
    now = collect_launch(spec, facts, code, git=git, changes=changes)
    earlier = read_states(files) if now.resume else []
    if earlier and not any(difference.matters for difference in compare_known(earlier[-1], now)):
        return
    files.provenance_folder.mkdir(exist_ok=True)
    left_out = dict(changes.left_out)
    if plan.tracking.code:
        left_out |= keep_modules(code, files.kept_code(now.resume))
    if changes.patch:
        files.changes(now.resume).write_bytes(os.fsencode(changes.patch))
    files.requirements.write_text("".join(f"{package.requirement}\n" for package in packages.values()))
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
        resume=spec.files.count_resumes() if plan.resume is not None else 0,
        code=record,
        packages={name: package.identity for name, package in facts.packages.items()},
        editable={name: package.path for name, package in facts.packages.items() if package.path},
        machine=facts.machine,
        variables=list_relevant_variables({**os.environ, **spec.environment}),
        command=str(command_line(sys.orig_argv)),
        folder=str(Path.cwd()),
        seed=plan.seed,
    )


def describe_module(file: CodeFile, git: CodeRecord | None) -> list[str]:
    """Returns the two digests of a module and its path in the repository; see `CodeRecord`."""
    path_in_repository = ""
    if git is not None:
        path = os.path.realpath(file.path)
        root = os.path.realpath(git.root)
        if Path(path).is_relative_to(root):
            path_in_repository = os.path.relpath(path, root)
    return [file.digest, new_digest(file.path.read_bytes()).hexdigest(), path_in_repository]


def keep_modules(code: Mapping[str, CodeFile], folder: Path) -> dict[str, str]:
    """Copies the user's modules, with secrets masked. Returns the reason for each module that is left out."""
    left_out = {}
    total = 0
    for name, file in sorted(code.items(), key=lambda item: item[1].path.stat().st_size):
        text = mask_code(os.fsdecode(file.path.read_bytes()), name)
        total += len(text)
        if is_secret_file(name):
            left_out[name] = "it looks like a secret"
            continue
        if total > CODE_BYTES:
            left_out[name] = "the modules are too large"
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
    for path, change in state.changed.items():
        if is_secret_file(path):
            continue
        with contextlib.suppress(OSError):
            sizes[path] = 0 if change == GONE else os.lstat(f"{state.root}/{path}").st_size
    small: list[str] = []
    total = 0
    for path, size in sort_by_size(sizes):
        if len(small) < MAX_NAMED and total + size <= DIGESTED_BYTES:
            small.append(path)
            total += size
    digest_of_file = digest_files([str(state.root / path) for path in small])
    digests = {}
    for path in small:
        digests[path] = GONE if state.changed[path] == GONE else digest_of_file.get(str(state.root / path), "")
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
    if before is None:
        return []
    now = Provenance(code=read_code(plan.config, plan.search))
    return [str(difference) for difference in compare(before, now, ("code",)) if difference.matters]


def refuse_changed_code(plan: Plan, files: RunFolder) -> None:
    """Raises ConfigError if code changed since the run was begun, unless `resume_code=changed`."""
    if plan.resume_code != "same":
        return
    changes = list_code_changes(plan, files, 1 + files.count_resumes())
    if changes:
        raise ConfigError(
            f"resume={plan.resume}: the code is not what the run was trained with: {', '.join(changes)}; restore it, "
            "or add resume_code=changed to continue with it"
        )
