"""Mean and deviation over the seeds of a sweep."""

from __future__ import annotations

from statistics import mean, stdev

import pytest

from scaleflow.interfaces.events import MetricsLogged, RunEnded, RunReady
from scaleflow.runs.state import RunState
from scaleflow.sweep.ledger import LedgerEntry
from scaleflow.sweep.sweep_report import SweepReport


def make_job(
    number: int, units: str, seed: str, accuracy: float, status: str = "FINISHED"
) -> tuple[LedgerEntry, RunState]:
    run = RunState()
    run.apply(RunReady("run", params={"model.units": units, "seed": seed}, modes={"accuracy": "max"}))
    values = {"val/accuracy": accuracy, "test/accuracy": accuracy + 0.01}
    run.apply(MetricsLogged(1, {**values, "test/accuracy_low": 0.1, "test/accuracy_high": 0.9}))
    run.apply(RunEnded(status))  # type: ignore[arg-type]
    entry = LedgerEntry(number, str(number), [f"model.units={units}", f"seed={seed}"], str(number), status)
    return entry, run


JOBS = [
    *(make_job(n, "8", str(n), value) for n, value in enumerate((0.6, 0.65, 0.7))),
    *(make_job(3 + n, "64", str(n), value) for n, value in enumerate((0.8, 0.9))),
    make_job(5, "64", "2", 0.1, "FAILED"),
    make_job(6, "128", "0", 0.95),
]


def test_a_sweep_over_seeds_reports_the_mean_and_deviation_of_each_configuration() -> None:
    report = SweepReport(JOBS, ["model.units", "seed"], "val/accuracy", "max")
    assert [(row["model.units"], row["seeds"]) for row in report.seeds] == [("64", 2), ("8", 3)]
    assert report.seeds[1]["val/accuracy mean"] == pytest.approx(mean((0.6, 0.65, 0.7)))
    assert report.seeds[1]["val/accuracy deviation"] == pytest.approx(stdev((0.6, 0.65, 0.7)))
    assert "| model.units | seeds | val/accuracy mean | val/accuracy deviation |" in report.markdown()
    assert not any("low" in column for column in report.columns)
    assert [label for label, _ in report.labelled[:2]] == ["model.units=128 seed=0", "model.units=64 seed=1"]


def test_without_seeds_there_is_no_such_table() -> None:
    assert SweepReport(JOBS, ["model.units"], "val/accuracy", "max").seeds == []
    one_each = [JOBS[0], JOBS[3]]
    assert SweepReport(one_each, ["model.units", "seed"], "val/accuracy", "max").seeds == []


def test_values_that_are_mappings_are_configurations_of_their_own() -> None:
    """A run's params have the keys inside a mapping, not the mapping's own."""
    jobs = []
    for number, (value, accuracy) in enumerate([("{0:[a]}", 0.5), ("{0:[a]}", 0.7), ("{0:[]}", 0.1), ("{0:[]}", 0.3)]):
        entry, run = make_job(number, "8", str(number), accuracy)
        entry.overrides[:] = [f"model.freeze={value}", f"seed={number}"]
        jobs.append((entry, run))
    report = SweepReport(jobs, ["model.freeze", "seed"], "val/accuracy", "max")
    assert [(row["model.freeze"], row["seeds"]) for row in report.seeds] == [("{0:[a]}", 2), ("{0:[]}", 2)]
