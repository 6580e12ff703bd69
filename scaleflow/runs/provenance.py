"""Collects a run's provenance (code, machine, command), which is saved in its folder and set as tags in the store.

Tags have MLflow's own names if there are some, so that MLflow's UI shows them.
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

from scaleflow.interfaces import is_console_script
from scaleflow.interfaces.secret_masking import mask_override, mask_secrets
from scaleflow.runs.folder import RunFolder

#: The environment variable with the folder of the run that this process works for.
INSIDE = "SCALEFLOW_RUN_FOLDER"

#: Time limit of a git command in seconds; the tag of a slower one is left out.
GIT_SECONDS = 2.0

PACKAGES = ("scaleflow", "tensorflow", "keras", "mlflow")

#: A longer command line is cut, in characters.
LONGEST = 4000


def collect_provenance() -> dict[str, str]:
    """Returns the provenance tags of a run that starts now in this process."""
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
    """Writes the provenance tags and `more` tags into a run's folder. A resumed run keeps its first tags."""
    path = RunFolder(folder).provenance
    if not path.exists():
        path.write_text(json.dumps({**collect_provenance(), **more}, indent=1))


def read_provenance(folder: Path) -> dict[str, str]:
    """Returns the tags in a run's folder; empty if there is no readable file."""
    try:
        tags = json.loads(RunFolder(folder).provenance.read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in tags.items()} if isinstance(tags, dict) else {}


@contextlib.contextmanager
def mark_process(folder: Path) -> Iterator[None]:
    """Marks this process as working for a run while the context is open; see `RunContext`."""
    before = os.environ.get(INSIDE)
    os.environ[INSIDE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(INSIDE)
        if before is not None:
            os.environ[INSIDE] = before


class RunContext:
    """An MLflow run-context provider: MLflow runs that user code starts inside a scaleflow run get that run's tags.

    MLflow calls it in every process that starts an MLflow run. It applies only in a process that `mark_process` marked.
    """

    def in_context(self) -> bool:
        return INSIDE in os.environ

    def tags(self) -> dict[str, str]:
        folder = Path(os.environ[INSIDE])
        return {**read_provenance(folder), "scaleflow.inside": str(folder)}


def collect_git_tags() -> dict[str, str]:
    """Returns the current folder's commit, branch, origin and whether tracked files differ; empty without git."""
    commit = run_git("rev-parse", "HEAD")
    if not commit:
        return {}
    changed = run_git("status", "--porcelain", "--untracked-files=no")
    facts = {
        "commit": commit,
        "branch": run_git("rev-parse", "--abbrev-ref", "HEAD"),
        "repoURL": mask_secrets(run_git("config", "--get", "remote.origin.url")),
        "dirty": None if changed is None else str(bool(changed)).lower(),
    }
    return {f"mlflow.source.git.{key}": value for key, value in facts.items() if value}


def run_git(*words: str) -> str | None:
    """Returns git's output; None if git is missing, fails or takes too long."""
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout.strip()


def find_script(words: Sequence[str]) -> str | None:
    """Returns the script that this process runs, as typed; None for a module (-m), code (-c) or a notebook."""
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return script if script.endswith(".py") and not {"-m", "-c"} & set(words[1 : words.index(script)]) else None


def command_line(words: Sequence[str]) -> str:
    """Returns a command line that can be typed again, with secrets masked."""
    if is_console_script(words):
        words = ["scaleflow", *words[2:]]
    masked = [Path(words[0]).name, *map(mask_word, words[1:])] if words else []
    if "-c" in words:  # code can contain any secret
        masked = [*masked[: words.index("-c") + 1], "..."]
    return shlex.join(masked)[:LONGEST]


def mask_word(word: str) -> str:
    """Masks a word of a command line. If a word contains several overrides, each of them is masked separately."""
    if re.search(r"\s", word) and "=" in word:
        with contextlib.suppress(ValueError):
            parts = shlex.split(word)
            if all("=" in part for part in parts):
                return shlex.join(map(mask_override, parts))
    return mask_override(str(mask_secrets(word)))
