"""The table of commands: every command runs by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from scaleflow import cli
from scaleflow.commands.table import list_commands, run_named_command
from scaleflow.interfaces import is_console_script, name_command
from tests.processes import ROOT

SCRIPT = str(Path(sysconfig.get_path("scripts"), "scaleflow"))

PAGE = (ROOT / "docs/commands.md").read_text()


@pytest.mark.parametrize("name", list_commands())
def test_a_command_has_a_module_of_its_name_and_a_line_in_the_docs(name: str) -> None:
    module = list_commands()[name].module
    assert import_module(module).main
    assert name in module.split(".") or module.endswith(".command")
    assert "__main__" not in (ROOT / f"{module.replace('.', '/')}.py").read_text()  # it has no entry of its own
    assert name == "project" or f"\n    scaleflow {name} " in PAGE


@pytest.mark.parametrize("words", [["evaluate", "abc"], ["--json", "predict", "abc"], ["find", "lr", "--steps", "1"]])
def test_both_forms_answer_alike(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = next(word for word in words if word in list_commands())
    ends = []
    for main, typed in (
        (cli.main, words),
        (partial(run_named_command, list_commands()[name]), [word for word in words if word != name]),
    ):
        try:
            code = main(typed)
        except SystemExit as leaving:  # argparse
            code = leaving.code
        ends.append((code, capsys.readouterr()))
    assert ends[0] == ends[1]
    assert ends[0][0] == 2


@pytest.mark.parametrize(
    ("words", "path", "run", "sync"),
    [
        (["python", "-m", "scaleflow"], False, "python -m scaleflow", "python -m scaleflow sync"),
        (["python", "-m", "scaleflow"], True, "scaleflow", "scaleflow sync"),
        (["python", "train.py"], True, "scaleflow", "scaleflow sync"),
        (["python", SCRIPT], True, "scaleflow", "scaleflow sync"),
        (["python", SCRIPT], False, SCRIPT, f"{SCRIPT} sync"),
        (["python", "my env/bin/scaleflow"], True, "'my env/bin/scaleflow'", "'my env/bin/scaleflow' sync"),
    ],
)
def test_printed_commands_can_be_typed(
    words: list[str], path: bool, run: str, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    if path:
        monkeypatch.setenv("PATH", f"{Path(SCRIPT).parent}{os.pathsep}{os.environ['PATH']}")
    assert (name_command(), name_command("sync")) == (run, sync)


def test_a_script_of_another_environment_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scaleflow").write_text("#!/bin/sh\n")
    (tmp_path / "scaleflow").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "scaleflow"])
    assert name_command("sync") == "python -m scaleflow sync"


def test_a_message_names_the_script_as_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "record.json").write_text("{}")
    done = subprocess.run(
        [SCRIPT, "rerun", str(tmp_path), "--json"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert f"; {SCRIPT} sync {tmp_path} records it" in json.loads(done.stdout)["error"]
    assert done.stderr.startswith("scaleflow: ")


@pytest.mark.parametrize(
    ("words", "is_script"),
    [
        (["python3", "/venv/bin/scaleflow", "sync", "outputs"], True),
        (["python3", "-m", "scaleflow"], False),
        (["python3", "train.py", "scaleflow"], False),
        (["python3"], False),
    ],
)
def test_the_console_script_is_known_by_its_name(words: list[str], is_script: bool) -> None:
    assert is_console_script(words) is is_script
