"""The hint at the warm server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scaleflow.features.warm import hint
from scaleflow.features.warm.hint import WarmHint
from scaleflow.interfaces.events import RunReady
from scaleflow.interfaces.hooks import FollowedRun
from scaleflow.launcher.processes.handover import WARM_ENV

HINT = "with SCALEFLOW_WARM=1 in the environment, the next commands start in an instant (scaleflow warm --help)"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(WARM_ENV, raising=False)
    monkeypatch.setattr(hint, "FORKED_BY", None)
    monkeypatch.setattr(hint, "find_cache_folder", lambda *_: tmp_path)
    return tmp_path / "warm"


def give_hints(seconds: float, is_on_terminal: bool = True) -> list[str]:
    """Returns what is told of a run that was ready after so many seconds."""
    nothing: Any = None
    told: list[str] = []
    run = FollowedRun(
        plan=nothing,
        folder=Path(),
        is_job=False,
        find_name=str,
        print_note=told.append,
        is_on_terminal=is_on_terminal,
    )
    ready = RunReady(
        time=int(seconds * 1000), name="run", began=0, tags={}, params={}, steps=1, epochs=1, modes={}, search=[]
    )
    WarmHint(run).on_event(ready)
    return told


def test_a_slow_start_on_a_terminal_gets_one_hint_a_day(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert give_hints(2.9) == []
    assert give_hints(5.0, is_on_terminal=False) == []
    assert give_hints(5.0) == [HINT]
    assert give_hints(5.0) == []
    given = mark.stat().st_mtime
    monkeypatch.setattr(hint.time, "time", lambda: given + 90_000)
    assert give_hints(5.0) == [HINT]


def test_who_has_decided_gets_no_hint(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WARM_ENV, "0")
    assert give_hints(5.0) == []
    assert not mark.exists()


def test_a_hint_that_cannot_be_remembered_is_not_given(mark: Path) -> None:
    mark.parent.rmdir()
    mark.parent.write_text("no folder")
    assert give_hints(5.0) == []
