"""A run's folder, when no command is at it: who may write there, and how a run ended that could not say so itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from scaleflow.errors import ConfigError
from scaleflow.events import EVENTS, EventReader, EventWriter
from scaleflow.worker.main import make_write_lock

#: Held by the command that records a run, from before its workers are there until it has recorded their last word.
RECORD_LOCK = "record.lock"

#: How long a command waits for an earlier one that still records the run.
SECONDS_TO_WAIT = 60.0

LAUNCHER_DIED = "the launcher was killed"


class FolderBusy(ConfigError):
    """A process is at work in the run's folder."""


@contextlib.contextmanager
def claim_folder(folder: Path, seconds: float = SECONDS_TO_WAIT) -> Iterator[None]:
    """A run's folder, in which no other command records as long as the block lasts.

    Args:
        folder: the run's.
        seconds: how long to wait for another command that is at it.

    Raises:
        FolderBusy: if one still is then.
    """
    recording = FileLock(folder / RECORD_LOCK)
    try:
        recording.acquire(timeout=seconds)
    except Timeout as error:
        raise FolderBusy(f"{folder}: another command is recording this run") from error
    try:
        yield
    finally:
        recording.release()


@contextlib.contextmanager
def exclude_workers(folder: Path) -> Iterator[None]:
    """A run's folder, in which no worker writes as long as the block lasts.

    Raises:
        FolderBusy: if one does.
    """
    writing = make_write_lock(folder)
    try:
        writing.acquire(timeout=0)
    except Timeout as error:
        raise FolderBusy(f"{folder}: a worker of this run is still writing") from error
    try:
        yield
    finally:
        writing.release()


def has_run(folder: Path) -> bool:
    """Whether a run was ever ready in this folder."""
    return any(event["event"] == "ready" for event in EventReader(folder / EVENTS).read())


def finalize_run(folder: Path) -> bool:
    """Gives the run in a folder its end, if it began and nobody is left to say how it ended.

    It ended when it was last heard of: FAILED if its chief had told of a fault, else KILLED.

    Args:
        folder: claimed, and without workers.

    Returns:
        Whether it had no end.
    """
    is_open, fault, last = False, "", 0
    for event in EventReader(folder / EVENTS).read():
        last = max(last, event["time"])
        if event["event"] in ("ready", "restart"):
            is_open, fault = is_open or event["event"] == "ready", ""
        elif event["event"] == "fault":
            fault = event["error"]
        elif event["event"] == "end":
            is_open = False
    if is_open:
        write = EventWriter(folder / EVENTS)
        write("end", status="FAILED" if fault else "KILLED", error=fault or LAUNCHER_DIED, time=last)
        write.close()
    return is_open
