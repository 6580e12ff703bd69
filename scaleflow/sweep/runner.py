"""The life of a sweep: its jobs checked, run so many at a time, recorded as the children of one run.

The launcher's process composes and records all of them; their workers are forked from one server.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from scaleflow.config.folders import create_folder, remove_created
from scaleflow.config.hydra_config import MULTIRUN, check_folder_writable, mask_sweep_files
from scaleflow.config.parse import flatten
from scaleflow.errors import ConfigError
from scaleflow.events import EVENTS, Event, EventWriter
from scaleflow.interfaces import Plan
from scaleflow.launcher.display import Display, JobDisplay, format_duration
from scaleflow.launcher.recorder import Recorder
from scaleflow.launcher.recovery import RECORD_LOCK, claim_folder
from scaleflow.launcher.supervisor import (
    FAILED,
    FINISHED,
    REFUSED,
    StopRequest,
    SweepContext,
    catch_stop_signals,
    launch_run,
)
from scaleflow.launcher.worker_process import start_fork_server
from scaleflow.provenance import write_provenance
from scaleflow.secret_masking import mask_override, mask_secrets
from scaleflow.sweep.devices import make_environments
from scaleflow.sweep.jobs import JobRequest, compose_job, expand_repeats, find_swept_keys
from scaleflow.sweep.ledger import (
    LEDGER,
    SWEEP_LOCK,
    Ledger,
    LedgerEntry,
    compute_identity,
    find_common_leaves,
    is_under,
    lock_sweep,
)
from scaleflow.sweep.report import Report
from scaleflow.sweep.run_summary import RunSummary
from scaleflow.sync import repair_quietly
from scaleflow.tracking import locate_weights, make_tracker


class JobStop(StopRequest):
    """Ends one job: with the sweep, or alone."""

    def __init__(self, sweep: StopRequest) -> None:
        self._sweep = sweep
        self._own: int | None = None

    @property
    def signal(self) -> int | None:  # type: ignore[override]
        return self._sweep.signal or self._own

    @property
    def times(self) -> int:  # type: ignore[override]
        return self._sweep.times

    def alone(self) -> None:
        self._own = signal.SIGTERM


@dataclass
class SweepJob:
    """A job and what is known of it.

    Attributes:
        request: as it was composed.
        entry: in the sweep's ledger.
        plan: checked; None where it need not run, or can't.
        attempt: which time it is that it goes on; 0 where it begins.
        changes: what is asked of one that goes on.
        is_pruned: whether a sweeper has stopped it.
        indices: the positions in the batch that ask for it; several where a value was given twice.
    """

    request: JobRequest
    entry: LedgerEntry
    plan: Plan | None = None
    attempt: int = 0
    changes: Sequence[str] = ()
    is_pruned: bool = False
    indices: list[int] = field(default_factory=list)

    @property
    def is_through(self) -> bool:
        """Whether nothing is left to do of it: a sweeper has had what it wanted of one that it pruned."""
        return self.entry.status in ("FINISHED", "PRUNED")


class SweepRunner:
    """A sweep in a folder.

    Args:
        context: Hydra's.
        config: the command's, from which those of the jobs are made.
        began: when the command began, in seconds since the epoch.

    Attributes:
        watch: is called with each event of a job and the positions of that job in the batch. The job is stopped if it
            returns True.

    Raises:
        ConfigError: if the folder can't be used.
    """

    def __init__(self, context: HydraContext, config: DictConfig, began: float) -> None:
        self._context = context
        self._config = config
        self._began = began
        self._at_once = int(config.hydra.launcher.get("n_jobs", 1))
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._writing = threading.RLock()
        self._stop = StopRequest()
        self._server = ""
        self._recorder: Recorder | None = None
        self._tell: EventWriter | None = None
        self._plan: Plan | None = None
        self._jobs: list[SweepJob] = []
        self._same_losses = False
        self.watch: Callable[[Sequence[int], Event], bool] | None = None
        if self._at_once < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={self._at_once}: expected at least 1")
        check_folder_writable(self._folder)
        with contextlib.ExitStack() as opened:
            opened.enter_context(lock_sweep(self._folder))
            opened.enter_context(claim_folder(self._folder))  # its own run, which only one command records
            self._ledger = Ledger.load(self._folder)
            self._open = opened.pop_all()
        self._is_resumed = bool(self._ledger.entries)
        self._swept = find_swept_keys(config)
        mask_sweep_files(self._folder)

    # -----------------------------------------------------------------------------------------
    # One batch
    # -----------------------------------------------------------------------------------------

    def launch(self, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Runs jobs, and waits for them.

        Args:
            overrides: of each job.

        Returns:
            To each job its status and, as its value, the metric that `sweep.metric` names: of repeats the median.

        Raises:
            ConfigError: if none of them can run.
        """
        asked = [compose_job(self._context, self._config, each, i) for i, each in enumerate(overrides)]
        turns = expand_repeats(asked)
        jobs = self._check_jobs(turns)
        waiting = [job for job in jobs if job.plan is not None]
        if waiting:
            self._start([job.plan for job in waiting if job.plan is not None])
            self._run(waiting)
        jobs_of = {(each.entry.identity, each.entry.repeat): each for each in self._jobs}
        return [
            self._return_value(each, [jobs_of[compute_identity(each.config), repeat] for repeat in range(each.repeats)])
            for each in asked
        ]

    def _check_jobs(self, turns: Sequence[tuple[int, JobRequest]]) -> list[SweepJob]:
        """The jobs that are new to this command, with their plans; what is wrong with one is said at once.

        Args:
            turns: the position in the batch of each, and what is asked for.
        """
        asked = [each for _, each in turns]
        options = asked[0].options
        if self._at_once > 1 and any(flatten(each.config).get("debug.inline") for each in asked):
            raise ConfigError(
                f"hydra.launcher.n_jobs={self._at_once}: debug.inline=true has one process; n_jobs=1 goes with it"
            )
        self._same_losses = self._same_losses or options.get("same_losses") is True
        self._ledger.check(
            find_common_leaves([each.config for each in asked]), self._swept, options.get("on_change") == "new"
        )
        jobs = self._new_jobs(turns)
        refusals = [found for found in (self._check(job) for job in jobs) if found is not None]
        if refusals and len(refusals) == len(jobs):
            self._forget_if_new()
            raise refusals[0]
        self._jobs += jobs
        self._ledger.save()
        return jobs

    def _new_jobs(self, turns: Sequence[tuple[int, JobRequest]]) -> list[SweepJob]:
        """One job for each config that this command has not run yet, however often the config is asked for."""
        known = {job.entry.number for job in self._jobs}
        new: dict[int, SweepJob] = {}
        for index, each in turns:
            job = self._find_job(each)
            if job.entry.number not in known:
                new.setdefault(job.entry.number, job).indices.append(index)
        for job in new.values():
            if len(job.indices) > 1:
                JobDisplay(sys.stdout, job.entry.number).print_line(
                    f"is asked for {len(job.indices)} times and runs once"
                )
        return list(new.values())

    def _find_job(self, request: JobRequest) -> SweepJob:
        """The job with its place in the ledger, the old one if it has one."""
        identity = compute_identity(request.config)
        entry = self._ledger.find_entry(identity, request.repeat)
        if entry is None:
            number = self._ledger.next_number
            overrides = [mask_override(override) for override in request.overrides]
            entry = self._ledger.add_entry(identity, overrides, self._subfolder(request, number), request.repeat)
        entry.warms_up = request.turn == "warm-up"
        return SweepJob(request, entry)

    def _subfolder(self, request: JobRequest, number: int) -> str:
        """As Hydra is told to name it, but no other job's."""
        composed = compose_job(self._context, self._config, request.overrides, number).subfolder
        taken = {entry.folder for entry in self._ledger.entries}
        return composed if composed not in taken else f"{composed}-{number}"

    def _check(self, job: SweepJob) -> ConfigError | None:
        """Finds out what is to be done of a job; gives why it can't be."""
        folder = self._folder / job.entry.folder
        told = RunSummary.read(folder)
        try:
            if told.status == "FINISHED" or job.entry.status == "PRUNED":
                job.entry.status = "FINISHED" if told.status == "FINISHED" else "PRUNED"
                JobDisplay(sys.stdout, job.entry.number).print_line(f"is {job.entry.status} already")
            elif told.is_ready:
                job.plan, run = job.request.resume_plan(folder)
                job.attempt, job.changes = run.number, run.changes
            else:
                job.plan = job.request.plan()
        except ConfigError as refusal:
            job.entry.status, job.entry.reason = "REFUSED", str(mask_secrets(str(refusal)))
            JobDisplay(sys.stdout, job.entry.number).print_error(job.entry.reason)
            return refusal
        return None

    def _forget_if_new(self) -> None:
        """Takes away what was written for a sweep of which nothing can run."""
        if not self._is_resumed and not self._jobs:
            self._open.close()
            for name in (LEDGER, SWEEP_LOCK, RECORD_LOCK, MULTIRUN):
                (self._folder / name).unlink(missing_ok=True)
            remove_created(self._folder)

    def _run(self, jobs: Sequence[SweepJob]) -> None:
        at_once = min(self._at_once, len(jobs))
        slots: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for portion in make_environments(at_once):
            slots.put(portion)
        if at_once == 1:
            for job in jobs:
                self._run_one(job, slots)
            return
        with ThreadPoolExecutor(at_once, "job") as pool:
            for done in [pool.submit(self._run_one, job, slots) for job in jobs]:
                done.result()

    def _run_one(self, job: SweepJob, slots: queue.SimpleQueue[dict[str, str]]) -> None:
        if self._stop.is_set():
            return
        environment = slots.get()
        try:
            self._record_status(job, "RUNNING")
            own = {} if has_own_machines(job.plan) else environment
            code = self._launch_job(job, {**job.request.environment, **own})
            told = RunSummary.read(self._folder / job.entry.folder)
            status = "REFUSED" if code == REFUSED else told.status or "FAILED"
            if job.is_pruned and status == "KILLED":
                status = "PRUNED"
            self._record_status(job, status, told.error if status != "FINISHED" else "")
        finally:
            slots.put(environment)

    def _launch_job(self, job: SweepJob, environment: dict[str, str]) -> int:
        assert job.plan is not None
        stop, number = JobStop(self._stop), job.entry.number
        display = Display(sys.stdout) if job.plan.debug.inline else JobDisplay(sys.stdout, number)
        turn = f" ({job.request.turn})" if job.request.turn else ""
        display.print_line((" ".join(job.request.describe(self._ledger.swept)) or "as it is configured") + turn)

        def on_event(event: Event) -> None:
            if event["event"] == "ready":
                self._begin(job)
            if self.watch is not None and self.watch(job.indices, event):
                stop.alone()
                job.is_pruned = True

        folder = self._folder / job.entry.folder
        create_folder(folder)
        label = job.request.label(self._ledger.swept)
        sweep_context = SweepContext(self._folder, label, environment, self._server, display, stop, on_event)
        config, changes = OmegaConf.to_container(job.request.task, resolve=False), job.changes
        overrides = changes if job.attempt else job.request.overrides
        try:
            with locate_weights(job.plan) as plan:
                return launch_run(plan, config, overrides, folder, time.time(), job.attempt, sweep_context)
        except ConfigError as refusal:
            display.print_error(str(mask_secrets(str(refusal))))
            job.entry.reason = str(mask_secrets(str(refusal)))
            return REFUSED
        except Exception:  # of one job; the others go on
            display.print_error(str(mask_secrets(traceback.format_exc())))
            return FAILED

    def _record_status(self, job: SweepJob, status: str, reason: str = "") -> None:
        with self._writing:
            job.entry.status, job.entry.reason = status, reason or (job.entry.reason if status == "REFUSED" else "")
            self._ledger.save()
            if status != "RUNNING" and self._tell is not None:
                self._report()

    def _return_value(self, request: JobRequest, repeats: Sequence[SweepJob]) -> JobReturn:
        """What a sweeper is told of a job that it asked for, and of its repeats."""
        told = [RunSummary.read(self._folder / each.entry.folder) for each in repeats]
        name = request.options.get("metric") or "val/loss"
        values = [each.last.get(name, math.nan) if each.status == "FINISHED" else math.nan for each in told]
        returned = JobReturn()
        returned.overrides = request.overrides
        returned.cfg, returned.hydra_cfg = request.task, OmegaConf.masked_copy(request.hydra, ["hydra"])
        returned.working_dir, returned.task_name = str(Path.cwd()), "scaleflow"
        returned.return_value = math.nan if any(map(math.isnan, values)) else statistics.median(values)
        returned.status = JobStatus.COMPLETED
        return returned

    # -----------------------------------------------------------------------------------------
    # The sweep's own run
    # -----------------------------------------------------------------------------------------

    def _start(self, plans: Sequence[Plan]) -> None:
        """Starts what all jobs share, before the first of them."""
        if self._plan is None:
            self._plan = plans[0]
            self._stop = self._open.enter_context(catch_stop_signals())
        if not self._server and not all(has_own_machines(plan) for plan in plans):
            self._server = self._open.enter_context(start_fork_server())

    def _begin(self, job: SweepJob) -> None:
        """Opens the run that is the parent of all: with the first job that is ready, since before there may be none."""
        with self._writing:
            if self._tell is not None:
                return
            assert self._plan is not None
            self._tell = EventWriter(self._folder / EVENTS)
            write_config(self._folder, self._config)
            tracking, events = self._plan.tracking, self._folder / EVENTS
            before = events.stat().st_size
            goes_on, offline = self._is_resumed, tracking.offline
            write_provenance(self._folder, {})
            tracker = make_tracker(tracking, adopts=not goes_on)
            self._recorder = Recorder(tracker, events, before, is_resumed=goes_on, offline=offline)
            swept = ", ".join(self._ledger.swept)
            name = self._plan.tracking.run_name or f"sweep of {swept or 'one job'}"
            tags = {**(self._plan.tracking.tags or {}), "scaleflow.swept": swept}
            chosen = job.request.choices
            params = {k: v for k, v in chosen.items() if not is_under(k, self._ledger.swept)}
            params |= {k: v if isinstance(v, str) else str(v) for k, v in self._ledger.base.items() if k not in params}
            more = {"began": int(self._began * 1000), "steps": 0, "epochs": 0, "search": []}
            more |= {"resumed": 0} if self._is_resumed else {}
            self._tell("ready", name=name, tags=tags, params=params, **more)
            self._recorder.start()

    def _report(self) -> Report:
        """Writes the report of what is known by now, and has it recorded."""
        assert self._tell is not None
        report = self._make_report(self._ledger.entries)
        for path in report.write(self._folder):
            self._tell("artifact", path=str(path))
        self._tell("tags", values=report.tags())
        return report

    def _make_report(self, entries: Sequence[LedgerEntry]) -> Report:
        jobs = [(entry, RunSummary.read(self._folder / entry.folder)) for entry in entries]
        return Report(jobs, self._ledger.swept, self._same_losses)

    def end(self) -> int:
        """Ends the sweep: its report, its run's status; gives the exit code."""
        try:
            return self._finish()
        finally:
            self._open.close()

    def _finish(self) -> int:
        if not self._jobs:
            return REFUSED
        if self._tell is None or self._recorder is None:  # nothing was to be done, or nothing could
            report = self._make_report([job.entry for job in self._jobs])
            self._show(report)
            is_recorded = self._repair_end()
        else:
            report = self._report_end()
            self._show(report)
            is_recorded = self._finish_recording(self._recorder)
        if is_recorded:  # of those that need nothing else, what the command that ran them could not record
            all(
                repair_quietly(self._folder / job.entry.folder)
                for job in self._jobs
                if job.plan is None and job.is_through
            )
        return self._exit_code(report)

    def _report_end(self) -> Report:
        """Writes the last words of the sweep's own run."""
        assert self._tell is not None
        report = self._report()
        code = self._exit_code(report)
        for path in report.draw(self._folder):
            self._tell("artifact", path=str(path), folder="plots")
        status = "KILLED" if self._stop.is_set() else "FINISHED" if code == FINISHED else "FAILED"
        bad = self._remaining_jobs()
        error = {"error": f"{len(bad)} of {len(self._jobs)} jobs did not finish"} if bad else {}
        if report.differences and not bad:
            error = {"error": f"the first losses differ: {report.differences[0]}"}
        self._tell("end", status=status, **error)
        self._tell.close()
        return report

    def _repair_end(self) -> bool:
        """Gives the sweep's own run the end that an earlier command could not write, or not record.

        Returns:
            Whether its store has it now.
        """
        told = RunSummary.read(self._folder)
        if not told.is_ready:
            return False
        if not told.status:
            self._tell = EventWriter(self._folder / EVENTS)
            self._report_end()
        self._open.close()  # whoever repairs it claims the folder
        return repair_quietly(self._folder)

    def _remaining_jobs(self) -> list[LedgerEntry]:
        """The jobs that are not through."""
        return [job.entry for job in self._jobs if not job.is_through]

    def _show(self, report: Report) -> None:
        report.show(sys.stdout)
        display = Display(sys.stdout)
        for difference in report.differences:
            display.print_error(f"the first losses differ: {difference}")
        done = sum(job.entry.status == "FINISHED" for job in self._jobs)
        rows = [("jobs", f"{done} of {len(self._jobs)} FINISHED in {format_duration(time.time() - self._began)}")]
        rows += [("output", os.path.relpath(self._folder))]
        if self._remaining_jobs():
            rows += [("go on", f"the same command with hydra.sweep.dir={os.path.relpath(self._folder)}")]
        display.print_summary(rows)

    def _finish_recording(self, recorder: Recorder) -> bool:
        """Waits until the sweep's own run is recorded; gives whether it is."""
        assert self._plan is not None
        signals, patience = self._stop.times, self._plan.tracking.flush_seconds
        display = Display(sys.stdout)
        is_recorded = recorder.finish(patience, lambda: self._stop.times > signals)
        if not is_recorded:
            display.print_error(
                f"the store did not take the sweep's own run: {mask_secrets(recorder.reason)}; nothing is lost, "
                "and what is "
                f"missing there is sent by: python -m scaleflow.sync {os.path.relpath(self._folder)}"
            )
        elif where := recorder.describe_links():
            display.print_summary(where)
        return is_recorded

    def _exit_code(self, report: Report) -> int:
        if self._stop.is_set():
            return 128 + (self._stop.signal or signal.SIGTERM)
        statuses = {job.entry.status for job in self._jobs} - {"PRUNED"}
        if statuses <= {"FINISHED"} and not report.differences:
            return FINISHED
        return REFUSED if statuses == {"REFUSED"} else FAILED


def has_own_machines(plan: Plan | None) -> bool:
    """Whether a job's processes are on machines that it does not share with the others here."""
    return plan is not None and plan.cluster.name == "ray"


def write_config(folder: Path, config: DictConfig) -> None:
    """What all jobs begin with, secrets masked."""
    base = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    plain = OmegaConf.to_container(base, resolve=False)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(mask_secrets(plain))))
