"""Runs the changed stages of a pipeline in processes. Stages that do not depend on each other run in parallel."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
from omegaconf import OmegaConf

from scaleflow.config.compose import config_dir_flags
from scaleflow.config.trust import list_own_modules
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError, RunError
from scaleflow.features.pipelines.decisions import LEAVE, REUSE, RUN, SKIP, Decider, StageProgress
from scaleflow.features.pipelines.ledger import StageRecord
from scaleflow.features.pipelines.recording import (
    STAGE_TAG,
    describe_pipeline,
    describe_stage_run,
    list_results,
    summarize_outputs,
    write_picture,
    write_stages,
)
from scaleflow.features.pipelines.stage_commands import TRAIN
from scaleflow.interfaces import Status, Tracking
from scaleflow.interfaces.clock import CLOCK
from scaleflow.interfaces.formatting import format_csv
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import FAILED, FINISHED, JSON
from scaleflow.launcher.display import Display
from scaleflow.launcher.executor import Portion, Work, run_side_by_side
from scaleflow.launcher.prepare import STAGE_TAGS
from scaleflow.launcher.processes.stop import PartStop, StopRequest
from scaleflow.launcher.recording.recorder import CommandRun
from scaleflow.launcher.recording.recovery import repair_quietly
from scaleflow.launcher.recording.request_cursor import PIPELINE
from scaleflow.runs import RunFolder
from scaleflow.runs.provenance.tags import command_line
from scaleflow.runs.state import RunState
from scaleflow.tracking import RUN_ID
from scaleflow.tracking.tracked_runs import STAGE_BEGAN

PROGRAM = "scaleflow.features.pipelines.stage_process"

#: Output of a stage's process, in the stage's folder.
LOG = "stage.log"

#: Seconds between checks of a process, or of the workers it left behind.
LOOK_SECONDS = 0.05

#: Maximum seconds to wait for a killed command's workers: they first save a checkpoint.
LEFT_SECONDS = 90.0

#: Exit codes of processes ended by a signal: this plus the signal's number.
SIGNAL_BASE = 128


class StageProcess:
    """The process of a stage. The end of a `with` block terminates it if it is still alive.

    Args:
        name: name of the stage, for the terminal.
        words: words after `scaleflow`.
        folder: the stage's folder, which must exist.
        environment: variables to add. MLFLOW_RUN_ID is left out, because it names the pipeline's own run.

    Attributes:
        answer: the command's answer; {} until it ends, or if it was killed before answering.

    Raises OSError if the process cannot be started.
    """

    def __init__(self, name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._log = folder / LOG
        self._position = self._log.stat().st_size if self._log.exists() else 0
        self.answer: dict[str, Any] = {}
        command = [sys.executable, "-m", PROGRAM, str(os.getpid()), *words, JSON]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**{key: value for key, value in os.environ.items() if key != RUN_ID}, **environment},
                start_new_session=True,  # this process passes Ctrl-C on, so it arrives once
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def identity(self) -> tuple[int, float]:
        """Process id, and start of the process in seconds since the epoch."""
        with contextlib.suppress(psutil.Error):
            return self._process.pid, psutil.Process(self._process.pid).create_time()
        return self._process.pid, 0.0

    def wait(self, display: Display, stop: StopRequest) -> int:
        """Shows the process's output and forwards signals until it ends. Returns its exit code."""
        forwarded = 0
        code = None
        while code is None:  # wait first: a signal while Python starts gives a traceback
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(LOOK_SECONDS)
            self._show_output(display)
            asked = max(1, stop.times) if stop.is_set() else 0
            if asked > forwarded:
                forwarded = asked
                self._process.send_signal(stop.signal or signal.SIGTERM)
        return code if code >= 0 else SIGNAL_BASE - code

    def _show_output(self, display: Display) -> None:
        """Shows the lines printed since the last call, and reads the answer."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._position)
            content = log.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._position += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if not line.startswith('{"exit_code":'):
                    display.print_line(f"[{self._name}] {line}")
                    continue
                with contextlib.suppress(ValueError):
                    self.answer = json.loads(line)


def end_orphaned_process(identity: Sequence[float]) -> None:
    """Terminates a stage's process left by a killed pipeline, if it is still alive, and waits for its end."""
    pid = int(identity[0])
    began = float(identity[1])
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - began) > 1.0:
            return  # the id belongs to another process now
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LEFT_SECONDS
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.1)


#: State of a stage that does not run, by decision.
STATES = {REUSE: "reused", SKIP: "skipped", LEAVE: "left out"}

#: The record of a stage that has never run.
NO_RECORD = StageRecord({}, attempt=0, execution=0, status="")

#: Description of a run until it ends.
UNFINISHED = "**RUNNING.** The results follow at the end."


def find_runs_of(stage: Path) -> list[Path]:
    """Returns the folder of a stage, and of the jobs if it is a sweep."""
    return [stage, *sorted(path.parent for path in stage.glob("*/events.jsonl"))]


def wait_for_workers(stage: Path, stop: StopRequest) -> None:
    """Waits until the workers of a killed stage have ended, or a signal arrives, or LEFT_SECONDS pass."""
    deadline = time.monotonic() + LEFT_SECONDS
    while any(RunFolder(folder).is_locked for folder in find_runs_of(stage)):
        if stop.is_set() or time.monotonic() > deadline:
            return
        time.sleep(LOOK_SECONDS)


def repair_missing(folder: Path) -> None:
    """Marks an unfinished run in this folder as ended, and sends its missing records to the store."""
    if RunFolder(folder).events.is_file():
        repair_quietly(folder)


class PipelineRunner:
    """Runs a pipeline whose folder is locked.

    Args:
        count: how many stages run in parallel.

    Attributes:
        status: status of the pipeline; valid after `run`.
        stages: progress of each stage, in running order.
    """

    def __init__(
        self, decider: Decider, tracking: Tracking, display: Display, *, stop: StopRequest, count: int
    ) -> None:
        self._pipeline = decider.pipeline
        self._ledger = decider.ledger
        self._decider = decider
        self._tracking = tracking
        self._display = display
        self._stop = stop
        self._count = count
        self._stop_of_stages = PartStop(stop)
        self._lock = threading.Lock()  # guards the attributes below and the ledger
        self._parent: CommandRun | None = None
        self._closing: list[CommandRun] = []
        self._fault = ""  # a disk error that stops all stages
        self.status: Status = "FINISHED"
        known = self._ledger.records
        self.stages = []
        for name, stage in self._pipeline.stages.items():
            self.stages.append(StageProgress(stage, known.get(name, NO_RECORD)))

    def run(self) -> int:
        """Runs the stages and returns the exit code.

        Raises ConfigError if the store cannot be used, before any stage has run.
        """
        if self._ledger.status == "RUNNING":  # it was killed: end its own run as well
            self._open()
        self._end_left_stages()
        try:
            run_side_by_side(self._begin_next, self._count, self._stop_of_stages.end_part)
        except OSError as error:  # disk full, or folder gone
            self._fault = f"{error.strerror or error}: {error.filename or self._ledger.folder}"
        return self._end()

    def _end_left_stages(self) -> None:
        """Cleans up after a command that was killed or could not reach its store, so that no run stays RUNNING."""
        for name, record in self._ledger.records.items():
            if record.process is not None:
                end_orphaned_process(record.process)
            if record.status == "RUNNING":
                record.status = "KILLED"
                record.reason = "the pipeline was killed"
            self._repair_stage(name, record)
        if self._parent is None:
            repair_missing(self._ledger.run_folder)

    def _repair_stage(self, name: str, record: StageRecord) -> None:
        """Sends the store the missing records of a stage's runs, and reads their ids if they were not known."""
        folder = self._ledger.find_folder(name, record.attempt)
        stage = self._pipeline.stages.get(name)
        for run_folder in find_runs_of(folder):
            repair_missing(run_folder)
        is_known = None not in (record.outputs.get("run_id"), record.outputs.get("model"))
        if stage is not None and stage.command.has_own_run and record.status == "FINISHED" and not is_known:
            record.outputs |= stage.command.read_run(folder)

    def _begin_next(self, portion: Portion) -> Work | None:
        """Begins the next stage that has to run.

        Returns the function that runs it to its end, or None if none can begin now.
        """
        with self._lock:
            for progress in self.stages:
                before = [other for other in self.stages if other.name in self._pipeline.needs[progress.name]]
                if self._stop.is_set() or progress.state or not all(other.is_over for other in before):
                    continue
                bad = [other for other in before if not other.is_good]
                if bad:
                    if all(other.state == "skipped" for other in bad):
                        state = "skipped"
                    elif self._decider.is_wanted(progress.name):
                        state = "not run"
                    else:
                        state = "left out"
                    self._show(progress, state, f"{bad[0].name} is {bad[0].state}")
                    continue
                try:
                    progress.decision = self._decider.decide(progress.stage)
                except ConfigError as refusal:
                    self._show(progress, "FAILED", str(refusal))
                    continue
                if progress.decision.action == RUN:
                    return self._begin(progress, portion)
                self._show(progress, STATES[progress.decision.action], progress.decision.why)
        return None

    def _show(self, progress: StageProgress, state: str, reason: str = "") -> None:
        progress.state = state
        progress.reason = reason
        line = f"[{progress.name}] {state}"
        if reason:
            line += f": {reason}"
        self._display.print_line(line)

    def _begin(self, progress: StageProgress, portion: Portion) -> Work:
        """Begins a stage, after opening the pipeline's own run. Returns the function that runs its process."""
        self._open()
        key = progress.decision.key
        attempt = progress.record.attempt + (0 if progress.decision.continues else 1)
        folder = self._ledger.find_folder(progress.name, attempt)
        is_forced = progress.name in self._decider.forced
        folder.mkdir(parents=True, exist_ok=True)
        assert key is not None
        progress.record = StageRecord(key, attempt, self._ledger.execution, began=CLOCK.read(), is_forced=is_forced)
        self._ledger.records[progress.name] = progress.record
        self._ledger.save()
        words = self._make_words(progress, folder)
        tags = {PIPELINE: str(self._ledger.run_folder), STAGE_TAG: progress.name}
        environment = {**portion, STAGE_TAGS: json.dumps(tags)}
        run = None
        if not progress.stage.command.has_own_run:
            run = self._open_stage_run(progress.name, words, folder, tags=tags)
            environment[STAGE_BEGAN] = str(run.began)
            if self._tracking.uri is not None:  # where it finds the runs of earlier stages
                environment["MLFLOW_TRACKING_URI"] = self._tracking.uri
        progress.state = "RUNNING"
        self._display.print_line(f"[{progress.name}] {progress.stage.command.name}: {progress.decision.why}")
        return partial(self._run_stage, progress, run, words, environment=environment)

    def _make_words(self, progress: StageProgress, folder: Path) -> list[str]:
        dirs = self._pipeline.config_dirs
        command = progress.stage.command
        values = progress.decision.values
        if command is TRAIN and RunState.read(folder).has_begun:
            return [*config_dir_flags(dirs), make_override("resume", folder)]
        words = command.make_words(values, folder, dirs)
        if "trust" in command.flags:
            run_folder = self._decider.find_folder_of_run(str(values["run"]))
            if run_folder:  # a run of this pipeline, whose code is the user's own
                config: Any = OmegaConf.to_container(OmegaConf.load(RunFolder(run_folder).config), resolve=False)
                for module in list_own_modules(config):
                    words += ["--trust", module]
        return words

    def _open_stage_run(self, name: str, words: Sequence[str], folder: Path, tags: Mapping[str, str]) -> CommandRun:
        run = CommandRun(folder, f"the run of the stage {name}")
        params = {"command": shlex.join(["scaleflow", *words])[:6000]}
        parent = self._ledger.run_folder
        run.open(f"{self._pipeline.name} {name}", self._tracking, tags=tags, params=params, parent=parent)
        run.add({}, text=UNFINISHED)
        return run

    def _run_stage(
        self, progress: StageProgress, run: CommandRun | None, words: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Runs a stage's process to its end. `run` is the stage's run if its command records none."""
        folder = self._ledger.find_folder(progress.name, progress.record.attempt)
        with StageProcess(progress.name, words, folder, environment=environment) as process:
            with self._lock:
                progress.record.process = process.identity
                self._ledger.save()
            code = process.wait(self._display, self._stop_of_stages)
        if code > SIGNAL_BASE:
            wait_for_workers(folder, self._stop)
        with self._lock:
            self._finish_stage(progress, code, process.answer, folder=folder)
            if run is not None:
                self._end_stage_run(progress, run, folder)
            self._ledger.save()
            self._show(progress, progress.record.status, progress.record.reason)

    def _finish_stage(self, progress: StageProgress, code: int, answer: Mapping[str, Any], folder: Path) -> None:
        """Stores a stage's status and outputs in its record."""
        record = progress.record
        stage = progress.stage
        values = progress.decision.values
        record.ended = CLOCK.read()
        record.process = None
        if code in stage.command.good:
            record.status = "FINISHED"
            try:
                record.outputs = stage.command.read_outputs(answer, values, folder)
                record.files = stage.command.list_files(values, record.outputs)
                if stage.command.has_own_run:
                    self._repair_stage(stage.name, record)
            except ConfigError as refusal:
                record.status = "FAILED"
                record.reason = str(refusal)
            except (OSError, KeyError, ValueError) as error:
                record.status = "FAILED"
                record.reason = f"its answer cannot be read: {error}"
        else:
            record.status = "KILLED" if code > SIGNAL_BASE else "FAILED"
            record.reason = str(answer.get("error") or f"exit code {code}")

    def _end_stage_run(self, progress: StageProgress, run: CommandRun, folder: Path) -> None:
        """Records the end of a stage in its own run.

        If this command is killed afterwards, the next one repeats the stage.
        """
        record = progress.record
        stage = progress.stage
        outputs = record.outputs if record.status == "FINISHED" else {}
        links = {f"scaleflow.{key}": str(outputs[key]) for key in ("run_id", "model") if outputs.get(key)}
        words = stage.command.make_words(progress.decision.values, folder, self._pipeline.config_dirs)
        text = record.reason or summarize_outputs(stage, outputs)
        command = shlex.join(["scaleflow", *words])
        text = describe_stage_run(stage.name, record.status, text, outputs=outputs, command=command)
        files = [folder / name for name in (LOG, *stage.command.files)]
        run.add(outputs.get("metrics") or {}, files, tags=links, text=text)
        run.end(record.status, record.reason)  # type: ignore[arg-type]
        self._closing.append(run)

    def _open(self) -> None:
        """Opens the pipeline's own run: continues an unfinished command's run, or begins a new one."""
        if self._parent is not None:
            return
        if self._ledger.status == "FINISHED":
            self._ledger.execution += 1
        self._ledger.status = "RUNNING"
        folder = self._ledger.run_folder
        name = self._pipeline.name
        self._parent = CommandRun(folder, "the pipeline's own run")
        self._ledger.save()
        (folder / "pipeline.yaml").write_text(str(mask_secrets(self._pipeline.text)))
        tags = {PIPELINE: str(folder), "scaleflow.command": command_line(sys.orig_argv)}
        earlier = self._ledger.find_earlier_run_folder()
        self._parent.open(name, self._tracking, tags=tags, params={"pipeline": name}, earlier=earlier)
        self._parent.add({}, text=UNFINISHED)
        refusal = self._parent.refusal
        if refusal is not None:
            raise ConfigError(str(refusal))

    def _end(self) -> int:
        """Ends the pipeline's own run, waits for the store, and returns the exit code."""
        states = {stage.state for stage in self.stages}
        is_bad = bool(self._fault) or not states.isdisjoint(("FAILED", "KILLED", "not run"))
        is_stopped = self._stop.is_set() and (is_bad or "" in states)
        if is_stopped:
            self.status = "KILLED"
            code = self._stop.exit_code
        elif is_bad:
            self.status = "FAILED"
            code = FAILED
        else:
            self.status = "FINISHED"
            code = FINISHED
        is_whole = self.status == "FINISHED" and "left out" not in states
        if self._parent is None and is_whole and self._ledger.status != "FINISHED":
            self._open()  # an earlier command stopped after its last stage
        if self._parent is None:
            return code
        try:
            self._record_end(self._parent)
        except OSError as error:
            raise RunError(f"{self._ledger.folder}: cannot be written: {error.strerror}") from error
        return code

    def _record_end(self, run: CommandRun) -> None:
        are_closed = [run.finish(self._stop) for run in self._closing]
        rows = list_results(self.stages, self._ledger)
        folder = self._ledger.run_folder
        (folder / "results.csv").write_text(format_csv(rows[0], rows[1:]))
        files = [
            folder / "pipeline.yaml",
            write_stages(self.stages, self._ledger, self._pipeline.config_dirs),
            folder / "results.csv",
            write_picture(self.stages, self._pipeline.needs, folder),
        ]
        run.add({}, files, text=describe_pipeline(self.status, rows, command_line(sys.orig_argv)))
        run.end(self.status, self.find_error() or "")
        self._ledger.status = self.status  # only now: after a kill, the same command ends the run
        self._ledger.save()
        run.finish(self._stop)
        if all(are_closed):
            for name, record in self._ledger.records.items():
                if record.status in ("FINISHED", "KILLED"):
                    self._repair_stage(name, record)

    def find_error(self) -> str | None:
        """Returns why the first failed stage failed; None if none did."""
        failed = (f"{stage.name}: {stage.reason}" for stage in self.stages if stage.state == "FAILED")
        return next(failed, self._fault or None)

    def list_rows(self) -> list[tuple[str, str]]:
        """Returns the summary at the end, as (label, text): each stage's result, the folder, and links to the run."""
        rows = []
        for progress in self.stages:
            text = progress.state or "not run"
            details = progress.reason or summarize_outputs(progress.stage, progress.outputs)
            if details:
                text += f"  {details}"
            rows.append((progress.name, text))
        rows.append(("output", os.path.relpath(self._ledger.folder)))
        if self._parent:
            rows += self._parent.describe_links()
        if self.status != "FINISHED":
            rows.append(("go on", "the same command again"))
        return rows

    def describe(self) -> dict[str, Any]:
        """Returns the answer for `--json`."""
        stages = {}
        for progress in self.stages:
            status = {"status": progress.state or "not run", "reason": progress.reason or None}
            stages[progress.name] = {**status, **progress.outputs}
        return {"status": self.status, "folder": os.path.abspath(self._ledger.folder), "stages": stages}  # noqa: PTH100
