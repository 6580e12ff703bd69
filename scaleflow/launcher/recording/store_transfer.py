"""Sends the events of a run to a tracking store.

`record.json`, beside the events, says which run in the store they belong to and how many bytes the store has taken.
After a failure, everything after those bytes is sent again, unchanged. What would be created twice is looked up first.
So the store holds each run once and each point once, even if several commands send it several times.

The page of a run in MLflow lists metrics in the order in which the store first got them. Baselines and the first speeds
are known before the first loss. So they wait until the test is recorded or the run has ended, but at most a minute of
the run's time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.errors import RunMissing
from scaleflow.interfaces import IDENTITY, Point, Tracker, name_command
from scaleflow.interfaces.events import (
    ArtifactWritten,
    ConfusionWritten,
    DatasetDescribed,
    DescriptionSet,
    Event,
    FormatExported,
    MetricsLogged,
    ModelExported,
    Restarted,
    RolledBack,
    RunEnded,
    RunReady,
    RunRefused,
    SettingFound,
    StepsProfiled,
    SystemMetrics,
    TagsSet,
)
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.recording.description import describe_run
from scaleflow.runs import EventReader, RunFolder, RunState
from scaleflow.runs.provenance.tags import read_run_tags
from scaleflow.tracking import TensorBoardWriter
from scaleflow.tracking.connection import format_store_error
from scaleflow.tracking.store import WEIGHTS
from scaleflow.tracking.uri import sqlite_file

if TYPE_CHECKING:
    from scaleflow.profiler.analysis_process import Profile


#: Prefixes of the metrics that wait, and of those that they wait for.
LATE, AWAITED = ("baseline/", "perf/"), "test/"

#: How long they wait, in milliseconds.
LONGEST_WAIT = 60_000


class LatePoints:
    """The points that wait.

    Args:
        events: the run's `events.jsonl`.
        offsets: the events in it whose late points an earlier command has not sent.
        has_begun: whether the store has metrics of the run, whose order is then given.

    Attributes:
        is_due: whether they are to be sent now, after all others.
    """

    def __init__(self, events: Path, offsets: Iterable[int] = (), has_begun: bool = False) -> None:
        self._events: dict[int, MetricsLogged | SystemMetrics] = {}
        for at in offsets:
            event = next(EventReader(events, at).read())
            assert isinstance(event, MetricsLogged | SystemMetrics)
            self._events[at] = event
        self._is_over = has_begun and not self._events
        self.is_due = False

    @property
    def offsets(self) -> list[int]:
        """The events of which points wait, by their offsets in the file."""
        return list(self._events)

    @property
    def points(self) -> list[Point]:
        return [p for event in self._events.values() for p in to_points(event) if p.key.startswith(LATE)]

    def hold(self, at: int, event: MetricsLogged | SystemMetrics) -> list[Point]:
        """Returns the points of an event at an offset that are to be sent now, and holds the others back."""
        points = to_points(event)
        if self._is_over:
            return points
        if any(point.key.startswith(LATE) for point in points):
            self._events[at] = event
        since = min((held.time for held in self._events.values()), default=event.time)
        self.is_due |= event.time - since > LONGEST_WAIT or any(p.key.startswith(AWAITED) for p in points)
        return [point for point in points if not point.key.startswith(LATE)]

    def end(self) -> None:
        """Lets all points go: those that wait have been sent, and none waits from now on."""
        self._events.clear()
        self._is_over, self.is_due = True, False


def to_points(event: MetricsLogged | SystemMetrics) -> list[Point]:
    return [Point(name, value, event.step, event.time) for name, value in event.values.items()]


#: MLflow's tag of a child run.
PARENT = "mlflow.parentRunId"

#: The tag with the folder of the run of the pipeline that a run belongs to.
PIPELINE = "scaleflow.pipeline"

EVENTS_A_PASS = 500

#: Failures after which a file is skipped, if the store accepts other events. Later events are then sent without it.
TRIES_OF_A_FILE = 8

#: Events of files and descriptions. They can be skipped, so that they do not block later events.
DEFERRABLE = (ArtifactWritten, ConfusionWritten, DatasetDescribed, ModelExported, SettingFound, StepsProfiled)

#: Events that are sent, in addition to metrics.
SENT = (*DEFERRABLE, FormatExported, RunReady, TagsSet, DescriptionSet, Restarted, RolledBack, RunEnded, RunRefused)


class StillReadingError(Exception):
    """A profile is still being analysed."""


def read_profile(event: StepsProfiled) -> Profile:
    """Returns the analysis of a traced window, which can take minutes."""
    from scaleflow.profiler import analyze_window

    return analyze_window(event)


class EventTransfer:
    """Sends the events of a run to a tracker, in order. Each is sent until the store has taken it.

    Args:
        events: the run's `events.jsonl`.
        tries_of_a_file: failures after which a file is put aside.
        board: writes the events for TensorBoard; None: not written.
        keeps_record: whether to write `record.json`.
        wait_for_files: returns when the files that are sent with `ready` are written.

    Attributes:
        read_profile: analyses a traced window.
        taken: how many bytes of the events the store has.
        ended: the bytes up to the event `end` or `refused`, if that was the last taken one; else 0.
        aside: the events that were put aside: the reason, by offset in the file.
        profiles: a line for the user about each traced window, by its first step.
    """

    def __init__(
        self,
        tracker: Tracker,
        events: Path,
        tries_of_a_file: int = TRIES_OF_A_FILE,
        board: TensorBoardWriter | None = None,
        keeps_record: bool = True,
        wait_for_files: Callable[[], object] = bool,
    ) -> None:
        self.tracker, self.events = tracker, events
        self._tries_of_a_file = tries_of_a_file
        self._board = board
        self._for_board = EventReader(events)
        self._reader = EventReader(events)
        self._files = RunFolder(events.parent)
        self._record = self._files.read_record()
        self._unread: set[int] = set()
        self._tries: dict[int, int] = {}
        self._missing: set[int] = set()
        self._keeps_record = keeps_record
        self._wait_for_files = wait_for_files
        self.read_profile = read_profile
        self.profiles: dict[int, str] = {}
        self.taken: int = self._record.get("offset", 0)
        self.ended: int = self.taken if self._record.get("done") else 0
        self.aside: dict[int, str] = {int(at): why for at, why in self._record.get("aside", {}).items()}
        self._late = LatePoints(events, self._record.get("late", ()), has_begun=self.taken > 0)
        if "id" not in self._record:
            self._record |= self._make_record()

    def _make_record(self) -> dict[str, str]:
        return {"id": uuid.uuid4().hex, "folder": str(self._files.path.absolute())}

    @property
    def is_complete(self) -> bool:
        size = self.events.stat().st_size if self.events.exists() else 0
        return not (self.aside or self._late.offsets) and self.taken >= size

    @property
    def has_run(self) -> bool:
        return self.run_id is not None

    @property
    def has_everything(self) -> bool:
        """Whether a store has the run with all of its events."""
        return self.is_complete and self.has_run

    @property
    def run_id(self) -> str | None:
        """The run in the store, once there is one."""
        return self._record.get("run_id")

    @property
    def has_deferred(self) -> bool:
        """Whether an event was put aside that the store may still take, because its files exist."""
        return bool(self.aside.keys() - self._missing)

    @property
    def is_reading(self) -> bool:
        """Whether a profile is still being analysed."""
        return bool(self._unread)

    def start_after(self, offset: int) -> None:
        """Begins a new run with the events after an offset. Those before it belong to an earlier run."""
        self._record = self._make_record()
        self.taken, self.aside, self.ended = offset, {}, 0
        self._late = LatePoints(self.events)

    def start_over(self) -> None:
        """Begins a new run in the store with all events, as it has the earlier one no more. Raises ConfigError."""
        self.tracker.connect()
        self.tracker.check_experiment()  # before the record of the earlier run is gone
        before = self._record["folder"]
        self.start_after(0)
        self._record["folder"] = before  # the events name files in it

    def open(self) -> None:
        """Opens the store, and the run in it, if there is one.

        Raises:
            StoreUnreachable: if the store does not answer.
            RunMissing: if it does not have the run any more.
            ConfigError: if it cannot be used.
        """
        try:
            self._refuse_new_store()
            self.tracker.connect()
            if self.has_run:
                self.tracker.adopt(self._record["run_id"])
        except RunMissing as missing:
            folder = os.path.relpath(self._files.path)
            raise type(missing)(
                f"{missing}; {name_command('sync')} {folder} --again records it again, as a new run"
            ) from missing
        if not self.has_run:
            if "adopts" in self._record:  # an earlier command began to adopt a run, and died
                self.tracker.adopted = self._record["adopts"]
            self.tracker.check_experiment()

    def _refuse_new_store(self) -> None:
        """Raises RunMissing if the store of a recorded run is an SQLite file that is gone: opening would create it."""
        file = sqlite_file(self.tracker.uri) if self.has_run and self.tracker.uri else None
        if file and file.parent.is_dir() and not file.exists():
            raise RunMissing(f"the store {self.tracker.uri} with the run {self.run_id} does not exist any more")

    def link_parent(self, event: RunReady) -> None:
        """Makes the recorded run the child of its sweep's run, which may have been recorded again."""
        self.tracker.set_tags(self._make_parent_tag(event))

    def import_ahead(self) -> None:
        """Imports what draws pictures, while the workers start: at the end of a run the command would wait for it."""
        if self.tracker.uri is not None:
            from scaleflow.tracking.plot import import_figure

            import_figure()

    def send(self, again: bool = False, should_stop: Callable[[], bool] = bool) -> None:
        """Sends all events that the file holds. Raises what the store raises; what it has taken stays taken.

        Args:
            again: whether to first send what was put aside.
            should_stop: returns True to leave the rest unsent.
        """
        self._send_deferred(self.aside if again else self._unread)
        self._reader.offset = self.taken
        while not should_stop() and self._send_portion(should_stop):
            pass

    def send_unwritten(self, events: Sequence[Event]) -> None:
        """Sends events that come after all others and are not in the file."""
        for event in events:
            if isinstance(event, RunEnded):
                self._send_late()
            self._handle(event)
            self.ended = sys.maxsize if isinstance(event, RunEnded | RunRefused) else 0

    def _send_portion(self, should_stop: Callable[[], bool]) -> bool:
        """Sends some events, consecutive metrics in one request; returns whether there may be more to send."""
        points: list[Point] = []
        at, count = self._reader.offset, 0
        for event in islice(self._reader.read(), EVENTS_A_PASS):
            if should_stop():
                return False
            count += 1
            if isinstance(event, MetricsLogged | SystemMetrics):
                points += self._late.hold(at, event)
            elif isinstance(event, SENT):
                self._send_points(points, at)
                points = []
                self._send_event(event, at)
            at = self._reader.offset
        self._send_points(points, self._reader.offset)  # after events at the end that this version does not know, too
        return count > 0

    def _send_points(self, points: Sequence[Point], offset: int) -> None:
        if points:
            self.tracker.log_metrics(points)
        if self._late.is_due:
            self._send_late()
        self._take(offset)

    def _send_late(self) -> None:
        if points := self._late.points:
            self.tracker.log_metrics(points)
        self._late.end()

    def _send_event(self, event: Event, at: int) -> None:
        if isinstance(event, RunEnded):
            self._send_late()
        if isinstance(event, RunReady):
            self._wait_for_files()
        if not isinstance(event, DEFERRABLE):
            self._handle(event)
        if isinstance(event, (*DEFERRABLE, RunReady, RunEnded)):
            self._send_file(event, at)
        if isinstance(event, RunEnded | RunRefused):
            self.ended = self._reader.offset
        elif isinstance(event, RunReady):
            self.ended = 0
        self._take(self._reader.offset)

    def _send_file(self, event: Event, at: int) -> None:
        """Sends the files of an event, or puts the event aside if the store answers other requests."""
        try:
            self._log_files(event, at)
        except StillReadingError as error:
            self._unread.add(at)
            self.aside[at] = str(error)
        except Exception as error:
            self._tries[at] = self._tries.get(at, 0) + 1
            if isinstance(error, FileNotFoundError):
                self._missing.add(at)
            elif self._tries[at] < self._tries_of_a_file:
                raise
            if self.has_run:
                self.tracker.adopt(self._record["run_id"])  # raises if the store is unreachable
            self.aside[at] = format_store_error(error, self.tracker.uri)

    def _send_deferred(self, offsets: Iterable[int]) -> None:
        for at in sorted(offsets):
            try:
                event = next(EventReader(self.events, at).read())
                self._log_files(event, at)
                if isinstance(event, ModelExported):
                    self._describe_run()
            except StillReadingError:
                self._unread.add(at)
                continue
            except Exception as error:
                self.aside[at] = format_store_error(error, self.tracker.uri)
            else:
                del self.aside[at]
            self._unread.discard(at)
            self.save_state()

    def _log_files(self, event: Event, at: int) -> None:
        if isinstance(event, RunReady):
            for path, folder in self._files.list_logged_files():
                self.tracker.log_artifact(path, folder)
        elif isinstance(event, RunEnded):
            self.write_tensorboard()
            for path in sorted(self._files.tensorboard.glob("*")):
                self.tracker.log_artifact(path, self._files.tensorboard.name)
        elif not (isinstance(event, ModelExported) and self._is_replaced(event, at)):
            self._handle(event)

    def _is_replaced(self, model: ModelExported, at: int) -> bool:
        """Whether a later event says that another model was exported, to the same folder."""
        return any(isinstance(e, ModelExported) and e != model for e in EventReader(self.events, at).read())

    def _handle(self, event: Event) -> None:
        """Sends one event. A refusal sends nothing: there is no run, or a resumed run keeps its earlier end."""
        match event:
            case RunReady():
                self._start_run(event)
            case RunEnded():
                self._end_run(event)
            case TagsSet():
                self.tracker.set_tags(event.values)
            case DescriptionSet():
                self.tracker.describe(event.text)
            case FormatExported():
                self.tracker.set_tags({f"scaleflow.export.{event.name}": event.error or "good"})
            case Restarted():
                self._count_event("restart", event.number, event.reason)
            case RolledBack():
                self._count_event("rollback", event.number, event.reason)
            case _:
                self._handle_file(event)

    def _handle_file(self, event: Event) -> None:
        match event:
            case ArtifactWritten():
                self.tracker.log_artifact(self._locate(event.path), event.folder)
            case DatasetDescribed():
                self.tracker.log_dataset(event)
            case ConfusionWritten():
                self._log_confusion(event)
            case StepsProfiled():
                self._log_profile(event)
            case SettingFound():
                self._log_setting(event)
            case ModelExported():
                self.tracker.log_model(self._locate(event.path), event.step)
                if event.weights:
                    self.tracker.set_tags({WEIGHTS: event.weights})

    def _take(self, offset: int) -> None:
        if offset != self.taken:
            self.taken = offset
            self.save_state()

    def leave_record(self) -> None:
        """Writes `record.json` no more: the folder is removed, or another command may record the run."""
        self._keeps_record = False

    def save_state(self, is_vital: bool = False) -> None:
        """Writes `record.json`: which run in the store this is, and how much of it the store has.

        Args:
            is_vital: whether to wait until it is on the disk, because a request follows that must not be sent twice.
        """
        if not self._keeps_record:
            return
        if self.tracker.uri is None:  # not tracked now: the record keeps a store that has the run
            record = {"run_id": None, **self._files.read_record()}
        else:
            record = {**self._record, "offset": self.taken, "uri": mask_secrets(self.tracker.uri)}
            record |= {"done": bool(self.ended), "aside": self.aside}
            record.pop("late", None)
            if self._late.offsets:
                record["late"] = self._late.offsets
            if self.tracker.adopted is not None:
                record["adopts"] = self.tracker.adopted
            if self.tracker.run_id is not None:
                record["run_id"] = self.tracker.run_id
            if self.tracker.model_uri is not None:
                record["model_uri"] = self.tracker.model_uri
            self._record = record
        with contextlib.suppress(OSError):  # the disk is full; sending the same again later does no harm
            self._files.write_record(record, is_vital)

    def _start_run(self, event: RunReady) -> None:
        if event.resumed is not None and self.has_run:
            self.tracker.reopen()
            self._describe_run()
            return
        self.save_state(is_vital=True)  # so that a later command finds the run that is created or adopted now
        tags = {
            **read_run_tags(self._files.path),
            **event.tags,
            "scaleflow.folder": self._record["folder"],
            IDENTITY: self._record["id"],
            **self._make_parent_tag(event),
        }
        self.tracker.start(event.name, tags, event.began)
        self.save_state()
        self.tracker.log_params(event.params)
        self._describe_run()

    def _describe_run(self, end: RunEnded | None = None) -> None:
        """Writes the description of the run as it is now. The command of a sweep or a pipeline describes that.

        Args:
            end: the end of the run, which may not be in the file.
        """
        if self.tracker.uri is None or self._files.ledger.exists():
            return
        state = RunState.read(self._files.path)
        if end is not None and state.is_open:
            state.apply(end)
        model = self.tracker.model_uri or self._record.get("model_uri")
        self.tracker.describe(state.description or describe_run(self._files, state, self.tracker.uri, model))

    def _make_parent_tag(self, event: RunReady) -> dict[str, str]:
        """Returns the tag that makes a run the child of its sweep's run.

        Raises LookupError if the run of the sweep is not recorded yet.
        """
        parent = event.parent or read_run_tags(self._files.path).get(PIPELINE)
        if parent in (None, str(self._files.path)) or self.tracker.uri is None:
            return {}
        run_id = RunFolder(Path(parent)).read_record().get("run_id")
        if run_id is None:
            raise LookupError("its parent, the run of the sweep or of the pipeline, is not recorded yet")
        return {PARENT: run_id}

    def _count_event(self, name: str, number: int, reason: str) -> None:
        self.tracker.set_tags({f"scaleflow.{name}s": str(number), f"scaleflow.{name}.{number}": reason})

    def _log_confusion(self, event: ConfusionWritten) -> None:
        from scaleflow.tracking.plot import draw_confusion

        table = self._locate(event.path)
        for path in filter(None, (draw_confusion(table, event.split), table)):
            self.tracker.log_artifact(path, event.folder)

    def _log_setting(self, event: SettingFound) -> None:
        from scaleflow.tracking.plot import draw_trial

        table = self._locate(event.path)
        for path in filter(None, (draw_trial(table, event.word, event.value), table)):
            self.tracker.log_artifact(path, self._files.plots.name)
        self.tracker.set_tags({"scaleflow.found": event.word, "scaleflow.found.reason": event.reason})

    def _log_profile(self, event: StepsProfiled) -> None:
        profile = self.read_profile(event)
        for path, folder in profile.files:
            self.tracker.log_artifact(path, folder)
        self.tracker.log_metrics([Point(k, value, event.last, event.time) for k, value in profile.values.items()])
        self.profiles[event.first] = profile.line

    def _end_run(self, event: RunEnded) -> None:
        tags: dict[str, str] = {"scaleflow.status": event.status}
        if event.error:
            tags["scaleflow.error"] = event.error
        self.tracker.set_tags(tags)
        self.tracker.finish(event.status, event.time)
        self._describe_run(event)

    def _locate(self, name: str) -> Path:
        """Returns the path of a file that an event names, even if the run's folder was moved."""
        path, before = Path(name), Path(self._record["folder"])
        if not path.exists() and path.is_relative_to(before):
            return self._files.path / path.relative_to(before)
        return path

    def write_tensorboard(self) -> None:
        """Writes the new events for TensorBoard. It has its own offset: each point must be written once."""
        if self._board is not None:
            self._board.write_events(self._for_board.read())
