"""Checks that jobs that do the same work start with the same losses, as every synchronous strategy must.

A strategy can look fast because it trains on other data. The check compares `train/loss`, the mean over the first epoch
so far, at the steps at which both jobs logged it: at least the first step and the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scaleflow.runs.state import RunHistory
from scaleflow.sweep.ledger import IGNORED_KEYS, LedgerEntry, is_under

LOSS = "train/loss"

#: The largest difference of two losses, relative to the loss if that is above 1. In float32 the order of summation
#: makes small differences, which updates amplify. The significands of bfloat16 and float16 have 8 and 11 bits.
FLOAT32_TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 5e-2

GLOBAL_BATCH = "resolved.global_batch_size"

#: Params that do not affect the losses.
LOSS_NEUTRAL_PARAMS = (
    *("strategy", "hardware", "cluster", "precision", *IGNORED_KEYS, "resolved", "experiment"),
    *("training.batch_size", "training.global_batch_size", "training.accumulate", "training.steps_per_loop"),
)

Jobs = Sequence[tuple[LedgerEntry, RunHistory]]


class LossCheck:
    """Compares the first losses of the jobs of a sweep, warm-ups included. `name` returns the label of a job.

    Attributes:
        verdicts: by the number of a job: `same`, `DIFFER`, or `not compared` if no other job does the same work or has
            losses at the same steps. Jobs without losses have none.
        differences: one line for each job that differs.
    """

    def __init__(self, jobs: Jobs, name: Callable[[LedgerEntry], str]) -> None:
        self._name = name
        self.verdicts: dict[int, str] = {}
        self.differences: list[str] = []
        alike: dict[frozenset[tuple[str, str]], list[tuple[LedgerEntry, RunHistory]]] = {}
        for entry, run in jobs:
            if list_first_losses(run):
                alike.setdefault(describe_work(run), []).append((entry, run))
        for group in alike.values():
            self._compare(group)

    def _compare(self, group: Jobs) -> None:
        """Compares jobs with the first one that has one replica, or with the first one if none has."""
        single_replica_jobs = (job for job in group if job[1].params.get("resolved.replicas") == "1")
        reference = next(single_replica_jobs, group[0])
        others = [job for job in group if job is not reference]
        self.verdicts[reference[0].number] = "not compared"
        for entry, run in others:
            if not list_first_losses(run).keys() & list_first_losses(reference[1]).keys():
                self.verdicts[entry.number] = "not compared"
                continue
            difference = find_difference(run, reference[1])
            self.verdicts[reference[0].number] = "same"
            self.verdicts[entry.number] = "DIFFER" if difference else "same"
            if difference:
                self.differences.append(
                    f"{self._name_entry(entry)} has {difference} of {self._name_entry(reference[0])}"
                )

    def _name_entry(self, entry: LedgerEntry) -> str:
        return f"#{entry.number} {self._name(entry)}"

    def worst_verdict(self, entries: Sequence[LedgerEntry]) -> str | None:
        """Returns the worst verdict of several jobs; None if they have none."""
        verdicts = {self.verdicts[entry.number] for entry in entries if entry.number in self.verdicts}
        return next((verdict for verdict in ("DIFFER", "same", "not compared") if verdict in verdicts), None)


def describe_work(summary: RunHistory) -> frozenset[tuple[str, str]]:
    """Returns the params that decide a job's losses: all except `LOSS_NEUTRAL_PARAMS`, and the global batch size."""
    params = {key: value for key, value in summary.params.items() if not is_under(key, LOSS_NEUTRAL_PARAMS)}
    return frozenset({**params, GLOBAL_BATCH: summary.params.get(GLOBAL_BATCH, "")}.items())


def find_difference(summary: RunHistory, other: RunHistory) -> str:
    """Describes the first step at which the losses of two runs differ; empty if they do not."""
    losses, others = list_first_losses(summary), list_first_losses(other)
    allowed = max(choose_tolerance(summary), choose_tolerance(other))
    for step in sorted(losses.keys() & others.keys()):
        loss, other_loss = losses[step], others[step]
        if not abs(loss - other_loss) <= allowed * max(1.0, abs(other_loss)):  # also true for NaN
            return (
                f"a loss of {loss:.6g} at step {step}, which differs by more than {allowed:g} from the {other_loss:.6g}"
            )
    return ""


def list_first_losses(summary: RunHistory) -> dict[int, float]:
    """Returns the losses of the first epoch by step."""
    last = summary.epoch_steps
    return {step: loss for step, loss in summary.curves.get(LOSS, ()) if last is None or step <= last}


def choose_tolerance(summary: RunHistory) -> float:
    return FLOAT32_TOLERANCE if summary.params.get("precision", "float32") == "float32" else HALF_PRECISION_TOLERANCE
