"""The ledger of a pipeline, `pipeline.json` in its folder: the same command reads it and goes on from there.

The runs and models of finished stages are looked up in the store, as they may be deleted.
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

#: The folder of all pipelines, in the current one, and that of a pipeline's own runs, in its folder.
PIPELINES = "pipelines"
RUNS = "_runs"

#: The lock of a pipeline's folder.
LOCK = "pipeline.lock"

#: What decides whether a stage is the same: settings, code, data and packages, each with its parts by name.
StageKey = Mapping[str, Mapping[str, str]]


@dataclass
class StageRecord:
    """The last execution of a stage."""

    key: StageKey  # of what it was made
    attempt: int  # the number of its folder
    execution: int  # that of the pipeline which ran it
    status: str = "RUNNING"  # or FINISHED, FAILED, KILLED
    outputs: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # why it did not finish
    began: float = 0.0  # in seconds since the epoch
    ended: float | None = None
    files: list[str] = field(default_factory=list)  # those that a function's arguments or result named at its end
    is_forced: bool = False  # whether a flag named it, so that it is not forced again when the command goes on
    process: tuple[int, float] | None = None  # the id of its process, and when that began


class PipelineLedger:
    """What a pipeline has done.

    Attributes:
        execution: the number of the last execution; 0 if there was none.
        status: how that ended; `RUNNING` if it has not.
        records: the last execution of each stage.
        composed: what configs were composed to, by a digest of all that they were made of.

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
            self.records = {name: StageRecord(**each) for name, each in content["stages"].items()}
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
            "stages": {name: asdict(each) for name, each in self.records.items()},
            "composed": self.composed,
        }
        replace_json(self._path, content)

    @contextlib.contextmanager
    def lock(self, may_create: bool) -> Iterator[None]:
        """Excludes other commands of this pipeline during the block. Raises ConfigError if there is one, or if the
        folder is not a pipeline's. Without a folder, and if none `may_create` be made, there is no lock.
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
        """The absolute path of the folder of the pipeline's own run in this execution."""
        return self.folder.absolute() / RUNS / str(self.execution)

    def find_earlier_run_folder(self) -> Path | None:
        """Returns the absolute path of the newest folder of an earlier execution's run; None if there is none."""
        for execution in range(self.execution - 1, 0, -1):
            folder = self.folder.absolute() / RUNS / str(execution)
            if folder.is_dir():
                return folder
        return None

    def find_folder(self, name: str, attempt: int) -> Path:
        """Returns the absolute path of the folder of a stage."""
        return self.folder.absolute() / name / str(attempt)


def move_paths(value: Any, before: str, now: Path) -> Any:
    """Returns a value in which the paths below a folder that was moved or copied are those of the present folder."""
    if isinstance(value, dict):
        return {key: move_paths(each, before, now) for key, each in value.items()}
    if isinstance(value, list):
        return [move_paths(each, before, now) for each in value]
    if isinstance(value, str) and (value == before or value.startswith(f"{before}/")):
        return f"{now}{value.removeprefix(before)}"
    return value


def describe_longer_runs(folder: str | None) -> str:
    """Says with which length a command resumed the run of a stage, or a job of its sweep; empty if none did."""
    if folder is None:
        return ""
    for path in (Path(folder), *sorted(each.parent for each in Path(folder).glob("*/events.jsonl"))):
        if RunFolder(path).count_resumes() and (length := RunState.read(path).resumed_length):
            words = " ".join(f"{key}={format_value(value)}" for key, value in length.items())
            return f"{path.relative_to(Path(folder).parent)} was resumed with {words}"
    return ""


#: A registered model by an alias, which may move.
ALIAS = re.compile(r"models:/[^/@\s'\"]+@[\w-]+")


class StoredRuns:
    """The runs in the store of a pipeline, at the address in `tracking`; it is connected when it is asked first."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    @functools.cached_property
    def _tracker(self) -> MlflowTracker:
        tracker = MlflowTracker(self._tracking)
        tracker.connect()
        return tracker

    def find_loss(self, record: StageRecord) -> str:
        """Says what of a finished stage is gone, or became another run; empty if nothing is.

        Raises ConfigError if the store does not answer.
        """
        outputs = record.outputs
        for file in filter(None, (outputs.get("file"), *record.files)):
            if not Path(file).exists():
                return f"{file} is gone"
        if change := describe_longer_runs(outputs.get("folder")):
            return change
        if self._tracking.name == "none":
            folder = outputs.get("folder")
            return f"{folder} is gone" if folder and not Path(folder).is_dir() else ""
        run_id = outputs.get("run_id")
        if run_id is None:
            return ""
        try:
            self._tracker.adopt(run_id)
        except RunMissing:
            return f"its run {run_id} was deleted"
        return ""

    def fix_aliases(self, text: str) -> str:
        """Replaces `models:/NAME@ALIAS` in a text by the model that it names now; an alias that names none stays."""
        return ALIAS.sub(lambda found: self._find_model(found[0]), text) if self._tracking.name != "none" else text

    def _find_model(self, uri: str) -> str:
        try:
            return f"models:/{resolve_reference(uri, str(self._tracker.uri)).model_id}"
        except ConfigError:  # the command of the stage says why
            return uri
