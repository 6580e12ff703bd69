"""Numbers and durations as text."""

import math
from pathlib import Path

import pytest

from scaleflow.api import JobResult, Result, SweepResult
from scaleflow.interfaces.formatting import format_duration, format_elapsed, format_number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (168401787944.96, "1.68e+11"),
        (0.0034, "0.0034"),
        (0.00341234, "0.003412"),
        (0.95333, "0.9533"),
        (0.1 + 0.2, "0.3"),
        (1.0, "1"),
        (0.0, "0"),
        (-0.5, "-0.5"),
        (0.0001, "0.0001"),
        (0.000012345, "1.23e-05"),
        (12.3456, "12.35"),
        (999.96, "1000"),
        (1234.56, "1234.6"),
        (-61000.4, "-61000"),
        (99999.7, "1e+05"),
        (123456.0, "1.23e+05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_a_number(value: float, shown: str) -> None:
    assert format_number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (8.2, "8 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (250, "4 min 10 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_a_duration_in_words(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (70, "1 min 10 s")])
def test_the_time_that_something_takes(seconds: float, shown: str) -> None:
    assert format_elapsed(seconds) == shown


def test_results_are_printed_as_rows_and_shown_as_a_table() -> None:
    metrics = {"train/loss": 0.1, "test/loss": 0.0733, "test/f1_low": 0.5, "test/auc": 0.9, "test/auc_low": 0.85,
               "test/auc_high": 0.95}  # fmt: skip
    result = Result("FINISHED", "abc", Path("out/<1>"), metrics, model_uri="models:/m-1")
    assert str(result).splitlines() == [
        "status       FINISHED",
        "test loss    0.0733",
        "test f1_low  0.5",
        "test auc     0.9 (0.85 to 0.95)",
        "folder       out/<1>",
        "run          abc",
        "model        models:/m-1",
    ]
    assert repr(result).startswith("Result(status='FINISHED'")
    page = result._repr_html_()
    assert page.count("<tr>") == 7
    assert "out/&lt;1&gt;" in page
    job = JobResult(2, ("model.units=8",), result)
    sweep = SweepResult("FINISHED", None, Path("s"), (job,), job)
    assert "#2 (best)  model.units=8  FINISHED  test loss 0.0733  test f1_low 0.5  test auc 0.9 (0.85 to 0.95)" in str(
        sweep
    )
