"""docs/objective.md is true: its own metric and loss, put where it says, train by its commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from scaleflow.testing import Events
from tests.processes import ROOT
from tests.test_extend import run_commands

PAGE = (ROOT / "docs" / "objective.md").read_text()
OWN = re.findall(r"^    (?:python -m )?scaleflow (--config-dir .*)$", PAGE, re.M)


@pytest.mark.parametrize("line", OWN, ids=["metric", "loss"])
def test_a_command_with_own_code_trains(
    isolated: Callable[..., list[tuple[int, str]]], tmp_path: Path, line: str
) -> None:
    for name, text in re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.S):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = [*shlex.split(line), "tracking=none", "debug=inline", f"hydra.run.dir={tmp_path}/run"]
    ((code, printed),) = isolated(run_commands, str(tmp_path), [words])
    assert code == 0, printed
    events = Events.of(tmp_path / "run")
    assert events.history("test/accuracy")[-1][1] > 0.7
    if "Confidence" in line:
        assert 0.5 < events.history("test/confidence")[-1][1] < 1


def test_the_pages_code_is_tried() -> None:
    assert len(OWN) == PAGE.count("<!-- test: ") == 2
