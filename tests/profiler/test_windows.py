"""Which steps are traced, and how calls are cut for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.profiler.windows import Windows

Taken = list[tuple[int, int, bool]]


def taken(windows: list[tuple[int, int]], total: int, wanted: int, begin: int = 0) -> Taken:
    """(first step, steps, whether it was traced) of each call of a run that would like calls of `wanted`
    steps.
    """
    asked = Windows(windows)
    calls, step = [], begin
    while step < total:
        left = asked.steps_left(step)
        steps = min(wanted, total - step, wanted if left is None else left)
        window = asked.find_window(step + 1) if asked.is_single(step + 1) else None
        calls.append((step + 1, steps, window is not None))
        step += steps
        if window is not None and step >= window[1]:
            asked.end_window(window)
    return calls


def traced(calls: Taken) -> list[int]:
    assert all(steps == 1 for _, steps, is_traced in calls if is_traced)
    return [first for first, _, is_traced in calls if is_traced]


@pytest.mark.parametrize(
    ("windows", "wanted"), [([(50, 69)], 64), ([(50, 69)], 1), ([(2, 9)], 64), ([(5, 6), (7, 8)], 3), ([(10, 19)], 10)]
)
def test_the_steps_of_a_window_are_traced_one_by_one_and_no_others(windows: list[tuple[int, int]], wanted: int) -> None:
    calls = taken(windows, 200, wanted)
    assert traced(calls) == [step for first, last in windows for step in range(first, last + 1)]
    assert sum(steps for _, steps, _ in calls) == 200
    singles = [first for first, steps, is_traced in calls[:-1] if steps == 1 and not is_traced]
    assert wanted == 1 or len(singles) <= 1 + 2 * len(windows)  # those that warm up
    assert singles[0] == 1
    later = [steps for first, steps, _ in calls if first > windows[-1][1]]
    assert set(later[:-1]) == {wanted}


def test_a_run_that_goes_on_after_a_window_traces_nothing_and_within_it_the_rest() -> None:
    assert traced(taken([(50, 69)], 200, 64, begin=70)) == []
    assert taken([(50, 69)], 200, 64, begin=69)[0][1] == 64
    assert traced(taken([(50, 69)], 200, 64, begin=59)) == list(range(61, 70))  # the first one compiles
    assert taken([(50, 69)], 200, 64, begin=20)[:2] == [(21, 1, False), (22, 26, False)]


def test_a_run_that_ends_within_a_window_traces_what_there_is() -> None:
    assert traced(taken([(50, 69)], 55, 64)) == [50, 51, 52, 53, 54, 55]
    assert traced(taken([(50, 69)], 40, 64)) == []


def test_windows_come_in_order_and_without_a_profiler_there_are_none(plan: Callable[..., Any]) -> None:
    chosen = plan("profiler=trace", "profiler.start_step=[500,50]", "profiler.steps=3", "training.max_steps=502")
    assert chosen.profiler.windows == [(50, 52), (500, 502)]
    assert plan("debug=fast").profiler.windows == []
