"""Where a run comes from: the code, the machine, the command. Kept in its folder, and told to the store as tags.

The names are MLflow's own where it has one, so that its pages show them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scaleflow.secret_masking import mask_override, mask_secrets

FILE = "provenance.json"

#: The environment variable that names the folder of the run that a process works for.
INSIDE = "SCALEFLOW_RUN_FOLDER"

#: How long git may take, in seconds; the answer of a slower one is left out.
GIT_SECONDS = 2.0

PACKAGES = ("scaleflow", "tensorflow", "keras", "mlflow")

#: Of a command line longer than that the rest is left out.
LONGEST = 4000


def collect_provenance() -> dict[str, str]:
    """Tags of a run that begins now in this process."""
    tags = {
        "scaleflow.host": socket.gethostname(),
        "scaleflow.command": command_line(sys.orig_argv),
        **collect_git_tags(),
    }
    if script := find_script(sys.orig_argv):
        tags["mlflow.source.name"] = script
    tags["scaleflow.version.python"] = sys.version.split()[0]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            tags[f"scaleflow.version.{package}"] = version(package)
    return tags


def write_provenance(folder: Path, more: Mapping[str, str]) -> None:
    """Writes the tags into a run's folder, and more of them; a run that goes on keeps those that it has."""
    path = folder / FILE
    if not path.exists():
        path.write_text(json.dumps({**collect_provenance(), **more}, indent=1))


def read_provenance(folder: Path) -> dict[str, str]:
    """The tags in a run's folder; none where there are none."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


@contextlib.contextmanager
def mark_process(folder: Path) -> Iterator[None]:
    """Has this process know that it works for a run, as long as the block."""
    before = os.environ.get(INSIDE)
    os.environ[INSIDE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(INSIDE)
        if before is not None:
            os.environ[INSIDE] = before


class RunContext:
    """An MLflow run-context provider: what a user's own code logs inside of our runs has their tags.

    MLflow asks it in every process in which it starts a run: elsewhere it has nothing to say.
    """

    def in_context(self) -> bool:
        return INSIDE in os.environ

    def tags(self) -> dict[str, str]:
        folder = Path(os.environ[INSIDE])
        return {**read_provenance(folder), "scaleflow.inside": str(folder)}


def collect_git_tags() -> dict[str, str]:
    """The current folder's commit, branch and origin, and whether tracked files differ; empty without git."""
    commit = run_git("rev-parse", "HEAD")
    if not commit:
        return {}
    changed = run_git("status", "--porcelain", "--untracked-files=no")
    found = {
        "commit": commit,
        "branch": run_git("rev-parse", "--abbrev-ref", "HEAD"),
        "repoURL": mask_secrets(run_git("config", "--get", "remote.origin.url")),
        "dirty": None if changed is None else str(bool(changed)).lower(),
    }
    return {f"mlflow.source.git.{key}": value for key, value in found.items() if value}


def run_git(*words: str) -> str | None:
    """What git answers; None where it is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def find_script(words: Sequence[str]) -> str | None:
    """The script that this process runs, as it was typed; None where it is a module, a notebook or code."""
    found = next((word for word in words[1:] if not word.startswith("-")), "")
    return found if found.endswith(".py") and not {"-m", "-c"} & set(words[1 : words.index(found)]) else None


def command_line(words: Sequence[str]) -> str:
    """A command as one would type it again, its secrets masked."""
    shown = [Path(words[0]).name, *map(mask_word, words[1:])] if words else []
    if "-c" in words:  # code, which may hold anything
        shown = [*shown[: words.index("-c") + 1], "..."]
    return shlex.join(shown)[:LONGEST]


def mask_word(word: str) -> str:
    """A word of a command line; of several overrides in one word each is looked at."""
    if re.search(r"\s", word) and "=" in word:
        with contextlib.suppress(ValueError):
            parts = shlex.split(word)
            if all("=" in part for part in parts):
                return shlex.join(map(mask_override, parts))
    return mask_override(str(mask_secrets(word)))
