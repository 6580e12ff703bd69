"""`python -m scaleflow.sync DIR`: sends what a store has not taken of the runs in a folder, and gives a run that was
killed with all its processes the end that it could not write.

It imports no TensorFlow. Nothing is sent twice: `record.json` in a run's folder says what the store has.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scaleflow.config.parse import parse_section
from scaleflow.errors import ConfigError
from scaleflow.events import EVENTS, read_last_end
from scaleflow.interfaces import Tracking
from scaleflow.launcher.display import write_error
from scaleflow.launcher.recorder import STATE, EventTransfer, format_error, read_recorder_state
from scaleflow.launcher.recovery import FolderBusy, claim_folder, exclude_workers, finalize_run, has_run
from scaleflow.launcher.resume import SWEEP
from scaleflow.secret_masking import MASK, mask_secrets, register_resolver
from scaleflow.tracking import NoTracker, make_tracker
from scaleflow.tracking.uri import resolve_store

ALL, NOT_ALL, WRONG_USE = 0, 1, 2

#: A store that fails so often without having taken anything in between is away.
TRIES = 3
SECONDS_BETWEEN_TRIES = 1.0

SyncResult = Literal["recorded", "complete", "not recorded", "under way", "no run", "not tracked"]


@dataclass(frozen=True)
class SyncStatus:
    """How a run stands, in its folder and in its store.

    Attributes:
        folder: the run's.
        result: `recorded` now; `complete`, since it was before; `not recorded`, or not all of it; `under way`:
            a process of it is alive, and it was left alone; `no run`: it was never ready; `not tracked`: tracking=none.
        status: how the run ended, FINISHED, FAILED or KILLED; None where it has not, or there is none.
        was_open: whether its end was only written now.
        run_id: in the store.
        reason: why it is not recorded, or what is at it.
    """

    folder: Path
    result: SyncResult
    status: str | None = None
    was_open: bool = False
    run_id: str | None = None
    reason: str = ""


def repair(folder: Path, uri: str | None = None, tries: int = TRIES) -> SyncStatus:
    """Writes a run's end where nobody could, and sends what the store has not taken; in this order, both or the first.

    Args:
        folder: the run's.
        uri: of the store; by default the one that the run was told of.
        tries: how often a store is asked that has failed and taken nothing since.

    Returns:
        How it stands now. A store's failure is told there, and not raised.
    """
    folder = folder.absolute()
    try:
        with claim_folder(folder, seconds=0), exclude_workers(folder):
            was_open = finalize_run(folder)
            end = read_last_end(folder)
            standing = SyncStatus(folder, "no run", end["status"] if end else None, was_open)
            if not has_run(folder):
                return standing
            known = EventTransfer(NoTracker(), folder / EVENTS)
            if known.is_complete and known.has_run:  # whether the store is there now or not
                return replace(standing, result="complete", run_id=known.run_id)
            try:
                tracking = find_tracking_options(folder, uri)
                if tracking.name == "none":
                    return replace(standing, result="not tracked")
                return send_missing(standing, tracking, tries)
            except (ConfigError, OmegaConfBaseException) as refusal:
                return replace(standing, result="not recorded", reason=format_store_error(refusal))
    except FolderBusy as busy:
        return SyncStatus(folder, "under way", reason=str(busy).removeprefix(f"{folder}: "))
    except OSError as error:
        return SyncStatus(folder, "not recorded", reason=format_error(error))


def repair_quietly(folder: Path) -> bool:
    """Repairs a run that needs nothing else, and says on standard error what a store does not take.

    Returns:
        Whether the store has what it is to have.
    """
    standing = repair(folder)
    if standing.result == "not recorded":
        where = os.path.relpath(folder)
        write_error(f"the store has not taken everything: {standing.reason}; python -m scaleflow.sync {where}")
    return standing.result != "not recorded"


def send_missing(status: SyncStatus, tracking: Tracking, tries: int) -> SyncStatus:
    """Sends what is missing; gives how it stands behind that."""
    transfer = EventTransfer(make_tracker(tracking), status.folder / EVENTS, tries_of_a_file=max(1, tries - 1))
    reason, left = "", tries
    transfer.save_state()
    while left:
        before = transfer.taken
        try:
            transfer.open()
            transfer.send(again=True)
            break
        except Exception as error:  # whatever a store may raise
            reason = format_store_error(error)
            left = tries if transfer.taken > before else left - 1
            if left:
                time.sleep(SECONDS_BETWEEN_TRIES)
    status = replace(status, run_id=transfer.run_id)
    if transfer.is_complete:
        return replace(status, result="recorded")
    return replace(status, result="not recorded", reason=next(iter(transfer.aside.values()), reason))


def format_store_error(error: Exception) -> str:
    return mask_secrets(str(error)) if isinstance(error, ConfigError) else str(mask_secrets(format_error(error)))


def find_tracking_options(folder: Path, uri: str | None) -> Tracking:
    """Where a run is recorded, by its config and what was recorded of it; what is masked there is the environment's.

    Raises:
        ConfigError: if that can't be known, or the store does not answer.
    """
    tracking = parse_section(Tracking, read_tracking_section(folder), "tracking")
    known = uri or read_recorder_state(folder / STATE).get("uri") or tracking.uri
    if known is not None and MASK in known:
        known = os.environ.get("MLFLOW_TRACKING_URI") or drop_masked_credentials(known)
    if tracking.name == "none" and uri is None:
        return tracking
    return resolve_store(replace(tracking, name="mlflow", uri=known, offline=False))


def read_tracking_section(folder: Path) -> dict[str, Any]:
    """The section `tracking` of a run's config."""
    try:
        config = OmegaConf.load(folder / "config.yaml")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: its config.yaml can't be read: {error}") from error
    section = OmegaConf.to_container(OmegaConf.select(config, "tracking"), resolve=True)
    return {str(key): value for key, value in section.items()} if isinstance(section, dict) else {}


def drop_masked_credentials(uri: str) -> str:
    """An address without credentials that were masked: MLflow takes them from MLFLOW_TRACKING_USERNAME and so on."""
    return uri.replace(f"{MASK}@", "")


def find_run_folders(place: Path) -> Iterator[Path]:
    """The folders of runs in a folder, itself one of them perhaps, in the order of their names."""
    for parent, folders, files in os.walk(place):
        folders.sort()
        if EVENTS in files and {STATE, "config.yaml"} & set(files):
            if SWEEP not in files:
                folders.clear()
            yield Path(parent)  # a sweep's before those of its jobs, whose runs are children of its


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scaleflow.sync",
        description="Sends what a tracking store has not taken of the runs in a folder, and gives a run that was "
        "killed its end. Exit code: 0 all is recorded, 1 something is not, or a run is under way, 2 wrong use.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run's folder, or any folder above some")
    parser.add_argument("--uri", help="the store, where it is another than the run was told of")
    options = parser.parse_args(arguments)
    register_resolver()
    os.environ.pop("MLFLOW_RUN_ID", None)  # the run of whoever gives this command, not one of these
    found = list(dict.fromkeys(folder for place in options.folders for folder in find_run_folders(place.absolute())))
    if not found:
        print(f"scaleflow.sync: no run's folder in {', '.join(map(str, options.folders))}", file=sys.stderr)
        return WRONG_USE
    standings = []
    for folder in found:
        standings.append(repair(folder, options.uri))
        print(format_status(standings[-1]), flush=True)
    print(format_totals(standings))
    return NOT_ALL if any(s.result in ("not recorded", "under way") for s in standings) else ALL


WORDS: dict[SyncResult, str] = {
    "recorded": "recorded",
    "complete": "was recorded before",
    "not recorded": "NOT RECORDED",
    "under way": "left alone",
    "no run": "never ready, nothing to record",
    "not tracked": "tracking=none, nothing to record",
}


def format_status(standing: SyncStatus) -> str:
    """`outputs/a/b: KILLED (the launcher was killed), recorded, run 0123...`."""
    words = [standing.status or "", WORDS[standing.result]]
    if standing.was_open:
        words[0] += ", which nobody was left to say"
    line = f"{os.path.relpath(standing.folder)}: " + ", ".join(filter(None, words))
    if standing.result == "recorded" and standing.run_id:
        line += f", run {standing.run_id}"
    return line + (f": {standing.reason}" if standing.reason else "")


def format_totals(standings: Sequence[SyncStatus]) -> str:
    """`5 runs: 2 recorded, 2 complete, 1 not recorded`."""
    counts = {outcome: sum(s.result == outcome for s in standings) for outcome in WORDS}
    told = ", ".join(f"{count} {WORDS[outcome]}" for outcome, count in counts.items() if count)
    return f"{len(standings)} folder{'s' * (len(standings) != 1)}: {told}"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
