"""Restores the code of a run in a folder: a git worktree with the patch, or the kept copies of the modules.

The record may come from a store that others write to. So nothing is written outside the folder, and no code from it is
imported here.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleflow.errors import ConfigError
from scaleflow.interfaces.formatting import join_first
from scaleflow.runs.data_digest import new_digest
from scaleflow.runs.provenance.git import (
    CHECKOUT_MARK,
    COMMIT_ID,
    GONE,
    find_patched_path,
    is_path_within,
    run_git,
    split_patch,
)
from scaleflow.runs.provenance.record import CodeRecord
from scaleflow.runs.run import Run


@dataclass(frozen=True)
class Checkout:
    """The restored code of a run."""

    folders: Sequence[str]  # folders with the modules
    masked: Sequence[str]  # modules whose copies contain a masked secret
    notes: Sequence[str]  # messages for the user


def check_out(run: Run, folder: Path) -> Checkout:
    """Restores the code of a run, as it was at the run's start, in a new folder. Reuses an earlier checkout of the same
    run.

    Raises ConfigError if the run kept no code, or if the folder has other content.
    """
    code = run.states[0].code
    mark = folder / CHECKOUT_MARK
    name = run.run_id or str(run.files.path)
    if not code.is_kept or not code.modules:
        why = "used no code of yours" if code.version and not code.modules else "kept no code"
        raise ConfigError(f"--checkout {folder}: the run {why}; leave it out")
    is_earlier = mark.is_file() and mark.read_text() == name
    if not is_earlier and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--checkout {folder}: it exists, and is no checkout of this run; choose another one")
    notes: list[str] = []
    repository = find_repository(code.commit)
    if not is_earlier:
        if repository is not None:
            add_worktree(repository, folder, code)
            notes += apply_changes(run, folder, code)
        elif code.commit:
            notes.append(f"the commit {code.commit} is not here; the copies of the modules are used")
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(name)
    masked: list[str] = []
    folders = dict.fromkeys(restore_modules(run, folder.resolve(), is_earlier, masked=masked))
    if masked:
        notes.append(
            f"secrets are masked in {', '.join(masked)}; if they are needed, complete them and repeat the command"
        )
    return Checkout([*folders], masked, notes)


def find_repository(commit: str) -> Path | None:
    """Returns the repository of the current folder if it has the commit, else None."""
    try:
        root = Path(run_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        run_git(root, "cat-file", "-e", f"{commit}^{{commit}}")
    except (OSError, subprocess.SubprocessError):
        return None
    return root if COMMIT_ID.fullmatch(commit) else None


def add_worktree(repository: Path, folder: Path, code: CodeRecord) -> None:
    """Checks out a run's commit, and the commits of submodules that exist here."""
    try:
        run_git(repository, "worktree", "add", "--detach", str(folder.absolute()), code.commit)
        tree = run_git(repository, "ls-tree", "-r", "-z", code.commit).split("\0")
        modules = {line.partition("\t")[2]: line.split()[2] for line in tree if line.startswith("160000 ")}
        for path, commit in {**modules, **code.submodules}.items():
            if COMMIT_ID.fullmatch(commit) and is_inside(folder, path) and (repository / path / ".git").exists():
                target = str((folder / path).absolute())
                run_git(repository / path, "worktree", "add", "--force", "--detach", target, commit)
    except (OSError, subprocess.SubprocessError) as error:
        reason = os.fsdecode(getattr(error, "stderr", None) or b"").strip().splitlines()
        raise ConfigError(f"--checkout {folder}: git failed: {reason[-1] if reason else error}") from error


def apply_changes(run: Run, folder: Path, code: CodeRecord) -> Iterator[str]:
    """Applies the patch file by file and deletes removed files.

    Yields a message for each change that cannot be restored.
    """
    path = run.files.changes(0)
    for section in split_patch(os.fsdecode(path.read_bytes())) if path.is_file() else ():
        try:
            run_git(folder, "apply", "--whitespace=nowarn", text=section)
        except (OSError, subprocess.SubprocessError):
            yield f"{find_patched_path(section)} has its content of the commit: its changes cannot be applied"
    for name, digest in code.changed.items():
        if digest == GONE and is_inside(folder, name):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    lost = sorted(set(code.left_out) - set(code.modules))
    if lost:
        reasons = [f"{name} ({code.left_out[name]})" for name in lost]
        yield f"not restored: {join_first(reasons, 5)}"


def restore_modules(run: Run, folder: Path, is_earlier: bool, masked: list[str]) -> Iterator[str]:
    """Writes the run's modules that are missing or differ, from their copies. Writes nothing if the checkout
    `is_earlier`.

    Adds modules with masked secrets to `masked`. Yields the folders with the modules.
    """
    is_worktree = (folder / ".git").exists()
    for name, (_, content, inner) in sorted(run.states[0].code.modules.items()):
        path = inner if is_worktree and inner.endswith(name) else name
        target = folder / path
        copy = run.files.kept_code(0) / name
        here = Path(name)
        if not is_inside(folder, path):
            raise ConfigError(f"the record of the run names the module {path}, which is not in a folder")
        if not is_earlier and not has_content(target, content):
            source = here if has_content(here, content) else copy
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_file() and not source.is_symlink():
                target.write_bytes(source.read_bytes())
        if copy.is_file() and not has_content(copy, content) and has_content(target, digest_content(copy)):
            masked.append(name)
        yield str(folder / path).removesuffix(name)


def digest_content(path: Path) -> str:
    return new_digest(path.read_bytes()).hexdigest()


def has_content(path: Path, digest: str) -> bool:
    return path.is_file() and digest_content(path) == digest


def is_inside(folder: Path, path: str) -> bool:
    """Returns whether a path from a record stays inside a folder, even through links."""
    return is_path_within(path) and (folder / path).resolve().is_relative_to(folder.resolve())
