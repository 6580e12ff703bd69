"""Which jobs have to begin with the same losses, and how far apart these may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from scaleflow.interfaces.events import RunReady
from scaleflow.runs.state import RunState
from scaleflow.sweep.first_losses import LOSS
from scaleflow.sweep.ledger import LedgerEntry
from scaleflow.sweep.sweep_report import SweepReport, choose_results

Points = Sequence[tuple[int, float]]


def job(number: int, points: Points, **params: str) -> tuple[LedgerEntry, RunState]:
    words = [f"{key}={value}" for key, value in params.items() if not key.startswith("resolved")]
    params = {"resolved.replicas": "1", "resolved.global_batch_size": "32", "precision": "float32", **params}
    history = RunState(
        RunReady("fake", params=params), last_status="FINISHED", epoch_steps=2, curves={LOSS: list(points)}
    )
    return LedgerEntry(number, identity=str(number), overrides=words, folder=str(number), status="FINISHED"), history


def verdicts(
    *jobs: tuple[LedgerEntry, RunState], swept: Sequence[str] = ("strategy", "precision", "seed")
) -> list[str]:
    report = SweepReport(jobs, swept, same_losses=True)
    assert len(report.differences) == sum(row["first losses"] == "DIFFER" for row in report.rows)
    return [str(row["first losses"]) for row in report.rows]


def pair(
    first: Points, second: Points, **params: str
) -> tuple[tuple[LedgerEntry, RunState], tuple[LedgerEntry, RunState]]:
    return job(0, first, strategy="one_device", **params), job(1, second, strategy="mirrored", **params)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([(1, 2.0)], [(1, 2.0001)], "same"),
        ([(1, 2.0)], [(1, 2.01)], "DIFFER"),
        ([(1, 2.0)], [(1, math.nan)], "DIFFER"),
        ([(1, 2.0), (2, 1.0)], [(1, 2.0), (2, 1.1)], "DIFFER"),
        ([(1, 2.0), (3, 1.0)], [(1, 2.0), (3, 1.1)], "same"),  # after the first epoch
    ],
)
def test_losses_are_compared_through_the_first_epoch(first: Points, second: Points, verdict: str) -> None:
    assert verdicts(*pair(first, second)) == ["same", verdict]


def test_jobs_without_a_step_in_common_are_not_compared() -> None:
    assert verdicts(*pair([(1, 2.0)], [(2, 9.0)])) == ["not compared"] * 2


def test_another_precision_may_be_farther_off() -> None:
    exact = job(0, [(1, 2.0)])
    mixed = {"precision": "mixed"}
    assert verdicts(exact, job(1, [(1, 2.02)], **mixed), job(2, [(1, 2.3)], **mixed)) == ["same", "same", "DIFFER"]


def test_how_a_global_batch_comes_about_does_not_matter() -> None:
    two = {"strategy": "mirrored", "training.batch_size": "16", "resolved.replicas": "2"}
    assert verdicts(job(0, [(1, 2.0)]), job(1, [(1, 3.0)], **two)) == ["same", "DIFFER"]


@pytest.mark.parametrize("other", [{"seed": "1"}, {"model.units": "64"}, {"resolved.global_batch_size": "64"}])
def test_only_the_same_work_seed_and_global_batch_have_the_same_losses(other: Mapping[str, str]) -> None:
    found = verdicts(*pair([(1, 2.0)], [(1, 2.0)]), job(2, [(1, 3.0)], **other))
    assert found == ["same", "same", "not compared"]


def test_one_replica_is_what_others_are_compared_with() -> None:
    two = {"resolved.replicas": "2"}
    jobs = job(0, [(1, 3.0)], strategy="mirrored", **two), job(1, [(1, 2.0)]), job(2, [(1, 2.0)], **two)
    assert verdicts(*jobs) == ["DIFFER", "same", "same"]
    assert SweepReport(jobs, ["strategy"], same_losses=True).differences == [
        "#0 strategy=mirrored has a loss of 3 at step 1, which differs by more than 0.001 from the 2 of #1 job 1"
    ]


def test_of_repeats_one_that_differs_is_enough() -> None:
    jobs = [*pair([(1, 2.0)], [(1, 2.0)]), *pair([(1, 2.0)], [(1, 2.2)])]
    for number, (entry, _) in enumerate(jobs):
        entry.number = number
    assert verdicts(*jobs) == ["same", "DIFFER"]


def test_a_job_that_told_no_loss_has_no_verdict() -> None:
    assert verdicts(*pair([(1, 2.0)], [])) == ["not compared", "None"]


def test_jobs_that_validate_on_different_examples_have_a_note() -> None:
    def report(*counts: str) -> str:
        jobs = [job(number, [], **{"resolved.examples.validation": count}) for number, count in enumerate(counts)]
        for _, state in jobs:
            state.metrics["val/loss"] = 0.5
        return SweepReport(jobs, ["model"], metric="val/loss").markdown()

    told = "val/loss is not of the same examples in all jobs (80 and 800); dataset.validation=0.1 makes it so"
    assert told in report("800", "80", "800")
    assert "same examples" not in report("80", "80")
    begun, waiting = job(0, [], **{"resolved.examples.validation": "80"}), job(1, [])
    interrupted = [begun, (waiting[0], RunState())]  # this job has not begun
    assert "same examples" not in SweepReport(interrupted, ["model"], metric="val/loss").markdown()


def test_tables_show_the_metrics_of_a_rare_class() -> None:
    values = {f"val/{name}": 0.5 for name in ("loss", "accuracy")}
    values |= {f"test/{name}": 0.5 for name in ("loss", "accuracy", "precision", "recall", "f1")}
    values |= {f"test/{name}{end}": 0.5 for name in ("roc_auc", "average_precision") for end in ("", "_low", "_high")}
    rare = job(0, [])
    rare[1].metrics.update(values)
    report = SweepReport([rare], ["model"])
    added = ["test/roc_auc", "test/average_precision"]
    shown = [name for name in report.shown if "/" in name and not name.startswith("examples")]
    assert shown == ["val/loss", "val/accuracy", *added]
    head = report.csv().splitlines()[0].split(",")
    assert [name for name in head if name.startswith("test/")] == ["test/loss", "test/accuracy", *added]


def test_tables_show_the_first_metrics_of_a_split() -> None:
    values = {f"test/{name}": 0.5 for name in ("loss", "accuracy", "mae", "recall", "f1")}
    assert choose_results(values, "", 2) == ["test/loss", "test/accuracy"]
    assert choose_results({**values, "test/price/roc_auc": 0.5}, "", 1) == ["test/price/roc_auc"]
