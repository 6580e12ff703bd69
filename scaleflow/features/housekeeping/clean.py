"""Frees disk space: lists the folders of runs by size, and deletes those of finished runs that MLflow has completely.

    scaleflow clean
    scaleflow clean outputs units --older-than 30d
    scaleflow clean --checkpoints --yes

It asks before it deletes; without a terminal it only lists. A run without its folder, or without its checkpoints, can
no longer be trained longer (resume=...); its model, metrics and files are in MLflow. Left alone are runs that were
stopped, failed, are running, are not recorded or not completely, and the finished jobs of a sweep that is not finished.
It deletes only files that the run has written: a folder with any other file or link, or with a tracking store, stays.
A folder of a run that was deleted in MLflow, and is in its trash, is deleted like the others.

Exit code: 0 done, or there is nothing to do; 1 a folder cannot be deleted; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.errors import ConfigError, RunDeleted, RunMissing
from scaleflow.interfaces import Tracker
from scaleflow.interfaces.formatting import SECONDS, format_duration, join_first
from scaleflow.interfaces.secret_masking import register_resolver
from scaleflow.launcher.command_exit import FAILED, FINISHED, JSON, Outcome
from scaleflow.launcher.recording.store_record import StoreRecord
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.folder import FolderBusy
from scaleflow.runs.run import find_tracking_options
from scaleflow.sync import find_run_folders
from scaleflow.tracking import make_tracker
from scaleflow.tracking.connection import format_store_error
from scaleflow.tracking.uri import sqlite_file

#: Folders to search if the user names none.
DEFAULT_FOLDERS = ("outputs", "multirun")

#: States of a run that may be deleted.
RECORDED = "recorded"
DELETED = "deleted in MLflow"


@dataclass
class FoundRun:
    """A run or sweep whose folder was found."""

    folder: Path
    status: str | None  # FINISHED, FAILED or KILLED; None: not ended
    state: str  # `recorded` or `deleted in MLflow`; otherwise why it stays
    bytes: int  # size of the files to delete
    age: float  # seconds since its last event
    is_deleted: bool = False

    @property
    def is_deletable(self) -> bool:
        return self.state in (RECORDED, DELETED) and self.bytes > 0


@make_main
def main(words: list[str]) -> Outcome:
    parser = CommandParser("clean", __doc__)
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="where runs are (default: outputs, multirun)"
    )
    parser.add_argument(
        "--older-than", default="7d", metavar="TIME", help="only runs that ended so long ago: 12h, 7d, 4w"
    )
    parser.add_argument("--checkpoints", action="store_true", help="delete only checkpoints")
    parser.add_argument("--yes", action="store_true", help="delete without a question")
    options = parser.parse_args(words)
    least_age = parse_age(options.older_than)
    for folder in options.folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder")
    register_resolver()
    roots = options.folders or [Path(name) for name in DEFAULT_FOLDERS if Path(name).is_dir()]
    runs = find_runs([root.absolute() for root in roots], least_age, options.checkpoints)
    problems: list[str] = []
    if runs:
        problems = offer_deletion(runs, roots, options)
    else:
        print(f"no folder of a run in {', '.join(map(str, options.folders or DEFAULT_FOLDERS))}")
    folders = []
    freed = 0
    for run in runs:
        folders.append({**asdict(run), "is_deletable": run.is_deletable})
        if run.is_deleted:
            freed += run.bytes
    values = {"folders": folders, "freed": freed, "error": problems[0] if problems else None}
    return Outcome(FAILED if problems else FINISHED, lambda: values)


def offer_deletion(runs: Sequence[FoundRun], roots: Sequence[Path], options: argparse.Namespace) -> list[str]:
    """Shows the runs and, if the user agrees, deletes those that may be deleted.

    Returns why others could not be deleted.
    """
    show(runs)
    chosen = [run for run in runs if run.is_deletable]
    chosen.sort(key=lambda run: -len(run.folder.parts))  # jobs before their sweep
    what = "the checkpoints" if options.checkpoints else "the folders"
    total = format_bytes(sum_bytes(chosen))
    if not chosen:
        print("nothing to delete")
        return []
    print(
        f"{what} of {len(chosen)} runs can be deleted: {total}. Such a run can no longer be trained longer (resume=...)"
    )
    if not (options.yes or is_confirmed(f"delete {what} of {len(chosen)} runs? [y/N] ")):
        print("nothing is deleted" if sys.stdin.isatty() else "nothing is deleted; add --yes to delete them")
        return []
    deleted = []
    problems = []
    for run in chosen:
        problem = delete(run, options.checkpoints)
        if problem:
            problems.append(problem)
        else:
            deleted.append(run)
    remove_empty_parents(chosen, roots)
    print(f"deleted {what} of {len(deleted)} runs: {format_bytes(sum_bytes(deleted))}")
    for problem in problems:
        print(f"left: {problem}", file=sys.stderr)
    return problems


def sum_bytes(runs: Sequence[FoundRun]) -> int:
    """Returns the bytes of all runs."""
    return sum(run.bytes for run in runs)


def parse_age(text: str) -> float:
    """Parses `--older-than` and returns seconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise ConfigError(f"--older-than {text}: expected a number with s, m, h, d or w, such as 12h or 7d")
    return float(match[1]) * SECONDS[match[2]]


def find_runs(roots: Sequence[Path], least_age: float, only_checkpoints: bool) -> list[FoundRun]:
    """Returns the runs in some folders, the largest first, with each run's state."""
    store = StoreCheck()
    runs: dict[Path, FoundRun] = {}
    for root in roots:
        for folder in find_run_folders(root):
            if folder not in runs:
                runs[folder] = describe_folder(folder, least_age, only_checkpoints, store=store)
    keep_stores(runs)
    for folder, run in runs.items():
        if RunFolder(folder).ledger.is_file():
            keep_sweep(run, list_runs_inside(folder, runs), only_checkpoints)
    return sorted(runs.values(), key=lambda run: -run.bytes)


def list_runs_inside(folder: Path, runs: Mapping[Path, FoundRun]) -> list[FoundRun]:
    """Returns the runs whose folders are inside another folder, such as the jobs of a sweep."""
    inner_runs = []
    for run_folder, run in runs.items():
        if run_folder != folder and run_folder.is_relative_to(folder):
            inner_runs.append(run)
    return inner_runs


def keep_stores(runs: Mapping[Path, FoundRun]) -> None:
    """Keeps the folders that contain the store of a run."""
    stores = []
    for folder in runs:
        file = sqlite_file(str(RunFolder(folder).read_record().get("uri")))
        if file is not None:
            stores.append(file)
    for folder, run in runs.items():
        if any(file.is_relative_to(folder) for file in stores):
            run.state = "holds a tracking store"


def keep_sweep(sweep: FoundRun, jobs: Sequence[FoundRun], only_checkpoints: bool) -> None:
    """Keeps the jobs of a sweep that is not finished, and a sweep some of whose jobs stay."""
    if sweep.status != "FINISHED" and not only_checkpoints:
        for job in jobs:
            if job.is_deletable:
                job.state = "its sweep is not finished"
    if sweep.is_deletable and not all(job.is_deletable for job in jobs):
        sweep.state = "it holds jobs that stay"


def describe_folder(folder: Path, least_age: float, only_checkpoints: bool, store: StoreCheck) -> FoundRun:
    """Returns the run in a folder, with the reason if it stays."""
    files = RunFolder(folder)
    state = RunState.read(folder)
    run_files, other_files = list_deletable(files, only_checkpoints)
    size = sum(measure(path) for path in run_files)
    age = time.time() - state.time / 1000
    run = FoundRun(folder, state.status, "", bytes=size, age=age)
    if files.is_locked:
        run.state = "running"
    elif not state.has_begun:
        run.state = "ended before training began"
    elif state.status != "FINISHED":
        run.state = {"FAILED": "failed", "KILLED": "stopped"}.get(str(state.status), "not ended; see scaleflow sync")
    elif other_files:
        run.state = name_others(other_files)
    else:
        run.state = store.check(folder)
        if run.is_deletable and age < least_age:
            run.state = f"{run.state}, too new"
    return run


class StoreCheck:
    """Asks stores whether they have a run. After a failure, it does not ask that store again."""

    def __init__(self) -> None:
        self._failures: dict[str, str] = {}

    def check(self, folder: Path) -> str:
        """Returns `recorded`, `deleted in MLflow`, or why a finished run stays."""
        record = StoreRecord(RunFolder(folder).events, Tracker())
        uri = str(RunFolder(folder).read_record().get("uri"))
        if record.run_id is None:
            return "not recorded"
        if not record.is_complete:
            return "not completely recorded; see scaleflow sync"
        if uri in self._failures:
            return self._failures[uri]
        try:
            EventTransfer(make_tracker(find_tracking_options(folder, uri)), RunFolder(folder).events).open()
        except RunDeleted:
            return DELETED
        except RunMissing:
            return "not in the store"
        except Exception as error:  # a store may raise anything
            self._failures[uri] = f"the store does not answer: {format_store_error(error, uri)}"
            return self._failures[uri]
        return RECORDED


def list_deletable(files: RunFolder, only_checkpoints: bool) -> tuple[list[Path], list[str]]:
    """Returns the files of a run to delete, and the names of other files, which prevent that."""
    run_files, other_files = files.split_files()
    if only_checkpoints:
        run_files = list_names_below(files.checkpoints.name, run_files)
        other_files = list_names_below(files.checkpoints.name, other_files)
    return [files.path / name for name in run_files], other_files


def list_names_below(folder: str, names: Sequence[str]) -> list[str]:
    """Returns the names that are a folder, or inside it."""
    return [name for name in names if name == folder or name.startswith(f"{folder}{os.sep}")]


def name_others(names: Sequence[str]) -> str:
    """Says that a folder has files that no run wrote."""
    return f"holds other files: {join_first(names)}"


def measure(path: Path) -> int:
    """Returns the size of a file in bytes; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return 0


def delete(run: FoundRun, only_checkpoints: bool) -> str:
    """Deletes a run's folder, or only its checkpoints. Returns why that failed; empty if it worked."""
    files = RunFolder(run.folder)
    try:
        with files.lock_recording(seconds=0), files.lock_writing():
            if RunState.read(run.folder).status != "FINISHED":
                return f"{run.folder}: it goes on"
            other = None if only_checkpoints else find_other_run(run.folder)
            if other is not None:
                return f"{run.folder}: it holds another run, {other}"
            run_files, other_files = list_deletable(files, only_checkpoints)
            if other_files:
                return f"{run.folder}: {name_others(other_files)}"
            for path in run_files:
                path.unlink()
        folder = files.checkpoints if only_checkpoints else run.folder
        for base, *_ in os.walk(folder.resolve(), topdown=False):  # if the folder is a link, the link stays
            Path(base).rmdir()
    except (FolderBusy, OSError) as error:
        return f"{run.folder}: {error}"
    run.is_deleted = True
    return ""


def find_other_run(folder: Path) -> str | None:
    """Returns the folder of another run inside a run's folder, or None."""
    for base, _, names in os.walk(folder):
        if base != str(folder) and not RunFolder.MARKS.isdisjoint(names):
            return base
    return None


def remove_empty_parents(runs: Sequence[FoundRun], roots: Sequence[Path]) -> None:
    """Removes empty folders of days and sweeps below `roots`."""
    tops = {root.absolute() for root in roots}
    for run in runs:
        for parent in run.folder.parents:
            if not any(parent != top and parent.is_relative_to(top) for top in tops):
                break
            with contextlib.suppress(OSError):
                parent.rmdir()


def show(runs: Sequence[FoundRun]) -> None:
    """Prints a line about each run."""
    for run in runs:
        age = format_duration(run.age) if run.age < SECONDS["d"] else f"{run.age / SECONDS['d']:.0f} d"
        size = format_bytes(run.bytes)
        print(f"{size:>9}  {age:>12}  {run.status or '-':<8}  {run.state:<24}  {os.path.relpath(run.folder)}")


def is_confirmed(question: str) -> bool:
    """Asks the user. Returns False without asking if there is no terminal, or with `--json`."""
    if JSON in sys.argv or not sys.stdin.isatty():
        return False
    with contextlib.suppress(EOFError):
        return input(question).strip().lower() in ("y", "yes")
    return False


def format_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
