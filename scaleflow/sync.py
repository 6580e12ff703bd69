"""Sends to the tracking store what it does not have yet of the runs in a folder.

If all processes of a run were killed, it also records the run's end. Nothing is sent twice: `record.json` in a run's
folder says how much the store has.

Exit code: 0 everything is recorded; 1 something is not recorded or was deleted, or a run is still active; 2 wrong
arguments.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.errors import ConfigError
from scaleflow.interfaces.secret_masking import register_resolver
from scaleflow.launcher.command_exit import FAILED, FINISHED, Outcome
from scaleflow.launcher.display import Display
from scaleflow.launcher.recording.recovery import SyncResult, SyncStatus, repair
from scaleflow.runs import RunFolder
from scaleflow.tracking.uri import sqlite_file

__all__ = ["SyncResult", "SyncStatus", "find_run_folders", "main", "repair"]


def find_run_folders(folder: Path) -> Iterator[Path]:
    """Yields the run folders in a folder, or the folder itself if it is one, sorted by path.

    A sweep's folder comes before its jobs' folders, because their runs are children of the sweep's run.
    """
    for parent, folders, _ in os.walk(folder):
        folders.sort()
        files = RunFolder(Path(parent))
        if files.events.is_file() and (files.record.is_file() or files.config.is_file()):
            if not files.ledger.is_file():
                folders.clear()
            yield files.path


@make_main
def main(words: list[str]) -> Outcome:
    parser = CommandParser("sync", __doc__)
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="the folder of a run, or a folder that contains folders of runs",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="record runs that were deleted from the store again, from their folders, as new runs",
    )
    parser.add_argument(
        "--moved",
        action="store_true",
        help="first correct the paths in an SQLite store that was moved or copied together with the folders: the file "
        "of --uri, or mlflow.db in the first folder",
    )
    parser.add_argument("--uri", help="the tracking store to send to (default: the store in the run's config)")
    options = parser.parse_args(words)
    register_resolver()
    os.environ.pop("MLFLOW_RUN_ID", None)  # this is a run of the caller, not one in these folders
    display = Display(sys.stdout)
    if options.moved:
        display.print_line(correct_store(options.folders[0], options.uri))
    folders: list[Path] = []
    for root in options.folders:
        folders += find_run_folders(root.absolute())
    folders = list(dict.fromkeys(folders))
    if not folders and not options.moved:
        raise ConfigError(f"no folder of a run in {', '.join(map(str, options.folders))}")
    statuses: list[SyncStatus] = []
    for folder in folders:
        statuses.append(repair(folder, options.uri, again=options.again))
        display.print_line(format_status(statuses[-1]))
    totals = format_totals(statuses)
    display.print_line(totals)
    is_left = any(status.result in ("not recorded", "under way", "deleted") for status in statuses)
    values = {"folders": [vars(status) for status in statuses], "error": totals}
    return Outcome(FAILED if is_left else FINISHED, lambda: values)


def correct_store(folder: Path, uri: str | None) -> str:
    """Corrects the paths in the SQLite store `uri`, or in mlflow.db in a folder. Returns a line about the changes.

    Raises ConfigError if there is no such file, or if it cannot be written.
    """
    from scaleflow.tracking.path_correction import correct_moved_store

    file = sqlite_file((uri or f"sqlite:///{folder / 'mlflow.db'}").strip())
    if file is None or not file.is_file():
        raise ConfigError(f"--moved: there is no {file or uri}; name the SQLite store with --uri sqlite:///FILE")
    file = file.absolute()
    corrected = correct_moved_store(file)
    if not corrected.roots:
        return f"{os.path.relpath(file)}: its paths are right"
    old = ", ".join(map(str, corrected.roots))
    line = f"{os.path.relpath(file)}: {corrected.changed} paths changed from {old} to {file.parent}"
    if corrected.left_behind:
        line += f"; {corrected.left_behind} runs have their files only in the old place"
    return line


WORDS: dict[SyncResult, str] = {
    "recorded": "recorded",
    "complete": "already recorded",
    "not recorded": "NOT RECORDED",
    "deleted": "DELETED FROM THE STORE",
    "under way": "skipped",
    "no run": "ended before training began, nothing to record",
    "not tracked": "tracking=none, nothing to record",
}


def format_status(status: SyncStatus) -> str:
    """Formats a line such as `outputs/a/b: KILLED (end written by sync), recorded, run 0123...`."""
    words = [status.status or "", WORDS[status.result]]
    if status.was_open:
        words[0] += " (end written by sync)"
    line = f"{os.path.relpath(status.folder)}: " + ", ".join(filter(None, words))
    if status.result == "recorded" and status.run_id:
        line += f", run {status.run_id}"
    return line + (f": {status.reason}" if status.reason else "")


def format_totals(statuses: Sequence[SyncStatus]) -> str:
    """Formats a line such as `5 folders: 2 recorded, 2 already recorded, 1 NOT RECORDED`."""
    counts = Counter(status.result for status in statuses)
    totals = ", ".join(f"{counts[result]} {words}" for result, words in WORDS.items() if counts[result])
    return f"{len(statuses)} folder{'s' * (len(statuses) != 1)}: {totals}"
