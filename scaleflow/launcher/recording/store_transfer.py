"""Sends the events of a run to a tracking store.

`record.json`, beside the events, says which run in the store they belong to and how many bytes the store has taken.
After a failure, everything after those bytes is sent again, unchanged. What would be created twice is looked up first.
So the store holds each run once and each point once, even if several commands send it several times.

The store may refuse a file, or a file may be missing or take minutes to make. Its event is then put aside, and those
that follow are sent. What was put aside is sent again at the end of the run, and by `scaleflow sync`.

The page of a run in MLflow lists metrics in the order in which the store first got them. Baselines and the first speeds
are known before the first loss. So they wait until the test is recorded or the run has ended, but at most a minute of
the run's time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.errors import RunMissing, ScaleflowError
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
from scaleflow.tracking.plot import draw_confusion, draw_trial
from scaleflow.tracking.store import WEIGHTS
from scaleflow.tracking.uri import sqlite_file

if TYPE_CHECKING:
    from scaleflow.profiler.analysis_process import Profile


#: Prefixes of the metrics that wait, and of those that they wait for.
LATE, AWAITED = ("baseline/", "perf/"), "test/"

#: How long they wait, in milliseconds.
LONGEST_WAIT = 60_000

#: MLflow's tag of a child run.
PARENT = "mlflow.parentRunId"

#: The tag with the folder of the run of the pipeline that a run belongs to.
PIPELINE = "scaleflow.pipeline"

EVENTS_A_PASS = 500

#: Failures after which a file is put aside, if the store accepts other requests.
TRIES_OF_A_FILE = 8

#: Events that are sent, in addition to metrics.
SENT = (
    *(RunReady, RunEnded, RunRefused, Restarted, RolledBack, TagsSet, DescriptionSet, DatasetDescribed),
    *(ArtifactWritten, ConfusionWritten, SettingFound, StepsProfiled, ModelExported, FormatExported),
)

#: Analyses of profiles need much memory: one at a time.
ANALYSIS_LOCK = threading.Lock()


class StillAnalyzingError(ScaleflowError):
    """A profile is still being analyzed."""


def analyze_meanwhile(event: StepsProfiled) -> Future[Profile]:
    """Analyzes a traced window in a thread, because that can take minutes."""
    from scaleflow.profiler import analyze_window

    analysis: Future[Profile] = Future()

    def analyze() -> None:
        with ANALYSIS_LOCK:
            try:
                analysis.set_result(analyze_window(event))
            except Exception as error:
                analysis.set_exception(error)

    threading.Thread(target=analyze, name="profile", daemon=True).start()
    return analysis


def read_event(events: Path, offset: int) -> Event:
    return next(EventReader(events, offset).read())


class LatePoints:
    """The points that wait.

    Args:
        events: the run's `events.jsonl`.
        offsets: the events in it whose late points an earlier command has not sent.
        has_begun: whether the store has metrics of the run, whose order is then given.

    Attributes:
        is_due: whether they are to be sent now, after all others.
    """

    def __init__(self, events: Path, offsets: Sequence[int] = (), has_begun: bool = False) -> None:
        self._points: dict[int, list[Point]] = {}
        self._is_over = has_begun and not offsets
        self.is_due = False
        for at in offsets:
            self.hold(at, read_event(events, at))

    @property
    def offsets(self) -> list[int]:
        """The events of which points wait, by their offsets in the file."""
        return list(self._points)

    @property
    def points(self) -> list[Point]:
        return [point for points in self._points.values() for point in points]

    def hold(self, at: int, event: Event) -> list[Point]:
        """Returns the points of an event at an offset that are to be sent now, and holds the others back."""
        assert isinstance(event, MetricsLogged | SystemMetrics)
        points = [Point(name, value, event.step, time=event.time) for name, value in event.values.items()]
        if self._is_over:
            return points
        if late := [point for point in points if point.key.startswith(LATE)]:
            self._points[at] = late
        since = next((points[0].time for points in self._points.values()), event.time)
        self.is_due |= event.time - since > LONGEST_WAIT or any(p.key.startswith(AWAITED) for p in points)
        return [point for point in points if not point.key.startswith(LATE)]

    def end(self) -> None:
        """Lets all points go: those that wait have been sent, and none waits from now on."""
        self._points.clear()
        self._is_over, self.is_due = True, False


class EventTransfer:
    """Sends the events of a run to a tracker, in order. Each is sent until the store has taken it.

    Args:
        events: the run's `events.jsonl`.
        tries_of_a_file: failures after which a file is put aside.
        board: writes the events for TensorBoard; None: not written.
        wait_for_files: returns when the files that are sent with `ready` are written.

    Attributes:
        keeps_record: whether to write `record.json`: not if the folder goes, or if another command may record the run.
        taken: how many bytes of the events the store has.
        ended: the bytes up to the event `end` or `refused`, if that was the last taken one; else 0.
        aside: the events that were put aside: the reason, by offset in the file.
        profiles: a line for the user about each traced window, by its first step.
        unwritten_end: an end that could not be written to the file. It is sent after all events.
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
        self._analyses: dict[int, Future[Profile]] = {}
        self.keeps_record = keeps_record
        self._wait_for_files = wait_for_files
        self.profiles: dict[int, str] = {}
        self.unwritten_end: RunEnded | RunRefused | None = None
        self.taken: int = self._record.get("offset", 0)
        self.ended: int = self.taken if self._record.get("done") else 0
        self.aside: dict[int, str] = {int(at): why for at, why in self._record.get("aside", {}).items()}
        self._tries = Counter(dict.fromkeys(self.aside, tries_of_a_file))
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
    def is_analyzing(self) -> bool:
        """Whether a profile is still being analyzed, or not sent yet."""
        return bool(self._analyses)

    def start_after(self, offset: int) -> None:
        """Begins a new run with the events after an offset. Those before it belong to an earlier run."""
        self._record = self._make_record()
        self.taken, self.aside, self.ended = offset, {}, 0
        self._tries.clear()
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

    def send(self, should_stop: Callable[[], bool] = bool) -> None:
        """Sends all events that the file holds. Raises what the store raises; what it has taken stays taken.

        `should_stop` returns True to leave the rest unsent.
        """
        self._write_tensorboard()
        self._send_aside(at for at, analysis in self._analyses.items() if analysis.done())
        self._reader.offset = self.taken
        while not should_stop() and self._send_portion(should_stop):
            pass
        if self.unwritten_end is not None and not should_stop():
            self._send_request(self.unwritten_end)
            self.ended = sys.maxsize

    def send_all(self) -> None:
        """Sends all events, and what was put aside. It waits until profiles are analyzed. Raises like `send`."""
        if self.ended:  # otherwise the end of the run sends it
            self._send_aside(self.aside)
        self.send()
        wait(self._analyses.values())
        self.send()

    def _send_portion(self, should_stop: Callable[[], bool]) -> bool:
        """Sends some events, consecutive metrics in one request; returns whether there may be more to send."""
        points: list[Point] = []
        start = at = self._reader.offset
        for event in islice(self._reader.read(), EVENTS_A_PASS):
            if should_stop():
                return False
            if isinstance(event, MetricsLogged | SystemMetrics):
                points += self._late.hold(at, event)
            elif isinstance(event, SENT):
                self._send_points(points, at)
                points = []
                self._send_event(event, at)
            at = self._reader.offset
        self._send_points(points, self._reader.offset)  # after events at the end that this version does not know, too
        return self._reader.offset > start

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
        self._send_request(event)
        self._try_files(event, at)
        if isinstance(event, RunEnded | RunRefused):
            self.ended = self._reader.offset
        elif isinstance(event, RunReady):
            self.ended = 0
        self._take(self._reader.offset)

    def _send_request(self, event: Event) -> None:
        """Sends what an event has beside files. A refusal has nothing: a resumed run keeps its earlier end."""
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
            case SettingFound():
                self.tracker.set_tags({"scaleflow.found": event.word, "scaleflow.found.reason": event.reason})
            case Restarted() | RolledBack():
                tag = f"scaleflow.{event.event}"
                self.tracker.set_tags({f"{tag}s": str(event.number), f"{tag}.{event.number}": event.reason})

    def _start_run(self, event: RunReady) -> None:
        self._wait_for_files()
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
            **self.make_parent_tag(event),
        }
        self.tracker.start(event.name, tags, event.began)
        self.save_state()
        self.tracker.log_params(event.params)
        self._describe_run()

    def make_parent_tag(self, event: RunReady) -> dict[str, str]:
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

    def _end_run(self, event: RunEnded) -> None:
        self._send_late()
        error = {"scaleflow.error": event.error} if event.error else {}
        self.tracker.set_tags({"scaleflow.status": event.status, **error})
        self._send_aside(self.aside)
        self.tracker.finish(event.status, event.time)
        self._describe_run(event)

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
        self.tracker.describe(state.description or describe_run(self._files, state, self.tracker.uri, model_uri=model))

    def _send_aside(self, offsets: Iterable[int]) -> None:
        """Sends the files of events that were put aside. Those that the store does not take stay there."""
        for at in sorted(offsets):
            event = read_event(self.events, at)
            self._try_files(event, at)
            if isinstance(event, ModelExported):
                self._describe_run()
            self.save_state()

    def _try_files(self, event: Event, at: int) -> None:
        """Sends the files of an event, or puts it aside: if they are not there, or the store takes only other requests.

        Raises what the store raises, so that the event is tried again, until it was tried often enough and the store
        answers.
        """
        try:
            self._send_files(event, at)
            self.aside.pop(at, None)
        except Exception as error:
            if not isinstance(error, FileNotFoundError | StillAnalyzingError):
                self._tries[at] += 1
                if self._tries[at] < self._tries_of_a_file:
                    raise
                if self.has_run:
                    self.tracker.adopt(self._record["run_id"])  # raises if the store is unreachable
            if not isinstance(error, StillAnalyzingError):
                self._analyses.pop(at, None)
            self.aside[at] = format_store_error(error, self.tracker.uri)

    def _send_files(self, event: Event, at: int) -> None:
        match event:
            case DatasetDescribed():
                self.tracker.log_dataset(event)
            case ModelExported():
                self._log_model(event, at)
            case StepsProfiled():
                self._log_profile(event, at)
            case _:
                for path, folder in self._list_artifacts(event):
                    self.tracker.log_artifact(path, folder)

    def _log_model(self, event: ModelExported, at: int) -> None:
        if not self._is_replaced(event, at):
            self.tracker.log_model(self._locate(event.path), event.step)
            if event.weights:
                self.tracker.set_tags({WEIGHTS: event.weights})

    def _is_replaced(self, model: ModelExported, at: int) -> bool:
        """Whether a later event says that another model was exported, to the same folder."""
        return any(isinstance(e, ModelExported) and e != model for e in EventReader(self.events, at).read())

    def _log_profile(self, event: StepsProfiled, at: int) -> None:
        """Sends the analysis of a traced window. Raises `StillAnalyzingError` until there is one."""
        if at not in self._analyses:
            self._analyses[at] = analyze_meanwhile(event)
        if not self._analyses[at].done():
            raise StillAnalyzingError(f"the profile of steps {event.first} to {event.last} is still being analyzed")
        profile = self._analyses[at].result()
        for path, folder in profile.files:
            self.tracker.log_artifact(path, folder)
        self.tracker.log_metrics([Point(k, value, event.last, time=event.time) for k, value in profile.values.items()])
        self.profiles[event.first] = profile.line
        del self._analyses[at]

    def _list_artifacts(self, event: Event) -> Sequence[tuple[Path, str | None]]:
        """Returns the files of an event, each with its folder among the artifacts. Draws tables."""
        match event:
            case RunReady():
                return self._files.list_logged_files()
            case RunEnded():
                self._write_tensorboard()
                return [(path, path.parent.name) for path in sorted(self._files.tensorboard.glob("*"))]
            case ArtifactWritten():
                return [(self._locate(event.path), event.folder)]
            case ConfusionWritten():
                table, folder = self._locate(event.path), event.folder
                picture = draw_confusion(table, event.split)
            case SettingFound():
                table, folder = self._locate(event.path), self._files.plots.name
                picture = draw_trial(table, event.word, event.value)
            case _:
                return []
        return [(path, folder) for path in (picture, table) if path is not None]

    def _locate(self, name: str) -> Path:
        """Returns the path of a file that an event names, even if the run's folder was moved."""
        path, before = Path(name), Path(self._record["folder"])
        if not path.exists() and path.is_relative_to(before):
            return self._files.path / path.relative_to(before)
        return path

    def _write_tensorboard(self) -> None:
        """Writes the new events for TensorBoard. It has its own offset: each point must be written once."""
        if self._board is not None:
            self._board.write_events(self._for_board.read())

    def _take(self, offset: int) -> None:
        if offset != self.taken:
            self.taken = offset
            self.save_state()

    def save_state(self, is_vital: bool = False) -> None:
        """Writes `record.json`: which run in the store this is, and how much of it the store has.

        Args:
            is_vital: whether to wait until it is on the disk, because a request follows that must not be sent twice.
        """
        if not self.keeps_record:
            return
        if self.tracker.uri is None:  # not tracked now: the record keeps a store that has the run
            record = {"run_id": None, **self._files.read_record()}
        else:
            tracker, record = self.tracker, self._record
            record |= {"offset": self.taken, "uri": mask_secrets(tracker.uri)}
            record |= {"done": bool(self.ended), "aside": self.aside, "late": self._late.offsets}
            if not record["late"]:
                del record["late"]
            known = {"adopts": tracker.adopted, "run_id": tracker.run_id, "model_uri": tracker.model_uri}
            record |= {key: value for key, value in known.items() if value is not None}
        with contextlib.suppress(OSError):  # the disk is full; sending the same again later does no harm
            self._files.write_record(record, is_vital)
