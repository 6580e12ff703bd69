"""Manages `record.json` in a run's folder: its run in the store, and how many of its events the store has."""

import contextlib
import uuid
from pathlib import Path
from typing import Any

from scaleflow.interfaces import Tracker
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs import RunFolder


class StoreRecord:
    """The contents of `record.json`.

    Attributes:
        is_kept: whether to write the file: not if the folder is removed, or if another command may record the run.
        known: facts about the run in the store. `id` identifies the run even before it has a `run_id`. `folder` is its
            folder when it was first recorded, `adopts` the run that a command began to adopt, `uri` the store,
            `uri_from` the folder when `uri` was written, `experiment` the experiment's name when the run was created,
            `model_uri` the model.
        offset: the bytes of the events whose requests the store has: metrics, params, tags, the run's end.
        file_offset: the bytes of the events whose files the store has: artifacts, the dataset, the model.
        missing_files: why the files of an event before `file_offset` are missing, by the offset of the event. The file
            calls it `left`.
        ended: the offset after the run's end or refusal, if that was the last event of a command; otherwise 0.
    """

    def __init__(self, events: Path, tracker: Tracker, is_kept: bool = True) -> None:
        self.events = events
        self.files = RunFolder(events.parent)
        self.tracker = tracker
        self.is_kept = is_kept
        known = self.files.read_record()
        self.known = known
        self.offset: int = known.get("offset", 0)
        self.file_offset: int = known.get("file_offset", 0)
        self.missing_files: dict[int, str] = {int(offset): reason for offset, reason in known.get("left", {}).items()}
        self.ended = self.offset if known.get("done") else 0
        known.setdefault("id", uuid.uuid4().hex)
        known.setdefault("folder", str(self.files.path.absolute()))

    def begin_after(self, offset: int, folder: str | None = None) -> None:
        """Begins a new run with the events after an offset. They name files in `folder`; None: the present folder."""
        self.known = {"id": uuid.uuid4().hex, "folder": folder or str(self.files.path.absolute())}
        self.offset = self.file_offset = offset
        self.missing_files = {}
        self.ended = 0

    @property
    def run_id(self) -> str | None:
        """The run's id in the store; None before the run is created there."""
        return self.known.get("run_id")

    @property
    def is_complete(self) -> bool:
        """Whether the store has the run with all of its events."""
        size = self.events.stat().st_size if self.events.exists() else 0
        has_all = not self.missing_files and min(self.offset, self.file_offset) >= size
        return has_all and self.run_id is not None

    def locate(self, name: str | Path) -> Path:
        """Returns the path of a file or folder that an event names, even if the run's folder was moved or copied."""
        return self.files.find_moved(Path(name), Path(self.known["folder"]))

    def save(self, is_vital: bool = False) -> None:
        """Writes the file. If `is_vital` for later requests, waits until it is on the disk."""
        if not self.is_kept:
            return
        tracker = self.tracker
        content = dict[str, Any]()
        if tracker.uri is None:  # not tracked now: the file keeps a store that already has the run
            content = {"run_id": None, **self.files.read_record()}
        else:
            ids = {"adopts": tracker.adopted_run_id, "run_id": tracker.run_id, "model_uri": tracker.model_uri}
            self.known |= {key: value for key, value in ids.items() if value is not None}
            self.known["offset"] = self.offset
            self.known["file_offset"] = self.file_offset
            self.known["left"] = self.missing_files
            self.known["done"] = bool(self.ended)
            self.known["uri"] = mask_secrets(tracker.uri)
            if tracker.run_id is not None and tracker.experiment is not None:
                self.known.setdefault("experiment", tracker.experiment)
            self.known["uri_from"] = str(self.files.path.absolute())
            content = {key: value for key, value in self.known.items() if value is not None}
        with contextlib.suppress(OSError):  # if the disk is full, sending the same events again later is harmless
            self.files.write_record(content, is_vital)
