"""Runs the jobs of a sweep: checks them, runs `n_jobs` at a time, and reports them.

The process of the command composes and records all jobs. One fork server starts their workers.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig

from scaleflow.cluster.engines import find_engine
from scaleflow.config.compose import list_module_folders, mask_sweep_config
from scaleflow.config.words import quote_override
from scaleflow.errors import ConfigError, NothingCanRun
from scaleflow.interfaces import Plan, Status, Sweep, parse_duration
from scaleflow.interfaces.clock import measure_since
from scaleflow.interfaces.events import Event, RunReady
from scaleflow.interfaces.formatting import format_duration, join_first
from scaleflow.interfaces.hooks import FollowedRun
from scaleflow.interfaces.secret_masking import mask_override, mask_secrets
from scaleflow.launcher.command_exit import FAILED, FINISHED, REFUSED, Outcome, find_interruption
from scaleflow.launcher.display import Display, JobDisplay
from scaleflow.launcher.executor import Portion, Work, run_side_by_side
from scaleflow.launcher.feature_hooks import FeatureHooks
from scaleflow.launcher.launch import launch_run
from scaleflow.launcher.prepare import note_copies
from scaleflow.launcher.processes.server_start import start_fork_server
from scaleflow.launcher.processes.stop import PartStop, StopRequest, catch_stop_signals
from scaleflow.launcher.recording.recovery import repair_quietly
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.folder_use import SWEEP_DIR, check_writable, create_folder, refuse_others, remove_created
from scaleflow.runs.provenance.collect import LaunchFacts
from scaleflow.runs.state import is_finished
from scaleflow.sweep.changes import CHANGED, SweepInputs, describe_changes
from scaleflow.sweep.composer import (
    JobCallbacks,
    JobComposer,
    JobRequest,
    SweepJob,
    expand_repeats,
    find_swept_keys,
    make_return,
)
from scaleflow.sweep.ledger import Ledger, LedgerEntry, find_common_leaves, read_job_state
from scaleflow.sweep.parent_run import ParentRun, describe_jobs
from scaleflow.sweep.ranking import RepeatedJob, choose_mode
from scaleflow.sweep.sweep_report import SweepReport, make_loading_row

#: Statuses after which a job does not change before it runs again.
ENDED = ("FINISHED", "FAILED", "KILLED", "PRUNED")

#: The most jobs that are each shown in a line before the first job runs.
MAX_LINES = 10

#: The part of the time that may be spent on reports while jobs run. A report of many jobs takes longer.
REPORT_SHARE = 0.05


class SweepRunner:
    """Runs the jobs of one command in the folder of a sweep.

    Args:
        config: the config of the command, with Hydra's own part.
        began: when the command began, in seconds since the epoch.
        task: the task function of Hydra's app, for callbacks.

    Attributes:
        watch: a function that gets the positions of a job in the batch and each of its events. If it returns True, the
            job is stopped and counts as pruned.

    Raises ConfigError if `n_jobs` is less than 1, or if the folder cannot be used.
    """

    def __init__(self, context: HydraContext, config: DictConfig, began: float, task: object) -> None:
        self._config = config
        self._began = began
        self._n_jobs = int(config.hydra.launcher.get("n_jobs", 1))
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._files = RunFolder(self._folder)
        self._ledger_lock = threading.RLock()
        self._stop = StopRequest()
        self._server = ""
        self._facts = LaunchFacts()
        self._composer = JobComposer(context, config)
        self._callbacks = JobCallbacks(context, self._composer, task)
        self._is_started = False
        self._plan: Plan | None = None
        self._timer: threading.Timer | None = None  # ends the sweep after `sweep.max_seconds`
        self._are_remote: set[bool] = set()  # whether the processes of the jobs run on other machines
        self._states: dict[int, RunState] = {}
        self._next_update = 0.0
        self._jobs: list[SweepJob] = []
        self._options = Sweep()
        self.watch: Callable[[Sequence[int], Event], bool] | None = None
        if self._n_jobs < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={self._n_jobs}: expected at least 1")
        check_writable(self._folder, SWEEP_DIR)
        with contextlib.ExitStack() as resources:
            resources.enter_context(self._files.lock_sweep())
            self._parent = ParentRun(self._folder)
            resources.callback(self._parent.close)
            self._ledger = Ledger.load(self._files)
            self._inputs = SweepInputs(self._folder, list_module_folders(config.hydra.runtime))
            self._resources = resources.pop_all()
        self._is_resumed = bool(self._ledger.entries)
        self._swept = find_swept_keys(config)
        self._noted: set[str] = set()  # the notes of all jobs
        mask_sweep_config(self._files.sweep_config)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal, or `sweep.max_seconds`, asked for the end of the sweep."""
        return self._stop.is_set()

    @property
    def limit(self) -> str:
        """The limit that ended the sweep, as it was typed; empty if none did."""
        return self._stop.limit

    def launch(self, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Runs a batch of jobs, given the overrides of each, and waits for them.

        Returns for each job the value of `sweep.metric`: the median over repeats (no warm-ups), the mean over folds,
        or NaN if one of them did not finish. Raises ConfigError if none of the jobs can run.
        """
        asked = [self._composer.read_request(words, number) for number, words in enumerate(overrides)]
        if all(each.refusal for each in asked):
            raise NothingCanRun(asked[0].refusal)
        turns = expand_repeats(asked)
        jobs = self._check_jobs(turns)
        waiting = [job for job in jobs if job.is_waiting]
        if waiting:
            self._start()
            self._run(waiting)
        jobs_of = {(each.entry.identity, each.entry.repeat): each for each in self._jobs}
        return [
            self._return_value(each, [jobs_of[each.identity, repeat] for repeat in each.counted_repeats])
            for each in asked
        ]

    def _check_jobs(self, turns: Sequence[tuple[int, JobRequest]]) -> list[SweepJob]:
        """Prepares the jobs that are new to this command, and shows why one cannot run.

        `turns` has (position in the batch, job) for each run. Raises ConfigError if none of them can run, or if they do
        not fit the sweep in the folder.
        """
        requests = [each for _, each in turns if not each.refusal]
        options = requests[0].options
        if self._n_jobs > 1 and any(each.is_inline for each in requests):
            raise ConfigError(
                f"hydra.launcher.n_jobs={self._n_jobs}: debug.inline=true runs one job at a time; use "
                "hydra.launcher.n_jobs=1"
            )
        self._options = options
        common = find_common_leaves([each.config for each in requests])
        references = frozenset().union(*(each.references for each in requests))  # they follow from other keys
        base = {key: value for key, value in common.items() if key not in references}
        self._ledger.check(base, self._swept, options.on_change in ("new", "rerun", "keep"))
        jobs = self._new_jobs(turns)
        if self._is_resumed and not self._jobs:
            self._handle_changes(jobs)
        refusals = [refusal for refusal in (self._check(job) for job in jobs) if refusal is not None]
        self._show_ended([job.entry for job in jobs if job.entry.is_finished])
        if refusals and len(refusals) == len(jobs):
            raise NothingCanRun(str(refusals[0])) from refusals[0]
        self._jobs += jobs
        self._ledger.save()
        return jobs

    def _new_jobs(self, turns: Sequence[tuple[int, JobRequest]]) -> list[SweepJob]:
        """Returns a job for each config and repeat that is new to this command. Duplicates in the batch share one."""
        known = {job.entry.number for job in self._jobs}
        jobs_by_number: dict[int, SweepJob] = {}
        for index, request in turns:
            job = self._find_job(request)
            if job.entry.number not in known:
                jobs_by_number.setdefault(job.entry.number, job).indices.append(index)
        for job in jobs_by_number.values():
            if len(job.indices) > 1:
                JobDisplay(sys.stdout, job.entry.number).print_line(
                    f"is requested {len(job.indices)} times and runs once"
                )
        return list(jobs_by_number.values())

    def _find_job(self, request: JobRequest) -> SweepJob:
        """Returns a job with its entry in the ledger, which is added if there is none."""
        entry = self._ledger.find_entry(request.identity, request.repeat)
        if entry is None:
            number = self._ledger.next_number
            overrides = [mask_override(override) for override in request.overrides]
            folder = self._subfolder(request, number)
            entry = self._ledger.add_entry(request.identity, overrides, folder, repeat=request.repeat)
        entry.warms_up = request.turn == "warm-up"
        return SweepJob(request, entry)

    def _handle_changes(self, jobs: Sequence[SweepJob]) -> None:
        """Does what `sweep.on_change` says about code and data that changed since jobs of earlier commands ran."""
        policy, configs = self._options.on_change, {job.entry.number: job.request.config for job in jobs}
        kept = self._inputs.find_changes(self._ledger.entries, configs)
        if kept and policy not in ("rerun", "keep"):
            raise ConfigError(
                f"hydra.sweep.dir={self._folder}: {describe_changes(kept)}\nuse sweep.on_change=rerun to run such jobs "
                "again, sweep.on_change=keep to keep the results of finished ones, or choose another folder"
            )
        again: dict[int, Sequence[str]] = {}
        for job in jobs:
            if job.entry.number in kept and (policy == "rerun" or not job.entry.is_finished):
                again[job.entry.number] = kept.pop(job.entry.number)
                job.entry.restart(self._subfolder(job.request, job.entry.number))
        for entry in self._ledger.entries:
            if entry.is_finished:
                entry.reason = f"{join_first(kept[entry.number])} since it ran" if entry.number in kept else ""
        for changes, what in ((again, "they run again"), (kept, "their results are kept")):
            if changes:
                Display(sys.stdout).print_line(f"note: {describe_changes(changes)}: {what}")
        if again or kept:
            self._parent.tags[CHANGED] = describe_changes(kept) if kept else ""

    def _subfolder(self, request: JobRequest, number: int) -> str:
        """Returns the job's folder as `hydra.sweep.subdir` gives it, relative to the sweep's folder and made unique."""
        name = os.path.relpath(self._composer.name_folder(request, number), self._folder)
        used_names = {os.curdir, *(entry.folder for entry in self._ledger.entries)}  # "." is the sweep's own
        names = itertools.chain([name], (f"{name}-{turn}" for turn in itertools.count(number)))
        return next(
            each for each in names if each not in used_names and not RunFolder(self._folder / each).events.exists()
        )

    def _check(self, job: SweepJob) -> ConfigError | None:
        """Checks a job, unless it has finished. Returns the error if it cannot run.

        A job is prepared again just before it runs: the runs of a thousand jobs would take much memory.
        """
        folder = self._folder / job.entry.folder
        if job.entry.is_finished and (job.entry.status == "PRUNED" or is_finished(folder)):
            return None
        state = RunState.read(folder)
        if state.status == "FINISHED":
            job.entry.status = "FINISHED"
            return None
        try:
            refuse_others(folder)
            if job.request.refusal:
                raise ConfigError(job.request.refusal)
            plan = self._composer.prepare(job.request, folder, state.is_ready).spec.plan
        except ConfigError as refusal:
            if find_interruption(refusal):
                raise
            job.entry.status, job.entry.reason = "REFUSED", str(mask_secrets(str(refusal)))
            JobDisplay(sys.stdout, job.entry.number).print_error(job.entry.reason)
            return refusal
        job.is_waiting, job.is_resumed = True, state.is_ready
        if job.entry.is_finished:  # its folder is gone
            job.entry.status = "waiting"
        self._plan = self._plan or plan
        self._are_remote.add(find_engine(plan.cluster).is_remote)
        return None

    def _show_ended(self, entries: Sequence[LedgerEntry]) -> None:
        for entry in entries[:MAX_LINES]:
            JobDisplay(sys.stdout, entry.number).print_line(f"is already {entry.status}")
        if len(entries) > MAX_LINES:
            statuses = Counter(entry.status for entry in entries[MAX_LINES:])
            counts = ", ".join(f"{count:,} more are already {status}" for status, count in statuses.items())
            Display(sys.stdout).print_line(counts)

    def _run(self, jobs: Sequence[SweepJob]) -> None:
        waiting = iter(jobs)

        def begin_next(portion: Portion) -> Work | None:
            job = None if self._stop.is_set() else next(waiting, None)
            return None if job is None else partial(self._run_job, job, portion)

        run_side_by_side(begin_next, min(self._n_jobs, len(jobs)), end_others=lambda: None)

    def _run_job(self, job: SweepJob, portion: Portion) -> None:
        if changes := self._inputs.note_changes(job.request.config):
            note = f"note: {join_first(changes)} since the job before it began"
            JobDisplay(sys.stdout, job.entry.number).print_line(note)
        self._record_status(job, "RUNNING")
        code = self._launch_job(job, portion)
        state = RunState.read(self._folder / job.entry.folder)
        without_run = "KILLED" if code == self._stop.exit_code else "FAILED"
        status = "REFUSED" if code == REFUSED else state.status or without_run
        if job.is_pruned and status == "KILLED":
            status = "PRUNED"
        self._record_status(job, status, (state.error or job.entry.reason) if status != "FINISHED" else "")
        self._callbacks.end(job.request, self._folder / job.entry.folder, status, reason=job.entry.reason)

    def _launch_job(self, job: SweepJob, portion: Portion) -> int:
        """Runs a job with a portion of this machine. Returns the exit code of its command."""
        stop, in_turn = PartStop(self._stop), JobDisplay(sys.stdout, job.entry.number, self._noted)
        display = Display(sys.stdout, breaks_silence=False) if job.request.is_inline else in_turn
        words = job.request.describe(self._ledger.swept) or ["without overrides"]
        display.print_line(" ".join([*words, *([f"({job.request.turn})"] if job.request.turn else [])]))

        def on_event(event: Event) -> None:
            if isinstance(event, RunReady):
                with self._ledger_lock:  # if no job becomes ready, there is no parent run
                    if not self._parent.recorder:
                        plan, began = run.spec.plan, self._began
                        self._parent.begin(plan, self._config, self._ledger, began=began, facts=self._facts)
            if self.watch is not None and self.watch(job.indices, event):
                stop.end_part()
                job.is_pruned = True

        folder = self._folder / job.entry.folder
        try:
            run = self._composer.prepare(job.request, folder, job.is_resumed)
            is_elsewhere = find_engine(run.spec.plan.cluster).is_remote  # it shares this machine with no other job
            environment = {**job.request.environment, **({} if is_elsewhere else portion)}
            create_folder(folder)
            spec = replace(run.spec, parent=str(self._folder), label=job.request.label(self._ledger.swept))
            run = replace(run, spec=replace(spec, environment=environment, server=self._server))
            self._callbacks.begin(job.request, folder)
            facts = self._facts
            outcome = launch_run(run, adopts=False, stop=stop, display=display, on_event=on_event, facts=facts)
        except ConfigError as refusal:  # what the job needs is gone since it was checked
            outcome = Outcome(REFUSED, error=str(mask_secrets(str(refusal))))
        except Exception as error:  # the other jobs continue
            display.print_error(str(mask_secrets(traceback.format_exc())))
            job.entry.reason = str(mask_secrets(f"{type(error).__name__}: {error}"))
            return FAILED
        if outcome.error:
            job.entry.reason = outcome.error
            display.print_error(outcome.error)
        return outcome.code

    def _record_status(self, job: SweepJob, status: str, reason: str = "") -> None:
        with self._ledger_lock:
            job.entry.status, job.entry.reason = status, reason
            self._states.pop(job.entry.number, None)
            self._ledger.save()
            if status != "RUNNING" and self._parent.recorder and time.monotonic() >= self._next_update:
                began = time.monotonic()
                self._parent.update(self._make_report(self._ledger.entries))
                self._next_update = time.monotonic() + (time.monotonic() - began) / REPORT_SHARE

    def _return_value(self, request: JobRequest, repeats: Sequence[SweepJob]) -> JobReturn:
        job = RepeatedJob([(each.entry, self._read_state(each.entry)) for each in repeats])
        return make_return(request.overrides, True, job.measure(request.options.metric))

    def _read_state(self, entry: LedgerEntry) -> RunState:
        """Reads the run of a job, once if it has ended."""
        state = self._states.get(entry.number) or read_job_state(self._folder / entry.folder)
        if entry.status in ENDED:
            self._states[entry.number] = state
        return state

    def _start(self) -> None:
        """Starts what all jobs share: the handling of signals, and the fork server if jobs run on this machine."""
        if not self._is_started:
            self._is_started = True
            self._stop = self._resources.enter_context(catch_stop_signals())
            if self._plan is not None and (note := note_copies(self._plan)):
                Display(sys.stdout).print_line(note)
            self._start_timer()
        if not self._server and self._are_remote != {True}:
            self._server = self._resources.enter_context(start_fork_server())

    def _start_timer(self) -> None:
        limit = parse_duration(self._options.max_seconds)
        if limit is None:
            return

        def end_sweep() -> None:
            if not self._stop.is_set():
                self._stop.limit = f"sweep.max_seconds={self._options.max_seconds}"
                self._stop.signal = signal.SIGTERM

        self._timer = threading.Timer(max(0.0, limit - measure_since(self._began)), end_sweep)
        self._timer.daemon = True
        self._timer.start()

    def _make_report(self, entries: Sequence[LedgerEntry]) -> SweepReport:
        jobs = [(entry, self._read_state(entry)) for entry in entries]
        options, direction = self._options, self._config.hydra.sweeper.get("direction")
        mode = choose_mode(options.metric, options.mode, direction=direction, runs=[run for _, run in jobs])
        return SweepReport(jobs, self._ledger.swept, options.metric, mode=mode, same_losses=options.same_losses)

    def end(self) -> Outcome:
        """Ends the sweep: shows and records the report, and ends the parent run. Returns the outcome of the command."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            code = self._finish()
        finally:
            self._resources.close()
        reason = next((job.entry.reason for job in reversed(self._jobs) if job.entry.reason), None)
        if code == REFUSED:
            return Outcome(code, lambda: {"error": reason})
        return Outcome(code, lambda: {"error": reason, **describe_jobs(self._folder)})

    def _finish(self) -> int:
        if not self._jobs:
            if not self._is_resumed:  # nothing stays of a new sweep
                self._resources.close()
                for path in self._files.list_sweep_files():
                    path.unlink(missing_ok=True)
                remove_created(self._folder)
            return REFUSED
        if self._parent.recorder:
            report = self._end_parent()
            self._show(report)
            is_recorded = self._parent.finish(self._stop)
        else:  # no job became ready, or all were finished before
            report = self._make_report([job.entry for job in self._jobs])
            self._show(report)
            is_recorded = self._repair_parent()
        self._show_best(report)
        if is_recorded:  # the store answers: send what earlier commands could not record
            finished = [job for job in self._jobs if not job.is_waiting and job.entry.is_finished]
            all(repair_quietly(self._folder / job.entry.folder) for job in finished)
        code = self._exit_code(report)
        if self._parent.plan:
            self._call_hooks(self._parent.plan, code)
        return code

    def _call_hooks(self, plan: Plan, code: int) -> None:
        """Calls what features do after a sweep."""
        display = Display(sys.stdout)
        run = FollowedRun(
            plan=plan,
            folder=self._folder,
            is_job=False,
            find_name=lambda: RunState.read(self._folder).name,
            print_note=lambda text: display.print_line(f"note: {text}", "yellow"),
        )
        FeatureHooks(run).after_run({"exit_code": code, **describe_jobs(self._folder)})

    def _end_parent(self) -> SweepReport:
        """Ends the parent run, and returns the final report."""
        report = self._make_report(self._ledger.entries)
        status: Status = "FINISHED" if self._exit_code(report) == FINISHED else "FAILED"
        remaining = self._remaining_jobs()
        error = f"{len(remaining)} of {len(self._jobs)} jobs did not finish" if remaining else ""
        error = ": ".join(filter(None, (self._stop.limit, error)))
        if report.differences and not remaining:
            error = f"the first losses differ: {report.differences[0]}"
        self._parent.conclude(report, "KILLED" if self._stop.is_set() else status, error)
        return report

    def _repair_parent(self) -> bool:
        """Ends and records a parent run that is open, or KILLED after its last job. Returns whether it is recorded."""
        state = RunState.read(self._folder)
        if not state.is_ready:
            return False
        if state.is_open or (state.status == "KILLED" and not self._remaining_jobs()):
            self._end_parent()
        else:
            self._parent.add({}, tags=self._parent.tags)
        self._resources.close()  # the repair takes the locks of the folder
        return repair_quietly(self._folder)

    def _remaining_jobs(self) -> list[LedgerEntry]:
        return [job.entry for job in self._jobs if not job.entry.is_finished]

    def _show(self, report: SweepReport) -> None:
        report.show(sys.stdout)
        display = Display(sys.stdout)
        for difference in report.differences:
            display.print_error(f"the first losses differ: {difference}")
        finished = sum(job.entry.status == "FINISHED" for job in self._jobs)
        rows = [("jobs", f"{finished} of {len(self._jobs)} FINISHED in {format_duration(measure_since(self._began))}")]
        if self._stop.limit:
            counts = Counter(entry.status for entry in self._remaining_jobs())
            rows += [("ended", f"{self._stop.limit}: {counts['KILLED']} stopped, {counts['waiting']} not begun")]
        rows += [("output", os.path.relpath(self._folder))]
        if self._remaining_jobs() or self._stop.is_set():
            word = quote_override("hydra.sweep.dir", os.path.relpath(self._folder))
            rows += [("go on", f"the same command with {word}")]
        display.print_summary(rows)

    def _show_best(self, report: SweepReport) -> None:
        """Shows where the sweep is recorded, and in the last lines the best run and how to load its model."""
        rows = [*self._parent.describe_links(), *([("compared", line)] if (line := self._parent.comparison) else [])]
        if report.best is not None:
            entry, run = report.best
            loading = make_loading_row(run.model_uri, run.record.get("uri"), self._folder / entry.folder)
            rows += [("best", report.describe_best()), loading]
        if rows:
            Display(sys.stdout).print_summary(rows)

    def _exit_code(self, report: SweepReport) -> int:
        if self._stop.is_set():
            return self._stop.exit_code
        statuses = {job.entry.status for job in self._jobs} - {"PRUNED"}
        if statuses <= {"FINISHED"} and not report.differences:
            return FINISHED
        return REFUSED if statuses == {"REFUSED"} else FAILED
