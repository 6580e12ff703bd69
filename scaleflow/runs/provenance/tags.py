"""The tags that describe where a run comes from (code, machine, command), in its folder and in the store.

If MLflow has a tag for a fact, that name is used, so that MLflow's UI shows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.interfaces import is_console_script
from scaleflow.interfaces.secret_masking import mask_override, mask_secrets
from scaleflow.runs.folder import RunFolder, read_json

if TYPE_CHECKING:  # MLflow imports this module in every process that uses it
    from scaleflow.runs.provenance.machine import Package
    from scaleflow.runs.provenance.record import CodeRecord

#: The environment variable that names the folder of this process's run.
INSIDE = "SCALEFLOW_RUN_FOLDER"

PACKAGES = ("scaleflow", "tensorflow", "keras", "mlflow")

#: Longer command lines are cut, in characters.
MAX_LINE = 4000


def make_run_tags(state: CodeRecord | None, packages: Mapping[str, Package]) -> dict[str, str]:
    """Returns the tags of a run that this process starts now."""
    tags = {
        "scaleflow.host": socket.gethostname(),
        "scaleflow.command": command_line(sys.orig_argv),
        **make_git_tags(state),
    }
    script = find_script(sys.orig_argv)
    if script:
        tags["mlflow.source.name"] = script
    tags["scaleflow.version.python"] = sys.version.split()[0]
    for name in PACKAGES:
        if name in packages:
            tags[f"scaleflow.version.{name}"] = packages[name].version
    return tags


def write_run_tags(folder: Path, tags: Mapping[str, str]) -> None:
    """Writes the tags into a run's folder. A resumed run keeps its first tags."""
    path = RunFolder(folder).provenance
    if not path.exists():
        path.write_text(json.dumps(tags, indent=1))


def read_run_tags(folder: Path) -> dict[str, str]:
    """Returns the tags in a run's folder; empty if there is no readable file."""
    return {str(key): str(value) for key, value in read_json(RunFolder(folder).provenance).items()}


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

    MLflow calls it in every process that starts an MLflow run. It applies only in a process marked by `mark_process`.
    """

    def in_context(self) -> bool:
        return INSIDE in os.environ

    def tags(self) -> dict[str, str]:
        folder = Path(os.environ[INSIDE])
        tags = read_run_tags(folder)
        tags.pop("mlflow.parentRunId", None)
        return {**tags, "scaleflow.inside": str(folder)}


def make_git_tags(state: CodeRecord | None) -> dict[str, str]:
    """Returns the commit, the branch, the origin, and whether tracked files differ; empty without git."""
    if state is None:
        return {}
    facts = {
        "mlflow.source.git.commit": state.commit,
        "mlflow.source.git.branch": state.branch,
        "mlflow.source.git.repoURL": state.origin,
        "mlflow.source.git.dirty": str(state.is_dirty).lower(),
    }
    return {tag: value for tag, value in facts.items() if value}


def find_script(words: Sequence[str]) -> str | None:
    """Returns the script that this process runs, as typed; None for a module (-m), code (-c) or a notebook."""
    for word in words[1:]:
        if word in ("-m", "-c"):
            return None
        if not word.startswith("-"):
            return word if word.endswith(".py") else None
    return None


def command_line(words: Sequence[str]) -> str:
    """Returns a command line that the user can type again, with secrets masked."""
    if is_console_script(words):
        words = ["scaleflow", *words[2:]]
    if not words:
        return ""
    masked = [Path(words[0]).name]
    masked += [mask_word(word) for word in words[1:]]
    if "-c" in words:  # code can contain any secret
        masked = [*masked[: words.index("-c") + 1], "..."]
    return shlex.join(masked)[:MAX_LINE]


def mask_word(word: str) -> str:
    """Masks a word of a command line. Several overrides in one word are masked separately."""
    if re.search(r"\s", word) and "=" in word:
        with contextlib.suppress(ValueError):
            parts = shlex.split(word)
            if all("=" in part for part in parts):
                return shlex.join(map(mask_override, parts))
    return mask_override(str(mask_secrets(word)))
