"""Sends the events of a run to a tracking store.

Two cursors go through the events in order: one sends requests (`request_cursor.py`), the other one files
(`file_cursor.py`). `record.json` has the offset of each. After a failure, everything after it is sent again, unchanged.
What would be created twice is looked up first. So the store holds each run once and each point once, even if several
commands send it several times.

Files are sent after the requests before them, and the end of a run after the files before it. What the launcher makes
of a run may come later (`reports.py`).
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from scaleflow.errors import RunMissing
from scaleflow.interfaces import Tracker, name_command
from scaleflow.interfaces.events import RunEnded, RunRefused
from scaleflow.launcher.recording.file_cursor import FileCursor
from scaleflow.launcher.recording.request_cursor import RequestCursor
from scaleflow.launcher.recording.store_record import StoreRecord
from scaleflow.runs import EventReader
from scaleflow.tracking import TensorBoardWriter
from scaleflow.tracking.uri import sqlite_file

#: Failures in a row after which a file is refused, if the store accepts other requests.
TRIES_OF_A_FILE = 12


class EventTransfer:
    """Sends the events of a run to a tracker, each until the store has taken it.

    Args:
        events: the run's `events.jsonl`.
        tries_of_a_file: failures after which a file is refused.
        board: writes the events for TensorBoard; None: not written.
        keeps_record: whether to write `record.json`.
        wait_for_files: returns when the files that are sent with `ready` are written.

    Attributes:
        record: how much of the events the store has.
        is_open: whether the store, and the run in it, could be opened.
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
        self.tracker = tracker
        self.events = events
        self.record = StoreRecord(events, tracker, is_kept=keeps_record)
        self.requests = RequestCursor(self.record, wait_for_files)
        self.files = FileCursor(self.record, tries_of_a_file)
        self.is_open = False
        self._board, self._for_board = board, EventReader(events)
        self.unwritten_end: RunEnded | RunRefused | None = None

    def start_over(self) -> None:
        """Begins a new run in the store with all events, as it has the earlier one no more. Raises ConfigError."""
        self.tracker.connect()
        self.tracker.check_experiment()  # before the record of the earlier run is gone
        if self.record.known.get("experiment") == self.tracker.experiment:
            self.tracker.follows = self.record.run_id
        self.record.begin_after(0, self.record.known["folder"])

    def open(self) -> None:
        """Opens the store, and the run in it, if there is one.

        Raises:
            StoreUnreachable: if the store does not answer.
            RunMissing: if it does not have the run any more.
            ConfigError: if it cannot be used.
        """
        run_id = self.record.run_id
        try:
            self._refuse_new_store()
            self.tracker.connect()
            if run_id is not None:
                self.tracker.adopt(run_id)
        except RunMissing as missing:
            folder = os.path.relpath(self.record.files.path)
            raise type(missing)(
                f"{missing}; {name_command('sync')} {folder} --again records it again, as a new run"
            ) from missing
        if run_id is None:
            if "adopts" in self.record.known:  # an earlier command began to adopt a run, and died
                self.tracker.adopted = self.record.known["adopts"]
            self.tracker.check_experiment()
        self.is_open = True

    def _refuse_new_store(self) -> None:
        """Raises RunMissing if the store of a recorded run is an SQLite file that is gone: opening would create it."""
        run_id = self.record.run_id
        uri = self.tracker.uri
        file = sqlite_file(uri) if run_id and uri else None
        if file and file.parent.is_dir() and not file.exists():
            raise RunMissing(
                f"the store {uri} with the run {run_id} does not exist any more; if it was moved, name its new place "
                "with --uri sqlite:///FILE"
            )

    def send(self, should_stop: Callable[[], bool] = bool) -> None:
        """Sends all events that the file holds. Raises what the store raises; what it has taken stays taken.

        `should_stop` returns True to leave the rest unsent.
        """
        self._write_tensorboard()
        while not should_stop():
            end = self.requests.send(should_stop)
            self._write_tensorboard()  # a file of the end
            self.files.send(self.requests.position, should_stop)
            if end is None or should_stop():
                break
            self._end_run(end, self.requests.position)
            self.requests.take(self.requests.position)
        if self.unwritten_end is not None and not should_stop():
            self._end_run(self.unwritten_end, sys.maxsize)

    def _end_run(self, end: RunEnded | RunRefused, offset: int) -> None:
        if isinstance(end, RunEnded):
            self.files.send_left()
            self.requests.end_run(end)
        self.record.ended = offset

    def _write_tensorboard(self) -> None:
        """Writes the new events for TensorBoard. It has its own offset: each point must be written once."""
        if self._board is not None:
            self._board.write_events(self._for_board.read())
