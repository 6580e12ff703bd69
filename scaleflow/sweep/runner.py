"""Runs the jobs of a sweep: checks them, runs `n_jobs` at once, and reports them.

The process of the command composes and records all jobs. One fork server starts their workers.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig

from scaleflow.cluster.engines import find_engine
from scaleflow.config.compose import mask_sweep_config
from scaleflow.config.words import quote_override, show_keys
from scaleflow.errors import ConfigError, NothingCanRun
from scaleflow.interfaces import Plan, Status, parse_duration
from scaleflow.interfaces.clock import measure_since
from scaleflow.interfaces.events import Event, RunReady
from scaleflow.interfaces.formatting import format_duration, join_first
from scaleflow.interfaces.hooks import FollowedRun
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import FAILED, FINISHED, REFUSED, Outcome
from scaleflow.launcher.display import Display, JobDisplay
from scaleflow.launcher.executor import Portion, Work, run_side_by_side
from scaleflow.launcher.feature_hooks import FeatureHooks
from scaleflow.launcher.launch import launch_run
from scaleflow.launcher.prepare import PreparedRun, note_copies
from scaleflow.launcher.processes.server_start import start_fork_server
from scaleflow.launcher.processes.stop import PartStop, StopRequest, catch_stop_signals
from scaleflow.launcher.recording.recovery import repair_quietly
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.folder_use import SWEEP_DIR, check_writable, create_folder, remove_created
from scaleflow.sweep.composer import JobCallbacks, JobComposer, JobRequest, SweepJob, expand_repeats, make_return
from scaleflow.sweep.ledger import Ledger, LedgerEntry
from scaleflow.sweep.parent_run import ParentRun, describe_jobs
from scaleflow.sweep.planner import JobPlanner
from scaleflow.sweep.progress import SweepProgress
from scaleflow.sweep.ranking import RepeatedJob
from scaleflow.sweep.sweep_report import SweepReport, make_loading_row


class SweepRunner:
    """Runs the jobs of one command in the folder of a sweep.

    Args:
        config: the config of the command, with Hydra's own part.
        began: when the command began, in seconds since the epoch.
        task: the task function of Hydra's app, for callbacks.

    Attributes:
        watch: a function that receives the positions of a job in the batch and each of its events. If it returns True,
            the job is stopped and counts as pruned.

    Raises ConfigError if `n_jobs` is less than 1, or if the folder cannot be used.
    """

    def __init__(self, context: HydraContext, config: DictConfig, began: float, task: object) -> None:
        self._began = began
        self._n_jobs = int(config.hydra.launcher.get("n_jobs", 1))
        if self._n_jobs < 1:
            raise ConfigError(f"hydra.launcher.n_jobs={self._n_jobs}: expected at least 1")
        self._folder = Path(config.hydra.sweep.dir).absolute()
        check_writable(self._folder, SWEEP_DIR)
        self._composer = JobComposer(context, config)
        self._callbacks = JobCallbacks(context, self._composer, task)
        files = RunFolder(self._folder)
        with contextlib.ExitStack() as resources:
            resources.enter_context(files.lock_sweep())
            parent = ParentRun(self._folder)
            resources.callback(parent.close)
            ledger = Ledger.load(files)
            self._planner = JobPlanner(config, self._folder, self._composer, ledger)
            self._progress = SweepProgress(config, began, ledger, parent)
            self._resources = resources.pop_all()
        self._stop = StopRequest()
        self._server = ""  # the address of the fork server
        self._is_started = False
        self._timer: threading.Timer | None = None  # ends the sweep after `sweep.max_seconds`
        self._shown_notes: set[str] = set()  # a note of several jobs is shown only once
        self.watch: Callable[[Sequence[int], Event], bool] | None = None
        mask_sweep_config(files.sweep_config)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or `sweep.max_seconds` ends the sweep."""
        return self._stop.is_set()

    @property
    def limit(self) -> str:
        """The limit that ended the sweep, as typed; empty without such a limit."""
        return self._stop.limit

    def launch(self, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Runs a batch of jobs, one per list of overrides, and waits for them.

        Returns for each job the value of `sweep.metric`: the median over repeats (no warm-ups), the mean over folds,
        or NaN if one of them did not finish. Raises ConfigError if none of the jobs can run.
        """
        requests = []
        for number, words in enumerate(overrides):
            requests.append(self._composer.read_request(words, number))
        self._check_requests(requests)
        jobs = self._planner.plan_jobs(expand_repeats(requests), self._progress.options)
        self._progress.parent.tags.update(self._planner.tags)
        waiting = [job for job in jobs if job.is_waiting]
        if waiting:
            self._start()
            self._run(waiting)
        return self._return_values(requests)

    def _check_requests(self, requests: Sequence[JobRequest]) -> None:
        """Raises ConfigError if no job can be composed, or if jobs that run in this process would run at once."""
        composed = [request for request in requests if not request.refusal]
        if not composed:
            raise NothingCanRun(requests[0].refusal)
        if self._n_jobs > 1 and any(request.is_inline for request in composed):
            raise ConfigError(
                f"hydra.launcher.n_jobs={self._n_jobs}: debug.inline=true runs one job at a time; use "
                "hydra.launcher.n_jobs=1"
            )
        self._progress.options = composed[0].options

    def _return_values(self, requests: Sequence[JobRequest]) -> list[JobReturn]:
        """Returns the value of `sweep.metric` for each request, in the form of Hydra's launchers."""
        jobs = {(job.entry.identity, job.entry.repeat): job for job in self._planner.jobs}
        returned = []
        for request in requests:
            runs = []
            for repeat in request.counted_repeats:
                entry = jobs[request.identity, repeat].entry
                runs.append((entry, self._progress.read_state(entry)))
            value = RepeatedJob(runs).measure(request.options.metric)
            returned.append(make_return(request.overrides, True, value))
        return returned

    def _run(self, jobs: Sequence[SweepJob]) -> None:
        waiting = iter(jobs)

        def begin_next(portion: Portion) -> Work | None:
            job = None if self._stop.is_set() else next(waiting, None)
            return None if job is None else partial(self._run_job, job, portion)

        run_side_by_side(begin_next, min(self._n_jobs, len(jobs)), end_others=lambda: None)

    def _run_job(self, job: SweepJob, portion: Portion) -> None:
        """Runs a job with a portion of this machine, and records its status."""
        entry = job.entry
        changes = self._planner.inputs.note_changes(job.request.config)
        if changes:
            note = f"note: {join_first(changes)} since the job before it began"
            JobDisplay(sys.stdout, entry.number).print_line(note)
        self._progress.record_status(entry, "RUNNING")
        code = self._launch_job(job, portion)
        state = RunState.read(self._folder / entry.folder)
        status = self._choose_status(job, code, state)
        reason = ""
        if status != "FINISHED":
            reason = state.error or entry.reason
        self._progress.record_status(entry, status, reason)
        self._callbacks.end(job.request, self._folder / entry.folder, status, reason=entry.reason)

    def _choose_status(self, job: SweepJob, code: int, state: RunState) -> str:
        """Returns the status of a job that has ended with an exit code."""
        if code == REFUSED:
            return "REFUSED"
        without_run = "KILLED" if code == self._stop.exit_code else "FAILED"
        status = state.status or without_run
        return "PRUNED" if job.is_pruned and status == "KILLED" else status

    def _launch_job(self, job: SweepJob, portion: Portion) -> int:
        """Launches the run of a job, and waits for it. Returns the exit code of its command."""
        stop = PartStop(self._stop)
        display: Display = JobDisplay(sys.stdout, job.entry.number, self._shown_notes)
        if job.request.is_inline:
            display = Display(sys.stdout, breaks_silence=False)
        display.print_line(self._describe_job(job))
        try:
            run = self._prepare_run(job, portion)
            self._callbacks.begin(job.request, self._folder / job.entry.folder)
            outcome = launch_run(
                run,
                adopts=False,
                stop=stop,
                display=display,
                on_event=partial(self._handle_event, job, run.spec.plan, stop),
                facts=self._progress.facts,
            )
        except ConfigError as refusal:  # something that the job needs has disappeared since the check
            outcome = Outcome(REFUSED, error=show_keys(str(mask_secrets(str(refusal)))))
        except Exception as error:  # the other jobs continue
            display.print_error(str(mask_secrets(traceback.format_exc())))
            job.entry.reason = str(mask_secrets(f"{type(error).__name__}: {error}"))
            return FAILED
        if outcome.error:
            job.entry.reason = outcome.error
            display.print_error(outcome.error)
        return outcome.code

    def _describe_job(self, job: SweepJob) -> str:
        """Returns the overrides of a job, and its turn: `seed=1 (repeat 2)`."""
        words = job.request.describe(self._progress.ledger.swept) or ["without overrides"]
        if job.request.turn:
            words.append(f"({job.request.turn})")
        return " ".join(words)

    def _prepare_run(self, job: SweepJob, portion: Portion) -> PreparedRun:
        """Prepares the run of a job in its folder. Jobs on other machines get no portion of this machine."""
        folder = self._folder / job.entry.folder
        run = self._composer.prepare(job.request, folder, job.is_resumed)
        environment = dict(job.request.environment)
        if not find_engine(run.spec.plan.cluster).is_remote:
            environment |= portion
        create_folder(folder)
        spec = replace(
            run.spec,
            parent=str(self._folder),
            label=job.request.label(self._progress.ledger.swept),
            environment=environment,
            server=self._server,
        )
        return replace(run, spec=spec)

    def _handle_event(self, job: SweepJob, plan: Plan, stop: PartStop, event: Event) -> None:
        """Begins the sweep's own run when a job is ready, and stops the job if `watch` says so."""
        if isinstance(event, RunReady):
            self._progress.begin_parent(plan)
        if self.watch is not None and self.watch(job.indices, event):
            stop.end_part()
            job.is_pruned = True

    def _start(self) -> None:
        """Starts everything that all jobs share: signal handling, the timer and the fork server.

        Only jobs on this machine need the fork server.
        """
        if not self._is_started:
            self._is_started = True
            self._stop = self._resources.enter_context(catch_stop_signals())
            if self._planner.plan is not None:
                note = note_copies(self._planner.plan)
                if note:
                    Display(sys.stdout).print_line(note)
            self._start_timer()
        if not self._server and self._planner.needs_server:
            self._server = self._resources.enter_context(start_fork_server())

    def _start_timer(self) -> None:
        max_seconds = self._progress.options.max_seconds
        limit = parse_duration(max_seconds)
        if limit is None:
            return

        def end_sweep() -> None:
            if not self._stop.is_set():
                self._stop.limit = f"sweep.max_seconds={max_seconds}"
                self._stop.signal = signal.SIGTERM

        self._timer = threading.Timer(max(0.0, limit - measure_since(self._began)), end_sweep)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> Outcome:
        """Ends the sweep: shows and records the report, and ends the parent run. Returns the outcome of the command."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            code = self._finish()
        finally:
            self._resources.close()
        reason = None
        for job in self._planner.jobs:
            reason = job.entry.reason or reason
        if code == REFUSED:
            return Outcome(code, lambda: {"error": reason})
        return Outcome(code, lambda: {"error": reason, **describe_jobs(self._folder)})

    def _finish(self) -> int:
        """Shows and records the report. Returns the exit code of the command."""
        jobs = self._planner.jobs
        parent = self._progress.parent
        if not jobs:
            if not self._planner.is_resumed:
                self._remove_files()
            return REFUSED
        if parent.recorder:
            report = self._end_parent()
            self._show(report)
            is_recorded = parent.finish(self._stop)
        else:  # no job became ready, or all were finished before
            report = self._progress.make_report([job.entry for job in jobs])
            self._show(report)
            is_recorded = self._repair_parent()
        self._show_best(report)
        if is_recorded:
            self._send_earlier_jobs()
        code = self._choose_exit_code(report)
        if self._hooks is not None:
            self._hooks.after_run({"exit_code": code, **describe_jobs(self._folder)})
        return code

    def _remove_files(self) -> None:
        """Removes the files of a new sweep that has no jobs."""
        self._resources.close()
        for path in RunFolder(self._folder).list_sweep_files():
            path.unlink(missing_ok=True)
        remove_created(self._folder)

    def _send_earlier_jobs(self) -> None:
        """Sends events of jobs that earlier commands could not record. Stops when the store does not answer."""
        for job in self._planner.jobs:
            is_earlier = job.entry.is_finished and not job.is_waiting
            if is_earlier and not repair_quietly(self._folder / job.entry.folder):
                return

    @cached_property
    def _hooks(self) -> FeatureHooks | None:
        """The hooks of features at the end of a sweep; None if no job became ready in this command."""
        plan = self._progress.parent.plan
        if plan is None:
            return None
        display = Display(sys.stdout)
        run = FollowedRun(
            plan=plan,
            folder=self._folder,
            is_job=False,
            find_name=lambda: RunState.read(self._folder).name,
            print_note=lambda text: display.print_line(f"note: {text}", "yellow"),
        )
        return FeatureHooks(run)

    def _end_parent(self) -> SweepReport:
        """Ends the sweep's own run, and returns the final report."""
        report = self._progress.make_report(self._progress.ledger.entries)
        status: Status = "FINISHED" if self._choose_exit_code(report) == FINISHED else "FAILED"
        if self._stop.is_set():
            status = "KILLED"
        self._progress.parent.conclude(report, status, self._explain_end(report), self._hooks)
        return report

    def _explain_end(self, report: SweepReport) -> str:
        """Returns the error of the sweep's own run; empty if all jobs finished."""
        remaining = self._list_remaining()
        if report.differences and not remaining:
            return f"the first losses differ: {report.differences[0]}"
        unfinished = ""
        if remaining:
            unfinished = f"{len(remaining)} of {len(self._planner.jobs)} jobs did not finish"
        return ": ".join(filter(None, (self._stop.limit, unfinished)))

    def _repair_parent(self) -> bool:
        """Ends a sweep's own run that is still open, or that was killed after its last job, and records it.

        Returns whether it is recorded.
        """
        state = RunState.read(self._folder)
        if not state.has_begun:
            return False
        if state.is_open or (state.status == "KILLED" and not self._list_remaining()):
            self._end_parent()
        else:
            parent = self._progress.parent
            parent.add({}, tags=parent.tags)
        self._resources.close()  # the repair takes the locks of the folder
        return repair_quietly(self._folder)

    def _list_remaining(self) -> list[LedgerEntry]:
        """Lists the jobs of this command that have not finished."""
        return [job.entry for job in self._planner.jobs if not job.entry.is_finished]

    def _show(self, report: SweepReport) -> None:
        """Shows the report, and a summary of the sweep."""
        report.show(sys.stdout)
        display = Display(sys.stdout)
        for difference in report.differences:
            display.print_error(f"the first losses differ: {difference}")
        jobs = self._planner.jobs
        remaining = self._list_remaining()
        finished = sum(job.entry.status == "FINISHED" for job in jobs)
        rows = [("jobs", f"{finished} of {len(jobs)} FINISHED in {format_duration(measure_since(self._began))}")]
        if self._stop.limit:
            counts = Counter(entry.status for entry in remaining)
            ended = f"{self._stop.limit}: {counts['KILLED']} stopped, {counts['waiting']} not begun"
            rows.append(("ended", ended))
        folder = os.path.relpath(self._folder)
        rows.append(("output", folder))
        if remaining or self._stop.is_set():
            rows.append(("go on", f"the same command with {quote_override('hydra.sweep.dir', folder)}"))
        display.print_summary(rows)

    def _show_best(self, report: SweepReport) -> None:
        """Shows where the sweep is recorded, and in the last lines the best run and how to load its model."""
        parent = self._progress.parent
        rows = list(parent.describe_links())
        if parent.comparison:
            rows.append(("compared", parent.comparison))
        if report.best is not None:
            entry, run = report.best
            rows.append(("best", report.describe_best()))
            rows.append(make_loading_row(run.model_uri, run.record.get("uri"), self._folder / entry.folder))
        if rows:
            Display(sys.stdout).print_summary(rows)

    def _choose_exit_code(self, report: SweepReport) -> int:
        if self._stop.is_set():
            return self._stop.exit_code
        statuses = {job.entry.status for job in self._planner.jobs}
        statuses.discard("PRUNED")
        if statuses <= {"FINISHED"} and not report.differences:
            return FINISHED
        return REFUSED if statuses == {"REFUSED"} else FAILED
