"""`python -m scaleflow.sync DIR`: sends the events and files of runs that their store lacks.

It also writes the end of runs whose processes were all killed. Nothing is sent twice: `record.json` in a run's folder
says how much the store has.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from scaleflow.launcher.recovery import SyncResult, SyncStatus, repair
from scaleflow.runs import RunFolder
from scaleflow.secret_masking import register_resolver

__all__ = ["SyncResult", "SyncStatus", "find_run_folders", "main", "repair"]

ALL, NOT_ALL, WRONG_USE = 0, 1, 2


def find_run_folders(folder: Path) -> Iterator[Path]:
    """Yields the run folders in a folder, which may be one itself, sorted by path.

    The folder of a sweep comes before those of its jobs, because their runs are children of its run.
    """
    for parent, folders, _ in os.walk(folder):
        folders.sort()
        files = RunFolder(Path(parent))
        if files.events.is_file() and (files.record.is_file() or files.config.is_file()):
            if not files.ledger.is_file():
                folders.clear()
            yield files.path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scaleflow.sync",
        description="Sends what a tracking store has not taken of the runs in a folder, and gives a run that was "
        "killed its end. Exit code: 0 all is recorded, 1 something is not, or a run is under way, 2 wrong use.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run's folder, or any folder above some")
    parser.add_argument("--uri", help="the store, where it is another than the run was told of")
    options = parser.parse_args(arguments)
    register_resolver()
    os.environ.pop("MLFLOW_RUN_ID", None)  # it names a run of the caller, not one of these
    folders = list(dict.fromkeys(folder for root in options.folders for folder in find_run_folders(root.absolute())))
    if not folders:
        print(f"scaleflow.sync: no run's folder in {', '.join(map(str, options.folders))}", file=sys.stderr)
        return WRONG_USE
    statuses = []
    for folder in folders:
        statuses.append(repair(folder, options.uri))
        print(format_status(statuses[-1]), flush=True)
    print(format_totals(statuses))
    return NOT_ALL if any(s.result in ("not recorded", "under way") for s in statuses) else ALL


WORDS: dict[SyncResult, str] = {
    "recorded": "recorded",
    "complete": "was recorded before",
    "not recorded": "NOT RECORDED",
    "under way": "left alone",
    "no run": "never ready, nothing to record",
    "not tracked": "tracking=none, nothing to record",
}


def format_status(status: SyncStatus) -> str:
    """Formats a line such as `outputs/a/b: KILLED, which nobody was left to say, recorded, run 0123...`."""
    words = [status.status or "", WORDS[status.result]]
    if status.was_open:
        words[0] += ", which nobody was left to say"
    line = f"{os.path.relpath(status.folder)}: " + ", ".join(filter(None, words))
    if status.result == "recorded" and status.run_id:
        line += f", run {status.run_id}"
    return line + (f": {status.reason}" if status.reason else "")


def format_totals(statuses: Sequence[SyncStatus]) -> str:
    """Formats a line such as `5 folders: 2 recorded, 2 was recorded before, 1 NOT RECORDED`."""
    counts = {result: sum(s.result == result for s in statuses) for result in WORDS}
    totals = ", ".join(f"{count} {WORDS[result]}" for result, count in counts.items() if count)
    return f"{len(statuses)} folder{'s' * (len(statuses) != 1)}: {totals}"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
