"""The ledger of a pipeline: each stage's last execution, in `pipeline.json` in its folder.

The next command reads it and continues from there. Runs and models of finished stages are looked up in the store,
because they may have been deleted.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scaleflow.config.parse import format_value
from scaleflow.errors import ConfigError, RunMissing
from scaleflow.interfaces import Tracking
from scaleflow.interfaces.formatting import join_first
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.folder import hold_lock, read_json, replace_json
from scaleflow.tracking.model_uris import resolve_reference
from scaleflow.tracking.store import MlflowTracker

#: PIPELINES holds all pipelines, in the current folder. RUNS holds a pipeline's own runs, in its folder.
PIPELINES = "pipelines"
RUNS = "_runs"

#: Lock file in a pipeline's folder.
LOCK = "pipeline.lock"

#: Ingredients of a stage: settings, code, data and packages, each by name. If none changed, its result is reused.
StageKey = Mapping[str, Mapping[str, str]]


@dataclass
class StageRecord:
    """The last execution of a stage."""

    key: StageKey  # its ingredients
    attempt: int  # number of its folder
    execution: int  # number of the pipeline's execution that ran it
    status: str = "RUNNING"  # or FINISHED, FAILED, KILLED
    outputs: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # why it did not finish
    began: float = 0.0  # in seconds since the epoch
    ended: float | None = None
    files: list[str] = field(default_factory=list)  # existing files named by a function's arguments or result
    is_forced: bool = False  # a flag forced it; then it is not forced again when the command continues
    process: tuple[int, float] | None = None  # process id, and start in seconds since the epoch


class PipelineLedger:
    """The record of a pipeline's stages.

    Attributes:
        execution: number of the last execution; 0 before the first.
        status: how the last execution ended; `RUNNING` if it has not.
        records: last execution of each stage.
        composed: composed configs, by a digest of everything that they were composed from.

    Raises ConfigError if the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "pipeline.json"
        self.execution = 0
        self.status = "FINISHED"
        self.records: dict[str, StageRecord] = {}
        self.composed: dict[str, Any] = {}
        if self._path.exists():
            self._load(read_json(self._path))

    def _load(self, content: Mapping[str, Any]) -> None:
        try:
            self.execution = content["execution"]
            self.status = content["status"]
            self.composed = content["composed"]
            self.records = {name: StageRecord(**record) for name, record in content["stages"].items()}
            before = content["folder"]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{self._path}: cannot be read ({error}); delete it to run all stages again") from error
        now = self.folder.absolute()
        if before != str(now):
            for record in self.records.values():
                record.outputs = move_paths(record.outputs, before, now)
                record.files = move_paths(record.files, before, now)

    def save(self) -> None:
        """Writes the file atomically. Raises OSError if it cannot be written."""
        content = {
            "folder": str(self.folder.absolute()),
            "execution": self.execution,
            "status": self.status,
            "stages": {name: asdict(record) for name, record in self.records.items()},
            "composed": self.composed,
        }
        replace_json(self._path, content)

    @contextlib.contextmanager
    def lock(self, may_create: bool) -> Iterator[None]:
        """Keeps other commands of this pipeline out during the block.

        Takes no lock if the folder does not exist and must not be created (`may_create`).

        Raises ConfigError if another command holds the lock, or if the folder is not a pipeline's.
        """
        if may_create:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--folder {self.folder}: cannot be created ({error.strerror}); choose another one"
                ) from error
        is_known = self._path.exists() or (self.folder / LOCK).exists()
        if not is_known and self.folder.is_dir() and (names := sorted(path.name for path in self.folder.iterdir())):
            raise ConfigError(
                f"--folder {self.folder}: holds files that are not a pipeline's ({join_first(names)}); choose a new or "
                "an empty folder"
            )
        message = f"{self.folder}: another command runs this pipeline; wait for its end, or use --folder DIR"
        lock = hold_lock(self.folder / LOCK, 0.0, message)
        with lock if self.folder.is_dir() else contextlib.nullcontext():
            yield

    @property
    def run_folder(self) -> Path:
        """Absolute path of the folder of the pipeline's own run in this execution."""
        return self.folder.absolute() / RUNS / str(self.execution)

    def find_earlier_run_folder(self) -> Path | None:
        """Returns the absolute path of the latest earlier execution's run folder, or None."""
        for execution in range(self.execution - 1, 0, -1):
            folder = self.folder.absolute() / RUNS / str(execution)
            if folder.is_dir():
                return folder
        return None

    def find_folder(self, name: str, attempt: int) -> Path:
        """Returns the absolute path of a stage's folder."""
        return self.folder.absolute() / name / str(attempt)


def move_paths(value: Any, before: str, now: Path) -> Any:
    """Returns a value with paths below `before` moved to `now`, after the pipeline's folder was moved or copied."""
    if isinstance(value, dict):
        return {key: move_paths(item, before, now) for key, item in value.items()}
    if isinstance(value, list):
        return [move_paths(item, before, now) for item in value]
    if isinstance(value, str) and (value == before or value.startswith(f"{before}/")):
        return f"{now}{value.removeprefix(before)}"
    return value


def describe_longer_runs(folder: str | None) -> str:
    """Says that a stage's run, or a job of its sweep, was resumed with another length; empty if not."""
    if folder is None:
        return ""
    for path in (Path(folder), *sorted(path.parent for path in Path(folder).glob("*/events.jsonl"))):
        if not RunFolder(path).count_resumes():
            continue
        length = RunState.read(path).resumed_length
        if length:
            words = " ".join(f"{key}={format_value(value)}" for key, value in length.items())
            return f"{path.relative_to(Path(folder).parent)} was resumed with {words}"
    return ""


#: A registered model by an alias, which may move to another version.
ALIAS = re.compile(r"models:/[^/@\s'\"]+@[\w-]+")


class StoredRuns:
    """The runs in a pipeline's store. It connects on the first question."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    @functools.cached_property
    def _tracker(self) -> MlflowTracker:
        tracker = MlflowTracker(self._tracking)
        tracker.connect()
        return tracker

    def find_loss(self, record: StageRecord) -> str:
        """Says which result of a finished stage is missing or has changed; empty if none.

        Checks its files, its run's length, and its run in the store. Raises ConfigError if the store does not answer.
        """
        outputs = record.outputs
        for file in filter(None, (outputs.get("file"), *record.files)):
            if not Path(file).exists():
                return f"{file} is gone"
        change = describe_longer_runs(outputs.get("folder"))
        if change:
            return change
        if self._tracking.name == "none":
            folder = outputs.get("folder")
            return f"{folder} is gone" if folder and not Path(folder).is_dir() else ""
        run_id = outputs.get("run_id")
        if run_id is None:
            return ""
        try:
            self._tracker.select_run(run_id)
        except RunMissing:
            return f"its run {run_id} was deleted"
        return ""

    def fix_aliases(self, text: str) -> str:
        """Replaces each `models:/NAME@ALIAS` in a text by its current model. An alias without a model stays."""
        if self._tracking.name == "none":
            return text
        return ALIAS.sub(lambda match: self._find_model(match[0]), text)

    def _find_model(self, uri: str) -> str:
        try:
            return f"models:/{resolve_reference(uri, str(self._tracker.uri)).model_id}"
        except ConfigError:  # the stage's command explains it
            return uri
