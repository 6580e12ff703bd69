"""docs/extend.md is true: its examples, put where it says, train by its commands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "extend.md").read_text()
COMMANDS = re.findall(r"^    python -m scaleflow (.*)$", PAGE, re.M)

#: What each command is known by, and the accuracy that it reaches at least; guessing has a tenth on digits, else half.
TRAINED = {
    "dataset=pumps debug": 0.0,
    "dataset=pumps training": 0.85,
    "model=sound": 0.85,
    "my_steps.consistent": 0.8,
    "my_steps.TwoRates": 0.8,
    "my_callbacks.Halve": 0.8,
    "optimizer=signum": 0.8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page shows, and the recordings that one of them makes."""
    folder = tmp_path_factory.mktemp("extend")
    for name, text in re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.S):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (script,) = re.findall(r"^    python (\w+\.py)$", PAGE, re.M)
    subprocess.run([sys.executable, script], cwd=folder, check=True, timeout=60)
    return folder


def run_here(folder: str, words: list[str]) -> tuple[int, str]:
    """The command in this process: (exit code, what it printed)."""
    from scaleflow.cli import main

    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(words)
    return code, printed.getvalue()


def test_every_command_is_tried() -> None:
    assert [[name for name in TRAINED if name in line] for line in COMMANDS] == [[name] for name in TRAINED]


def test_every_block_of_code_is_tried() -> None:
    assert PAGE.count("<!-- test: ") == len(re.findall(r"^```(?:python|yaml)$", PAGE, re.M))


@pytest.mark.parametrize("name", TRAINED)
def test_a_command_trains(isolated: Callable[..., Any], folder: Path, name: str) -> None:
    (line,) = [line for line in COMMANDS if name in line]
    own = ["tracking=none", "debug=inline", f"hydra.run.dir={folder}/runs/{len(name)}"]
    words = dict.fromkeys([*shlex.split(line), *own])
    code, printed = isolated(run_here, str(folder), list(words))
    assert code == 0, printed
    (accuracy,) = re.findall(r"test accuracy +(\S+)", printed)
    assert float(accuracy) >= TRAINED[name], printed
    if name == "my_callbacks.Halve":
        assert "learning rate 0.01" in printed
