"""Ranks the jobs of a sweep by a metric.

Jobs with the same config are repeats or folds of one job. The median over repeats counts, and the mean over folds.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

from scaleflow.config.compose import override_key
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Mode, Tracking, find_direction
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.run import Run
from scaleflow.sweep.ledger import Ledger, LedgerEntry
from scaleflow.tracking.model_uris import RUN_OR_MODEL
from scaleflow.tracking.tracked_runs import (
    BEST,
    BEST_METRIC,
    BEST_OVERRIDES,
    BEST_STEPS,
    check_sweep_tags,
    open_best_job,
)


@dataclass(frozen=True)
class RepeatedJob:
    """A job with its runs: one run, or one for each repeat or fold."""

    #: Its entries in the ledger with their runs, warm-ups included
    runs: Sequence[tuple[LedgerEntry, RunState]]

    @property
    def entry(self) -> LedgerEntry:
        """The entry of the first run."""
        return self.runs[0][0]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the runs in the sweep."""
        return [entry.number for entry, _ in self.runs]

    @property
    def without_warm_ups(self) -> list[tuple[LedgerEntry, RunState]]:
        return [(entry, run) for entry, run in self.runs if not entry.warms_up]

    @property
    def counted(self) -> list[RunState]:
        """The runs that count in metrics and curves: finished runs, or if no run finished, all that have begun."""
        begun = []
        finished = []
        for _, run in self.without_warm_ups:
            if run.has_begun:
                begun.append(run)
                if run.status == "FINISHED":
                    finished.append(run)
        return finished or begun

    @property
    def are_folds(self) -> bool:
        """Whether the runs are folds. Means count for folds."""
        return self.entry.is_fold

    @property
    def has_begun(self) -> bool:
        """Whether any run of the job exists."""
        return any(run.has_begun for _, run in self.runs)

    @property
    def is_finished(self) -> bool:
        return any(run.status == "FINISHED" for run in self.counted)

    @property
    def status(self) -> str:
        """The status of all runs, or the number of runs with each status: `2 FINISHED, 1 FAILED`."""
        counts = Counter(entry.status for entry, _ in self.runs)
        if len(counts) == 1:
            return self.entry.status
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    @property
    def reason(self) -> str | None:
        """The distinct reasons why runs were refused or did not finish; None if all finished."""
        reasons = dict.fromkeys(entry.reason for entry, _ in self.runs)
        return "; ".join(filter(None, reasons)) or None

    @property
    def params(self) -> Mapping[str, str]:
        """The params of the first run that has any. A job that never became ready has none."""
        for _, run in self.runs:
            if run.params:
                return run.params
        return {}

    def find_value(self, key: str) -> str | None:
        """Returns the value of a key: the length that a later command set, the param, or the value of an override.

        The overrides count for a job that never became ready, and for a mapping, which is not a param.
        """
        for _, run in reversed(self.runs):
            if key in run.resumed_length:
                return json.dumps(run.resumed_length[key])
        if key in self.params:
            return self.params[key]
        for override in reversed(self.entry.overrides):
            if override_key(override) == key:
                return override.partition("=")[2]
        return None

    def find_values(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns the values of keys; empty for a key without a value."""
        return tuple(self.find_value(key) or "" for key in keys)

    @property
    def curves(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """The (step, value) pairs of each metric, of the first run that counts."""
        counted = self.counted
        return counted[0].curves if counted else {}

    @property
    def run_ids(self) -> str | None:
        """The ids of the runs in the store, separated by spaces; None if no run is in a store."""
        return " ".join(run.run_id for _, run in self.runs if run.run_id) or None

    @property
    def rates(self) -> list[float]:
        """Examples per second of each run that counts."""
        return [run.rate for run in self.counted if run.rate]

    @property
    def rate(self) -> float | None:
        rates = self.rates
        return median(rates) if rates else None

    @property
    def results(self) -> dict[str, float]:
        """The medians or means of the metrics that measure the quality of the model."""
        return self._average([run.results for run in self.counted])

    @property
    def metrics(self) -> dict[str, float]:
        """The medians or means of all metrics."""
        return self._average([run.metrics for run in self.counted])

    def score(self, metric: str) -> float | None:
        """Returns the median or mean of a metric. None if a run did not finish, or has no finite value."""
        values = self._list_values(metric)
        if not values or not all(map(math.isfinite, values)):
            return None
        return self._take_middle(values)

    def measure(self, metric: str) -> float:
        """Returns the median or mean of a metric, which may be infinite. NaN if a run did not finish, or lacks it."""
        values = self._list_values(metric)
        if not values or any(map(math.isnan, values)):
            return math.nan
        return self._take_middle(values)

    def spread(self, metric: str) -> float | None:
        """Returns the deviation of a metric over the folds (of a sample, with n - 1); None without folds."""
        values = []
        for run in self.counted:
            if metric in run.metrics:
                values.append(run.metrics[metric])
        return stdev(values) if self.are_folds and len(values) > 1 else None

    def find_best(self, metric: str, is_larger_better: bool) -> tuple[LedgerEntry, RunState]:
        """Returns the run with the best value of a metric. All runs must have the metric. Warm-ups do not count."""
        choose = max if is_larger_better else min
        return choose(self.without_warm_ups, key=lambda member: member[1].metrics[metric])

    def _list_values(self, metric: str) -> list[float]:
        """Returns the value of a metric of each run; NaN for a run that did not finish, or lacks it."""
        values = []
        for _, run in self.without_warm_ups:
            is_finished = run.status == "FINISHED"
            values.append(run.metrics.get(metric, math.nan) if is_finished else math.nan)
        return values

    def _average(self, metrics_of_runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Returns the median or mean of each metric over the runs that have it."""
        values: dict[str, list[float]] = {}
        for metrics in metrics_of_runs:
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)
        return {name: self._take_middle(values_of_metric) for name, values_of_metric in values.items()}

    def _take_middle(self, values: Sequence[float]) -> float:
        """Returns the mean over folds, or the median over repeats."""
        return mean(values) if self.are_folds else median(values)


def group_repeats(jobs: Sequence[tuple[LedgerEntry, RunState]]) -> list[RepeatedJob]:
    """Groups jobs by their config, in the order of the first job of each."""
    groups: dict[str, list[tuple[LedgerEntry, RunState]]] = {}
    for entry, run in jobs:
        groups.setdefault(entry.identity, []).append((entry, run))
    return [RepeatedJob(group) for group in groups.values()]


def choose_mode(metric: str, typed: str, direction: object, runs: Iterable[RunState]) -> Mode | None:
    """Chooses whether smaller or larger values of a metric are better.

    Args:
        direction: the sweeper's option `direction`, which ends in `minimize` or `maximize`; None without one.
        runs: the runs of the jobs; they know directions of their metrics.
    """
    if typed in ("min", "max"):
        return "max" if typed == "max" else "min"
    if direction is not None:
        return "max" if str(direction).lower().endswith("maximize") else "min"
    directions = {find_direction(metric, run.ready.modes) for run in runs if run.ready}
    if not directions:
        return find_direction(metric)
    if len(directions) > 1:  # jobs have different metrics with this name
        return None
    return directions.pop()


def rank_jobs(jobs: Sequence[RepeatedJob], metric: str, mode: Mode | None) -> list[RepeatedJob]:
    """Sorts jobs by a metric, the best first. Jobs without it, and jobs that did not finish, are last.

    If it is unknown which values are better, the jobs stay in their order.
    """
    if mode is None:
        return list(jobs)

    def rank(job: RepeatedJob) -> tuple[bool, float]:
        score = job.score(metric)
        if score is None:
            return True, 0.0
        return False, -score if mode == "max" else score

    return sorted(jobs, key=rank)


@dataclass(frozen=True)
class BestJob:
    """The best job of a sweep."""

    run: Run
    tags: Mapping[str, str]  # the tags of the sweep's own run, which name the job
    metrics: Mapping[str, float]  # the metrics of the job's exported model
    overrides: Sequence[str]

    @property
    def number(self) -> int:
        return int(self.tags[BEST])

    @property
    def metric(self) -> str:
        """The metric that ranks the jobs."""
        return self.tags[BEST_METRIC]

    @property
    def steps(self) -> int:
        """The number of updates of its best model; 0 if unknown."""
        return int(self.tags[BEST_STEPS])


def find_best_job(parent: str, options: Tracking | None = None) -> BestJob:
    """Returns the best job of a sweep.

    Args:
        parent: the folder of the sweep, or the id of its run in MLflow.

    Raises ConfigError if it is not a sweep, or if no finished job has its metric.
    """
    folder = Path(parent).expanduser()
    if RunFolder(folder).ledger.is_file():
        return read_best_job(folder, parent)
    if folder.is_dir() or not RUN_OR_MODEL.fullmatch(parent) or parent.startswith("models:/"):
        raise ConfigError(f"{parent}: expected the folder of a sweep, or the id of its run in MLflow")
    tracker, model, sweep = open_best_job(parent.removeprefix("runs:/"), options or Tracking())
    run = Run(None, tracker, model)
    tags = sweep.data.tags
    metrics = {**run.tracked.data.metrics, **sweep.data.metrics}
    return BestJob(run, tags, metrics, overrides=shlex.split(tags[BEST_OVERRIDES]))


def read_best_job(folder: Path, parent: str) -> BestJob:
    """Reads the best job of the sweep in a folder. Errors name the folder as the user typed it, `parent`."""
    tags = RunState.read(folder).annotations.tags
    check_sweep_tags(parent, tags)
    entry = Ledger.load(RunFolder(folder)).get_entry(int(tags[BEST]))
    run = Run((folder / entry.folder).absolute())
    return BestJob(run, tags, run.state.model_metrics, overrides=entry.overrides)
