"""Sends the files that a run's events name: artifacts, the dataset, the model."""

from collections.abc import Callable, Iterable
from pathlib import Path

from scaleflow.interfaces.events import (
    ArtifactWritten,
    DatasetDescribed,
    Event,
    MetricsLogged,
    ModelExported,
    ReportMade,
    RunEnded,
    RunReady,
    SystemMetrics,
)
from scaleflow.launcher.recording.reports import EVENTS_WITH_REPORTS, explain_missing_report
from scaleflow.launcher.recording.store_record import StoreRecord
from scaleflow.runs import EventReader
from scaleflow.runs.event_log import read_event
from scaleflow.tracking.connection import format_store_error
from scaleflow.tracking.store import WEIGHTS

#: Events that name files.
EVENTS_WITH_FILES = (
    *EVENTS_WITH_REPORTS,
    RunReady,
    DatasetDescribed,
    ArtifactWritten,
    ReportMade,
    ModelExported,
    RunEnded,
)


class FileCursor:
    """Reads the events of a run in order, and sends the files of each. The record keeps its position.

    If files do not exist or are refused, it skips their event and notes the reason in `missing_files` of the record.
    Such files are tried again at the end of the run, and by `scaleflow sync`.

    Args:
        tries: after this many failures in a row a file is refused, if the store answers.
    """

    def __init__(self, record: StoreRecord, tries: int) -> None:
        self._record = record
        self._tracker = record.tracker
        self._tries = tries
        self._failures = 0
        self._claimed_reports = set[int]()

    @property
    def missing_reports(self) -> list[int]:
        """The offsets of events whose reports are missing."""
        offsets = []
        for event_offset in self._record.missing_files:
            if isinstance(read_event(self._record.events, event_offset), EVENTS_WITH_REPORTS):
                offsets.append(event_offset)
        return offsets

    def claim_reports(self) -> list[int]:
        """Returns the offsets in `missing_reports` that were not returned before. The caller makes their reports."""
        new_offsets = [offset for offset in self.missing_reports if offset not in self._claimed_reports]
        self._claimed_reports.update(new_offsets)
        return new_offsets

    def send(self, end: int, should_stop: Callable[[], bool]) -> None:
        """Sends the files of the events before the offset `end`. Raises the store's errors."""
        reader = self._read_events(self._record.file_offset)
        for event in reader.read():
            if reader.offset > end or should_stop():
                return
            if isinstance(event, EVENTS_WITH_FILES):
                self._send_event(event, reader.event_offset)
                self._move_to(reader.offset)
        self._move_to(reader.offset)

    def _read_events(self, offset: int) -> EventReader:
        return EventReader(self._record.events, offset, skipped=(MetricsLogged, SystemMetrics))

    def _move_to(self, offset: int) -> None:
        """Notes that the store has the files of all events before an offset."""
        if offset != self._record.file_offset:
            self._record.file_offset = offset
            self._record.save()

    def _send_event(self, event: Event, event_offset: int) -> None:
        if isinstance(event, EVENTS_WITH_REPORTS):
            self._record.missing_files[event_offset] = explain_missing_report(event)
            return
        self._try_files(event, event_offset, self._tries)
        if isinstance(event, ReportMade):
            self._record.missing_files.pop(event.at, None)

    def send_missing_files(self) -> None:
        """Tries to send the missing files again. Raises the store's error if it does not answer."""
        for event_offset in sorted({*self._record.missing_files} - {*self.missing_reports}):
            self._try_files(read_event(self._record.events, event_offset), event_offset, tries=1)
            self._record.save()

    def _try_files(self, event: Event, event_offset: int, tries: int) -> None:
        """Sends the files of an event at an offset, or notes why the store lacks them.

        Raises the store's error after fewer than `tries` failures, or if the store does not answer.
        """
        try:
            self._send_files(event, event_offset)
            self._failures = 0
            self._record.missing_files.pop(event_offset, None)
        except Exception as error:
            if not isinstance(error, FileNotFoundError):
                self._failures += 1
                if self._failures < tries:
                    raise
                if self._record.run_id is not None:
                    self._tracker.check_run(self._record.run_id)  # raises if the store does not answer
            self._record.missing_files[event_offset] = format_store_error(error, self._tracker.uri)

    def _send_files(self, event: Event, event_offset: int) -> None:
        """Sends the files of an event. Raises FileNotFoundError if one is missing, and the store's errors."""
        match event:
            case RunReady():
                self._log_artifacts(self._record.files.list_logged_files())
            case ArtifactWritten():
                self._log_artifacts([(event.path, event.folder)])
            case ReportMade():
                self._log_artifacts(event.files)
            case RunEnded():
                folder = self._record.files.tensorboard
                self._log_artifacts((path, folder.name) for path in sorted(folder.glob("*")))
            case DatasetDescribed():
                self._tracker.log_dataset(event)
            case ModelExported() if not self._is_replaced(event, event_offset):
                self._tracker.log_model(self._record.locate(event.path), event.step)
                if event.weights:
                    self._tracker.set_tags({WEIGHTS: event.weights})

    def _log_artifacts(self, files: Iterable[tuple[str | Path, str | None]]) -> None:
        for path, folder in files:
            self._tracker.log_artifact(self._record.locate(path), folder)

    def _is_replaced(self, model: ModelExported, event_offset: int) -> bool:
        """Whether a later event reports another model, exported to the same folder."""
        return any(
            isinstance(event, ModelExported) and event != model for event in self._read_events(event_offset).read()
        )
