"""Checks that jobs with the same work start with the same losses, as every synchronous strategy must.

A strategy can look fast because it trains on different data. The check compares `train/loss`, the mean over the
first epoch so far, at steps where both jobs logged it: at least the first step and the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scaleflow.config.parse import is_under
from scaleflow.runs.identity import is_ignored
from scaleflow.runs.state import RunState
from scaleflow.sweep.ledger import LedgerEntry

LOSS = "train/loss"

#: The maximum difference of two losses, relative to the loss if that is above 1. In float32 the order of summation
#: makes small differences, which updates amplify.
FLOAT32_TOLERANCE = 1e-3

#: The same in bfloat16 and float16, whose significands have 8 and 11 bits.
HALF_PRECISION_TOLERANCE = 5e-2

GLOBAL_BATCH = "resolved.global_batch_size"

#: Params that do not affect the losses, in addition to params that do not affect the computation.
LOSS_NEUTRAL_PARAMS = (
    *("strategy", "hardware", "cluster", "precision", "resolved", "experiment"),
    *("training.batch_size", "training.global_batch_size", "training.accumulate", "training.steps_per_loop"),
)

Job = tuple[LedgerEntry, RunState]


@dataclass
class LossCheck:
    """The result of comparing the first losses of the jobs of a sweep.

    Attributes:
        verdicts: `same`, `DIFFER` or `not compared` by the number of the job. Jobs without losses have no verdict.
        differences: a line for each job that differs.
    """

    verdicts: dict[int, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)


def check_first_losses(jobs: Sequence[Job], swept: Sequence[str]) -> LossCheck:
    """Compares the first losses of jobs that do the same work. Warm-ups are compared as well.

    The reference is the first such job with one replica, or the first such job if none has one replica. A job is not
    compared if no other job does the same work, or if they have no losses at the same steps.
    """
    check = LossCheck()
    for group in group_by_work(jobs):
        reference = choose_reference(group)
        for entry, _ in group:
            check.verdicts[entry.number] = "not compared"
        for job in group:
            if job[0] is not reference[0]:
                compare_with_reference(job, reference, swept, check)
    return check


def group_by_work(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups the jobs that have losses by their work."""
    groups: dict[frozenset[tuple[str, str]], list[Job]] = {}
    for entry, run in jobs:
        if list_first_losses(run):
            groups.setdefault(describe_work(run), []).append((entry, run))
    return list(groups.values())


def choose_reference(group: Sequence[Job]) -> Job:
    """Returns the first job with one replica, or the first job if none has one replica."""
    for job in group:
        if job[1].params.get("resolved.replicas") == "1":
            return job
    return group[0]


def compare_with_reference(job: Job, reference: Job, swept: Sequence[str], check: LossCheck) -> None:
    """Compares one job with the reference, and adds the verdicts to the check."""
    entry, run = job
    first, first_run = reference
    if not list_first_losses(run).keys() & list_first_losses(first_run).keys():
        return
    difference = find_difference(run, first_run)
    check.verdicts[first.number] = "same"
    check.verdicts[entry.number] = "DIFFER" if difference else "same"
    if difference:
        check.differences.append(
            f"#{entry.number} {entry.label(swept)} has {difference} of #{first.number} {first.label(swept)}"
        )


def describe_work(run: RunState) -> frozenset[tuple[str, str]]:
    """Returns the params that decide a job's losses, including the global batch size."""
    params = {
        key: value
        for key, value in run.params.items()
        if not is_under(key, LOSS_NEUTRAL_PARAMS) and not is_ignored(key)
    }
    params[GLOBAL_BATCH] = run.params.get(GLOBAL_BATCH, "")
    return frozenset(params.items())


def find_difference(run: RunState, reference: RunState) -> str:
    """Describes the first step where the losses of two runs differ; empty if they are equal."""
    tolerance = choose_tolerance(run, reference)
    losses = list_first_losses(run)
    reference_losses = list_first_losses(reference)
    for step in sorted(losses.keys() & reference_losses.keys()):
        loss = losses[step]
        expected = reference_losses[step]
        if not abs(loss - expected) <= tolerance * max(1.0, abs(expected)):  # also true for NaN
            return (
                f"a loss of {loss:.6g} at step {step}, which differs by more than {tolerance:g} from the {expected:.6g}"
            )
    return ""


def choose_tolerance(run: RunState, reference: RunState) -> float:
    for state in (run, reference):
        if state.params.get("precision", "float32") != "float32":
            return HALF_PRECISION_TOLERANCE
    return FLOAT32_TOLERANCE


def list_first_losses(run: RunState) -> dict[int, float]:
    """Returns the losses of the first epoch by step."""
    last_step = run.epoch_steps
    return {step: loss for step, loss in run.curves.get(LOSS, ()) if last_step is None or step <= last_step}
