from __future__ import annotations

from pathlib import Path

import pytest

from scaleflow.process import how_it_ended, last_lines


def test_the_last_lines_of_a_log_are_the_programs_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "first\n\nsecond\nWARNING: All log messages before absl::InitializeLog()\n"
        "I0000 00:00:1 cudart_stub.cc:31] no cuda\nE0000 00:00:1 cuInit\nI quit\n"
    )
    assert last_lines(log, 2) == "second | I quit"


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "ended with exit status 3"), (-9, "was killed by SIGKILL"), (-99, "was killed by signal 99")],
)
def test_an_end_is_told_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words
