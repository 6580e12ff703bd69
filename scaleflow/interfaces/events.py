"""The events of a run: one dataclass for each kind.

Workers emit events. The chief's events go to `events.jsonl` in the run's folder (`scaleflow.runs.event_log`), and the
state of a run is computed from them (`scaleflow.runs.state`). The classes are in the order in which a run emits them.

A reader ignores unknown kinds of events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, dataclass_transform

from scaleflow.interfaces.clock import CLOCK
from scaleflow.interfaces.features import import_feature_events, report_problems

#: How a run ended, in MLflow's words.
Status = Literal["FINISHED", "FAILED", "KILLED"]

#: The metadata of a field whose text may contain secrets. They are masked before the event is written.
MASKED = {"is_masked": True}

KINDS: dict[str, type[Event]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Event:
    """Something that happened in a run. Each class of events is a frozen dataclass."""

    event: ClassVar[str] = ""  # the name of the kind of event in `events.jsonl`
    #: When the event happened, in milliseconds since the epoch
    time: int = field(default_factory=lambda: int(CLOCK.read() * 1000), kw_only=True)

    def __init_subclass__(cls, event: str = "") -> None:
        if event:  # without a name it is a base class of several kinds
            known = KINDS.get(event)
            if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"there is an event {event} already, in {known.__module__}")
            cls.event = event
            KINDS[event] = dataclass(frozen=True)(cls)

    def list_tags(self) -> Mapping[str, str]:
        """Returns the run's tags that the event sets in the store."""
        return {}

    def list_params(self) -> Mapping[str, str]:
        """Returns the params that the event adds to the run in the store. A param cannot change."""
        return {}


#: Receives the events of a worker.
Emit = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """An `Emit` that ignores all events."""


class ProcessStarted(Event, event="started"):
    """A process of the run has started. `name` is `worker 0`, `coordinator` and so on."""

    name: str = field(metadata=MASKED)
    pid: int


class PhaseBegan(Event, event="stage"):
    """A part of the work before or after training begins, such as `reading house.csv`. The previous part has ended."""

    text: str = field(metadata=MASKED)


class RunReady(Event, event="ready"):
    """The worker has built everything. From now on the run exists; before it, an error is a refusal."""

    name: str = field(metadata=MASKED)  # the run's name in the store
    tags: Mapping[str, str] = field(default_factory=dict, metadata=MASKED)  # the user's tags
    #: Every key of the config, and the `resolved.` values
    params: Mapping[str, str] = field(default_factory=dict, metadata=MASKED)
    began: int = 0  # when the command began, in milliseconds since the epoch
    #: The length of the run
    steps: int = 0
    epochs: int = 0
    #: Which values of a metric are better, `min` or `max`, by name without the split
    modes: Mapping[str, str] = field(default_factory=dict)
    search: Sequence[str] = ()  # the folders with the user's modules
    parent: str | None = None  # the folder of the sweep, if the run is one of its jobs
    resumed: int | None = None  # the step at which the run continues; None if it begins


class EvaluationReady(Event, event="evaluating"):
    """`scaleflow.evaluate` has loaded the model and a split of `examples` examples, or `all` examples."""

    split: str
    resolved: Mapping[str, Any]
    examples: int


class TagsSet(Event, event="tags"):
    """Tags of the run have new values."""

    values: Mapping[str, str]

    def list_tags(self) -> Mapping[str, str]:
        return self.values


class DescriptionSet(Event, event="description"):
    """A sweep or a pipeline has a new description, in Markdown. A training is described by the launcher instead."""

    text: str = field(metadata=MASKED)


class CheckpointSaved(Event, event="checkpoint"):
    """A checkpoint was written and verified."""

    step: int
    path: str


class UploadAwaited(Event, event="upload"):
    """The worker waits, at most `seconds`, for the upload of the last checkpoints. 0: the wait is over."""

    seconds: float


class Restarted(Event, event="restart"):
    """The launcher restarts processes."""

    number: int  # the number of restarts, including this one
    reason: str = field(metadata=MASKED)  # the reason
    worker: str | None = None  # the process that restarts while the others continue; None: all processes restart


class RolledBack(Event, event="rollback"):
    """A value became NaN or infinite, and the run continues from an earlier checkpoint. `number` counts such events."""

    number: int
    reason: str = field(metadata=MASKED)


class Waiting(Event, event="waiting"):
    """The worker waits for other processes, at most `seconds`."""

    seconds: float  # the limit
    peers: Sequence[str] = ()  # the addresses of the processes
    #: The error if nobody answers in time; None: the launcher writes one that names the missing peers
    vain: str | None = field(default=None, metadata=MASKED)


class PeersMet(Event, event="met"):
    """The worker no longer waits: all peers answer."""


class Note(Event, event="note"):
    """Something that the user should know."""

    text: str = field(metadata=MASKED)


class MetricsLogged(Event, event="metrics"):
    """Values of metrics after `step` updates."""

    step: int  # the number of updates
    values: Mapping[str, float]  # by metric name
    rate: float | None = None  # training examples per second, for the terminal
    compiled: bool | None = None  # whether the call that computed these values compiled its step


class SystemMetrics(Event, event="system"):
    """System metrics that the launcher measured. `step` counts the measurements."""

    step: int
    values: Mapping[str, float]


class EpochEnded(Event, event="epoch"):
    """Epoch `epoch` of `epochs` ended, with the values to show on the terminal."""

    epoch: int
    epochs: int
    step: int
    values: Mapping[str, float]


class StepsPlanned(Event, event="planned"):
    """The training goes on to `steps` updates in all, because a script trains again."""

    steps: int  # 0: it is unknown


class WeightHistograms(Event, event="weights"):
    """The distribution of each weight after `step` updates, for TensorBoard."""

    step: int
    values: Mapping[str, Any]


class ArtifactWritten(Event, event="artifact"):
    """A file to log with the run, in the artifact folder `folder`; None: at the top level."""

    path: str
    folder: str | None = None


class TaskResult(Event):
    """The result of a task that trains no model, with a table of figures. Each kind is an event of a feature."""

    def describe(self) -> str:
        """Returns a sentence for the description of the run, in Markdown."""
        raise NotImplementedError

    def list_rows(self) -> list[tuple[str, str]]:
        """Returns rows for the last lines of the command, each with its label."""
        raise NotImplementedError

    def to_values(self) -> dict[str, Any]:
        """Returns values for the object of `--json`."""
        raise NotImplementedError

    def find_table(self) -> str:
        """Returns the path of the CSV file with the figures. It was valid when the event was emitted."""
        raise NotImplementedError

    def draw(self, table: Path) -> Path:
        """Draws the figures next to their table, and returns the path of the picture. The launcher calls it."""
        raise NotImplementedError


class DatasetDescribed(Event, event="data"):
    """The description of the dataset."""

    name: str = field(metadata=MASKED)  # the chosen option of the group `dataset`
    #: The path, or the class and arguments that read the data
    source: Mapping[str, Any] = field(default_factory=dict, metadata=MASKED)
    #: The kind of its targets: `classification` and so on; a dict by name for several outputs
    kind: str | Mapping[str, str] = ""
    #: The names of the classes, if there are any; a dict by name for several outputs
    classes: Sequence[str] | Mapping[str, Sequence[str]] = ()
    #: By split: the number of examples, the digest, its coverage and version, and the dtypes and shapes (by name for a
    #: dict)
    splits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class ConfusionWritten(Event, event="confusion"):
    """The confusion matrix of a split, as a CSV file for the artifact folder `folder`."""

    path: str
    folder: str
    split: str


class StepsProfiled(Event, event="profile"):
    """The steps `first` to `last` were traced."""

    folder: str  # holds the traces
    #: The first and the last traced step
    first: int
    last: int
    artifacts: str  # the artifact folder for the result of the analysis
    usual_ms: float | None = None  # the time of a step outside the window, in ms; None if unknown
    facts: Mapping[str, Any] = field(default_factory=dict)  # values of the run that the analysis uses


class ReportMade(Event, event="report"):
    """The launcher has drawn the table, or analysed the trace, that an earlier event names. The files exist.

    It may follow the end of the run. It has the time of the earlier event.
    """

    at: int  # the offset of the earlier event in the file
    files: Sequence[tuple[str, str | None]] = ()  # (path, artifact folder), with the table or the traces
    values: Mapping[str, float] = field(default_factory=dict)  # metrics after `step` updates
    step: int = 0
    line: str = field(default="", metadata=MASKED)  # a line for the user about a trace


class ModelExported(Event, event="model"):
    """The model was exported to a folder, as it was after `step` updates."""

    path: str
    step: int
    weights: str = ""  # the digest of its weights, to compare runs


class ModelVariant(Event):
    """The exported model was also made in another way, such as in another format. Each kind is an event of a feature.

    The last lines of the run and its description show all variants.
    """

    def find_name(self) -> str:
        """Returns the name of the variant among those of its kind. A later event with the name replaces this one."""
        raise NotImplementedError

    def list_rows(self) -> list[tuple[str, str]]:
        """Returns rows for the last lines of the command, each with its label."""
        raise NotImplementedError

    def describe(self) -> tuple[str, Mapping[str, float]]:
        """Returns the row of a table in the description of the run: the first cell, and figures by column."""
        raise NotImplementedError


class FaultReported(Event, event="fault"):
    """Training failed, or a peer was lost before training. The launcher decides how the run ends."""

    error: str = field(metadata=MASKED)  # one line
    lost_peer: bool = False  # whether the cause is that another process is gone


class RunEnded(Event, event="end"):
    """The run ended. `status` is FINISHED, FAILED or KILLED; `error` is the reason, unless it is FINISHED."""

    status: Status
    error: str = field(default="", metadata=MASKED)


class RunRefused(Event, event="refused"):
    """There is no run: the command cannot work."""

    message: str = field(metadata=MASKED)  # the reason and a fix
    keep: bool = False  # whether to keep the folder, because a log explains more
    died: bool = False  # whether a process died; then the exit code is 1 instead of 2


def read_tags(event: Event) -> dict[str, str]:
    """Returns the tags that an event sets in the store; none, with a message, if its class fails."""
    tags: dict[str, str] = {}
    with report_problems(type(event).__module__, f"the tags of its event {event.event} are left out"):
        tags = {str(name): str(value) for name, value in event.list_tags().items()}
    return tags  # noqa: RET504 (the block may fail)


def read_params(event: Event) -> dict[str, str]:
    """Returns the params that an event adds to a run; none, with a message, if its class fails."""
    params: dict[str, str] = {}
    with report_problems(type(event).__module__, f"the params of its event {event.event} are left out"):
        params = {str(name): str(value) for name, value in event.list_params().items()}
    return params  # noqa: RET504 (the block may fail)


def to_fields(event: Event) -> dict[str, Any]:
    """Returns the fields of an event for a line of `events.jsonl`, without fields that are None."""
    values: dict[str, Any] = {"event": event.event}
    for event_field in fields(event):
        value = getattr(event, event_field.name)
        if value is not None:
            values[event_field.name] = value
    return values


def parse_event(line: Mapping[str, Any]) -> Event | None:
    """Returns the event in a line of `events.jsonl`; None if its kind is unknown, or if it has other fields."""
    name = str(line.get("event"))
    if name not in KINDS:
        import_feature_events()
    kind = KINDS.get(name)
    if kind is None:
        return None
    try:
        return kind(**{key: value for key, value in line.items() if key != "event"})
    except Exception:  # other fields, or a class of another package that refuses them
        return None
