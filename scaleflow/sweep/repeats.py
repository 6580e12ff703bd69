"""Groups the jobs of a sweep that have the same config, and computes medians over these repeats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scaleflow.config.hydra_errors import override_key
from scaleflow.runs.state import RunHistory
from scaleflow.sweep.ledger import LedgerEntry


@dataclass(frozen=True)
class RepeatedJob:
    """All jobs of one config; without repeats it is a single one."""

    #: The jobs with their runs, warm-ups included. Warm-ups do not count in metrics and curves.
    jobs: Sequence[tuple[LedgerEntry, RunHistory]]

    @property
    def entry(self) -> LedgerEntry:
        return self.jobs[0][0]

    @property
    def counted(self) -> list[RunHistory]:
        """The runs that count: those that finished; if none did, those that became ready. No warm-ups."""
        ready = [run for entry, run in self.jobs if not entry.warms_up and run.is_ready]
        return [run for run in ready if run.status == "FINISHED"] or ready

    @property
    def is_ready(self) -> bool:
        return any(run.is_ready for _, run in self.jobs)

    @property
    def is_finished(self) -> bool:
        return any(run.status == "FINISHED" for run in self.counted)

    @property
    def status(self) -> str:
        """The status that all jobs have, or the number of jobs with each: `2 FINISHED, 1 FAILED`."""
        counts = Counter(entry.status for entry, _ in self.jobs)
        return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {status}" for status, n in counts.items())

    @property
    def reason(self) -> str | None:
        return "; ".join(dict.fromkeys(entry.reason for entry, _ in self.jobs if entry.reason)) or None

    @property
    def params(self) -> Mapping[str, str]:
        return next((run.params for _, run in self.jobs if run.params), {})

    def find_value(self, key: str) -> str | None:
        """Returns the value of a key: the param, or what the overrides say.

        A job that never became ready has no params, and a mapping has none of its own key.
        """
        typed = [o.partition("=")[2] for o in self.entry.overrides if override_key(o) == key]
        return self.params.get(key, typed[-1] if typed else None)

    @property
    def curves(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """The (step, value) pairs of each metric, of the first run that counts."""
        return next((run.curves for run in self.counted), {})

    @property
    def runs(self) -> str | None:
        """The ids of the runs in the store, separated by spaces; None if there are none."""
        return " ".join(run.run_id for _, run in self.jobs if run.run_id) or None

    @property
    def rates(self) -> list[float]:
        """Examples per second of each run that counts."""
        return [run.rate for run in self.counted if run.rate]

    @property
    def rate(self) -> float | None:
        return median(self.rates) if self.rates else None

    @property
    def results(self) -> dict[str, float]:
        """The medians of the metrics that say how good the model is."""
        return compute_medians([run.results for run in self.counted])

    def score(self, metric: str) -> float | None:
        """Returns the median of a metric; None if a run that counts did not finish, or if it is not finite."""
        values = [
            run.metrics.get(metric, math.nan) if run.status == "FINISHED" else math.nan
            for entry, run in self.jobs
            if not entry.warms_up
        ]
        return median(values) if values and all(map(math.isfinite, values)) else None

    def find_best(self, metric: str, is_larger_better: bool) -> tuple[LedgerEntry, RunHistory]:
        """Returns the best of the runs that count. All of them have the metric."""
        counted = [(entry, run) for entry, run in self.jobs if not entry.warms_up]
        choose = max if is_larger_better else min
        return choose(counted, key=lambda job: job[1].metrics[metric])

    @property
    def metrics(self) -> dict[str, float]:
        """The medians of all metrics."""
        return compute_medians([run.metrics for run in self.counted])


def group_repeats(jobs: Sequence[tuple[LedgerEntry, RunHistory]]) -> list[RepeatedJob]:
    """Groups jobs by their config, in the order of the first job of each."""
    groups: dict[str, list[tuple[LedgerEntry, RunHistory]]] = {}
    for entry, run in jobs:
        groups.setdefault(entry.identity, []).append((entry, run))
    return [RepeatedJob(group) for group in groups.values()]


def compute_medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for each in values for key in each)
    return {key: median([each[key] for each in values if key in each]) for key in keys}
