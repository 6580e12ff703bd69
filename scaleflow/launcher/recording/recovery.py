"""Repairs a run whose processes are gone: writes its missing end, and sends what the store lacks."""

import os
import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from omegaconf.errors import OmegaConfBaseException

from scaleflow.errors import ConfigError, RunMissing
from scaleflow.interfaces import Tracker, Tracking, name_command
from scaleflow.interfaces.events import RunEnded, RunReady
from scaleflow.launcher.command_exit import write_error
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.event_log import append_event
from scaleflow.runs.folder import FolderBusy
from scaleflow.runs.run import find_tracking_options
from scaleflow.runs.state import is_finished
from scaleflow.tracking import make_tracker
from scaleflow.tracking.connection import format_store_error

LAUNCHER_DIED = "the launcher was killed"

#: A store counts as unreachable after this many failures in a row, during which it took nothing.
MAX_ATTEMPTS = 3
RETRY_SECONDS = 1.0

SyncResult = Literal["recorded", "complete", "not recorded", "under way", "no run", "not tracked", "deleted"]


@dataclass(frozen=True)
class SyncStatus:
    """The state of a run after a repair, in its folder and in its store."""

    folder: Path  # the run's folder
    #: `recorded`: the store has it now; `complete`: the store had it before; `not recorded`: the store lacks
    #: something; `under way`: a process of the run is alive, so nothing was done; `no run`: it was never ready; `not
    #: tracked`: `tracking=none`; `deleted`: the store had the run, and has it no more
    result: SyncResult
    status: str | None = None  # FINISHED, FAILED or KILLED; None if the run has not ended, or if there is none
    was_open: bool = False  # whether the repair wrote the run's end
    run_id: str | None = None  # the run's id in the store
    reason: str = ""  # why it is not recorded, or which process is alive


def repair(folder: Path, uri: str | None = None, tries: int = MAX_ATTEMPTS, again: bool = False) -> SyncStatus:
    """Writes a run's end if it has none, and sends what the store has not taken.

    Args:
        uri: the address of the store; None: the one in which the run was recorded, or which its config names.
        tries: failures of the store in a row, without anything taken, after which to give up.
        again: whether to record a run that was deleted from the store again, as a new run.

    Returns:
        The new state. It reports a failure of the store, which is not raised.
    """
    folder = folder.absolute()
    try:
        files = RunFolder(folder)
        with files.lock_recording(seconds=0), files.lock_writing(), files.track_files():
            was_open = finalize_run(folder)
            state = RunState.read(folder)
            status = SyncStatus(folder, "no run", state.status, was_open=was_open)
            if not state.is_ready:
                return status
            return record_missing(status, uri, tries, ready=state.ready if again else None)
    except FolderBusy as busy:
        return SyncStatus(folder, "under way", reason=str(busy).removeprefix(f"{folder}: "))
    except OSError as error:
        return SyncStatus(folder, "not recorded", reason=explain_to_sync(error))


def record_missing(status: SyncStatus, uri: str | None, tries: int, ready: RunReady | None) -> SyncStatus:
    """Sends what the store lacks of a run. With the event `ready`, a run that was deleted there is recorded again."""
    transfer = EventTransfer(Tracker(), RunFolder(status.folder).events)
    is_complete = transfer.has_everything
    status = replace(status, result="complete" if is_complete else "not recorded", run_id=transfer.run_id)
    try:
        tracking = find_tracking_options(status.folder, uri)
        if tracking.name == "none":
            return status if is_complete else replace(status, result="not tracked")
        status = confirm_recorded(status, tracking, ready) if is_complete else send_missing(status, tracking, tries)
        if status.result == "deleted" and ready is not None:
            return send_missing(replace(status, reason=""), tracking, tries, is_new=True)
        return status
    except (ConfigError, OmegaConfBaseException) as refusal:
        return replace(status, reason=explain_to_sync(refusal))


def repair_quietly(folder: Path) -> bool:
    """Repairs a run. Prints an error, and returns False, if the store does not take everything."""
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
    """Whether a run is finished, and its store has all of it or it has none. Reads two small pieces of its files."""
    files = RunFolder(folder)
    is_tracked = files.read_record() != {"run_id": None}
    return is_finished(folder) and (not is_tracked or EventTransfer(Tracker(), files.events).has_everything)


def confirm_recorded(status: SyncStatus, tracking: Tracking, ready: RunReady | None) -> SyncStatus:
    """Checks that the store still has a run that was recorded, and makes it a child of its sweep's run if `ready`.

    If the store does not answer, the reason says so.
    """
    try:
        transfer = EventTransfer(make_tracker(tracking), RunFolder(status.folder).events)
        transfer.open()
        if ready is not None:
            transfer.tracker.set_tags(transfer.make_parent_tag(ready))  # it may have been recorded again
    except RunMissing as missing:
        return replace(status, result="deleted", reason=explain_to_sync(missing))
    except Exception as error:  # a store may raise anything
        return replace(status, reason=explain_to_sync(error, tracking.uri))
    return status


def send_missing(status: SyncStatus, tracking: Tracking, tries: int, is_new: bool = False) -> SyncStatus:
    """Sends what the store lacks, or if it `is_new` everything, as a new run."""
    transfer = EventTransfer(make_tracker(tracking), RunFolder(status.folder).events, tries_of_a_file=max(1, tries - 1))
    reason, left = "", tries
    transfer.save_state()
    while left:
        before = transfer.taken
        try:
            if is_new:
                transfer.start_over()
                is_new = False
            transfer.open()
            transfer.send_all()
            break
        except RunMissing as missing:
            return replace(status, result="deleted", reason=explain_to_sync(missing))
        except Exception as error:  # a store may raise anything
            reason = explain_to_sync(error, tracking.uri)
            left = tries if transfer.taken > before else left - 1
            if left:
                time.sleep(RETRY_SECONDS)
    status = replace(status, run_id=transfer.run_id)
    if transfer.is_complete:
        return replace(status, result="recorded")
    return replace(status, result="not recorded", reason=next(iter(transfer.aside.values()), reason))


def explain_to_sync(error: Exception, uri: str | None = None) -> str:
    """Returns why a store has not taken a run, with the options of `sync` in place of the keys of a run."""
    text = format_store_error(error, uri).replace(", or start without it: tracking.offline=true", "")
    text = text.replace("set tracking.uri to the store that has it", "name the store that has it with --uri")
    return re.sub(r"(?<= )tracking\.uri=", "--uri ", text)


def finalize_run(folder: Path) -> bool:
    """Writes the end of a run that has none, because its launcher was killed; returns whether it had none.

    The run ended at its newest event: FAILED if its chief had reported a fault, else KILLED. The caller holds its
    locks.
    """
    state = RunState.read(folder)
    if state.is_open:
        end = RunEnded("FAILED" if state.fault else "KILLED", state.fault or LAUNCHER_DIED, time=state.time)
        append_event(RunFolder(folder).events, end)
    return state.is_open
