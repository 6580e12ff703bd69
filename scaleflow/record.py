"""The recorder: tails a run's events and tells them to a tracker, in a thread of its own.

Training never waits for it, nor does the terminal. It keeps the offset of what the store has taken;
what fails is sent again from there, verbatim.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from scaleflow.errors import Refusal
from scaleflow.events import Event, Reader
from scaleflow.interfaces import Point, Tracker
from scaleflow.masking import masked
from scaleflow.tracking import Board

STATE = "record.json"
EVENTS_A_PASS = 500
SECONDS_BETWEEN_PASSES = 1.0
LONGEST_PAUSE = 10.0


class Recorder(threading.Thread):
    """Records one run.

    Args:
        tracker: the store.
        events: the run's `events.jsonl`.
        artifacts: files of the run's folder that are logged once it is open.
        since: when this command began, in seconds since the epoch, where the run has begun before: what was not
            recorded then is recorded first, into the same run.
        board: is told the same, of the whole run.

    Attributes:
        refusal: why the store can't be used, once that is known.
        profiles: what to tell the user of each window that was traced, by its first step.
        done: set when the run's end is recorded, or there is nothing to record.
    """

    def __init__(
        self,
        tracker: Tracker,
        events: Path,
        artifacts: Sequence[Path],
        since: float | None = None,
        board: Board | None = None,
    ) -> None:
        super().__init__(name="recorder", daemon=True)
        self._tracker = tracker
        self._reader = Reader(events)
        self._board = board
        self._for_board = Reader(events)
        self._state = events.with_name(STATE)
        self._artifacts = artifacts
        self._hurry = threading.Event()
        self._connected = False
        self._failing_since: float | None = None
        self._reason = ""
        self._over = False
        self._taken = 0
        self._has_run = False
        self._since = since
        self._unwritten: list[Event] = []
        self.profiles: dict[int, str] = {}
        self.refusal: Refusal | None = None
        self.done = threading.Event()

    def add(self, event: Event) -> None:
        """One more event, behind all others, that could not be written."""
        self._unwritten.append(event)

    @property
    def recorded(self) -> int:
        """Bytes of `events.jsonl` that the store has taken."""
        return self._taken

    def run(self) -> None:
        try:
            self._tracker.connect()
            self._take_up()
            self._connected = True
            while not self._over:
                self._hurry.wait(self._pause())
                self._try_pass()
        except Refusal as refusal:
            self.refusal = refusal
        except Exception as error:
            self.refusal = Refusal(f"tracking: {told(error)}")
        finally:
            self.done.set()

    def finish(self, patience: float, told_to_stop: Callable[[], bool] = bool) -> bool:
        """Waits until everything is recorded; gives up when the store has failed for `patience` seconds.

        Args:
            patience: in seconds; a store that takes what it is sent may take as long as it needs.
            told_to_stop: gives up at once where it says so.

        Returns:
            Whether everything is recorded.
        """
        began = time.monotonic()
        self._hurry.set()
        while not self.done.wait(0.02):
            since = self._failing_since if self._connected else began
            if told_to_stop():
                self._reason = self._reason or "interrupted"
                return False
            if since is not None and time.monotonic() - max(since, began) > patience:
                return False
        return self.refusal is None

    @property
    def reason(self) -> str:
        """What the store answered last, if it did not take something."""
        return str(self.refusal or self._reason)

    def where(self) -> Sequence[tuple[str, str]]:
        """How to look at the run, once it is recorded."""
        return self._tracker.where()

    def _pause(self) -> float:
        if self._failing_since is None:
            return SECONDS_BETWEEN_PASSES
        return min(LONGEST_PAUSE, SECONDS_BETWEEN_PASSES + (time.monotonic() - self._failing_since) / 2)

    def _try_pass(self) -> None:
        """Sends what is there; a failure leaves the offset where it was."""
        self._reader.offset = self._taken
        try:
            self._show_on_board()
            while events := list(islice(self._reader.read(), EVENTS_A_PASS)):
                self._send(events)
                self._taken = self._reader.offset
                self._keep_state()
            self._send(list(self._unwritten))
            self._failing_since = None
        except Refusal:
            raise
        except Exception as error:  # whatever a store may raise: it will be tried again
            self._failing_since = self._failing_since or time.monotonic()
            self._reason = told(error)
            if self._hurry.is_set():
                time.sleep(SECONDS_BETWEEN_PASSES)

    def _send(self, events: Iterable[Event]) -> None:
        points: list[Point] = []
        for event in events:
            if event["event"] == "metrics":
                points += points_of(event)
                continue
            if event["event"] in HANDLERS:
                self._send_points(points)
                points = []
                getattr(self, HANDLERS[event["event"]])(event)
        self._send_points(points)

    def _send_points(self, points: Sequence[Point]) -> None:
        if points:
            self._tracker.metrics(points)

    def _take_up(self) -> None:
        """Goes on with what is recorded already."""
        known = state_of(self._state) if self._since is not None else {}
        if known.get("run_id"):
            self._tracker.adopt(known["run_id"])
            self._taken, self._has_run = known["offset"], True

    def _start(self, event: Event) -> None:
        if "resumed" in event and self._has_run:
            self._tracker.reopen()
        else:
            tags = {**event["tags"], "scaleflow.folder": str(self._state.parent)}
            self._tracker.start(event["name"], tags, event["began"])
            self._has_run = True
            self._tracker.params(event["params"])
        if self._is_of_now(event):
            for path in self._artifacts:
                self._tracker.artifact(path, None)

    def _is_of_now(self, event: Event) -> bool:
        """Whether it was reported since this command began."""
        return self._since is None or event["time"] >= int(self._since * 1000)

    def _restart(self, event: Event) -> None:
        number = event["number"]
        self._tracker.tags({"scaleflow.restarts": str(number), f"scaleflow.restart.{number}": event["reason"]})

    def _rollback(self, event: Event) -> None:
        number = event["number"]
        self._tracker.tags({"scaleflow.rollbacks": str(number), f"scaleflow.rollback.{number}": event["reason"]})

    def _artifact(self, event: Event) -> None:
        self._tracker.artifact(Path(event["path"]), event.get("folder"))

    def _data(self, event: Event) -> None:
        self._tracker.data(event)

    def _confusion(self, event: Event) -> None:
        from scaleflow.tracking.picture import draw_confusion

        table = Path(event["path"])
        for path in filter(None, (draw_confusion(table, event["split"]), table)):
            self._tracker.artifact(path, event["folder"])

    def _profile(self, event: Event) -> None:
        from scaleflow.profiler import report

        profile = report(event)
        for path, folder in profile.files:
            self._tracker.artifact(path, folder)
        self._send_points([Point(key, value, event["last"], event["time"]) for key, value in profile.values.items()])
        self.profiles[event["first"]] = profile.line

    def _model(self, event: Event) -> None:
        self._tracker.model(Path(event["path"]), event["step"])

    def _show_on_board(self) -> None:
        """Reads by itself: what the store did not take is sent again, and a board would have it twice."""
        if self._board is not None:
            self._board.take(self._for_board.read())

    def _keep_board(self) -> None:
        if self._board is not None:
            self._show_on_board()
            for path in sorted(self._board.folder.glob("*")):
                self._tracker.artifact(path, self._board.folder.name)

    def _end(self, event: Event) -> None:
        if self._is_of_now(event):
            self._keep_board()
        tags = {"scaleflow.status": event["status"]}
        if event.get("error"):
            tags["scaleflow.error"] = event["error"]
        self._tracker.tags(tags)
        self._tracker.finish(event["status"], event["time"])
        self._over = self._is_of_now(event)

    def _refused(self, event: Event) -> None:
        self._over = self._is_of_now(event)

    def _keep_state(self) -> None:
        """Leaves beside the events how far they are recorded, and where."""
        if not self._has_run:
            return
        state = {
            "offset": self._reader.offset,
            "run_id": self._tracker.run_id,
            "uri": masked(self._tracker.uri),
            "done": self._over,
        }
        partial = self._state.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk: what is sent again then is sent verbatim
            partial.write_text(json.dumps(state))
            partial.replace(self._state)


HANDLERS = {
    "ready": "_start",
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


def state_of(path: Path) -> dict[str, Any]:
    """What a recorder left in a run's folder; empty where none did."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def told(error: BaseException) -> str:
    """An error in a line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def points_of(event: Event) -> list[Point]:
    return [Point(key, value, event["step"], event["time"]) for key, value in event["values"].items()]
