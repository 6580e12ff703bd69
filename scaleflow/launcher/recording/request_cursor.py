"""Sends the events of a run to a store, except files: metrics, params, tags, the run's beginning and its end."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from scaleflow.interfaces import IDENTITY, Point
from scaleflow.interfaces.events import (
    DescriptionSet,
    Event,
    MetricsLogged,
    ReportMade,
    Restarted,
    RolledBack,
    RunEnded,
    RunReady,
    RunRefused,
    SystemMetrics,
    read_params,
    read_tags,
)
from scaleflow.launcher.recording.description import describe_run
from scaleflow.launcher.recording.store_record import StoreRecord
from scaleflow.runs import EventReader, RunFolder, RunState
from scaleflow.runs.provenance.tags import read_run_tags
from scaleflow.tracking.active_run import PARENT

#: The tag with the folder of the pipeline's run that a run belongs to.
PIPELINE = "scaleflow.pipeline"

EVENTS_A_PASS = 500

#: Events to send, in addition to metrics and tags.
REQUESTS = (RunReady, RunEnded, RunRefused, Restarted, RolledBack, DescriptionSet)

#: Events with metrics.
Measured = MetricsLogged | SystemMetrics | ReportMade


def list_points(event: Measured) -> list[Point]:
    return [Point(name, value, event.step, time=event.time) for name, value in event.values.items()]


class RequestCursor:
    """Reads the events of a run in order, and sends each until the store accepts it. The record keeps its position.

    Args:
        wait_for_files: returns when the files that are sent with `ready` are written.

    Attributes:
        earlier: the folder of an earlier run whose experiment a new run without a parent uses; None: no such run.
    """

    def __init__(self, record: StoreRecord, wait_for_files: Callable[[], object]) -> None:
        self._record = record
        self._tracker = record.tracker
        self._reader = EventReader(record.events)
        self._wait_for_files = wait_for_files
        self.earlier: Path | None = None

    @property
    def position(self) -> int:
        """The offset after the events that `send` has read."""
        return self._reader.offset

    def send(self, should_stop: Callable[[], bool]) -> RunEnded | None:
        """Sends the events in the file up to the end of the run. Returns the end without sending it."""
        self._reader.offset = before = self._record.offset
        while not should_stop():
            end = self._send_portion(should_stop)
            if end or self._reader.offset == before:
                return end
            before = self._reader.offset
        return None

    def _send_portion(self, should_stop: Callable[[], bool]) -> RunEnded | None:
        """Sends some events, consecutive metrics in one request. Returns the end of the run when it finds it."""
        points: list[Point] = []
        for event in islice(self._reader.read(), EVENTS_A_PASS):
            if should_stop():
                return None
            if isinstance(event, Measured):
                points += list_points(event)
            elif isinstance(event, REQUESTS) or read_tags(event) or read_params(event):
                self._send_points(points, self._reader.event_offset)
                points = []
                if isinstance(event, RunEnded):
                    return event
                self._send_event(event)
                self.take(self._reader.offset)
        self._send_points(points, self._reader.offset)
        return None

    def _send_points(self, points: Sequence[Point], offset: int) -> None:
        """Sends the points of the events before an offset."""
        if points:
            self._tracker.log_metrics(points)
        self.take(offset)

    def take(self, offset: int) -> None:
        """Notes that the store has the requests of all events before an offset."""
        if offset != self._record.offset:
            self._record.offset = offset
            self._record.save()

    def _send_event(self, event: Event) -> None:
        match event:
            case RunReady():
                self._start_run(event)
                self._record.ended = 0
            case RunRefused():  # there is no run, or a resumed run keeps its earlier end
                self._record.ended = self._reader.offset
            case DescriptionSet():
                self._tracker.describe(event.text)
            case Restarted() | RolledBack():
                tag = f"scaleflow.{event.event}"
                self._tracker.set_tags({f"{tag}s": str(event.number), f"{tag}.{event.number}": event.reason})
            case _:
                if tags := read_tags(event):
                    self._tracker.set_tags(tags)
                if params := read_params(event):
                    self._tracker.log_params(params)

    def _start_run(self, event: RunReady) -> None:
        self._wait_for_files()
        if event.resumed is not None and self._record.run_id is not None:
            self._tracker.reopen()
            self.describe()
            return
        self._record.save(is_vital=True)  # so that a later command finds the run that is created or adopted now
        known = self._record.known
        tags = {
            **read_run_tags(self._record.files.path),
            **event.tags,
            "scaleflow.folder": known["folder"],
            IDENTITY: known["id"],
            **self.make_parent_tag(event),
        }
        self._follow_experiment(event, tags.get(PARENT))
        self._tracker.start(event.name, tags, event.began)
        self._record.save()
        self._tracker.log_params(event.params)
        self.describe()

    def _follow_experiment(self, event: RunReady, parent_id: str | None) -> None:
        """Creates the run in the experiment of its parent, or of an earlier run, if both use the same name.

        Somebody may have renamed that experiment. If the parent is a run that was active when the command began, its
        experiment counts unless the command names one.
        """
        folder = self._find_parent(event)
        if folder is None and parent_id is not None:
            if not self._tracker.names_experiment:
                self._tracker.follows = parent_id
            return
        folder = folder or self.earlier
        if folder is None:
            return
        record = RunFolder(folder).read_record()
        if self._tracker.experiment is not None and record.get("experiment") == self._tracker.experiment:
            self._tracker.follows = record.get("run_id")

    def _find_parent(self, event: RunReady) -> Path | None:
        """Returns the folder of the sweep or the pipeline that a run belongs to; None without a parent."""
        folder = self._record.files.path
        parent = event.parent or read_run_tags(folder).get(PIPELINE)
        return None if parent in (None, str(folder)) else self._record.locate(parent)

    def make_parent_tag(self, event: RunReady) -> dict[str, str]:
        """Returns the tag that makes a run a child of its sweep's run.

        Raises LookupError if the sweep's run is not recorded yet.
        """
        parent = self._find_parent(event)
        if parent is None or self._tracker.uri is None:
            return {}
        run_id = RunFolder(parent).read_record().get("run_id")
        if run_id is None:
            raise LookupError("its parent, the run of the sweep or of the pipeline, is not recorded yet")
        return {PARENT: run_id}

    def end_run(self, end: RunEnded) -> None:
        """Sends the end of the run. The end may be missing in the event file."""
        error = {"scaleflow.error": end.error} if end.error else {}
        self._tracker.set_tags({"scaleflow.status": end.status, **error})
        state = RunState.read(self._record.files.path)
        began = state.ready.began if state.ready else 0
        self._tracker.finish(end.status, max(end.time, began))  # the clock may have been set back
        self.describe(end)

    def describe(self, end: RunEnded | None = None) -> None:
        """Updates the run's description. The parent of a sweep gets its description from the sweep's command.

        Args:
            end: the end of the run, which may be missing in the event file.
        """
        files = self._record.files
        store = self._tracker.uri
        if store is None or files.ledger.exists():
            return
        state = RunState.read(files.path)
        if end is not None and state.is_open:
            state.apply(end)
        model = self._tracker.model_uri or self._record.known.get("model_uri")
        self._tracker.describe(state.annotations.description or describe_run(files, state, store, model_uri=model))
