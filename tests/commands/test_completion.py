"""What a shell completes: commands, their flags and their values; Hydra completes the rest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scaleflow import cli
from scaleflow.commands.completion import LINE, complete_line
from scaleflow.commands.table import list_commands
from tests.commands.test_table import SCRIPT
from tests.conftest import clean_environment


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("scaleflow evaluate --", {"--split", "--unknown-classes", "--trust", "--config-dir", "--json", "--help"}),
        ("scaleflow --json evaluate abc --split ", {"test", "validation", "train", "all"}),
        ("scaleflow predict abc --input ", set()),  # the shell completes names of files
        ("scaleflow find ", {"lr", "batch_size"}),
        ("scaleflow find --st", {"--low", "--high", "--steps", "--config-dir", "--json", "--help"}),
        ("scaleflow doctor --", {"--json", "--help"}),
        ("scaleflow project ", set()),
        ("scaleflow --cfg ", {"job", "hydra", "all"}),
    ],
)
def test_words_of_a_command_are_completed(
    line: str, found: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LINE, line)
    assert cli.main(["-sc", "query=bash"]) == 0
    assert set(capsys.readouterr().out.split()) == found


@pytest.mark.parametrize(
    ("line", "names", "rest"),
    [
        ("scaleflow ", True, "scaleflow "),
        ("scaleflow --json eva", True, "scaleflow eva"),
        ("scaleflow model=cnn model.", False, "scaleflow model=cnn model."),
        ("scaleflow find lr model=cnn model.", False, "scaleflow model=cnn model."),
        ("scaleflow evaluate abc dataset=", False, "scaleflow dataset="),
    ],
)
def test_hydra_completes_an_override(
    line: str, names: bool, rest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LINE, line)
    assert not complete_line()
    assert os.environ[LINE] == rest
    assert capsys.readouterr().out.split() == (list(list_commands()) if names else [])


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_and_groups() -> None:
    program = f"""
        PATH={Path(SCRIPT).parent}:$PATH
        eval "$(scaleflow -sc install=bash)"
        complete -p scaleflow
        COMP_LINE='scaleflow e' COMP_POINT=11 COMP_CWORD=1 hydra_bash_completion
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, env=clean_environment())
    found = done.stdout.split("\n")[-2].split()
    assert [word for word in found if not word.startswith(("evaluation", "export"))] == ["evaluate", "experiment="]
    assert "evaluation=" in found
    assert done.stdout.startswith("complete ")
    assert done.stderr == ""
