"""Sends the events of a run to a tracking store.

Two cursors read the events in order: one sends requests (`request_cursor.py`), the other one sends files
(`file_cursor.py`). `record.json` has both offsets. After a failure, everything after the offset is sent again,
unchanged. Objects that would be created twice are looked up first. So the store has each run once and each point once,
even if several commands send them.

Files are sent after the requests before them, and the end of a run after the files before it. The launcher's reports
may come later (`reports.py`).
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

#: After this many failures in a row a file is refused, if the store accepts other requests.
TRIES_OF_A_FILE = 12


class EventTransfer:
    """Sends the events of a run to a tracker, each until the store accepts it.

    Args:
        events: the run's `events.jsonl`.
        tries_of_a_file: the number of failures after which a file is refused.
        board: writes the events for TensorBoard; None: not written.
        keeps_record: whether to write `record.json`.
        wait_for_files: returns when the files that are sent with `ready` are written.

    Attributes:
        record: the position of the store in the events.
        is_open: whether the store, and the run in it, are open.
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
        self._board = board
        self._for_board = EventReader(events)
        self.unwritten_end: RunEnded | RunRefused | None = None

    def start_over(self) -> None:
        """Begins a new run in the store with all events, after the earlier run was deleted. Raises ConfigError."""
        self.tracker.connect()
        self.tracker.check_experiment()  # before the record of the earlier run is lost
        if self.record.known.get("experiment") == self.tracker.experiment:
            self.tracker.follows = self.record.run_id
        self.record.begin_after(0, self.record.known["folder"])

    def open(self) -> None:
        """Opens the store, and the run in it if there is one.

        Raises:
            StoreUnreachable: if the store does not answer.
            RunMissing: if the run was deleted from the store.
            ConfigError: if the store cannot be used.
        """
        run_id = self.record.run_id
        try:
            self._refuse_new_store()
            self.tracker.connect()
            if run_id is not None:
                self.tracker.select_run(run_id)
        except RunMissing as missing:
            folder = os.path.relpath(self.record.files.path)
            raise type(missing)(
                f"{missing}; {name_command('sync')} {folder} --again records it again, as a new run"
            ) from missing
        if run_id is None:
            if "adopts" in self.record.known:  # an earlier command died while it adopted a run
                self.tracker.adopted_run_id = self.record.known["adopts"]
            self.tracker.check_experiment()
        self.is_open = True

    def _refuse_new_store(self) -> None:
        """Raises RunMissing if a recorded run's store is an SQLite file that is gone: opening would
        create a new one.
        """
        run_id = self.record.run_id
        uri = self.tracker.uri
        file = sqlite_file(uri) if run_id and uri else None
        if file and file.parent.is_dir() and not file.exists():
            raise RunMissing(
                f"the store {uri} with the run {run_id} does not exist any more; if it was moved, name its new place "
                "with --uri sqlite:///FILE"
            )

    def send(self, should_stop: Callable[[], bool] = bool) -> None:
        """Sends all events in the file. Raises the store's errors; accepted events stay accepted.

        `should_stop` returns True to leave the rest unsent.
        """
        self._write_tensorboard()
        while not should_stop():
            end = self.requests.send(should_stop)
            self._write_tensorboard()  # writes a file that the end sends
            self.files.send(self.requests.position, should_stop)
            if end is None or should_stop():
                break
            self._end_run(end, self.requests.position)
            self.requests.take(self.requests.position)
        if self.unwritten_end is not None and not should_stop():
            self._end_run(self.unwritten_end, sys.maxsize)

    def _end_run(self, end: RunEnded | RunRefused, offset: int) -> None:
        if isinstance(end, RunEnded):
            self.files.send_missing_files()
            self.requests.end_run(end)
        self.record.ended = offset

    def _write_tensorboard(self) -> None:
        """Writes the new events for TensorBoard. It has its own offset: each point must be written once."""
        if self._board is not None:
            self._board.write_events(self._for_board.read())
