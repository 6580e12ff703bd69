"""Reads facts from git about the code around a folder: the commit, the changes since, and a patch of them.

It changes nothing and runs no hooks. If git is missing, too slow, or refuses a repository of another user, there are no
facts; this is not an error.
"""

import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from scaleflow.interfaces.secret_masking import is_secret_file, mask_lines, mask_text
from scaleflow.runs.data_digest import NO_DATA, NO_DATA_SUFFIXES, walk_outside_runs
from scaleflow.runs.provenance.record import CodeRecord

#: Time limit of a git command in seconds.
GIT_SECONDS = 5.0

#: Size limits of the patch: of one file, of all files together, and of the patch itself.
FILE_BYTES = 1 << 20
INPUT_BYTES = 16 << 20
PATCH_BYTES = 384 << 10

#: Maximum number of files in the patch: they are words of a command line.
MAX_PATCHED = 500

#: Maximum number of files that are listed with the reason why the patch lacks them.
MAX_LEFT_OUT = 200

#: Maximum number of new files to look at.
MAX_NEW = 100_000

#: Options that make git's output independent of the user's configuration, and that keep it from starting programs.
OPTIONS = (
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "core.quotePath=false",
    "-c",
    "color.ui=false",
)

#: Stands for the digest of a file that was deleted since the commit.
GONE = "gone"

#: A commit id. It may come from a store, so any other text is refused: git could read it as an option.
COMMIT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

#: A file that marks a folder with the code of an earlier run (`rerun --checkout`).
CHECKOUT_MARK = ".scaleflow-checkout"


def run_git(folder: Path, *words: str, text: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Returns git's output, without the last line break. Raises OSError or subprocess.SubprocessError if it fails."""
    done = subprocess.run(
        ["git", *OPTIONS, *words],
        cwd=folder,
        input=None if text is None else os.fsencode(text),
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        timeout=GIT_SECONDS,
        check=True,
        env={**os.environ, "GIT_TERMINAL_PROMPT": "0", **(environment or {})},
    )
    return os.fsdecode(done.stdout).rstrip("\n")


def read_git(folder: Path) -> CodeRecord | None:
    """Returns the state of the repository that contains a folder; None if git finds no readable repository with a
    commit.

    In `changed`, each file is `changed`, `new` or `gone`. New files that git ignores, and output of runs, are left out.
    """
    try:
        root = Path(run_git(folder, "rev-parse", "--show-toplevel"))
        options = ("--porcelain=v2", "--branch", "-z", "--no-renames", "--ignore-submodules=none")
        entries = run_git(root, "status", *options, "--untracked-files=normal").split("\0")
    except (OSError, subprocess.SubprocessError):
        return None
    status = parse_status(entries)
    if status.commit == "(initial)":
        return None
    changed = dict(status.changed)
    for path in list_new_files(root, status.new):
        changed[path] = "new"
    for path in list(changed):
        if is_output(path) or (root / path).is_dir():
            del changed[path]
    state = CodeRecord(
        commit=status.commit,
        branch="HEAD" if status.branch == "(detached)" else status.branch,
        origin=read_origin(root),
        changed=changed,
        root=root,
        is_dirty=bool(status.changed or status.submodules),
    )
    return add_submodules(state, status.submodules)


@dataclass
class GitStatus:
    """The output of `git status`."""

    commit: str = "(initial)"  # the id of the commit; `(initial)` without a commit
    branch: str = ""  # the name of the branch, or `(detached)`
    changed: dict[str, str] = field(
        default_factory=dict
    )  # tracked files that differ from the commit: `changed`, `gone`
    submodules: list[str] = field(default_factory=list)  # paths of submodules that differ from the commit
    new: list[str] = field(default_factory=list)  # untracked files, and folders, which end with `/`


def parse_status(entries: Sequence[str]) -> GitStatus:
    """Parses the entries of `git status --porcelain=v2 --branch`."""
    status = GitStatus()
    for entry in entries:
        if entry.startswith("# branch.oid "):
            status.commit = entry.removeprefix("# branch.oid ")
        elif entry.startswith("# branch.head "):
            status.branch = entry.removeprefix("# branch.head ")
        elif entry.startswith("? "):
            status.new.append(entry[2:])
        elif entry.startswith(("1 ", "u ")):  # changed, or unmerged, which has two more fields
            _, state, submodule, *_, path = entry.split(" ", 10 if entry[0] == "u" else 8)
            if submodule != "N...":
                status.submodules.append(path)
            else:
                status.changed[path] = GONE if "D" in state else "changed"
    return status


def read_origin(root: Path) -> str:
    """Returns the address of the remote `origin` with credentials masked; "" without it."""
    try:
        return mask_text(run_git(root, "config", "--get", "remote.origin.url"))
    except (OSError, subprocess.SubprocessError):
        return ""


def add_submodules(state: CodeRecord, paths: Sequence[str]) -> CodeRecord:
    """Adds the commits and the changed files of submodules."""
    changed = dict(state.changed)
    commits: dict[str, str] = {}
    for path in paths:
        inner = read_git(state.root / path)
        if inner is None or inner.root == state.root:
            continue
        commits[path] = inner.commit
        for name, commit in inner.submodules.items():
            commits[f"{path}/{name}"] = commit
        for name, change in inner.changed.items():
            changed[f"{path}/{name}"] = change
    return replace(state, changed=changed, submodules=commits)


def is_path_within(path: str) -> bool:
    """Whether a path stays inside its folder and outside `.git`. The path may come from a store."""
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] != "/" and not {"..", ".git"} & {*parts}


def is_output(path: str) -> bool:
    """Whether runs or Python wrote a file: the tracking store and its artifacts, compiled modules."""
    if path.endswith(NO_DATA_SUFFIXES) and not path.endswith(".py"):
        return True
    return not set(NO_DATA).isdisjoint(path.split("/"))


def list_changes_since(state: CodeRecord, commit: str) -> dict[str, str] | None:
    """Returns the files that differ from another commit, as `CodeRecord.changed` does; None if git does not know it."""
    if not COMMIT_ID.fullmatch(commit):
        return None
    try:
        names = run_git(state.root, "diff", "--name-only", "--no-renames", "-z", commit).split("\0")
    except (OSError, subprocess.SubprocessError):
        return None
    changes = {name: "changed" for name in names if name and not is_output(name)}
    return {**changes, **state.changed}


def list_new_files(root: Path, entries: Sequence[str]) -> Iterator[str]:
    """Yields the new files in git's status entries. An entry that ends with `/` is a folder.

    Files in a folder that git ignores, and folders of runs, are left out.
    """
    files: list[str] = []
    for entry in entries:
        if entry.endswith("/"):
            files += list_files_below(root, entry, limit=MAX_NEW - len(files))
        else:
            yield entry
    if files:
        try:
            ignored = run_git(root, "check-ignore", "--no-index", "-z", "--stdin", text="\0".join(files)).split("\0")
        except subprocess.CalledProcessError:  # git ignores none of them
            ignored = []
        yield from sorted(set(files) - set(ignored))


def list_files_below(root: Path, folder: str, limit: int) -> list[str]:
    """Returns files in a folder of a repository, relative to `root`. It stops after the subfolder that exceeds `limit`.

    Other repositories and environments in the folder are left out.
    """
    files: list[str] = []
    for base, folders, names in walk_outside_runs(str(root / folder), follows_links=False):
        if {".git", "pyvenv.cfg", CHECKOUT_MARK} & {*folders, *names}:  # another repository, or an environment
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in NO_DATA]
        files += [os.path.relpath(os.path.join(base, name), root) for name in names]  # noqa: PTH118
        if len(files) > limit:
            break
    return files


def choose_patched(state: CodeRecord) -> tuple[list[str], dict[str, str]]:
    """Chooses the files of the patch, small ones first. Returns them, and the reason for each file that is left out."""
    sizes = {}
    left_out = {}
    for path, change in state.changed.items():
        if change == GONE:
            continue
        try:
            size = os.lstat(f"{state.root}/{path}").st_size
        except OSError:
            continue  # it is gone by now
        if is_secret_file(path):
            left_out[path] = "it looks like a secret"
        else:
            sizes[path] = size
    chosen: list[str] = []
    total = 0
    for path, size in sort_by_size(sizes):
        if size > FILE_BYTES:
            left_out[path] = "too large"
        elif total + size > INPUT_BYTES or len(chosen) == MAX_PATCHED:
            left_out[path] = "the changes are too large"
        else:
            chosen.append(path)
            total += size
    more = list(left_out)[MAX_LEFT_OUT:]
    if more:
        left_out = dict(itertools.islice(left_out.items(), MAX_LEFT_OUT))
        left_out[f"{len(more):,} more files"] = "the changes are too large"
    return chosen, left_out


def sort_by_size(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns paths with their sizes, small ones first, and those of one size by name."""
    return sorted(sizes.items(), key=lambda item: (item[1], item[0]))


def make_patch(state: CodeRecord) -> tuple[str, dict[str, str]]:
    """Returns a patch from the commit to the changed and new files, and the reason for each file that is left out.

    Secrets are masked. Deleted files are not in the patch.
    """
    chosen, left_out = choose_patched(state)
    sections: list[str] = []
    for prefix in ["", *(f"{path}/" for path in state.submodules)]:
        nested = tuple(f"{path}/" for path in state.submodules if f"{path}/" != prefix and path.startswith(prefix))
        own = [path for path in chosen if path.startswith(prefix) and not path.startswith(nested)]
        if own:
            names = [path.removeprefix(prefix) for path in own]
            new = [path.removeprefix(prefix) for path in own if state.changed[path] == "new"]
            sections += diff_files(state.root / prefix, names, new, prefix=prefix)
    patch = ""
    for section in sections:
        path = find_patched_path(section)
        masked = mask_section(section, path)
        if re.search(r"^(Binary files|GIT binary patch)", section, re.M):
            left_out[path] = "binary"
        elif len(patch) + len(masked) > PATCH_BYTES:
            left_out[path] = "the patch is too large"
        else:
            patch += masked
    return patch, left_out


def diff_files(root: Path, paths: Sequence[str], new: Sequence[str], prefix: str) -> list[str]:
    """Returns the sections of a patch of these files. New files are added to a copy of the index."""
    with tempfile.TemporaryDirectory(prefix="scaleflow-") as folder:
        index = Path(folder, "index")
        # The copy keeps the index's time: git rereads files that are not older, since they may have changed in the same
        # second.
        shutil.copy2(Path(run_git(root, "rev-parse", "--absolute-git-dir"), "index"), index)
        variables = {"GIT_INDEX_FILE": str(index), "GIT_LITERAL_PATHSPECS": "1"}
        if new:
            run_git(root, "add", "--intent-to-add", "--", *new, environment=variables)
        form = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--full-index", "--ignore-submodules")
        names = (f"--src-prefix=a/{prefix}", f"--dst-prefix=b/{prefix}")
        text = run_git(root, "diff", *form, *names, "HEAD", "--", *paths, environment=variables)
    return split_patch(f"{text}\n")


def split_patch(patch: str) -> list[str]:
    """Splits a patch into one section per file."""
    return [section for section in re.split(r"^(?=diff --git )", patch, flags=re.M) if section.strip()]


def find_patched_path(section: str) -> str:
    """Returns the file path of a section, whose first line is `diff --git a/PATH b/PATH`."""
    names = section.partition("\n")[0].removeprefix("diff --git ")
    if names.startswith("a/"):
        return names[2 : len(names) // 2]  # both halves are the same path
    return names.strip('"').partition('" "b/')[2]  # git quotes a path with special characters


def mask_section(section: str, path: str) -> str:
    """Masks the secrets in a section. The number of lines of its hunks stays the same."""
    head, at, body = section.partition("\n@@ ")
    if not at:  # an empty file, or a change of the file mode
        return section
    lines = f"{at[1:]}{body}".split("\n")
    indices = [index for index, line in enumerate(lines) if line[:1] in (" ", "+", "-")]
    masked_lines = mask_lines([lines[index][1:] for index in indices], path)
    for index, masked in zip(indices, masked_lines, strict=True):
        lines[index] = lines[index][0] + masked
    # The text after the second @@ is a line of the file, so it is removed.
    hunks = [re.sub(r"^(@@ .*? @@).*", r"\1", line) for line in lines]
    return f"{head}\n" + "\n".join(hunks)
