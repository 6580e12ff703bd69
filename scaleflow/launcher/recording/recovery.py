"""Repairs a run whose processes are gone: writes its missing end, and sends missing events and files to the store."""

import os
import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from scaleflow.errors import RunMissing
from scaleflow.interfaces import Tracker, Tracking, name_command
from scaleflow.interfaces.events import RunEnded, RunReady
from scaleflow.launcher.command_exit import write_error
from scaleflow.launcher.recording.reports import append_report
from scaleflow.launcher.recording.store_record import StoreRecord
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.event_log import append_event
from scaleflow.runs.folder import FolderBusy
from scaleflow.runs.run import find_tracking_options
from scaleflow.runs.state import is_finished
from scaleflow.tracking import make_tracker
from scaleflow.tracking.connection import format_store_error

LAUNCHER_DIED = "the launcher was killed"

#: After this many failures in a row without progress, a store counts as unreachable.
MAX_ATTEMPTS = 3
RETRY_SECONDS = 1.0

SyncResult = Literal["recorded", "complete", "not recorded", "under way", "no run", "not tracked", "deleted"]


@dataclass(frozen=True)
class SyncStatus:
    """The state of a run after a repair, in its folder and in its store."""

    folder: Path  # the run's folder
    #: `recorded`: the store has it now; `complete`: the store had it before; `not recorded`: the store still lacks
    #: something; `under way`: a process of the run is alive, so nothing was done; `no run`: it was never ready;
    #: `not tracked`: `tracking=none`; `deleted`: the run was deleted from the store
    result: SyncResult
    status: str | None = None  # FINISHED, FAILED or KILLED; None if the run has not ended, or without a run
    was_open: bool = False  # whether the repair wrote the run's end
    run_id: str | None = None  # the run's id in the store
    reason: str = ""  # why it is not recorded, or which process is alive


def repair(folder: Path, uri: str | None = None, again: bool = False) -> SyncStatus:
    """Writes a run's end if it is missing, and sends everything that the store lacks.

    Args:
        uri: the address of the store; None: the recorded address, or the config's.
        again: whether to record a run again, as a new run, if it was deleted from the store.

    Returns:
        The new state. It contains a failure of the store, which is not raised.
    """
    folder = folder.absolute()
    try:
        files = RunFolder(folder)
        with files.lock_recording(seconds=0), files.lock_writing(), files.track_files():
            was_open = finalize_run(folder)
            state = RunState.read(folder)
            status = SyncStatus(folder, "no run", state.status, was_open=was_open)
            if not state.has_begun:
                return status
            return record_missing(status, uri, ready=state.ready if again else None)
    except FolderBusy as busy:
        return SyncStatus(folder, "under way", reason=str(busy).removeprefix(f"{folder}: "))
    except OSError as error:
        return SyncStatus(folder, "not recorded", reason=explain_to_sync(error))


def record_missing(status: SyncStatus, uri: str | None, ready: RunReady | None) -> SyncStatus:
    """Sends everything that the store lacks of a run, or checks that it still has a recorded run.

    With the event `ready`, a run that was deleted there is recorded again, below its sweep's run. A failure of the
    store becomes the reason of the status.
    """
    record = StoreRecord(RunFolder(status.folder).events, Tracker())
    address = None
    is_complete = record.is_complete
    status = replace(status, result="complete" if is_complete else "not recorded", run_id=record.run_id)
    try:
        tracking = find_tracking_options(status.folder, uri)
        address = tracking.uri
        if tracking.name == "none":
            return status if is_complete else replace(status, result="not tracked")
        try:
            if not is_complete:
                return send_missing(status, tracking)
            transfer = EventTransfer(make_tracker(tracking), record.events)
            transfer.open()
            if ready is not None:
                # The parent may have been recorded again.
                transfer.tracker.set_tags(transfer.requests.make_parent_tag(ready))
            return status
        except RunMissing as missing:
            status = replace(status, result="deleted", reason=explain_to_sync(missing))
            return status if ready is None else send_missing(replace(status, reason=""), tracking, is_new=True)
    except Exception as error:  # the config is invalid, or the store failed: it may raise anything
        return replace(status, reason=explain_to_sync(error, address))


def repair_quietly(folder: Path) -> bool:
    """Repairs a run. If the store does not accept everything, prints an error and returns False."""
    if is_recorded(folder):
        return True
    status = repair(folder)
    if status.result == "deleted":
        write_error(status.reason)
    if status.result == "not recorded":
        where = shlex.quote(os.path.relpath(folder))
        write_error(
            f"not everything is recorded: {status.reason}; to send the rest, run {name_command('sync')} {where}"
        )
    return status.result not in ("not recorded", "deleted")


def is_recorded(folder: Path) -> bool:
    """Whether a run is finished and its store, if it has one, has all of it. Reads two small parts of its files."""
    files = RunFolder(folder)
    is_tracked = files.read_record() != {"run_id": None}
    return is_finished(folder) and (not is_tracked or StoreRecord(files.events, Tracker()).is_complete)


def send_missing(status: SyncStatus, tracking: Tracking, is_new: bool = False) -> SyncStatus:
    """Sends everything that the store lacks; with `is_new`, the whole run as a new one. Raises RunMissing."""
    events = RunFolder(status.folder).events
    transfer = EventTransfer(make_tracker(tracking), events, tries_of_a_file=MAX_ATTEMPTS - 1)
    record = transfer.record
    reason = ""
    attempts_left = MAX_ATTEMPTS
    record.save()
    while attempts_left:
        before = (record.offset, record.file_offset)
        try:
            if is_new:
                transfer.start_over()
                is_new = False
            transfer.open()
            send_all(transfer)
            break
        except RunMissing:
            raise
        except Exception as error:  # a store may raise anything
            reason = explain_to_sync(error, tracking.uri)
            attempts_left -= 1
            if (record.offset, record.file_offset) > before:
                attempts_left = MAX_ATTEMPTS
            if attempts_left:
                time.sleep(RETRY_SECONDS)
    status = replace(status, run_id=record.run_id)
    if record.is_complete:
        return replace(status, result="recorded")
    return replace(status, result="not recorded", reason=next(iter(record.missing_files.values()), reason))


def send_all(transfer: EventTransfer) -> None:
    """Sends all events, makes the missing reports, and sends those. Raises the errors of `send`."""
    if transfer.record.ended and transfer.record.missing_files:  # otherwise they are sent with the end of the run
        transfer.files.send_missing_files()
        transfer.requests.describe()  # again, with the model
    transfer.send()
    for offset in transfer.files.missing_reports:
        append_report(transfer.events, offset, transfer.record.locate)
    transfer.send()


def explain_to_sync(error: Exception, uri: str | None = None) -> str:
    """Returns why a store lacks a run, in the words of `sync`: options of `sync` replace keys of a run."""
    text = format_store_error(error, uri).replace(", or start without it: tracking.offline=true", "")
    text = text.replace("set tracking.uri to the store that has it", "name the store that has it with --uri")
    return re.sub(r"(?<= )tracking\.uri=", "--uri ", text)


def finalize_run(folder: Path) -> bool:
    """Writes the missing end of a run whose launcher was killed. Returns whether the end was missing.

    The run ended at its newest event: FAILED if its chief had reported an error, otherwise KILLED. The caller holds the
    run's locks.
    """
    state = RunState.read(folder)
    if state.is_open:
        end = RunEnded(
            "FAILED" if state.attempt.fault else "KILLED", state.attempt.fault or LAUNCHER_DIED, time=state.time
        )
        append_event(RunFolder(folder).events, end)
    return state.is_open
