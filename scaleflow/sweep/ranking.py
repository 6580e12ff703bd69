"""Ranks the jobs of a sweep by a metric. Jobs with the same config are repeats, and their medians count; of folds, the
means."""

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
    """A job with its runs: its repeats or its folds; without these it is a single one."""

    #: Its entries in the ledger with their runs, warm-ups included
    runs: Sequence[tuple[LedgerEntry, RunState]]

    @property
    def entry(self) -> LedgerEntry:
        return self.runs[0][0]

    @property
    def without_warm_ups(self) -> list[tuple[LedgerEntry, RunState]]:
        return [(entry, run) for entry, run in self.runs if not entry.warms_up]

    @property
    def counted(self) -> list[RunState]:
        """The runs that count in metrics and curves: those that finished; if none did, those that became ready."""
        ready = [run for _, run in self.without_warm_ups if run.is_ready]
        return [run for run in ready if run.status == "FINISHED"] or ready

    @property
    def are_folds(self) -> bool:
        """Whether the jobs are the folds of one, of which means count."""
        return self.entry.is_fold

    @property
    def is_ready(self) -> bool:
        return any(run.is_ready for _, run in self.runs)

    @property
    def is_finished(self) -> bool:
        return any(run.status == "FINISHED" for run in self.counted)

    @property
    def status(self) -> str:
        """The status that all jobs have, or the number of jobs with each: `2 FINISHED, 1 FAILED`."""
        counts = Counter(entry.status for entry, _ in self.runs)
        return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {status}" for status, n in counts.items())

    @property
    def reason(self) -> str | None:
        return "; ".join(dict.fromkeys(entry.reason for entry, _ in self.runs if entry.reason)) or None

    @property
    def params(self) -> Mapping[str, str]:
        return next((run.params for _, run in self.runs if run.params), {})

    def find_value(self, key: str) -> str | None:
        """Returns the value of a key: the param, or what the overrides say.

        A job that never became ready has no params, and a mapping has none of its own key. A job may have been resumed
        with another length.
        """
        lengths = [run.resumed_length[key] for _, run in self.runs if key in run.resumed_length]
        if lengths:
            return json.dumps(lengths[-1])
        typed = [o.partition("=")[2] for o in self.entry.overrides if override_key(o) == key]
        return self.params.get(key, typed[-1] if typed else None)

    @property
    def curves(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """The (step, value) pairs of each metric, of the first run that counts."""
        return next((run.curves for run in self.counted), {})

    @property
    def run_ids(self) -> str | None:
        """The ids of the runs in the store, separated by spaces; None if there are none."""
        return " ".join(run.run_id for _, run in self.runs if run.run_id) or None

    @property
    def rates(self) -> list[float]:
        """Examples per second of each run that counts."""
        return [run.rate for run in self.counted if run.rate]

    @property
    def rate(self) -> float | None:
        return median(self.rates) if self.rates else None

    @property
    def results(self) -> dict[str, float]:
        """The medians of the metrics that say how good the model is, or the means over folds."""
        return self._join([run.results for run in self.counted])

    def _join(self, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
        keys = dict.fromkeys(key for each in values for key in each)
        middle = mean if self.are_folds else median
        return {key: middle([each[key] for each in values if key in each]) for key in keys}

    def score(self, metric: str) -> float | None:
        """Returns the median of a metric, or its mean over folds; None if a run that counts did not finish or has no
        finite one.
        """
        values = self._list_values(metric)
        return self.measure(metric) if values and all(map(math.isfinite, values)) else None

    def measure(self, metric: str) -> float:
        """Returns the same value, also if it is infinite; NaN if a run that counts did not finish, or has none."""
        values = self._list_values(metric)
        if not values or any(map(math.isnan, values)):
            return math.nan
        return mean(values) if self.are_folds else median(values)

    def _list_values(self, metric: str) -> list[float]:
        runs = [run for _, run in self.without_warm_ups]
        return [run.metrics.get(metric, math.nan) if run.status == "FINISHED" else math.nan for run in runs]

    def spread(self, metric: str) -> float | None:
        """Returns the deviation of a metric over the folds (of a sample, with n - 1); None without folds."""
        values = [run.metrics[metric] for run in self.counted if metric in run.metrics]
        return stdev(values) if self.are_folds and len(values) > 1 else None

    def find_best(self, metric: str, is_larger_better: bool) -> tuple[LedgerEntry, RunState]:
        """Returns the best of the runs that count. All of them have the metric."""
        choose = max if is_larger_better else min
        return choose(self.without_warm_ups, key=lambda each: each[1].metrics[metric])

    @property
    def metrics(self) -> dict[str, float]:
        """The medians of all metrics, or the means over folds."""
        return self._join([run.metrics for run in self.counted])


def group_repeats(jobs: Sequence[tuple[LedgerEntry, RunState]]) -> list[RepeatedJob]:
    """Groups jobs by their config, in the order of the first job of each."""
    groups: dict[str, list[tuple[LedgerEntry, RunState]]] = {}
    for entry, run in jobs:
        groups.setdefault(entry.identity, []).append((entry, run))
    return [RepeatedJob(group) for group in groups.values()]


def choose_mode(metric: str, typed: str, direction: object, runs: Iterable[RunState]) -> Mode | None:
    """Chooses whether smaller or larger values of a metric are better.

    Args:
        direction: the sweeper's option of this name, which ends in `minimize` or `maximize`; None if it has none.
        runs: the runs of the jobs, which know their metrics.
    """
    if typed in ("min", "max"):
        return "max" if typed == "max" else "min"
    if direction is not None:
        return "max" if str(direction).lower().endswith("maximize") else "min"
    found = {find_direction(metric, run.ready.modes) for run in runs if run.ready} or {find_direction(metric)}
    return found.pop() if len(found) == 1 else None  # jobs may have different metrics of one name


def rank_jobs(jobs: Sequence[RepeatedJob], metric: str, mode: Mode | None) -> list[RepeatedJob]:
    """Sorts jobs by a metric, the best first. Jobs without it, and jobs that did not finish, are last.

    If it is not known which values are better, the jobs stay in their order.
    """

    def position(job: RepeatedJob) -> tuple[bool, float]:
        score = job.score(metric)
        return score is None, 0.0 if score is None else -score if mode == "max" else score

    return sorted(jobs, key=position) if mode is not None else list(jobs)


@dataclass(frozen=True)
class BestJob:
    """The best job of a sweep."""

    run: Run  # its run
    tags: Mapping[str, str]  # those of the sweep's run, which name the job
    metrics: Mapping[str, float]  # those of its exported model
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
        """The updates after which its model was the best; 0 if they are not known."""
        return int(self.tags[BEST_STEPS])


def find_best_job(parent: str, options: Tracking | None = None) -> BestJob:
    """Returns the best job of the sweep that a folder or the id of its run names.

    Raises ConfigError if there is no such sweep, or no finished job has its metric.
    """
    folder = Path(parent).expanduser()
    if RunFolder(folder).ledger.is_file():
        tags = RunState.read(folder).tags
        check_sweep_tags(parent, tags)
        (entry,) = (each for each in Ledger.load(RunFolder(folder)).entries if str(each.number) == tags[BEST])
        run = Run((folder / entry.folder).absolute())
        return BestJob(run, tags, run.state.model_metrics, overrides=entry.overrides)
    if folder.is_dir() or not RUN_OR_MODEL.fullmatch(parent) or parent.startswith("models:/"):
        raise ConfigError(f"{parent}: expected the folder of a sweep, or the id of its run in MLflow")
    tracker, model, sweep = open_best_job(parent.removeprefix("runs:/"), options or Tracking())
    run, tags = Run(None, tracker, model), sweep.data.tags
    metrics = {**run.tracked.data.metrics, **sweep.data.metrics}
    return BestJob(run, tags, metrics, overrides=shlex.split(tags[BEST_OVERRIDES]))
