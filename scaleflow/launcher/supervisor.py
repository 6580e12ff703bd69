"""The launcher's life: start the worker, show and record what it reports, decide how the run ended.

It imports no TensorFlow, and MLflow only in the recorder's thread, while the worker imports
TensorFlow in its own process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import OmegaConf

from scaleflow.cluster import (
    TF_CONFIG,
    count_processes,
    environments,
    find_task,
    find_unreachable,
    gpu_environments,
    read_tf_config,
    visible_gpus,
)
from scaleflow.config.folders import remove_created
from scaleflow.errors import ConfigError
from scaleflow.events import EVENTS, Event, EventReader, EventWriter
from scaleflow.interfaces import Plan
from scaleflow.launcher.display import Display, display_for, format_duration
from scaleflow.launcher.recorder import STATE, TENSORBOARD, Recorder, read_recorder_state
from scaleflow.launcher.recovery import RECORD_LOCK, claim_folder, finalize_run, has_run
from scaleflow.launcher.system_metrics import make_machine_metrics, record_system_metrics
from scaleflow.launcher.worker_process import RunProcess, start_fork_server, start_workers
from scaleflow.provenance import FILE as PROVENANCE
from scaleflow.provenance import write_provenance
from scaleflow.secret_masking import (
    find_environment_secrets,
    find_secrets,
    mask_override,
    mask_secrets,
    remember_secrets,
)
from scaleflow.tracking import RUN_ID, NoTracker, TensorBoardWriter, make_tracker
from scaleflow.worker.main import WRITE_LOCK, RunSpec, acquire_lock, make_write_lock, run_worker

FINISHED, FAILED, REFUSED = 0, 1, 2

#: Between looks at the workers; their end is noticed within half of it. Looking more often takes from their cores.
POLL_SECONDS = 0.1
GRACE_SECONDS = 30.0

#: How long a command that is refused waits for a store that it has begun to make.
MIGRATION_SECONDS = 180.0

#: How long a run in this very process waits for its store to make the run, before it trains.
SECONDS_TO_OPEN = 10.0

#: How often workers are started again where `cluster.max_restarts` says nothing.
MOST_RESTARTS = 10

#: A run that died so often at one step, and then once more, is not started again: it would die there for ever.
SAME_STEP = 2

NO_ANSWER = "it does not answer"

#: What the processes of a run leave in its folder beside what they are told to keep.
OF_PROCESSES = (
    "coordinator.log",
    "evaluator.log",
    "worker-*.log",
    "server-*.log",
    "events*.jsonl",
    "model_summary.txt",
)

KEPT = ("config.yaml", "overrides.yaml", "environment.txt")


@dataclass(frozen=True)
class SweepContext:
    """What a run that is a job of a sweep has from it.

    Attributes:
        parent: the folder of the sweep, whose own run is the parent.
        label: what makes this job another than the others, for the run's name.
        environment: added to its processes'.
        server: the address of the server that forks them.
        display: shows it.
        stop: the sweep's.
        on_event: is given each event.
    """

    parent: Path
    label: str
    environment: Mapping[str, str]
    server: str
    display: Display
    stop: StopRequest
    on_event: Callable[[Event], None]


def launch_run(
    plan: Plan,
    config: Any,
    overrides: Sequence[str],
    folder: Path,
    began: float,
    attempt: int = 0,
    sweep_context: SweepContext | None = None,
    tags: Mapping[str, str] | None = None,
    refused: Callable[[str], None] | None = None,
) -> int:
    """Runs one plan from start to end.

    Args:
        plan: checked.
        config: the composed config, interpolations kept, for `config.yaml`.
        overrides: as typed, for `overrides.yaml`, or `resume-N.yaml`.
        folder: the run's own; exists and can be written.
        began: when the command began, in seconds since the epoch.
        attempt: which time it is that the run goes on by a command of its own; 0 where it begins.
        sweep_context: of the sweep that this is a job of.
        tags: of the run, beside those that say where it comes from.
        refused: told why there is no run, in place of the terminal.

    Returns:
        The command's exit code.
    """
    remember_secrets([*find_environment_secrets(), *find_secrets(config, plan.config)])
    display = sweep_context.display if sweep_context else Display(sys.stdout) if plan.debug.inline else display_for()
    task = find_task(plan)
    spec = RunSpec(plan, folder.absolute(), began, task.worker if task else 0, tags=tags or {})
    if sweep_context:
        spec = replace(spec, parent=str(sweep_context.parent), label=sweep_context.label)
        spec = replace(spec, environment=sweep_context.environment, server=sweep_context.server)
    complain = refused or display.print_error
    with contextlib.ExitStack() as until_it_is_recorded:
        until_it_is_recorded.callback(display.close)  # whatever happens, the cursor is shown again
        try:
            if spec.records:
                until_it_is_recorded.enter_context(claim_folder(spec.folder))
            if attempt:
                write_resume_files(spec, overrides, attempt)
            else:
                write_configs(spec, config, overrides)
        except ConfigError as refusal:
            display.close()
            complain(str(refusal))
            return REFUSED
        return launch_in_folder(spec, display, complain, attempt > 0, sweep_context)


def launch_in_folder(
    spec: RunSpec,
    display: Display,
    complain: Callable[[str], None],
    is_resumed: bool,
    sweep_context: SweepContext | None,
) -> int:
    """Runs a job in whose folder nobody else records; gives the command's exit code."""
    plan = spec.plan
    task = find_task(plan)
    tracker = (
        make_tracker(plan.tracking, adopts=not is_resumed and sweep_context is None) if spec.records else NoTracker()
    )
    if is_resumed and (unused := explain_not_adopted(spec.folder)):
        display.print_line(unused)
    if plan.evaluator == "here":
        display.print_line(f"{spec.name} of the checkpoints in {plan.checkpoint.folder}; the chief records the run")
    if task and task.worker:
        display.print_line(f"{spec.name} of {len(task.peers)} processes; the chief, {task.peers[0]}, records the run")
    before = spec.events.stat().st_size if spec.events.exists() else 0
    board = TensorBoardWriter(spec.folder / TENSORBOARD) if plan.tracking.tensorboard and spec.records else None
    offline = plan.tracking.offline
    recorder = Recorder(
        tracker, spec.events, before, is_resumed=is_resumed, offline=offline, writer=board, keeps=spec.records
    )
    run = choose_run_class(plan)
    with contextlib.nullcontext(sweep_context.stop) if sweep_context else catch_stop_signals() as stop:
        outcome = run(spec, recorder, display, stop, sweep_context.on_event if sweep_context else None).run()
        refusal = recorder.refusal or outcome.refusal
        if refusal is not None:
            more = f"\n{words_on_what_stays(spec, outcome)}" if outcome.step else ""
            complain(str(mask_secrets(str(refusal))) + more)
            return report_refusal(spec, recorder, outcome)
        return finish_run(spec, recorder, display, stop, outcome)


def write_configs(spec: RunSpec, config: Any, overrides: Sequence[str]) -> None:
    """What was asked, secrets masked; by the command that records the run, since machines may share a folder.

    Raises:
        ConfigError: if the folder is another run's.
    """
    if not spec.records:
        return
    if has_run(spec.folder):
        folder = os.path.relpath(spec.folder)
        raise ConfigError(f"hydra.run.dir={folder}: holds a run already; resume={folder} goes on with it")
    (spec.folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(mask_secrets(config))))
    (spec.folder / "overrides.yaml").write_text(OmegaConf.to_yaml([mask_override(o) for o in overrides]))


def write_resume_files(spec: RunSpec, overrides: Sequence[str], attempt: int) -> None:
    """What was asked of a run that goes on, once nobody else writes to its folder and its earlier life has an end.

    Raises:
        ConfigError: if somebody does.
    """
    if not spec.records:
        return
    writing = make_write_lock(spec.folder)
    acquire_lock(writing)
    finalize_run(spec.folder)
    writing.release()  # the worker takes it
    path = spec.folder / f"resume-{attempt}.yaml"
    path.write_text(OmegaConf.to_yaml([mask_override(o) for o in overrides]))


def explain_not_adopted(folder: Path) -> str | None:
    """What is said where the environment names another run than the one that goes on."""
    named, own = os.environ.get(RUN_ID), read_recorder_state(folder / STATE).get("run_id")
    if not named or named == own:
        return None
    return f"note: {RUN_ID}={named} is not used: the run that goes on is {own or 'the one in its folder'}"


def write_environment(folder: Path) -> None:
    """The versions of everything that is installed."""
    found = sorted({f"{d.name}=={d.version}" for d in distributions()}, key=str.lower)
    (folder / "environment.txt").write_text(f"python=={sys.version.split()[0]}\n" + "\n".join(found) + "\n")


class StopRequest:
    """Whether, and by which signal, the user or the system asked for an end."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.times = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.times += 1

    def is_set(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Turns SIGINT and SIGTERM into a flag; elsewhere than in the main thread they stay as they are."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RunState:
    """How a run ended.

    Attributes:
        code: the exit code.
        last: the last event, `end` or `refused`.
        fault: what the chief reported.
        step: the last one that a metric was reported of.
        checkpoint: the step of the newest one.
        heard: when the chief's last event arrived here, by this process's monotonic clock.
        is_under_way: whether this life's processes have built everything.
        waiting: the event that says that a worker waits for others, or for a TPU, as long as it does.
        waits_since: when that event arrived here.
        test: the test metrics.
    """

    def __init__(self) -> None:
        self.code = FAILED
        self.last: Event = {}
        self.test: dict[str, float] = {}
        self.is_ready = False
        self.fault = ""
        self.step = 0
        self.checkpoint: int | None = None
        self.heard = 0.0
        self.is_under_way = False
        self.waiting: Event | None = None
        self.waits_since = 0.0

    @property
    def refusal(self) -> ConfigError | None:
        """Why there is no run, if there is none."""
        return ConfigError(self.last["message"]) if self.last.get("event") == "refused" else None

    def apply(self, event: Event) -> None:
        if event["event"] == "system":
            return  # no word of the chief's
        self.heard = time.monotonic()
        if event["event"] == "ready":
            self.is_ready = self.is_under_way = True
            self.checkpoint = event.get("resumed") or self.checkpoint
        elif event["event"] == "checkpoint":
            self.checkpoint = event["step"]
        elif event["event"] == "fault":
            self.fault = event["error"]
        elif event["event"] == "waiting":
            self.waiting, self.waits_since = event, self.heard
        elif event["event"] == "met":
            self.waiting = None
        elif event["event"] in ("end", "refused"):
            self.last = event
        elif event["event"] == "metrics":
            self.step = max(self.step, event["step"])
            self.test.update({k: v for k, v in event["values"].items() if k.startswith("test/")})


class WorkerRun:
    """A run whose workers are processes of their own."""

    def __init__(
        self,
        spec: RunSpec,
        recorder: Recorder,
        display: Display,
        stop: StopRequest,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._job = spec
        self._on_event = on_event
        self._recorder = recorder
        self._display = display
        self._stop = stop
        self._reader = EventReader(spec.events, spec.events.stat().st_size if spec.events.exists() else 0)
        self._outcome = RunState()
        self._reason: tuple[str, bool] | None = None
        self._has_logs = True
        self._restarts = 0
        self._began = 0.0
        self._lost: str | None = None
        self._died_at: list[int] = []

    def run(self) -> RunState:
        try:
            while self._run_attempts():
                pass
        except Exception as error:  # of the launcher itself: the run has to end truthfully all the same
            with contextlib.suppress(OSError):
                print(mask_secrets(traceback.format_exc()), end="", file=sys.stderr)
            self._reason = f"the launcher failed: {type(error).__name__}: {error}", False
        self._show_events()
        return self._finish()

    def _finish(self) -> RunState:
        """The last that is done: how the run ended is said, where that is not yet, and shown."""
        if not self._outcome.last:
            self._report_end()
            self._show_events()
        self._display.close()
        self._outcome.code = self._exit_code()
        return self._outcome

    def _run_attempts(self) -> bool:
        """The run's lives for as long as what forks its processes is there; gives whether they are started again."""
        with start_fork_server(self._job.server, self._lost) as self._server:
            while self._run_attempt():
                self._job = replace(self._job, attempt=self._job.attempt + 1)
                if self._lost == self._server:
                    return True
        return False

    def _run_attempt(self) -> bool:
        """One life of the run's processes; gives whether they are started again."""
        self._reason = None
        if not self._open_store():
            self._reason = self._recorder.reason, True
            return False
        self._began = time.monotonic()
        try:
            with self._processes() as processes:
                self._watch(processes)
                self._reason = self._reason or self._find_reason(processes)
                if not all(process.has_server for process in processes):
                    self._lost = self._server
        except ConfigError as refusal:  # there is no place for them
            self._reason, self._has_logs = (str(refusal), True), False
        self._show_events()
        return self._should_restart(*self._reason)

    @contextlib.contextmanager
    def _processes(self) -> Iterator[Sequence[RunProcess]]:
        """The run's processes on this machine, the chief's first; none outlives the block."""
        with (
            start_workers(*make_worker_specs(self._job), self._server) as processes,
            record_system_metrics(self._job, make_machine_metrics(self._job, processes)),
        ):
            yield processes

    def _open_store(self) -> bool:
        """Starts the recorder, and waits until it knows of its store: nothing is computed that may have to be refused.

        The server imports TensorFlow in the meantime.
        """
        if not self._recorder.is_alive() and not self._recorder.done.is_set():
            if self._job.records:  # machines may share a folder
                write_environment(self._job.folder)
                write_provenance(self._job.folder, self._job.tags)
            self._recorder.start()
        while not self._recorder.is_settled.wait(POLL_SECONDS):
            if self._stop.is_set():
                return False
        return self._recorder.refusal is None

    def _find_reason(self, processes: Sequence[RunProcess]) -> tuple[str, bool]:
        """Why this life of the processes came to its end, and whether a worker said so of itself."""
        return choose_reason(processes)

    def _should_restart(self, why: str, is_own_word: bool) -> bool:
        """Whether all processes are started again, from the last checkpoint, after what one of them died of.

        What a worker reports itself would come again; but for the loss of another.
        """
        outcome, step = self._outcome, self._outcome.step
        if (
            self._stop.is_set()
            or outcome.last
            or not outcome.is_ready
            or self._recorder.refusal is not None
            or is_own_word
            or self._restarts >= self._allowed_restarts
        ):
            return False
        if self._died_at[-SAME_STEP:] == [step] * SAME_STEP:
            self._reason = f"{why}; it died at step {step} each of the last {SAME_STEP + 1} times", is_own_word
            return False
        self._died_at.append(step)
        self._report_restart(f"{why}; all start again from the last checkpoint")
        outcome.fault, outcome.waiting = "", None
        outcome.is_under_way = False
        return True

    def _report_restart(self, why: str) -> None:
        self._restarts += 1
        tell = EventWriter(self._job.events)
        tell("restart", number=self._restarts, reason=why)
        tell("note", text=f"{why} ({self._restarts} of at most {self._allowed_restarts})")
        tell.close()

    @property
    def _allowed_restarts(self) -> int:
        plan = self._job.plan
        if plan.cluster.max_restarts is not None:
            return plan.cluster.max_restarts
        is_asynchronous_here = plan.strategy.name == "parameter_server" and plan.cluster.name == "local"
        return MOST_RESTARTS if is_asynchronous_here or plan.cluster.name == "ray" else 0

    def _watch(self, processes: Sequence[RunProcess]) -> None:
        """Shows events until the chief is gone, and hands on what asks for an end."""
        deadline: float | None = None
        chief = processes[0]
        while chief.is_alive:
            self._show_events()
            if self._recorder.refusal is not None:
                chief.kill()
            if self._stop.is_set() and deadline is None:
                for process in processes:
                    if not process.job.serves:  # those end with the coordinator
                        process.stop()
                self._display.print_line(
                    f"stopping ({signal.Signals(self._stop.signal or 0).name}); again to stop at once"
                )
                deadline = time.monotonic() + GRACE_SECONDS
            if self._outcome.last and deadline is None:  # all is said; what the chief still waits for may be gone
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and (
                self._stop.times > 1 or time.monotonic() > deadline or not self._outcome.is_ready
            ):
                chief.kill()
            self._end_futile_wait(chief)
            self._end_stalled(processes)
            lost = find_lost(processes)
            if lost and not self._outcome.last and not all(self._start_again(process) for process in lost):
                time.sleep(POLL_SECONDS)  # for the others' words about it
                return
            chief.wait(POLL_SECONDS)

    def _start_again(self, process: RunProcess) -> bool:
        """Starts a lost worker again, if the coordinator goes on without it and not too many were lost."""
        if (
            not (process.job.is_replaceable and process.has_server and self._outcome.is_ready)
            or self._stop.is_set()
            or self._restarts >= self._allowed_restarts
        ):
            return False
        how = process.start_again()
        self._report_restart(f"{process.job.name} {how}; it is started again")
        return True

    def _end_stalled(self, processes: Sequence[RunProcess]) -> None:
        """Ends processes that have made no progress for too long: what one of them waits for will not come.

        What counts is when events arrive here. The clock of the chief's machine may be wrong.
        Until they have built everything they may be silent for `cluster.start_seconds` longer.
        """
        cluster, outcome = self._job.plan.cluster, self._outcome
        if cluster.stall_seconds is None or outcome.last or self._stop.is_set():
            return
        extra = 0.0 if outcome.is_under_way else cluster.start_seconds
        if time.monotonic() - max(outcome.heard, self._began) > cluster.stall_seconds + extra:
            more = f" + cluster.start_seconds={extra:g}" if extra else ""
            why = f"no progress for cluster.stall_seconds={cluster.stall_seconds:g}{more}, at step {outcome.step}"
            task = find_task(self._job.plan)
            if task and (away := find_unreachable(self._job.plan, task.peers)):
                why += f"; no answer from {away}"
            self._reason = why, False
            for process in processes:
                process.kill()

    def _end_futile_wait(self, chief: RunProcess) -> None:
        """Ends a worker that waits in vain; it can't do so itself, since TensorFlow's waiting stops its threads."""
        waiting = self._outcome.waiting
        if waiting is None or time.monotonic() < self._outcome.waits_since + waiting["seconds"]:
            return
        self._reason = waiting.get("vain") or self._find_absent(waiting), True
        chief.kill()

    def _find_absent(self, waiting: Event) -> str:
        absent = find_unreachable(self._job.plan, waiting["peers"])
        who = f"{absent} did not come" if absent else "all answer, and one of them does not begin"
        return f"cluster.start_seconds={waiting['seconds']:g}: {who}"

    def _show_events(self) -> None:
        for event in self._reader.read():
            self._outcome.apply(event)
            self._display.show_event(event)
            if self._on_event is not None:
                self._on_event(event)

    def _report_end(self) -> None:
        """Appends the last word where no worker has said it."""
        error, is_own_word = self._reason or ("it ended without a reason", False)
        status = "FAILED"
        if self._stop.is_set():
            status, error = "KILLED", f"stopped by {signal.Signals(self._stop.signal or 0).name}"
        last: Event = {"event": "end", "status": status, "error": error}
        if not self._outcome.is_ready:
            keeps = self._has_logs and not self._stop.is_set()
            last = {"event": "refused", "message": error, "keep": keeps, "died": not is_own_word}
        try:
            write = EventWriter(self._job.events)
            write(last["event"], **{key: value for key, value in last.items() if key != "event"})
            write.close()
        except OSError as full:
            self._report_unwritten_end(last, full)

    def _report_unwritten_end(self, last: Event, full: OSError) -> None:
        """The last word where not even that can be written: to the terminal and the store all the same."""
        key = "error" if last["event"] == "end" else "message"
        last[key] = f"{os.path.relpath(self._job.events)} can't be written: {full.strerror}; {last[key]}"
        last["time"] = int(time.time() * 1000)
        self._outcome.apply(last)
        self._display.show_event(last)
        self._recorder.add_event(last)

    def _exit_code(self) -> int:
        if self._outcome.last.get("status") == "KILLED" or (self._stop.is_set() and not self._outcome.is_ready):
            return 128 + (self._stop.signal or signal.SIGTERM)  # or a worker was told
        if self._recorder.refusal is not None:
            return REFUSED
        if self._outcome.last["event"] == "refused":
            return FAILED if self._outcome.last.get("died") else REFUSED
        return FINISHED if self._outcome.last["status"] == "FINISHED" else FAILED


class InlineRun(WorkerRun):
    """A run whose worker is this very process: for pdb, with output where it falls."""

    def run(self) -> RunState:
        if not self._open_store():
            self._reason = self._recorder.reason, True
            return self._finish()
        write = EventWriter(self._job.folder / EVENTS)
        with record_system_metrics(self._job, make_machine_metrics(self._job, [self])):
            self._work(write)
        self._display.close()
        self._outcome.code = self._exit_code()
        return self._outcome

    @property
    def job(self) -> RunSpec:
        return self._job

    @property
    def pid(self) -> int:
        return os.getpid()

    def _work(self, write: EventWriter) -> None:

        def emit(event: str, /, **fields: Any) -> None:
            write(event, **fields)
            self._show_events()
            if event == "ready":
                self._wait_for_run()

        try:
            if not run_worker(self._job, emit, self._has_to_stop) and self._outcome.is_ready:
                write("end", status="FAILED", error=self._outcome.fault)
        except ConfigError as refusal:  # of the store
            write("refused", message=str(refusal))
        self._show_events()

    def _has_to_stop(self) -> bool:
        return self._stop.is_set() or self._recorder.refusal is not None

    def _wait_for_run(self) -> None:
        """Waits a while until the store has the run: training can't be ended from outside if it refuses that.

        Raises:
            ConfigError: if it does.
        """
        deadline = time.monotonic() + SECONDS_TO_OPEN
        while not self._has_to_stop() and not self._recorder.has_taken(self._reader.offset):
            if self._recorder.reason or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
        if self._recorder.refusal is not None:
            raise self._recorder.refusal


def choose_run_class(plan: Plan) -> type[WorkerRun]:
    """Where its processes are."""
    if plan.debug.inline:
        return InlineRun
    if plan.cluster.name == "ray":
        from scaleflow.launcher.ray_supervisor import RayRun

        return RayRun
    return WorkerRun


def make_worker_specs(spec: RunSpec) -> tuple[list[RunSpec], list[Mapping[str, str]]]:
    """The jobs of the workers on this machine, the chief's first, and what their environments add.

    Raises:
        ConfigError: if the machine has too few GPUs for them.
    """
    if find_task(spec.plan) is not None or spec.plan.evaluator is not None:
        return [spec], [{**spec.environment, TF_CONFIG: str(read_tf_config(spec.plan))}]
    each = count_processes(spec.plan)
    count, options = sum(each.values()), spec.plan.hardware
    gpus = visible_gpus(spec.environment) if count > 1 and options.name not in ("cpu", "tpu") else []
    added = zip(environments(each), gpu_environments(each, options, gpus), strict=True)
    return [replace(spec, worker=number) for number in range(count)], [
        {**spec.environment, **peers, **own} for peers, own in added
    ]


def find_lost(processes: Sequence[RunProcess]) -> list[RunProcess]:
    """Those that have ended otherwise than well, and that nobody ended here."""
    return [process for process in processes if process.is_lost and not process.was_ended]


def choose_reason(processes: Sequence[RunProcess]) -> tuple[str, bool]:
    """Why a run came to its end: first what died without a word, then what a process reports of itself.

    Others report that they have lost it, which may come before its own word.

    Returns:
        The reason, and whether a worker said so of itself.
    """
    reasons = [process.reason() for process in find_lost(processes) or processes[:1]]
    first = min(reasons, key=lambda found: (found.is_reported, found.follows))
    return first.why, first.is_reported and not first.follows


def report_refusal(spec: RunSpec, recorder: Recorder, state: RunState) -> int:
    """There is no run: removes what was written for it, unless a log has more to say; gives the exit code.

    What was trained before the store refused the run stays.
    """
    if recorder.is_alive() and str(spec.plan.tracking.uri).startswith("sqlite:"):
        recorder.finish(MIGRATION_SECONDS)  # a process that ends while it makes a store leaves half a store
    recorder.stop()
    is_of_use = spec.is_resumed or state.step > 0
    if not is_of_use and (recorder.refusal is not None or not state.last.get("keep")):
        discard_folder(spec)
    return REFUSED if recorder.refusal is not None else state.code


def words_on_what_stays(spec: RunSpec, state: RunState) -> str:
    folder = os.path.relpath(spec.folder)
    return f"what was trained until step {state.step} is in {folder}; python -m scaleflow.sync {folder} records it"


def finish_run(spec: RunSpec, recorder: Recorder, display: Display, stop: StopRequest, state: RunState) -> int:
    """Waits for the recorder, and tells the user how it ended and where to look."""
    took = format_duration(time.time() - spec.started)
    signals, patience = stop.times, spec.plan.tracking.flush_seconds
    is_recorded = recorder.finish(patience, lambda: stop.times > signals)
    if state.last.get("error"):
        display.print_error(str(mask_secrets(state.last["error"])))
    rows = [("status", f"{state.last['status']} in {took}")]
    rows += [(k.replace("/", " "), f"{v:.4f}") for k, v in state.test.items()]
    rows += [("profile", line) for line in recorder.profiles.values()]
    rows += [("output", os.path.relpath(spec.folder))]
    if state.last["status"] != "FINISHED" and state.checkpoint is not None:
        rows += [
            ("go on", f"python -m scaleflow resume={os.path.relpath(spec.folder)}  (from step {state.checkpoint})")
        ]
    if is_recorded:
        rows += recorder.describe_links()
    display.print_summary(rows)
    if not is_recorded:
        display.print_error(
            f"the store did not take {'everything' if recorder.recorded else 'anything'} in "
            f"tracking.flush_seconds={patience:g}: {mask_secrets(recorder.reason or NO_ANSWER)}; nothing is "
            "lost, and what "
            f"is missing there is sent by: python -m scaleflow.sync {os.path.relpath(spec.folder)}"
        )
    return state.code


def discard_folder(spec: RunSpec) -> None:
    """Removes what this command wrote for a run that is not to be, and the empty folders that it created."""
    folder = spec.folder
    own = [spec.log, spec.events]
    if spec.records:
        if find_task(spec.plan) is None:  # those of other machines may share the folder, and still write there
            own = [path for pattern in OF_PROCESSES for path in folder.glob(pattern)]
        own += [folder / name for name in (*KEPT, STATE, WRITE_LOCK, RECORD_LOCK, PROVENANCE)]
    for path in own:
        path.unlink(missing_ok=True)
    remove_created(folder)
