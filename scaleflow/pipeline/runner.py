"""Runs the stages of a pipeline that changed, in processes, side by side where they do not depend on each other."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf

from scaleflow.config.compose import config_dir_flags
from scaleflow.config.trust import list_own_modules
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import Status, Tracking
from scaleflow.interfaces.formatting import format_csv
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.answer import FAILED, FINISHED, JSON
from scaleflow.launcher.display import Display
from scaleflow.launcher.prepare import STAGE_TAGS
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.recording.recorder import CommandRun
from scaleflow.launcher.recording.recovery import repair_quietly
from scaleflow.launcher.recording.store_transfer import PIPELINE
from scaleflow.pipeline.decisions import LEAVE, REUSE, RUN, SKIP, Decider, StageDecision
from scaleflow.pipeline.definition import Stage
from scaleflow.pipeline.recording import (
    STAGE_TAG,
    describe_pipeline,
    describe_stage_run,
    list_results,
    summarize_outputs,
    write_picture,
    write_stages,
)
from scaleflow.pipeline.stage_commands import (
    REPORT,
    find_named_files,
    make_words,
    read_outputs,
    read_run,
)
from scaleflow.pipeline.state import StageRecord
from scaleflow.runs import RunFolder
from scaleflow.runs.provenance.tags import command_line
from scaleflow.runs.state import RunState
from scaleflow.sweep.runner import make_environments
from scaleflow.tracking import RUN_ID
from scaleflow.tracking.tracked_runs import STAGE_BEGAN

PROGRAM = "scaleflow.pipeline.stage_process"

#: The output of a stage's process, in its folder.
LOG = "stage.log"

#: Seconds to wait for a process of an earlier command that was killed: it saves a checkpoint first.
LEFT_SECONDS = 90.0

#: The exit code of a process that a signal ended, by what Popen returns.
SIGNAL_BASE = 128


class StageProcess:
    """The process of a stage.

    Args:
        name: of the stage, for the terminal.
        words: those after `scaleflow`.
        folder: the stage's folder, which exists.
        environment: variables to add. MLFLOW_RUN_ID is left out: it names the pipeline's own run.

    Attributes:
        answer: what the command has answered; {} until its end, or if it was killed before.

    Raises OSError if it cannot be started.
    """

    def __init__(self, name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
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
                start_new_session=True,  # Ctrl-C reaches it from here, and once
            )

    @property
    def identity(self) -> tuple[int, float]:
        """The process id, and when the process began, in seconds since the epoch."""
        with contextlib.suppress(psutil.Error):
            return self._process.pid, psutil.Process(self._process.pid).create_time()
        return self._process.pid, 0.0

    def poll(self) -> int | None:
        """Returns the exit code; None while the process is alive."""
        code = self._process.poll()
        return None if code is None else code if code >= 0 else SIGNAL_BASE - code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def show_output(self, display: Display) -> None:
        """Shows the lines that the process has printed since the last call, and reads its answer."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._position)
            content = log.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._position += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if not line.startswith('{"exit_code":'):
                    display.print_line(f"[{self.name}] {line}")
                    continue
                with contextlib.suppress(ValueError):
                    self.answer = json.loads(line)


def end_left_process(identity: Sequence[float]) -> None:
    """Ends the process of a stage whose pipeline was killed, if it is still alive, and waits for it."""
    pid, began = int(identity[0]), float(identity[1])
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - began) > 1.0:
            return  # another process has its id now
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LEFT_SECONDS
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.1)


#: The description of a run until its end.
RUNNING = "**RUNNING.** The results follow at the end."

#: Seconds between looks at the processes.
LOOK_SECONDS = 0.05

#: The state of a stage that does not run, by what was decided.
STATES = {REUSE: "reused", SKIP: "skipped", LEAVE: "left out"}

#: States of stages that are over, and after which those that need them can run.
OVER, GOOD = ("FINISHED", "reused", "skipped", "FAILED", "KILLED", "not run", "left out"), ("FINISHED", "reused")


@dataclass
class Execution:
    """A stage that runs."""

    stage: Stage
    decision: StageDecision
    process: StageProcess
    folder: Path
    run: CommandRun | None  # of a stage whose command records none
    slot: dict[str, str] = field(default_factory=dict)  # its part of the devices


def repair_missing(folder: Path) -> None:
    """Ends the run in a folder and sends what the store lacks of it, unless it is finished and recorded."""
    if RunFolder(folder).events.is_file():
        repair_quietly(folder)


class PipelineRunner:
    """Runs a pipeline, whose folder is locked.

    Args:
        jobs: how many stages run at a time.

    Attributes:
        status: of the pipeline, when it is over.
        decisions: about the stages that could be decided.
        states: of each stage, in words.
        reasons: why a stage did not finish.
    """

    def __init__(self, decider: Decider, tracking: Tracking, display: Display, stop: StopRequest, jobs: int) -> None:
        self._pipeline, self._state, self._decider = decider.pipeline, decider.state, decider
        self._tracking, self._display, self._stop = tracking, display, stop
        self._slots = [*make_environments(jobs)]
        self._running: dict[str, Execution] = {}
        self._closing: list[CommandRun] = []
        self._run: CommandRun | None = None
        self._signals = 0
        self.status: Status = "FINISHED"
        self.decisions: dict[str, StageDecision] = {}
        self.states: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def run(self) -> int:
        """Runs the stages; returns the exit code. Raises ConfigError if the store cannot be used before any has run."""
        if self._state.status == "RUNNING":  # it was killed: its own run has no end
            self._open()
        self._end_left_stages()
        try:
            while not self._is_over():
                self._begin_stages()
                self._look()
                if self._running:
                    time.sleep(LOOK_SECONDS)
        except OSError as error:  # the disk is full, or the folder is gone
            self._stop_stages()
            self.reasons.setdefault("", f"{error.strerror or error}: {error.filename or self._state.folder}")
        finally:
            self._stop_stages()
        return self._end()

    def _is_over(self) -> bool:
        if self._stop.is_set():
            return not self._running
        return all(self.states.get(name) in OVER for name in self._pipeline.stages)

    def _end_left_stages(self) -> None:
        """Ends what an earlier command left that was killed, or whose store was away, so that no run stays RUNNING."""
        for name, record in self._state.records.items():
            if record.process is not None:
                end_left_process(record.process)
            if record.status == "RUNNING":
                record.status, record.reason = "KILLED", "the pipeline was killed"
            self._repair_stage(name, record)
        if self._run is None:
            repair_missing(self._state.run_folder)

    def _repair_stage(self, name: str, record: StageRecord) -> None:
        """Sends what the store lacks of the runs of a stage, and reads which they are if that was not known."""
        folder, stage = self._state.find_folder(name, record.attempt), self._pipeline.stages.get(name)
        for each in (folder, *sorted(path.parent for path in folder.glob("*/events.jsonl"))):  # of a sweep the jobs
            repair_missing(each)
        is_known = record.status != "FINISHED" or None not in (
            record.outputs.get("run_id"),
            record.outputs.get("model"),
        )
        if stage is not None and stage.command.has_own_run and not is_known:
            record.outputs |= read_run(stage.command, folder)

    def _begin_stages(self) -> None:
        for name, stage in self._pipeline.stages.items():
            if name in self.states or not all(self.states.get(each) in OVER for each in self._pipeline.needs[name]):
                continue
            bad = [each for each in self._pipeline.needs[name] if self.states[each] not in GOOD]
            if bad:
                is_skipped = all(self.states[each] == "skipped" for each in bad)
                state = "skipped" if is_skipped else "not run" if self._decider.is_wanted(name) else "left out"
                self._set(name, state, f"{bad[0]} is {self.states[bad[0]]}")
                continue
            if self._stop.is_set() or not self._slots:
                continue
            try:
                decision = self.decisions[name] = self._decider.decide(stage)
            except ConfigError as refusal:
                self._set(name, "FAILED", str(refusal))
                continue
            if decision.action == RUN:
                self._begin(stage, decision)
            else:
                self._set(name, STATES[decision.action], decision.why)

    def _set(self, name: str, state: str, reason: str = "") -> None:
        self.states[name] = state
        if reason:
            self.reasons[name] = reason
        self._display.print_line(f"[{name}] {state}{f': {reason}' if reason else ''}")

    def _begin(self, stage: Stage, decision: StageDecision) -> None:
        """Starts the process of a stage, after the pipeline's own run is open."""
        self._open()
        before = self._state.records.get(stage.name)
        attempt = 1 if before is None else before.attempt + (not decision.continues)
        folder = self._state.find_folder(stage.name, attempt).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        assert decision.key is not None
        is_forced = stage.name in self._decider.forced
        record = StageRecord(decision.key, attempt, self._state.execution, began=time.time(), is_forced=is_forced)
        self._state.records[stage.name] = record
        self._state.save()
        words = self._make_words(stage, decision, folder)
        tags = {PIPELINE: str(self._state.run_folder.absolute()), STAGE_TAG: stage.name}
        run = None
        if not stage.command.has_own_run:
            run = CommandRun(folder, f"the run of the stage {stage.name}")
            params, parent = {"command": shlex.join(["scaleflow", *words])[:6000]}, self._state.run_folder.absolute()
            name = f"{self._pipeline.name} {stage.name}"
            run.open(name, self._tracking, tags=tags, params=params, parent=parent)
            run.add({}, text=RUNNING)
        slot = self._slots.pop()
        environment = {**slot, STAGE_TAGS: json.dumps(tags)}
        if run is not None:
            environment[STAGE_BEGAN] = str(run.began)
            if self._tracking.uri is not None:  # where it finds the runs of the stages before it
                environment["MLFLOW_TRACKING_URI"] = self._tracking.uri
        process = StageProcess(stage.name, words, folder, environment)
        record.process = process.identity
        self._state.save()
        self.states[stage.name] = "RUNNING"
        self._display.print_line(f"[{stage.name}] {stage.command.name}: {decision.why}")
        self._running[stage.name] = Execution(stage, decision, process, folder, run, slot)

    def _make_words(self, stage: Stage, decision: StageDecision, folder: Path) -> list[str]:
        dirs = self._pipeline.config_dirs
        if stage.command.name == "train" and RunState.read(folder).is_ready:
            return [*config_dir_flags(dirs), make_override("resume", folder)]
        words = make_words(stage.command, decision.values, folder, dirs)
        if "trust" in stage.command.flags and (made := self._decider.find_run_folder(str(decision.values["run"]))):
            config: Any = OmegaConf.to_container(OmegaConf.load(RunFolder(made).config), resolve=False)
            words += [word for module in list_own_modules(config) for word in ("--trust", module)]
        return words

    def _look(self) -> None:
        """Shows what the processes print, passes signals on, and ends the stages whose processes have ended."""
        if self._stop.times > self._signals:
            self._signals = self._stop.times
            for each in self._running.values():
                each.process.send_signal(self._stop.signal or signal.SIGTERM)
        for name, each in [*self._running.items()]:
            code = each.process.poll()
            each.process.show_output(self._display)
            if code is not None:
                del self._running[name]
                self._slots.append(each.slot)
                self._finish_stage(each, code)

    def _finish_stage(self, each: Execution, code: int) -> None:
        record, name = self._state.records[each.stage.name], each.stage.name
        record.ended, record.process = time.time(), None
        answer = each.process.answer
        is_good = code in each.stage.command.good
        status = "FINISHED" if is_good else "KILLED" if code > 128 else "FAILED"
        reason = "" if is_good else str(answer.get("error") or f"exit code {code}")
        if is_good:
            try:
                record.outputs = read_outputs(each.stage.command, answer, each.decision.values, each.folder)
                if each.stage.command.name == "python":
                    record.files = find_named_files(each.decision.values, record.outputs)
                record.status = status
                if each.stage.command.has_own_run:
                    self._repair_stage(name, record)
            except ConfigError as refusal:
                status, reason = "FAILED", str(refusal)
            except (OSError, KeyError, ValueError) as error:
                status, reason = "FAILED", f"its answer cannot be read: {error}"
        record.status, record.reason = status, reason
        if each.run is not None:
            self._end_stage_run(each, each.run, record)
        self._state.save()
        self._set(name, status, reason)

    def _end_stage_run(self, each: Execution, run: CommandRun, record: StageRecord) -> None:
        """Records the end of a stage in its own run. A command that is killed after it does the stage again."""
        outputs = record.outputs if record.status == "FINISHED" else {}
        links = {f"scaleflow.{key}": str(outputs[key]) for key in ("run_id", "model") if outputs.get(key)}
        files = [each.folder / LOG, each.folder / REPORT, each.folder / "result.json"]
        text = record.reason or summarize_outputs(each.stage, outputs)
        words = make_words(each.stage.command, each.decision.values, each.folder, self._pipeline.config_dirs)
        command = shlex.join(["scaleflow", *words])
        text = describe_stage_run(each.stage.name, record.status, text, outputs, command)
        run.add(outputs.get("metrics") or {}, files, links, text)
        run.end(record.status, record.reason)  # type: ignore[arg-type]
        self._closing.append(run)

    def _open(self) -> None:
        """Opens the pipeline's own run: that of an earlier command which did not finish, or a new one."""
        if self._run is not None:
            return
        if self._state.status == "FINISHED":
            self._state.execution += 1
        self._state.status = "RUNNING"
        folder, name = self._state.run_folder.absolute(), self._pipeline.name
        self._run = CommandRun(folder, "the pipeline's own run")
        self._state.save()
        (folder / "pipeline.yaml").write_text(str(mask_secrets(self._pipeline.text)))
        tags = {PIPELINE: str(folder), "scaleflow.command": command_line(sys.orig_argv)}
        self._run.open(name, self._tracking, tags=tags, params={"pipeline": name})
        self._run.add({}, text=RUNNING)
        if (refusal := self._run.refusal) is not None:
            raise ConfigError(str(refusal))

    def _stop_stages(self) -> None:
        """Ends the processes that are still alive, and waits for them."""
        for each in self._running.values():
            each.process.send_signal(signal.SIGTERM)
        while self._running:
            try:
                self._look()
            except OSError:
                self._running.popitem()
            time.sleep(LOOK_SECONDS)

    def _end(self) -> int:
        """Ends the pipeline's own run, waits for the store, and returns the exit code."""
        is_bad = "" in self.reasons or any(state in ("FAILED", "KILLED", "not run") for state in self.states.values())
        is_stopped = self._stop.is_set() and (is_bad or self.states.keys() != self._pipeline.stages.keys())
        status: Status = "KILLED" if is_stopped else "FAILED" if is_bad else "FINISHED"
        code = self._stop.exit_code if is_stopped else FINISHED if status == "FINISHED" else FAILED
        self.status = status
        is_whole = status == "FINISHED" and "left out" not in self.states.values()
        if self._run is None and is_whole and self._state.status != "FINISHED":
            self._open()  # an earlier command was stopped after its last stage
        if self._run is None:
            return code
        self._state.status = status
        try:
            self._state.save()
            self._record_end(status)
        except OSError as error:
            raise RunError(f"{self._state.folder}: cannot be written: {error.strerror}") from error
        return code

    def _record_end(self, status: Status) -> None:
        assert self._run is not None
        closed = [run.finish(self._stop) for run in self._closing]
        head, *rows = list_results(self._pipeline, self._state, self.states)
        folder = self._state.run_folder
        (folder / "results.csv").write_text(format_csv(head, rows))
        files = [
            folder / "pipeline.yaml",
            write_stages(self._pipeline, self._state, self.states, self.decisions),
            folder / "results.csv",
            write_picture(self._pipeline, self.states, self._state.records, folder),
        ]
        self._run.add({}, files, {}, describe_pipeline(status, [head, *rows], command_line(sys.orig_argv)))
        self._run.end(status, self.find_error() or "")
        self._run.finish(self._stop)
        if all(closed):
            for name, record in self._state.records.items():
                if record.status == "FINISHED":
                    self._repair_stage(name, record)

    def describe_stage(self, stage: Stage) -> str:
        """Returns the state of a stage, with why it did not finish or its results."""
        state = self.states.get(stage.name, "not run")
        outputs = self._state.records[stage.name].outputs if state in GOOD else {}
        return "  ".join(filter(None, (state, self.reasons.get(stage.name) or summarize_outputs(stage, outputs))))

    def find_error(self) -> str | None:
        """Returns why the first stage has failed; None if none has."""
        failed = (f"{name}: {self.reasons.get(name, '')}" for name, state in self.states.items() if state == "FAILED")
        return next(failed, self.reasons.get(""))

    def describe(self) -> dict[str, Any]:
        """Returns what `--json` says."""
        stages = {
            name: {
                "status": self.states.get(name, "not run"),
                "reason": self.reasons.get(name) or None,
                **(self._state.records[name].outputs if self.states.get(name) in GOOD else {}),
            }
            for name in self._pipeline.stages
        }
        return {"status": self.status, "folder": os.path.abspath(self._state.folder), "stages": stages}  # noqa: PTH100

    def describe_links(self) -> Sequence[tuple[str, str]]:
        return self._run.describe_links() if self._run else ()
