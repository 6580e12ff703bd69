"""Computes the state of a run from its events. No other module derives the state from them."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Status
from scaleflow.interfaces.events import (
    CheckpointSaved,
    DescriptionSet,
    EpochEnded,
    Event,
    FaultReported,
    MetricsLogged,
    ModelExported,
    ModelVariant,
    PeersMet,
    ReportMade,
    Restarted,
    RunEnded,
    RunReady,
    RunRefused,
    TagsSet,
    TaskResult,
    UploadAwaited,
    Waiting,
)
from scaleflow.interfaces.features import list_compared_models
from scaleflow.runs.event_log import EventReader, read_last_event
from scaleflow.runs.folder import RunFolder

RATE = "perf/examples_per_second"

#: Suffixes of metrics that are the bounds of another metric's 95 % interval.
INTERVAL = ("_low", "_high")

#: Prefix of the metrics of a constant prediction.
BASELINE = "baseline/"

#: Prefix of the tags that hold the length set by resume= commands, as JSON: `scaleflow.training.epochs`.
LENGTH_TAG = "scaleflow.training."

#: The metric with the number of rows that compared models were fitted to, if they did not get all rows.
FITTED_ROWS = "baseline/rows"


@dataclass
class Attempt:
    """What the processes of a run reported since they were last started."""

    is_under_way: bool = False  # whether they have built everything
    fault: str = ""  # the error that the chief reported
    waiting: Waiting | None = None  # set while a worker waits
    #: Seconds that the process may wait for its own or the chief's upload, in addition to all other limits
    upload_seconds: float = 0.0


@dataclass
class ExportedModel:
    """The model that a run exported last."""

    step: int | None = None  # the updates before the export; None if the run has exported no model
    weights: str = ""  # the digest of its weights; empty if unknown
    #: Its variants, by the kind of their event and their name
    variants: dict[tuple[str, str], ModelVariant] = field(default_factory=dict)


@dataclass
class Annotations:
    """What the events of a run add to its record for people."""

    tags: dict[str, str] = field(default_factory=dict)
    description: str = ""  # set by a command that describes its run
    profiles: dict[int, str] = field(default_factory=dict)  # a line about each traced window, by the window's last step


@dataclass
class RunState:
    """The state of a run after a sequence of events: all events of the run, or those of one command."""

    ready: RunReady | None = None  # the first event `ready`; None if there is no run
    is_open: bool = False  # whether the run is ready and has not ended
    attempt: Attempt = field(default_factory=Attempt)  # the current one
    #: The event that ended or refused the run; None again after the run becomes ready again
    last: RunEnded | RunRefused | None = None
    last_status: Status | None = None  # the status of the last end; it stays if the run becomes ready again
    step: int = 0  # the largest step of any metric
    checkpoint: int | None = None  # the step of the newest checkpoint
    metrics: dict[str, float] = field(default_factory=dict)  # the last value of each metric
    model: ExportedModel = field(default_factory=ExportedModel)
    time: int = 0  # of the newest event, in milliseconds since the epoch
    result: TaskResult | None = None  # the result of a run that trains no model
    annotations: Annotations = field(default_factory=Annotations)
    length: dict[str, int] = field(default_factory=dict)  # the length of the last command, by key of `training`
    epoch_steps: int | None = None  # the updates in the first epoch; None until it ends
    has_points: bool = False  # whether `curves` are kept; they grow with the run
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # the (step, value) pairs of each metric
    record: Mapping[str, Any] = field(default_factory=dict)  # the content of the folder's `record.json`

    @classmethod
    def read(cls, folder: Path, has_points: bool = False) -> Self:
        """Reads the state of the run in a folder; the initial state if there is no run."""
        state = cls(has_points=has_points)
        files = RunFolder(folder)
        for event in EventReader(files.events).read():
            state.apply(event)
        state.record = files.read_record()
        return state

    def apply(self, event: Event) -> None:
        """Updates the state with the next event."""
        self.time = max(self.time, event.time)
        match event:
            case RunReady():
                self.ready = self.ready or event
                self.length = {"epochs": event.epochs, "max_steps": event.steps}
                self.annotations.tags |= event.tags
                self.is_open = True
                self.attempt.is_under_way = True
                self.last = None
                self.attempt.fault = ""
                self.model.step = None
                self.model.variants = {}
                self.checkpoint = event.resumed or self.checkpoint
            case Restarted():
                self.attempt.fault = ""
                if event.worker is None:
                    self.attempt.is_under_way = False
                    self.attempt.waiting = None
                    self.attempt.upload_seconds = 0.0
            case RunEnded():
                self.last = event
                self.last_status = event.status
                self.is_open = False
            case RunRefused():
                self.last = event
            case TagsSet():
                self.annotations.tags |= event.values
            case DescriptionSet():
                self.annotations.description = event.text
            case ReportMade() if event.line:
                self.annotations.profiles[event.step] = event.line
            case _:
                self._apply_progress(event)

    def _apply_progress(self, event: Event) -> None:
        match event:
            case MetricsLogged():
                self.attempt.upload_seconds = 0.0
                self.step = max(self.step, event.step)
                self.metrics.update(event.values)
                self._add_points(event)
            case CheckpointSaved():
                self.checkpoint = event.step
            case ModelExported():
                self.model.step = event.step
                self.model.weights = event.weights
            case EpochEnded():
                self.epoch_steps = self.epoch_steps or event.step
            case ModelVariant():
                self.model.variants[event.event, event.find_name()] = event
            case FaultReported():
                self.attempt.fault = event.error
            case TaskResult():
                self.result = event
            case UploadAwaited():
                self.attempt.upload_seconds = event.seconds
            case Waiting() | PeersMet():
                self.attempt.waiting = event if isinstance(event, Waiting) else None

    def _add_points(self, event: MetricsLogged) -> None:
        if not self.has_points:
            return
        for name, value in event.values.items():
            self.curves.setdefault(name, []).append((event.step, value))

    @property
    def has_begun(self) -> bool:
        """Whether the run exists: its first `ready` was read. A refused command has no run."""
        return self.ready is not None

    @property
    def status(self) -> Status | None:
        """FINISHED, FAILED or KILLED; None while the run is open, or without a run."""
        return None if self.is_open else self.last_status

    @property
    def error(self) -> str:
        """Why the run failed, was killed or was refused; otherwise empty."""
        match self.last:
            case RunEnded(error=error):
                return error
            case RunRefused(message=message):
                return message
        return ""

    @property
    def refusal(self) -> ConfigError | None:
        """The error of a refused run; None if it was not refused."""
        return ConfigError(self.last.message) if isinstance(self.last, RunRefused) else None

    @property
    def resumed_length(self) -> dict[str, Any]:
        """The length keys that a resume changed: they differ from `params`."""
        return parse_length_tags(self.annotations.tags)

    @property
    def name(self) -> str:
        return self.ready.name if self.ready else ""

    @property
    def run_id(self) -> str | None:
        """The run's id in the store; None if it is not recorded."""
        return self.record.get("run_id")

    @property
    def model_uri(self) -> str | None:
        """The URI `models:/m-...` of the model that the run logged last; None if the store has none."""
        return self.record.get("model_uri")

    @property
    def rate(self) -> float | None:
        """Training examples per second: the median over the epochs after the first, which includes the warm-up."""
        rates = [value for _, value in self.curves.get(RATE, ())]
        return median(rates[1:] or rates) if rates else None

    @property
    def model_metrics(self) -> dict[str, float]:
        """The metrics of the exported model. Needs `has_points`.

        If training went on after the step of the exported model, as with `checkpoint.export=best`, these are the values
        at that step. Otherwise, and for `perf/`, they are the last values.
        """
        if self.model.step is None or self.model.step >= self.step:
            return self.metrics
        metrics = dict(self.metrics)
        for name, points in self.curves.items():
            if name.startswith("perf/"):
                continue
            for step, value in points:
                if step <= self.model.step:
                    metrics[name] = value
        return metrics

    @property
    def params(self) -> Mapping[str, str]:
        return self.ready.params if self.ready else {}

    def metrics_of(self, split: Literal["train", "val", "test"]) -> dict[str, float]:
        """Returns the last values of the metrics of a split."""
        return {name: value for name, value in self.metrics.items() if name.startswith(f"{split}/")}

    @property
    def baseline(self) -> dict[str, float]:
        """The metrics of a constant prediction, keyed by the metric to compare with, such as `test/loss`.

        The worker reports `baseline/<metric>` for the validation split, or for the test split if there is no validation
        split.
        """
        of_test = f"{BASELINE}test/"
        has_validation = any(name.startswith((of_test, "val/")) for name in self.metrics)
        values = {}
        for name, value in self.metrics.items():
            if name.startswith(BASELINE) and name != FITTED_ROWS:
                prefix = "test/" if name.startswith(of_test) or not has_validation else "val/"
                values[prefix + name.removeprefix(BASELINE).removeprefix("test/")] = value
        return values

    def find_fitted_baselines(self, name: str) -> dict[str, float]:
        """Returns a metric, such as `test/rmse`, of the models that features fitted for comparison, by model.

        It is empty unless the metric's split is the split of `results`.
        """
        split, _, metric = name.partition("/")
        first_result = next(iter(self.results), "")
        if not first_result.startswith(f"{split}/"):
            return {}
        values = {}
        for model in list_compared_models():
            value = self.metrics.get(f"{BASELINE}{model}/{metric}")
            if value is not None:
                values[model] = value
        return values

    @property
    def fitted_rows(self) -> int:
        """The number of training rows that the compared models were fitted to; 0: all rows."""
        return int(self.metrics.get(FITTED_ROWS, 0))

    @property
    def results(self) -> dict[str, float]:
        """The metrics of the test split, without interval bounds; without a test split, of validation, else of
        training.
        """
        return drop_intervals(self.metrics_of("test")) or self.metrics_of("val") or self.metrics_of("train")


def make_length_tags(length: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tags that store the length of a resumed run. The keys of `length` are `training.epochs` and so on."""
    tags = {}
    for key, value in length.items():
        tags[LENGTH_TAG + key.removeprefix("training.")] = json.dumps(value)
    return tags


def parse_length_tags(tags: Mapping[str, str]) -> dict[str, Any]:
    """Returns the length stored in a run's tags, by the keys `training.epochs` and so on."""
    length = {}
    for tag, text in tags.items():
        if tag.startswith(LENGTH_TAG):
            with contextlib.suppress(ValueError):
                length[tag.removeprefix("scaleflow.")] = json.loads(text)
    return length


def drop_intervals(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics without the interval bounds of other metrics."""
    kept = {}
    for name, value in values.items():
        is_bound = name.endswith(INTERVAL) and name.rpartition("_")[0] in values
        if not is_bound:
            kept[name] = value
    return kept


def is_finished(folder: Path) -> bool:
    """Whether the last event of the run in a folder is its end with FINISHED. Reads only the end of the file."""
    last = read_last_event(RunFolder(folder).events)
    return isinstance(last, RunEnded) and last.status == "FINISHED"
