"""The campaign of pipelines: its cases are drawn from a seed, and it sees what differs. One case is tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.pipeline_campaign import KINDS, NAMES, Case, PipelineCases, Whole, compare, draw_case, make_table


def test_a_seed_says_which_faults_come_and_all_kinds_are_among_them() -> None:
    cases = [draw_case(0, number) for number in range(100)]
    assert cases == [draw_case(0, number) for number in range(100)]
    assert cases != [draw_case(1, number) for number in range(100)]
    assert {(case.kind, case.role) for case in cases} == set(KINDS)
    assert {case.stage for case in cases} == set(NAMES)
    assert sum(case.again is not None for case in cases) > 10


def test_the_judge_sees_results_and_points_that_differ() -> None:
    result = {"status": "FINISHED", "attempt": 1, "metrics": {"loss": 0.5}, "best": None}
    whole = Whole({}, {"fit": result}, {"fit/1": {"loss": [(1, 0.5)]}})
    assert list(compare(whole, whole)) == []
    again = replace(whole, results={"fit": {**result, "attempt": 2}})
    assert list(compare(again, whole)) == ["fit: attempt is 2, and of the undisturbed 1"]
    other = replace(whole, points={"fit/1": {"loss": [(1, 0.6)]}, "fit/2": {}})
    assert [line.partition(":")[0].partition(" ")[0] for line in compare(other, whole)] == ["trained", "fit/1"]


@pytest.mark.slow
def test_a_pipeline_that_is_killed_goes_on_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = Case(0, "kill -9", "pipeline", "adapt", 0.5, again=Case(0, "SIGTERM", "stage", "week", 0.5))
    case = Case(0, "kill -9", "stage", "search", 0.7, again=last)
    monkeypatch.setattr("tests.pipeline_campaign.draw_case", lambda *_: case)
    result = PipelineCases(tmp_path / "cases", 0, False).try_out(0)
    assert result.wrong == []
    assert result.faults >= 1
    assert "| kill -9 | stage | 1 | 1 | 0 |" in make_table([result], 0)
