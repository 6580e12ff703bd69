"""Whether jobs that do the same work begin with the same losses, as they have to under every synchronous strategy.

A strategy that is fast because it trains on something else is not fast. Compared are the mean losses of the first
epoch so far, at the steps at which two jobs both told of them: the first step, and the epoch's end, at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scaleflow.sweep.ledger import NOT_THE_JOBS, LedgerEntry, is_under
from scaleflow.sweep.run_summary import RunSummary

LOSS = "train/loss"

#: How far losses may be apart, relative to the loss where that is above 1. In float32 the order in which numbers are
#: summed makes the difference, and what updates make of that; 16 bits have 8 or 11 digits of two.
IN_FLOAT32, IN_16_BITS = 1e-3, 5e-2

GLOBAL_BATCH = "resolved.global_batch_size"

#: Parameters that do not decide what the losses are.
NOT_THE_WORK = (
    *("strategy", "hardware", "cluster", "precision", *NOT_THE_JOBS, "resolved", "experiment"),
    *("training.batch_size", "training.global_batch_size", "training.accumulate", "training.steps_per_loop"),
)

Jobs = Sequence[tuple[LedgerEntry, RunSummary]]


class LossCheck:
    """What comparing jobs came to.

    Args:
        jobs: of a sweep, those that warm up, too.
        name: a job in words.

    Attributes:
        verdicts: by a job's number: same, DIFFER, or not compared where no other does the same work.
        differences: for each that differs a line that says from which.
    """

    def __init__(self, jobs: Jobs, name: Callable[[LedgerEntry], str]) -> None:
        self._name = name
        self.verdicts: dict[int, str] = {}
        self.differences: list[str] = []
        alike: dict[frozenset[tuple[str, str]], list[tuple[LedgerEntry, RunSummary]]] = {}
        for entry, told in jobs:
            if list_first_losses(told):
                alike.setdefault(describe_work(told), []).append((entry, told))
        for group in alike.values():
            self._compare(group)

    def _compare(self, group: Jobs) -> None:
        """Compares jobs with the first that has one replica, or with the first."""
        by_itself = (job for job in group if job[1].params.get("resolved.replicas") == "1")
        reference = next(by_itself, group[0])
        others = [job for job in group if job is not reference]
        self.verdicts[reference[0].number] = "not compared"
        for entry, told in others:
            if not list_first_losses(told).keys() & list_first_losses(reference[1]).keys():
                self.verdicts[entry.number] = "not compared"
                continue
            difference = find_difference(told, reference[1])
            self.verdicts[reference[0].number] = "same"
            self.verdicts[entry.number] = "DIFFER" if difference else "same"
            if difference:
                self.differences.append(
                    f"{self._name_entry(entry)} has {difference} of {self._name_entry(reference[0])}"
                )

    def _name_entry(self, entry: LedgerEntry) -> str:
        return f"#{entry.number} {self._name(entry)}"

    def worst_verdict(self, entries: Sequence[LedgerEntry]) -> str | None:
        """The verdict on several jobs: the worst."""
        found = {self.verdicts[entry.number] for entry in entries if entry.number in self.verdicts}
        return next((verdict for verdict in ("DIFFER", "same", "not compared") if verdict in found), None)


def describe_work(summary: RunSummary) -> frozenset[tuple[str, str]]:
    """What decides a job's losses: its parameters, but for where it is computed and how a global batch comes about."""
    found = {key: value for key, value in summary.params.items() if not is_under(key, NOT_THE_WORK)}
    return frozenset({**found, GLOBAL_BATCH: summary.params.get(GLOBAL_BATCH, "")}.items())


def find_difference(summary: RunSummary, other: RunSummary) -> str:
    """The first step at which the losses of two jobs differ, in words; empty where they do not."""
    losses, others = list_first_losses(summary), list_first_losses(other)
    allowed = max(choose_tolerance(summary), choose_tolerance(other))
    for step in sorted(losses.keys() & others.keys()):
        here, there = losses[step], others[step]
        if not abs(here - there) <= allowed * max(1.0, abs(there)):  # NaN is like nothing
            return f"a loss of {here:.6g} at step {step}, more than {allowed:g} from the {there:.6g}"
    return ""


def list_first_losses(summary: RunSummary) -> dict[int, float]:
    """The losses of the first epoch by their steps."""
    last = summary.epoch_steps
    return {step: loss for step, loss in summary.curves.get(LOSS, ()) if last is None or step <= last}


def choose_tolerance(summary: RunSummary) -> float:
    return IN_FLOAT32 if summary.params.get("precision", "float32") == "float32" else IN_16_BITS
