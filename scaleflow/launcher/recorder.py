"""The recorder: tails a run's events and tells them to a tracker, in a thread of its own.

Training never waits for it, nor does the terminal. `record.json` beside the events says which run in the store they
are and how much of them the store has taken; what fails is sent again from there, verbatim. Whoever sends them, then or
later, sends the same, and whatever may have been made already is looked for before it is made: so a run is there once,
with each point once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError, StoreUnreachable
from scaleflow.events import Event, EventReader
from scaleflow.interfaces import IDENTITY, Point, Tracker
from scaleflow.provenance import read_provenance
from scaleflow.secret_masking import mask_secrets
from scaleflow.tracking import TensorBoardWriter

if TYPE_CHECKING:
    from scaleflow.profiler.analysis_process import Profile

STATE = "record.json"

#: The folder of a run's event file for TensorBoard.
TENSORBOARD = "tensorboard"

#: MLflow's tag of a child.
PARENT = "mlflow.parentRunId"
EVENTS_A_PASS = 500
SECONDS_BETWEEN_PASSES = 1.0
LONGEST_PAUSE = 10.0

#: How long a store may fail to open, where a run needs one, before the run is refused.
SECONDS_TO_CONNECT = 10.0

#: How long is waited for a request that is under way when nothing more is to be sent.
SECONDS_TO_STOP = 1.0

#: A file that the store has not taken so often, while it takes other things, is put aside: what follows goes on.
TRIES_OF_A_FILE = 8

#: So often it is tried once more when all else is recorded.
TRIES_AT_THE_END = 5

#: What of a run's folder goes with it; those of commands that went on with it, too.
KEPT = ("config.yaml", "overrides.yaml", "environment.txt", "resume-*.yaml", "multirun.yaml")


class EventTransfer:
    """Sends a run's events to a tracker: in their order, each until it is taken.

    Args:
        tracker: the store.
        events: the run's `events.jsonl`.
        tries_of_a_file: how often a file is sent that the store does not take, before it is put aside.

    Attributes:
        taken: bytes of the events that the store has.
        ended: bytes up to the end of the run, where that is the last that was taken; 0 where it is not.
        aside: what the store did not take while it took the rest, by its place, and why.
        keeps_state: whether `record.json` is written.
        profiles: what to tell the user of each window that was traced, by its first step.
        read_profile: reads a traced window.
        board: is told the same, of the whole run.
    """

    def __init__(self, tracker: Tracker, events: Path, tries_of_a_file: int = TRIES_OF_A_FILE) -> None:
        self._tracker = tracker
        self._tries_of_a_file = tries_of_a_file
        self._unread: set[int] = set()
        self._reader = EventReader(events)
        self._events = events
        self._state = events.with_name(STATE)
        self._known = read_recorder_state(self._state)
        self._tries: dict[int, int] = {}
        self._gone: set[int] = set()
        self.keeps_state = True
        self.profiles: dict[int, str] = {}
        self.read_profile: Callable[[Event], Profile] = read_profile
        self.board: TensorBoardWriter | None = None
        self._for_board = EventReader(events)
        self.taken: int = self._known.get("offset", 0)
        self.ended: int = self.taken if self._known.get("done") else 0
        self.aside: dict[int, str] = {int(at): why for at, why in self._known.get("aside", {}).items()}
        if "id" not in self._known:
            self._known |= {"id": uuid.uuid4().hex, "folder": str(events.parent.absolute())}

    @property
    def is_complete(self) -> bool:
        """Whether the store has taken all that is there."""
        return not self.aside and self.taken >= (self._events.stat().st_size if self._events.exists() else 0)

    @property
    def has_run(self) -> bool:
        return self.run_id is not None

    @property
    def run_id(self) -> str | None:
        """The run in the store, once there is one."""
        return self._known.get("run_id")

    @property
    def has_deferred(self) -> bool:
        """Whether something was put aside that the store may still take: a file that is there."""
        return bool(self.aside.keys() - self._gone)

    @property
    def is_reading(self) -> bool:
        """Whether a profile is still being read."""
        return bool(self._unread)

    def start_after(self, offset: int) -> None:
        """Makes another run of it: what is there is none of its own."""
        self._known = {"id": uuid.uuid4().hex, "folder": str(self._events.parent.absolute())}
        self.taken, self.aside, self.ended = offset, {}, 0

    def open(self) -> None:
        """Opens the store, and takes the run up where it was left. Raises `ConfigError`, or `StoreUnreachable`."""
        self._tracker.connect()
        if self.has_run:
            self._tracker.adopt(self._known["run_id"])
        elif "adopts" in self._known:  # whoever began to take it may not have come further
            self._tracker.adopted = self._known["adopts"]

    def send(self, again: bool = False, should_stop: Callable[[], bool] = bool) -> None:
        """Sends all that is there. Raises whatever the store does; what was taken until then stays taken.

        Args:
            again: first what was put aside before.
            should_stop: leaves the rest unsent where it says so.
        """
        self._send_deferred(self.aside if again else self._unread)
        self._reader.offset = self.taken
        while not should_stop() and self._send_portion(should_stop):
            pass

    def send_unwritten(self, events: Sequence[Event]) -> None:
        """Sends events, behind all others, that are not in the file."""
        for event in events:
            self._handle(event)
            self.ended = sys.maxsize if event["event"] in LAST else 0

    def _send_portion(self, should_stop: Callable[[], bool]) -> bool:
        """Sends some events; points that follow each other go together. Gives whether there may be more to send."""
        points: list[Point] = []
        at, count = self._reader.offset, 0
        for event in islice(self._reader.read(), EVENTS_A_PASS):
            if should_stop():
                return False
            count += 1
            if event["event"] in POINTS:
                points += to_points(event)
            elif event["event"] in HANDLERS:
                self._send_points(points, at)
                points = []
                self._send_event(event, at)
            at = self._reader.offset
        self._send_points(points, at)
        return count > 0

    def _send_points(self, points: Sequence[Point], behind: int) -> None:
        if points:
            self._tracker.log_metrics(points)
        self._take(behind)

    def _send_event(self, event: Event, at: int) -> None:
        if event["event"] not in FILES:
            self._handle(event)
        if event["event"] in (*FILES, *WITH_FILES):
            self._send_file(event, at)
        if event["event"] in LAST:
            self.ended = self._reader.offset
        elif event["event"] == "ready":
            self.ended = 0
        self._take(self._reader.offset)

    def _send_file(self, event: Event, at: int) -> None:
        """Sends the files of an event, or puts it aside where the store takes everything but that."""
        try:
            self._log_files(event)
        except StillReadingError as error:
            self._unread.add(at)
            self.aside[at] = str(error)
        except Exception as error:
            self._tries[at] = self._tries.get(at, 0) + 1
            if isinstance(error, FileNotFoundError):
                self._gone.add(at)
            elif self._tries[at] < self._tries_of_a_file:
                raise
            self._tracker.adopt(self._known["run_id"])  # raises where the store is away altogether
            self.aside[at] = format_error(error)

    def _send_deferred(self, places: Iterable[int]) -> None:
        for at in sorted(places):
            try:
                self._log_files(next(EventReader(self._events, at).read()))
            except StillReadingError:
                self._unread.add(at)
                continue
            except Exception as error:
                self.aside[at] = format_error(error)
            else:
                del self.aside[at]
            self._unread.discard(at)
            self.save_state()

    def _log_files(self, event: Event) -> None:
        if event["event"] == "ready":
            for path in list_logged_files(self._events.parent):
                self._tracker.log_artifact(path, None)
        elif event["event"] == "end":
            self.write_tensorboard()
            for path in sorted((self._events.parent / TENSORBOARD).glob("*")):
                self._tracker.log_artifact(path, TENSORBOARD)
        else:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        if event["event"] in HANDLERS:
            getattr(self, HANDLERS[event["event"]])(event)

    def _take(self, offset: int) -> None:
        if offset != self.taken:
            self.taken = offset
            self.save_state()

    def save_state(self, is_vital: bool = False) -> None:
        """Leaves beside the events how far they are recorded, and where.

        Args:
            is_vital: it has to be on the disk before anything is sent; but for a disk that is full.
        """
        if not self.keeps_state:
            return
        if self._tracker.uri is None:  # no store; one that knew of the run, or comes to, does so by itself
            state = {"run_id": None, **read_recorder_state(self._state)}
        else:
            state = {**self._known, "offset": self.taken, "uri": mask_secrets(self._tracker.uri)}
            state |= {"done": bool(self.ended), "aside": self.aside}
            if self._tracker.adopted is not None:
                state["adopts"] = self._tracker.adopted
            if self._tracker.run_id is not None:
                state["run_id"] = self._tracker.run_id
            self._known = state
        partial = self._state.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk: what is sent again then is the same
            with partial.open("w") as file:
                json.dump(state, file)
                if is_vital:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(self._state)

    def _start(self, event: Event) -> None:
        if "resumed" in event and self.has_run:
            self._tracker.reopen()
        else:
            self.save_state(is_vital=True)  # so that a run that is made, or taken, now is found again
            own = {
                "scaleflow.folder": self._known["folder"],
                IDENTITY: self._known["id"],
                **self._make_parent_tag(event),
            }
            tags = {**read_provenance(self._events.parent), **event["tags"], **own}
            self._tracker.start(event["name"], tags, event["began"])
            self.save_state()
            self._tracker.log_params(event["params"])

    def _make_parent_tag(self, event: Event) -> dict[str, str]:
        """The tag that makes a run the child of its sweep's.

        Raises:
            LookupError: as long as that is not recorded itself.
        """
        if not event.get("parent") or self._tracker.uri is None:
            return {}
        known = read_recorder_state(Path(event["parent"], STATE)).get("run_id")
        if known is None:
            raise LookupError("the run of the sweep is not recorded yet")
        return {PARENT: known}

    def _tags(self, event: Event) -> None:
        self._tracker.set_tags(event["values"])

    def _restart(self, event: Event) -> None:
        number = event["number"]
        self._tracker.set_tags({"scaleflow.restarts": str(number), f"scaleflow.restart.{number}": event["reason"]})

    def _rollback(self, event: Event) -> None:
        number = event["number"]
        self._tracker.set_tags({"scaleflow.rollbacks": str(number), f"scaleflow.rollback.{number}": event["reason"]})

    def _artifact(self, event: Event) -> None:
        self._tracker.log_artifact(self._find_path(event), event.get("folder"))

    def _data(self, event: Event) -> None:
        self._tracker.log_dataset(event)

    def _confusion(self, event: Event) -> None:
        from scaleflow.tracking.plot import draw_confusion

        table = self._find_path(event)
        for path in filter(None, (draw_confusion(table, event["split"]), table)):
            self._tracker.log_artifact(path, event["folder"])

    def _profile(self, event: Event) -> None:
        profile = self.read_profile(event)
        for path, folder in profile.files:
            self._tracker.log_artifact(path, folder)
        self._tracker.log_metrics(
            [Point(k, value, event["last"], event["time"]) for k, value in profile.values.items()]
        )
        self.profiles[event["first"]] = profile.line

    def _model(self, event: Event) -> None:
        self._tracker.log_model(self._find_path(event), event["step"])

    def write_tensorboard(self) -> None:
        """Reads by itself: what the store did not take is sent again, and a board would have it twice."""
        if self.board is not None:
            self.board.write_events(self._for_board.read())

    def _end(self, event: Event) -> None:
        tags = {"scaleflow.status": event["status"]}
        if event.get("error"):
            tags["scaleflow.error"] = event["error"]
        self._tracker.set_tags(tags)
        self._tracker.finish(event["status"], event["time"])

    def _refused(self, event: Event) -> None:
        """Nothing to record: there is no run, or it stays as it ended before."""

    def _find_path(self, event: Event) -> Path:
        """Where a file is that an event names: with the run's folder, if that was moved."""
        path, before = Path(event["path"]), Path(self._known["folder"])
        if not path.exists() and path.is_relative_to(before):
            return self._events.parent / path.relative_to(before)
        return path


class StillReadingError(Exception):
    """A profile is still being read."""


class BackgroundReader:
    """Reads profiles in threads of their own, one at a time: reading one takes minutes."""

    def __init__(self) -> None:
        self._profiles: dict[tuple[int, int], Future[Profile]] = {}
        self._turn = threading.Lock()

    def __call__(self, event: Event) -> Profile:
        """Gives what was read of a window. Begins to read it at the first call. Raises what reading it raised.

        Raises:
            StillReadingError: until it is read.
        """
        key = event["first"], event["time"]
        if key not in self._profiles:
            self._profiles[key] = Future()
            threading.Thread(target=self._read, args=(event, self._profiles[key]), name="profile", daemon=True).start()
        if not self._profiles[key].done():
            raise StillReadingError(f"the profile of steps {event['first']} to {event['last']} is still being read")
        if self._profiles[key].exception() is not None:
            return self._profiles.pop(key).result()  # raises, and the next call reads it again
        return self._profiles[key].result()

    def _read(self, event: Event, profile: Future[Profile]) -> None:
        with self._turn:
            try:
                profile.set_result(read_profile(event))
            except Exception as error:
                profile.set_exception(error)


class Recorder(threading.Thread):
    """Records one run while it is on.

    Args:
        tracker: the store.
        events: the run's `events.jsonl`.
        before: bytes of `events` that were there before this command.
        is_resumed: they are the run's: what was not recorded of them is recorded first.
        offline: the store may be away as long as it likes.
        writer: is told the same, of the whole run.
        keeps: leave `record.json` beside the events; not where that is another's, who shares the folder.

    Attributes:
        events: the run's `events.jsonl`.
        refusal: why the store can't be used, once that is known.
        is_settled: set when it is known whether the store can be used, or may be away.
        done: set when the run's end is recorded, or there is nothing to record.
    """

    def __init__(
        self,
        tracker: Tracker,
        events: Path,
        before: int = 0,
        *,
        is_resumed: bool = False,
        offline: bool = False,
        writer: TensorBoardWriter | None = None,
        keeps: bool = True,
    ) -> None:
        super().__init__(name="recorder", daemon=True)
        self._tracker = tracker
        self.events = events
        self._transfer = EventTransfer(tracker, events)
        self._transfer.board = writer
        self._transfer.read_profile = BackgroundReader()
        self._transfer.keeps_state = keeps
        self._before = before
        if not is_resumed:
            self._transfer.start_after(before)
        self._offline = offline
        self._hurry = threading.Event()
        self._told_to_stop = threading.Event()
        self._is_open = False
        self._tries_left = TRIES_AT_THE_END
        self._failing_since: float | None = None
        self._reason = ""
        self._unwritten: list[Event] = []
        self.refusal: ConfigError | None = None
        self.is_settled = threading.Event()
        self.done = threading.Event()

    def add_event(self, event: Event) -> None:
        """One more event, behind all others, that could not be written."""
        self._unwritten.append(event)

    @property
    def profiles(self) -> dict[int, str]:
        """What to tell the user of each window that was traced, by its first step."""
        return self._transfer.profiles

    @property
    def recorded(self) -> int:
        """Bytes of `events.jsonl` that the store has taken."""
        return self._transfer.taken if self._transfer.has_run else 0

    def has_taken(self, offset: int) -> bool:
        """Whether the events up to this byte are recorded, or need not be."""
        return self._transfer.taken >= offset

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._wait_for_earlier()
            self._transfer.save_state()
            while not self._told_to_stop.is_set():
                self._try_pass(began)
                if self._is_open or self._offline:
                    self.is_settled.set()
                if self._is_through and not (self._transfer.has_deferred and self._tries_left):
                    break
                self._tries_left -= self._is_through and not self._transfer.is_reading
                self._pause()
        except ConfigError as refusal:
            self.refusal = refusal
        finally:
            self.is_settled.set()
            self.done.set()

    def _wait_for_earlier(self) -> None:
        """Waits for the recorder of an earlier command in this process: its last request must not end this run."""
        for thread in threading.enumerate():
            if isinstance(thread, Recorder) and thread.events == self.events and thread.is_stopping:
                thread.join()

    @property
    def is_stopping(self) -> bool:
        """Whether it sends nothing more once its last request is answered."""
        return self._told_to_stop.is_set()

    @property
    def _is_through(self) -> bool:
        return self._transfer.ended > self._before

    def finish(self, patience: float, should_stop: Callable[[], bool] = bool) -> bool:
        """Waits until everything is recorded, or gives up; nothing is sent behind that.

        Args:
            patience: in seconds; a store that is away, and one that is too slow, may take so long.
            should_stop: gives up at once where it says so.

        Returns:
            Whether everything is recorded.
        """
        deadline = time.monotonic() + patience
        self._hurry.set()
        while not self.done.wait(0.02):
            if should_stop():
                self._reason = self._reason or "interrupted"
                break
            if time.monotonic() > deadline:
                break
        self._end_thread()
        return self._is_through and not self._transfer.aside

    def stop(self) -> None:
        """Sends nothing more, and writes no more to the run's folder."""
        self._transfer.keeps_state = False
        self._end_thread()

    def _end_thread(self) -> None:
        """Ends the thread; a request that the store does not answer may keep it a while longer."""
        self._told_to_stop.set()
        self._hurry.set()
        if self.is_alive():
            self.join(SECONDS_TO_STOP)
            self._transfer.keeps_state = self._transfer.keeps_state and not self.is_alive()

    @property
    def reason(self) -> str:
        """What the store answered last, if it did not take something."""
        return str(self.refusal or next(iter(self._transfer.aside.values()), self._reason))

    def describe_links(self) -> Sequence[tuple[str, str]]:
        """How to look at the run, once it is recorded."""
        return self._tracker.describe_links()

    def _pause(self) -> None:
        """Waits for more to send, the longer the longer the store has been away."""
        if self._hurry.is_set():
            self._told_to_stop.wait(SECONDS_BETWEEN_PASSES)
            return
        away = 0.0 if self._failing_since is None else time.monotonic() - self._failing_since
        self._hurry.wait(min(LONGEST_PAUSE, SECONDS_BETWEEN_PASSES + away / 2))

    def _try_pass(self, began: float) -> None:
        """Sends what is there; a failure leaves what was taken as it was.

        Raises:
            ConfigError: if it is the first that is heard of the store. Later it costs no run that is under way.
        """
        is_first = not self._is_open and self._failing_since is None
        try:
            if not self._is_open:
                self._transfer.open()
                self._is_open = True
            self._transfer.write_tensorboard()
            self._transfer.send(self._hurry.is_set(), self._told_to_stop.is_set)
            self._transfer.send_unwritten(list(self._unwritten))
            self._failing_since = None
        except Exception as error:  # whatever a store may raise: it will be tried again
            if self._is_fatal(error, is_first, time.monotonic() - began):
                raise (
                    error if isinstance(error, ConfigError) else ConfigError(f"tracking: {format_error(error)}")
                ) from error
            self._failing_since = self._failing_since or time.monotonic()
            self._reason = str(error) if isinstance(error, ConfigError) else format_error(error)

    def _is_fatal(self, error: Exception, is_first: bool, seconds: float) -> bool:
        """Whether a store that answers so can't be used: the run is refused."""
        if isinstance(error, ConfigError) and not isinstance(error, StoreUnreachable):
            return is_first or not (self._offline or self._failing_since or self._transfer.has_run)
        return not self._is_open and not self._offline and seconds > SECONDS_TO_CONNECT


HANDLERS = {
    "ready": "_start",
    "tags": "_tags",
    "restart": "_restart",
    "data": "_data",
    "rollback": "_rollback",
    "artifact": "_artifact",
    "confusion": "_confusion",
    "profile": "_profile",
    "model": "_model",
    "end": "_end",
    "refused": "_refused",
}

#: Events that hold points of metrics.
POINTS = ("metrics", "system")

#: Events behind which nothing comes, but from another command.
LAST = ("end", "refused")

#: Events of files and what is described beside the numbers: these can wait, and do not hold up what follows them.
FILES = ("artifact", "confusion", "data", "model", "profile")

#: Events after which files are sent that can wait in the same way.
WITH_FILES = ("ready", "end")


def read_profile(event: Event) -> Profile:
    """Reads a traced window, which may take minutes."""
    from scaleflow.profiler import analyze_window

    return analyze_window(event)


def list_logged_files(folder: Path) -> list[Path]:
    """The files of a run's folder that are logged."""
    return [path for pattern in KEPT for path in sorted(folder.glob(pattern))]


def make_parent_tag(event: Event) -> dict[str, str]:
    """The tag that makes a run the child of its sweep's.

    Raises:
        LookupError: as long as that is not recorded itself.
    """
    if not event.get("parent"):
        return {}
    known = read_recorder_state(Path(event["parent"], STATE))
    if "run_id" not in known:
        raise LookupError("the run of the sweep is not recorded yet")
    return {PARENT: known["run_id"]} if known["run_id"] else {}


def read_recorder_state(path: Path) -> dict[str, Any]:
    """What a recorder left in a run's folder; empty where none did."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def format_error(error: BaseException) -> str:
    """An error in a line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def to_points(event: Event) -> list[Point]:
    return [Point(key, value, event["step"], event["time"]) for key, value in event["values"].items()]
