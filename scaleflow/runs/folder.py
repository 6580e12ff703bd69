"""The folder of a run, or of a sweep: the names of its files, and its locks.

No other module builds a path in a run's folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scaleflow.errors import ConfigError
from scaleflow.interfaces import LEARNED_FILES
from scaleflow.interfaces.features import list_features, list_run_files
from scaleflow.tracking.moved_store import has_run
from scaleflow.tracking.uri import sqlite_file

#: Seconds to wait until an earlier command stops recording the run, or its worker stops writing.
SECONDS_TO_WAIT = 60.0

#: Patterns of the files that the processes of a run write.
PROCESS_FILES = ("coordinator.log", "worker-*.log", "server-*.log", "events*.jsonl")

#: Files with objects that a program passed: `scaleflow.run(data=..., model=...)`. Their names contain a content hash.
_HASH = "[0-9a-f]" * 16
OBJECT_FILES = (f"data-{_HASH}.feather", f"data-{_HASH}.npz", f"model-{_HASH}.keras")

#: The copy of the initial Keras file of a run with `model=keras_file`, as a pattern.
SOURCE_MODEL = "source_model.*"

#: Files of `OBJECT_FILES` and `SOURCE_MODEL` above this size in bytes are not logged with the run.
MAX_LOGGED_BYTES = 1 << 30

#: Patterns of further files at the top of a run's folder. `COMMAND_FILES` apply only if their key, a file, exists.
RUN_FILES = (
    "resume-*.yaml",
    "*.partial",
    *OBJECT_FILES,
    SOURCE_MODEL,
    "scaleflow.log",
    ".hydra",
)
COMMAND_FILES = {
    "multirun.yaml": ("report.*", "*.svg", "optuna.*", "trials.csv", "optimization_results.yaml"),
}


class FolderBusy(ConfigError):
    """Another process works in the run's folder."""


class FolderEntry:
    """The path of a file or folder in a run's folder, as a read-only attribute."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The files in the folder `path` of a run, or of a sweep."""

    #: A folder with one of these files belongs to a run (even one that has just begun) or to a sweep
    MARKS: ClassVar = frozenset({"events.jsonl", "record.lock", "sweep.lock", "sweep.json"})

    path: Path

    events = FolderEntry("events.jsonl")  # the chief's events, which are the run's events
    config = FolderEntry("config.yaml")  # the composed config; references between keys are kept, secrets are masked
    interpolations = FolderEntry("interpolations.yaml")  # the interpolations whose values are in config.yaml
    overrides = FolderEntry("overrides.yaml")  # as they were typed
    answers = FolderEntry("answers.json")  # answers that another run's validation rows decided; a refit uses them
    environment = FolderEntry("environment.txt")  # the versions of all installed packages
    provenance = FolderEntry("provenance.json")  # the tags that say where the run comes from
    provenance_folder = FolderEntry("provenance")  # code, packages, data and machine of the run
    provenance_record = FolderEntry("provenance/record.json")  # the launcher's part of it
    data_record = FolderEntry("provenance/data.json")  # the worker's part of it
    requirements = FolderEntry("provenance/requirements.txt")
    record = FolderEntry("record.json")  # the run's id in the store, and how many bytes of events are there
    traceback = FolderEntry("traceback.txt")  # of an error of the chief
    model_summary = FolderEntry("model_summary.txt")
    model = FolderEntry("model")  # the folder of the exported model
    checkpoints = FolderEntry("checkpoints")  # unless `checkpoint.folder` names another folder
    profile = FolderEntry("profile")  # traces and their analysis
    plots = FolderEntry("plots")
    evaluation = FolderEntry("evaluation")  # predictions and the report made from them
    tensorboard = FolderEntry("tensorboard")  # with the event file for TensorBoard
    sweep_config = FolderEntry("multirun.yaml")  # written by Hydra for a sweep, secrets masked
    ledger = FolderEntry("sweep.json")  # the jobs of a sweep; only a sweep's folder has it
    manifest = FolderEntry("files.json")  # which files of the folder the run has written

    _write_lock = FolderEntry("run.lock")
    _record_lock = FolderEntry("record.lock")
    _sweep_lock = FolderEntry("sweep.lock")

    def process_events(self, process: str) -> Path:
        """Returns the file with the events of another process, such as `worker 1`."""
        return self.path / f"events-{to_file_name(process)}.jsonl"

    def list_process_events(self) -> list[Path]:
        """Returns the event files of all processes except the chief."""
        return sorted(self.path.glob("events-*.jsonl"))

    def log(self, process: str) -> Path:
        """Returns the file with the output of a process."""
        return self.path / f"{to_file_name(process)}.log"

    def resume_overrides(self, number: int) -> Path:
        """Returns the file with the overrides of the `number`th command that resumed the run."""
        return self.path / f"resume-{number}.yaml"

    def count_resumes(self) -> int:
        return len(list(self.path.glob("resume-*.yaml")))

    def changes(self, resume: int) -> Path:
        """Returns the patch of uncommitted changes at the run's start (0), or at a resume with other code."""
        return self.provenance_folder / (f"changes-{resume}.patch" if resume else "changes.patch")

    def kept_code(self, resume: int) -> Path:
        """Returns the folder with copies of the user's modules at the run's start (0), or at a
        resume with other code.
        """
        return self.provenance_folder / (f"code-{resume}" if resume else "code")

    def list_logged_files(self) -> list[tuple[Path, str | None]]:
        """Returns the files to log as artifacts when the run begins or resumes, each with its artifact folder."""
        patterns = (
            "config.yaml",
            "interpolations.yaml",
            "overrides.yaml",
            "environment.txt",
            "resume-*.yaml",
            "multirun.yaml",
            *sorted(list_run_files()),
            "provenance/**/*",
        )
        paths = [path for path in self._list_matching(patterns) if path.is_file()]
        if self._logs_objects():
            paths += [path for path in self.list_objects() if path.stat().st_size <= MAX_LOGGED_BYTES]
        logged: list[tuple[Path, str | None]] = []
        for path in paths:
            is_at_top = path.parent == self.path
            logged.append((path, None if is_at_top else str(path.parent.relative_to(self.path))))
        return logged

    def _list_matching(self, patterns: Iterable[str]) -> list[Path]:
        """Returns the files and folders that match glob patterns, in the order of the patterns."""
        paths: list[Path] = []
        for pattern in patterns:
            paths += sorted(self.path.glob(pattern))
        return paths

    def _logs_objects(self) -> bool:
        """Returns whether data and model files are logged; `tracking.code=false` keeps them out of a store.

        If the config cannot be read, they are not logged.
        """
        if not self.list_objects():
            return False
        try:
            config = OmegaConf.load(self.config)
            return OmegaConf.select(config, "tracking.code", default=True) is not False
        except (OSError, ValueError, YAMLError, OmegaConfBaseException):
            return False

    def list_objects(self) -> list[Path]:
        """Returns the files with data and models that a program passed to the run, and its initial Keras file."""
        return self._list_matching((*OBJECT_FILES, SOURCE_MODEL))

    def source_model(self, suffix: str) -> Path:
        """Returns the path of the copy of the run's initial Keras file. The suffix is, for example, `.keras`."""
        return self.path / SOURCE_MODEL.replace(".*", suffix)

    def list_process_files(self) -> list[Path]:
        """Returns the files that the processes of a run write: events, logs, the model summary, the learned state."""
        learned = [self.path / name for name in LEARNED_FILES]
        return [self.model_summary, *learned, *self._list_matching(PROCESS_FILES)]

    def list_launcher_files(self) -> list[Path]:
        """Returns the paths of the files to remove if a run is refused, apart from those of its processes.

        The launcher and the features' commands write them before the processes are ready. Some may not exist.
        """
        files = [
            self.config,
            self.interpolations,
            self.answers,
            self.overrides,
            self.environment,
            self.provenance,
            self.record,
        ]
        files += self.list_objects()
        files += [self.path / name for name in list_run_files()]
        return [*files, self.manifest, self._write_lock, self._record_lock]

    def list_sweep_files(self) -> list[Path]:
        """Returns the files that a sweep writes before its first job is ready."""
        files = [self.ledger, self.sweep_config, self.manifest, self._sweep_lock, self._record_lock]
        return [*files, *self.path.glob("optuna.*")]

    @property
    def is_begun(self) -> bool:
        """Whether a process of a run, or of a sweep, has written to the folder."""
        marks = [*self.MARKS, *PROCESS_FILES, "optuna.db.lock"]
        for feature in list_features().values():
            marks += feature.folder_marks
        return bool(self._list_matching(marks))

    def is_own(self, name: str) -> bool:
        """Whether a run writes a file or folder with this name at the top of its folder."""
        patterns = [entry.name for entry in vars(RunFolder).values() if isinstance(entry, FolderEntry)]
        patterns += [*PROCESS_FILES, *RUN_FILES, *LEARNED_FILES]
        patterns += [f"{Path(table).stem}.*" for table in list_run_files()]
        patterns += self._list_command_patterns(COMMAND_FILES)
        for feature in list_features().values():
            patterns += feature.other_files
            patterns += feature.folder_marks
            patterns += self._list_command_patterns(feature.command_files)
        return any(fnmatch(name, pattern) for pattern in patterns)

    def _list_command_patterns(self, files_of_commands: Mapping[str, Sequence[str]]) -> list[str]:
        """Returns the patterns of the files of commands that ran here: those whose key, a file, exists."""
        patterns: list[str] = []
        for mark, files in files_of_commands.items():
            if (self.path / mark).exists():
                patterns += files
        return patterns

    def walk(self) -> Iterator[str]:
        """Yields the relative paths of all files and links in the folder, except those in folders of other runs."""
        for base, folders, names in os.walk(self.path):
            if Path(base) != self.path and not self.MARKS.isdisjoint(names):
                folders.clear()
                continue
            links = [name for name in folders if Path(base, name).is_symlink()]
            for name in (*names, *links):
                yield os.path.relpath(Path(base, name), self.path)

    def split_files(self, is_complete: bool = True) -> tuple[list[str], list[str]]:
        """Returns two lists of relative paths: the files that the run wrote, and all others.

        The manifest lists the run's files. After a kill the manifest is incomplete: then a file belongs to the run if
        its name is one that runs use and if it did not exist before. If the run `is_complete`, the file's time must
        also lie between the run's first file and its record, which is written last.
        """
        manifest = read_json(self.manifest)
        before = set(manifest.get("before", ()))
        listed = manifest.get("files")
        written_last = (self.manifest, self.record, self._write_lock, self._record_lock, self._sweep_lock)
        last_names = {path.name for path in written_last}
        names = list(self.walk())
        top_names = {name.partition(os.sep)[0] for name in names}
        own_tops = {top for top in top_names if self.is_own(top)}
        if listed is not None:
            process_files = {path.name for path in self.list_process_files()}
            candidates = {*listed, *last_names, *process_files}
        else:
            candidates = set(names)
        first = 0.0
        last = math.inf
        if is_complete and listed is None:
            first, last = self._find_period(own_tops)

        own = []
        for name in names:
            path = self.path / name
            has_own_name = name.partition(os.sep)[0] in own_tops and name in candidates
            if not has_own_name or name in before or path.is_symlink():
                continue
            if name in last_names or first <= read_time(path) <= last:
                own.append(name)
        return own, sorted({*names} - {*own})

    def _find_period(self, own_tops: Iterable[str]) -> tuple[float, float]:
        """Returns when the run wrote its first file at the top of the folder, and when it wrote its record."""
        files = [self.path / name for name in own_tops if (self.path / name).is_file()]
        first = min((read_time(path) for path in files), default=0.0)
        last = read_time(self.record) if self.record.exists() else math.inf
        return first, last

    @contextlib.contextmanager
    def track_files(self) -> Iterator[None]:
        """Maintains the manifest while a command runs: files written during the block belong to the run.

        Files that existed before do not, unless the manifest of an earlier command lists them.
        """
        before: list[str] = []
        if self.manifest.exists() or self.record.exists():
            _, before = self.split_files()
        self._write_manifest({"before": before})
        try:
            yield
        finally:
            if self.manifest.exists():  # without a manifest there is no run, and its files are removed
                own, _ = self.split_files(is_complete=False)
                self._write_manifest({"before": before, "files": own})

    def _write_manifest(self, content: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # if the disk is full, `clean` recognizes the files by their names
            replace_json(self.manifest, content)

    def lock_recording(self, seconds: float = SECONDS_TO_WAIT) -> AbstractContextManager[None]:
        """Excludes other commands that record this run while the block lasts.

        Raises `FolderBusy` if another command still records the run after `seconds`.
        """
        return hold_lock(self._record_lock, seconds, f"{self.path}: another command is recording this run")

    def lock_writing(self) -> AbstractContextManager[None]:
        """Excludes workers that write to this folder during the block. Raises `FolderBusy` if one still writes."""
        return hold_lock(self._write_lock, 0.0, f"{self.path}: a worker of this run is still writing")

    @property
    def is_locked(self) -> bool:
        """Whether a process of the run is alive. Does not create a file."""
        if not any(self.path.glob("*.lock")):
            return False
        try:
            with self.lock_recording(seconds=0), self.lock_writing():
                return False
        except (FolderBusy, OSError):
            return True

    def take_write_lock(self) -> FileLock:
        """Takes the write lock. The process holds it until it ends, even if it is killed.

        Raises ConfigError if another process has not released the lock within a minute.
        """
        lock = FileLock(self._write_lock)
        try:
            lock.acquire(timeout=SECONDS_TO_WAIT)
        except Timeout as error:
            raise ConfigError(
                f"resume={self.path}: another process has been writing there for a minute; end it first"
            ) from error
        return lock

    def lock_sweep(self) -> AbstractContextManager[None]:
        """Excludes other commands of this sweep while the block lasts. Raises `FolderBusy` if there is one."""
        message = f"hydra.sweep.dir={self.path}: another command runs the sweep in this folder; end it first"
        return hold_lock(self._sweep_lock, 0.0, message)

    def read_record(self) -> dict[str, Any]:
        """Reads `record.json`; empty if it does not exist or cannot be read.

        If the folder was moved or copied together with the store of its run, `uri` is the store's present address.
        """
        record = read_json(self.record)
        before = record.get("uri_from")
        file = sqlite_file(str(record.get("uri")))
        if file is None or before is None or before == str(self.path.absolute()):
            return record
        moved = self.find_moved(file, Path(before))
        if moved != file and (not record.get("run_id") or has_run(moved, record["run_id"])):
            record["uri"] = f"sqlite:///{moved}"
        return record

    def find_moved(self, path: Path, before: Path) -> Path:
        """Returns where a path is now, if it moved together with this folder, which was at `before`.

        Returns `path` itself if it did not move or if the new place does not exist.
        """
        here = self.path.absolute()
        if here == before or not path.is_absolute():
            return path
        moved = Path(os.path.normpath(here / os.path.relpath(path, before)))
        if not moved.exists() or (path.exists() and moved.samefile(path)):
            return path
        return moved

    def write_record(self, record: Mapping[str, Any], is_vital: bool = False) -> None:
        """Replaces `record.json` atomically. If `is_vital`, waits until the file is on the disk.

        Raises OSError if it cannot be written.
        """
        replace_json(self.record, record, is_vital)


@contextlib.contextmanager
def hold_lock(path: Path, seconds: float, message: str) -> Iterator[None]:
    """Holds a file lock while the block lasts.

    Raises `FolderBusy` with the message if another process still holds it after `seconds`.
    """
    try:
        held = FileLock(path).acquire(timeout=seconds)
    except Timeout as error:
        raise FolderBusy(message) from error
    with held:
        yield


def is_object_file(name: str) -> bool:
    """Returns whether a file with this name holds data or a model that a program passed."""
    return any(fnmatch(name, pattern) for pattern in OBJECT_FILES)


def read_time(path: Path) -> float:
    """Returns when a file was last changed, in seconds since the epoch; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; empty if the file is missing or invalid."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def replace_json(path: Path, content: Mapping[str, Any], is_vital: bool = False) -> None:
    """Replaces a JSON file; see `replace_text`."""
    replace_text(path, json.dumps(content), is_vital)


def replace_text(path: Path, text: str, is_vital: bool = False) -> None:
    """Replaces a file atomically. If `is_vital`, waits until it is on the disk. Raises OSError if
    it cannot be written.
    """
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        if is_vital:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)


def to_file_name(process: str) -> str:
    return process.replace(" ", "-")
