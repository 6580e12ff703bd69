"""A run that this process trains and records itself, without a launcher and a worker.

`LocalRun` takes the events of the training, writes them into the run's folder, and a thread sends them to the store.
Recording never ends the training: what goes wrong becomes one warning, and the training goes on without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scaleflow.api import Result, default_folder, read_result
from scaleflow.config.compose import CommandWords, ComposedConfig, compose_config
from scaleflow.config.plan import set_values
from scaleflow.errors import ConfigError, read_reason
from scaleflow.features.script.task import RunScript
from scaleflow.interfaces import Plan, Status, name_command
from scaleflow.interfaces.clock import measure_since
from scaleflow.interfaces.events import Event, Note, RunEnded, RunReady
from scaleflow.interfaces.formatting import format_duration
from scaleflow.interfaces.secret_masking import find_environment_secrets, find_secrets, mask_secrets, remember_secrets
from scaleflow.launcher.command_exit import to_printable
from scaleflow.launcher.display import Display
from scaleflow.launcher.launch import ProvenanceCollector, make_recorder, write_configs
from scaleflow.launcher.prepare import PreparedRun, make_plan, read_stage_tags
from scaleflow.launcher.recording.recorder import Recorder
from scaleflow.launcher.recording.system_metrics import make_machine_metrics, record_system_metrics
from scaleflow.runs import EventWriter, RunSpec, WorkerProcess
from scaleflow.runs.folder_use import check_folder, create_folder
from scaleflow.runs.provenance.collect import LaunchFacts
from scaleflow.tracking.active_run import find_active_run

#: The words that a run in an existing process can have.
ALLOWED_WORDS = "tracking.NAME=VALUE, seed=NUMBER and hydra.run.dir=FOLDER"

#: Seconds to wait at the end for a store that has not taken anything during the training.
NO_STORE_SECONDS = 3.0

#: Groups that say how TensorFlow and the model are set up.
SET_UP_BEFORE = ("strategy", "hardware", "precision", "cluster")

#: Groups that the call of `fit`, or the compiled model, decides.
DECIDED_BY_CALL = ("dataset", "model", "training", "fit", "epochs", "batch_size", "evaluation")
DECIDED_BY_COMPILE = ("objective", "optimizer")


@dataclass(frozen=True)
class LocalSettings:
    """What the words of the user say about a run.

    Attributes:
        seed: the seed, if the words have one.
        folder: the folder of the run, if the words have one.
    """

    composed: ComposedConfig
    plan: Plan
    seed: int | None
    folder: Path | None


def read_settings(overrides: Sequence[str] | str, said: str) -> LocalSettings:
    """Reads the words for a run in this process. `said` is the call that has them, such as `fit(overrides=...)`.

    Raises ConfigError if a word is wrong, or cannot apply to a model that exists.
    """
    words = [overrides] if isinstance(overrides, str) else list(overrides)
    for word in words:
        check_word(word, said)
    # offline: a store that does not answer costs a warning, not the training
    composed = compose_config(["tracking.offline=true", *words, "strategy=one_device"])
    composed = replace(composed, words=CommandWords(words))
    plan = make_plan(composed)
    keys = {read_key(word) for word in words}
    seed = plan.seed if "seed" in keys else None
    return LocalSettings(composed, plan, seed, composed.folder if "hydra.run.dir" in keys else None)


def check_word(word: object, said: str) -> None:
    """Raises ConfigError for a word that cannot apply."""
    if not isinstance(word, str) or "=" not in word:
        raise ConfigError(f"{said}: {word!r}: expected KEY=VALUE; it takes {ALLOWED_WORDS}")
    key = read_key(word)
    group = key.partition(".")[0]
    if group == "tracking" or key in ("seed", "hydra.run.dir"):
        return
    reason = "it does not apply to a fit in this process"
    if group in SET_UP_BEFORE:
        reason = f"the model and TensorFlow are set up already; `scaleflow train.py {word}` runs a script with it"
    elif group in DECIDED_BY_CALL:
        reason = "the arguments of the fit decide it; change them, such as epochs=5"
    elif group in DECIDED_BY_COMPILE:
        reason = "the compiled model decides it; change model.compile(...)"
    raise ConfigError(f"{said}: {word}: {reason} (it takes {ALLOWED_WORDS})")


def read_key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


class LocalRun:
    """A run that this process trains and records.

    The run begins with the event `ready`. Before it, nothing is written.

    Args:
        settings: what the user's words say.
        number: the number of this run among those that have these words, from 1.
        find_code: returns the file with the user's code, or None. It gets the run's folder, where it may write one.

    Attributes:
        process: takes the events of the run.
        is_open: whether the run has begun and not ended.
    """

    def __init__(self, settings: LocalSettings, number: int, find_code: Callable[[Path], Path | None]) -> None:
        self._composed = settings.composed
        self._find_code = find_code
        self._resources = contextlib.ExitStack()
        self._write: EventWriter | None = None
        self._recorder: Recorder | None = None
        self._has_failed = False
        self._display = Display(sys.stdout)
        folder = settings.folder or default_folder()
        if settings.folder is not None and number > 1:
            folder = folder.with_name(f"{folder.name}-{number}")
        self.spec = RunSpec(settings.plan, folder.absolute(), time.time(), RunScript(), tags=read_stage_tags())
        self.pid = os.getpid()
        self.process = WorkerProcess(self.spec, self.emit, bool)

    @property
    def is_open(self) -> bool:
        return self._write is not None

    def emit(self, event: Event) -> None:
        """Records an event. It raises nothing: if that fails, only the end of the run is still recorded."""
        if self._has_failed and not isinstance(event, RunEnded):
            return
        try:
            if isinstance(event, RunReady):
                self._open()
            if self._write is not None:
                self._write(event)
            if self._recorder is not None:
                self._recorder.wake()
        except Exception as error:  # recording must not end the training
            self.give_up(error)
        if isinstance(event, Note):
            self._print_note(event.text)

    def give_up(self, error: Exception) -> None:
        """Stops to record, with one warning."""
        if self._has_failed:
            return
        self._has_failed = True
        self._print_note(
            f"the run is not recorded any further, and the training goes on: {type(error).__name__}: "
            f"{read_reason(error)}"
        )

    def _open(self) -> None:
        """Creates the folder of the run, and starts to record."""
        spec = self.spec
        folder = spec.folder
        create_folder(folder)
        check_folder(folder)
        code = self._find_code(folder)
        values = {"script.path": None if code is None else str(code)}
        self.spec = spec = replace(spec, plan=set_values(spec.plan, values))
        config = self._composed.set({**values, "script.in_process": True})
        remember_secrets([*find_environment_secrets(), *find_secrets(config.raw, spec.plan.config)])
        self._resources.enter_context(spec.files.lock_recording())
        self._resources.enter_context(spec.files.track_files())
        self.process.lock_folder()
        self._resources.callback(self.process.unlock_folder)
        write_configs(PreparedRun(spec, config))
        active = find_active_run(spec.plan.tracking)
        if active is not None:
            spec = replace(spec, tags={**spec.tags, **active.tags})
            for note in active.notes:
                self._display.print_line(to_printable(note))
        self._collector = ProvenanceCollector(spec, LaunchFacts())
        self._collector.start()
        self._recorder = make_recorder(spec, False, active is None, wait_for_files=self._collector.join)
        self._resources.enter_context(record_system_metrics(spec, make_machine_metrics(spec, [self])))
        self._write = EventWriter(spec.events)
        self._resources.callback(self._write.close)
        self._recorder.start()

    def finish(self, status: Status, error: str = "") -> Result | None:
        """Ends the run, waits until the store has it, and says where it is. Returns None if there is no run.

        It waits at most `tracking.flush_seconds`, and less for a store that has never answered.
        """
        if not self.is_open:
            return None
        reason = str(mask_secrets(error))
        try:
            self.emit(RunEnded(status, reason))
            self._send(status)
        except Exception as failure:
            self.give_up(failure)
        finally:
            self._write = None
            self._resources.close()
        try:
            return read_result(self.spec.folder)
        except Exception as failure:
            self.give_up(failure)
            return None

    def _send(self, status: Status) -> None:
        """Waits until the store has the run, and prints where it is."""
        recorder = self._recorder
        assert recorder is not None
        self._collector.join()
        patience = self.spec.plan.tracking.flush_seconds
        if self._has_failed or (recorder.reason and not recorder.recorded):
            patience = min(patience, NO_STORE_SECONDS)
        is_recorded = recorder.finish(patience)
        folder = os.path.relpath(self.spec.folder)
        if self._collector.error:
            self._print_note(f"what the run is made of is not recorded: {self._collector.error}")
        rows = [
            ("status", f"{status} in {format_duration(measure_since(self.spec.started))}"),
            ("output", folder),
        ]
        if is_recorded:
            rows += recorder.transfer.tracker.describe_links()
        self._display.print_summary(rows)
        if not is_recorded:
            self._print_note(
                f"the store has not received the whole run: {mask_secrets(recorder.reason)}; nothing is lost; to send "
                f"the rest, run {name_command('sync')} {folder}"
            )

    def _print_note(self, text: str) -> None:
        self._display.print_line(to_printable(f"note: {text}"))
