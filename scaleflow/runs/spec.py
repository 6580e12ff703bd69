"""Describes one process of a run, and sends the description to that process."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from filelock import FileLock

from scaleflow.cluster.tasks import count_workers, process_name
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import Emit, RunReady
from scaleflow.interfaces.secret_masking import find_known_secrets, mask_secrets, remember_secrets
from scaleflow.runs.data_digest import Repetition
from scaleflow.runs.folder import RunFolder, to_file_name


class Task(Protocol):
    """The work of a run's processes: train a model, find a setting, evaluate, check, convert.

    A task is a small frozen dataclass. It travels to its processes through a pipe. The launcher also imports its
    module, so only `run` may import TensorFlow.

    Attributes:
        trains: whether the run trains a model. Only such runs are restarted, and launcher hooks apply only to them.
    """

    trains: ClassVar[bool] = False

    def run(self, process: WorkerProcess) -> None:
        """Does the work. The last event that it emits describes how it ended.

        An exception before the event `ready` refuses the run; a later one fails it (`scaleflow.worker.process`). A task
        that never emits `ready` is refused. A ConfigError is shown to the user as it is; other exceptions also leave a
        traceback in the log.
        """


@dataclass(frozen=True)
class RunSpec:
    """The description of one process of a run."""

    plan: Plan  # the checked config
    folder: Path  # the run's folder, an absolute path
    started: float  # when the command began, in seconds since the epoch
    task: Task  # what the process does
    worker: int = 0  # the number of this process; 0 is the chief, whose events are the run's
    attempt: int = 0  # how often this command has restarted all processes of the run
    parent: str | None = None  # the folder of the sweep, if the run is one of its jobs
    label: str = ""  # the part of the run's name that distinguishes it from other runs
    environment: Mapping[str, str] = field(default_factory=dict)  # variables to add to the environment of the processes
    server: str | None = None  # the address of the fork server; None: the run starts its own
    tags: Mapping[str, str] = field(default_factory=dict)  # tags of the run, for the launcher
    #: The length keys, such as `training.epochs`, whose values differ from the run's first command
    length: Mapping[str, Any] = field(default_factory=dict)
    repeats: Repetition = field(default_factory=Repetition)  # the run that this one repeats, if any

    @property
    def name(self) -> str:
        """The name of this process in messages."""
        return process_name(self.plan, self.worker)

    @property
    def file_name(self) -> str:
        """The name of this process in file names."""
        return to_file_name(self.name)

    @property
    def records(self) -> bool:
        """Whether the events of this process are the run's events."""
        return self.worker == 0

    @property
    def serves(self) -> bool:
        """Whether this process executes a coordinator's requests instead of training by itself."""
        return self.plan.strategy.has_coordinator and self.worker > 0

    @property
    def is_replaceable(self) -> bool:
        """Whether this process can restart while the others continue: it holds no variables."""
        return self.serves and self.worker <= count_workers(self.plan)

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues from an earlier command or attempt."""
        return self.attempt > 0 or self.plan.resume is not None

    @property
    def files(self) -> RunFolder:
        """The files in the run's folder."""
        return RunFolder(self.folder)

    @property
    def checkpoints(self) -> str:
        """The folder of the checkpoints. If they are kept in an object store, it is the one in the run's folder."""
        folder = self.plan.checkpoint.folder
        return str(self.files.checkpoints) if folder is None or is_store_address(folder) else folder

    @property
    def events(self) -> Path:
        """The file of this process's events."""
        return self.files.events if self.records else self.files.process_events(self.name)

    @property
    def log(self) -> Path:
        """The file of this process's output."""
        return self.files.log(self.name)

    def without_credentials(self) -> RunSpec:
        """Returns the spec for a worker, without the store's credentials and the launcher's own values.

        Among the tracking options only the address is masked: a password may equal another value, such as `mlflow`. A
        worker may have the typed address, because it uses no store.
        """
        from scaleflow.config.plan import set_values  # `scaleflow --help` imports this module, and needs no rules

        uri = mask_secrets((self.plan.config.get("tracking") or {}).get("uri"))
        return replace(self, plan=set_values(self.plan, {"tracking.uri": uri}), environment={}, server=None, tags={})

    def to_line(self, environment: Mapping[str, str] | None = None) -> bytes:
        """Serializes the spec for a pipe to a process of the same version that has this environment.

        The line contains the secrets of the config and the environment, so that the process can mask them. Never write
        it to a file.
        """
        spec = self.without_credentials()
        text = json.dumps([spec.plan.config, str(self.folder), self.label, dict(environment or {})], default=str)
        return base64.b64encode(pickle.dumps((find_known_secrets(text), spec))) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> RunSpec:
        """Parses a line of `to_line`, and remembers which secrets to mask."""
        secrets, spec = pickle.loads(base64.b64decode(line))
        remember_secrets(secrets)
        assert isinstance(spec, cls)
        return spec


@dataclass
class WorkerProcess:
    """The process that runs a task.

    Attributes:
        emit: takes the events of the process.
        should_stop: returns True if the launcher asks the process to stop.
        is_ready: whether `ready` was emitted, so that there is a run. A task calls `report_ready`.
        explain: converts an exception of the task to one with a better explanation of its cause.
        after_failure: called with the exception after it was reported, if there is a run.
    """

    spec: RunSpec
    emit: Emit
    should_stop: Callable[[], bool]
    is_ready: bool = False
    explain: Callable[[Exception], Exception] = lambda error: error
    after_failure: Callable[[Exception], object] = lambda error: None
    _lock: FileLock | None = field(default=None, init=False, repr=False)

    def lock_folder(self) -> None:
        """Excludes other processes that write the run's files, until this process or its task ends.

        Raises ConfigError if another process has not released the lock within a minute.
        """
        if self.spec.records:
            self._lock = self.spec.files.take_write_lock()

    def unlock_folder(self) -> None:
        """Releases the lock of `lock_folder`, if it is held. `run_worker` calls it after the last event."""
        if self._lock is not None:
            self._lock.release()

    def report_ready(self, ready: RunReady) -> None:
        """Reports that everything is built: now the run exists, or continues."""
        self.emit(ready)
        self.is_ready = True
