"""Sweeps from Python: `scaleflow.run_sweep` and `scaleflow.best_run`.

from scaleflow import best_run, run_sweep

sweep = run_sweep("model.units=32,128,512")           # a job for each value, as -m
print(sweep.best.overrides, sweep.best.result.model_uri)
best = best_run(sweep.run_id)                         # later: by the id of the sweep's run, or by its folder
"""

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.plugins import Plugins

from scaleflow.api import Folders, Result, raise_interruption, read_result, to_folders, to_override
from scaleflow.commands.hydra_task import HydraTask
from scaleflow.config.compose import as_command, compose_sweep, find_own_modules
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Status, Tracking
from scaleflow.interfaces.formatting import Readable, list_metric_rows
from scaleflow.launcher.answer import FINISHED, REFUSED
from scaleflow.runs import RunFolder
from scaleflow.runs.folder_use import FolderRefused
from scaleflow.runs.state import RunHistory
from scaleflow.sweep.ledger import JobHistory, Ledger, LedgerEntry
from scaleflow.sweep.ranking import read_sweep_tags
from scaleflow.tracking.model_uris import RUN_OR_MODEL
from scaleflow.tracking.tracked_runs import BEST, BEST_METRIC, BEST_OVERRIDES, check_sweep_tags, fetch_best_job


@dataclass(frozen=True)
class JobResult:
    """A job of a sweep.

    Attributes:
        number: the number of the job in the sweep, from 0.
        overrides: what makes the job, such as `model.units=128`, with secrets masked.
        result: the result of its run, with the metrics of the exported model, as in the sweep's report. A job without a
            run has the status FAILED, no metrics, and its reason.
    """

    number: int
    overrides: tuple[str, ...]
    result: Result


@dataclass(frozen=True)
class SweepResult(Readable):
    """The result of a sweep.

    Attributes:
        status: FINISHED if all jobs are; otherwise FAILED.
        run_id: the id of the sweep's own run in MLflow, the parent of the runs of its jobs; None if it is not tracked.
        folder: the sweep's folder, with `report.csv`. `run_sweep(..., folder=folder)` continues the sweep.
        jobs: all jobs in the folder.
        best: the best job; None if no finished job has the metric.
    """

    status: Status
    run_id: str | None
    folder: Path
    jobs: tuple[JobResult, ...]
    best: JobResult | None

    def list_rows(self) -> list[tuple[str, str]]:
        rows = [("status", str(self.status))]
        for job in self.jobs:
            figures = (f"{name} {value}" for name, value in list_metric_rows(job.result.metrics))
            shown = "  ".join([" ".join(job.overrides), job.result.status, *figures])
            rows.append((f"#{job.number}{' (best)' if job is self.best else ''}", shown))
        return [*rows, ("folder", str(self.folder)), *([("run", self.run_id)] if self.run_id else [])]


@dataclass(frozen=True)
class BestJob:
    """The best job of a sweep, the metric that ranks the jobs, and the address of the store; None if it has none."""

    job: JobResult
    metric: str
    store: str | None


def run_sweep(
    *overrides: str, config_dir: Folders = (), folder: str | Path | None = None, n_jobs: int | None = None
) -> SweepResult:
    """Runs a job for each combination of values, as `scaleflow -m` does, and returns when all jobs are over.

    Args:
        overrides: as on the command line, such as `model.units=32,128` or `hydra/sweeper=optuna5`.
        config_dir: one or more folders with your own config options, as `--config-dir`.
        folder: the sweep's folder, as `hydra.sweep.dir`. In the folder of an earlier sweep, finished jobs are skipped.
        n_jobs: how many jobs run at a time, as `hydra.launcher.n_jobs`; None: that of the launcher, 1.

    Returns:
        The result, also if jobs failed or were refused.

    Raises:
        ConfigError: if no job can run.
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the jobs are recorded.
    """
    words = [to_override(word) for word in overrides]
    words += [] if folder is None else [make_override("hydra.sweep.dir", folder)]
    words += [] if n_jobs is None else [f"hydra.launcher.n_jobs={n_jobs}"]
    task = HydraTask(time.time())
    dirs = to_folders(config_dir)
    with find_own_modules(dirs):
        context, config = compose_sweep(words, dirs)
    if not str(config.hydra.launcher.get("_target_")).startswith("hydra_plugins.scaleflow."):
        name = config.hydra.runtime.choices["hydra/launcher"]
        raise ConfigError(f"hydra/launcher={name}: run_sweep needs a launcher of scaleflow; use isolated or ray")
    try:
        context.callbacks.on_multirun_start(config=config, config_name="config")
    except FolderRefused as refusal:
        raise ConfigError(str(refusal)) from refusal
    path = Path(str(config.hydra.sweep.dir)).absolute()
    with as_command(words, dirs), find_own_modules(dirs), task:
        sweeper = Plugins.instance().instantiate_sweeper(hydra_context=context, task_function=task, config=config)
        sweeper.sweep(arguments=list(config.hydra.overrides.task))
        context.callbacks.on_multirun_end(config=config, config_name="config")
    raise_interruption(task.code, f"the sweep was stopped; its folder is {path}")
    result = read_sweep(path, is_finished=task.code == FINISHED)
    if task.code == REFUSED:
        raise ConfigError(str(result.jobs[0].result.error))
    return result


def best_run(parent: str | Path, uri: str | None = None) -> JobResult:
    """Returns the best job of a sweep by its `sweep.metric`. While the sweep runs, it is the best one so far.

    Args:
        parent: the sweep's folder, or the id of its run in MLflow.
        uri: the address of the store that has the run; None: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.

    Returns:
        The job. If its folder is not on this machine, the result is that of the store, without a history.

    Raises:
        ConfigError: if there is no such sweep, or no finished job has the metric.
    """
    return find_best_job(str(parent), uri).job


def find_best_job(parent: str, uri: str | None = None) -> BestJob:
    """Returns what `best_run` returns, with the metric. Raises as it does."""
    folder = Path(parent).expanduser()
    if RunFolder(folder).ledger.is_file():
        tags = read_sweep_tags(folder)
        check_sweep_tags(parent, tags)
        entries = Ledger.load(RunFolder(folder)).entries
        (entry,) = (entry for entry in entries if str(entry.number) == tags[BEST])
        store = RunHistory.read(folder / entry.folder).store
        return BestJob(read_job(folder, entry), tags[BEST_METRIC], store)
    if folder.is_dir() or not RUN_OR_MODEL.fullmatch(parent) or parent.startswith("models:/"):
        raise ConfigError(f"{parent}: expected the folder of a sweep, or the id of its run in MLflow")
    found = fetch_best_job(parent.removeprefix("runs:/"), Tracking(uri=uri))
    result = Result("FINISHED", found.run_id, found.folder, found.metrics, None, found.model_uri)
    if RunFolder(found.folder).events.is_file():
        result = replace(result, history=read_result(found.folder).history)
    overrides = tuple(shlex.split(found.tags[BEST_OVERRIDES]))
    return BestJob(JobResult(int(found.tags[BEST]), overrides, result), found.tags[BEST_METRIC], found.store)


def read_sweep(folder: Path, is_finished: bool) -> SweepResult:
    """Reads the result of the sweep in a folder."""
    run, tags = RunHistory.read(folder), read_sweep_tags(folder)
    jobs = tuple(read_job(folder, entry) for entry in Ledger.load(RunFolder(folder)).entries)
    best = next((job for job in jobs if str(job.number) == tags.get(BEST)), None)
    status: Status = "FINISHED" if is_finished else "FAILED"
    return SweepResult(status, run.run_id, folder, jobs, best)


def read_job(folder: Path, entry: LedgerEntry) -> JobResult:
    """Reads the result of a job of the sweep in a folder."""
    result, metrics = read_result(folder / entry.folder), JobHistory.read(folder / entry.folder).metrics
    return JobResult(
        entry.number,
        tuple(entry.overrides),
        replace(result, metrics=metrics, error=result.error or entry.reason or None),
    )
