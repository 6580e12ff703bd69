"""Decides which folders a new run or sweep may use: new ones, empty ones, and those that contain only a run's files.

The folders that this command creates are noted, so that a refused command removes only these.
"""

import contextlib
import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scaleflow.config.compose import check_current_folder
from scaleflow.errors import ConfigError
from scaleflow.interfaces.formatting import join_first
from scaleflow.runs.folder import RunFolder
from scaleflow.runs.state import RunState

_created: set[Path] = set()


def create_folder(folder: Path) -> None:
    note_missing(folder)
    folder.mkdir(parents=True, exist_ok=True)


def note_missing(folder: Path) -> None:
    """Notes which of a folder and its parents do not exist. Call it just before creating them."""
    with contextlib.suppress(OSError):  # if a folder cannot be read, nothing can be created in it
        for path in lineage(folder):
            if not path.exists():
                _created.add(path)


def remove_created(folder: Path) -> None:
    """Removes a folder, then its parents, until one is not empty or is not noted as created by this command."""
    with contextlib.suppress(OSError):
        for path in lineage(folder):
            if path not in _created:
                break
            path.rmdir()
            _created.discard(path)


def lineage(folder: Path) -> list[Path]:
    """Returns a folder and all its parents."""
    absolute = folder.resolve()  # without "..", so that `parents` are the real ones
    return [absolute, *absolute.parents]


RUN_DIR = "hydra.run.dir"
SWEEP_DIR = "hydra.sweep.dir"


class FolderRefused(BaseException):
    """The folder of a command cannot be used. A BaseException: Hydra only prints an `Exception` of a callback."""


def check_folder(folder: Path, key: str = RUN_DIR, ignored: Collection[str] = ()) -> None:
    """Raises ConfigError if a new run cannot use an existing folder: see `check_writable` and `refuse_others`."""
    check_writable(folder, key)
    refuse_others(folder, key, ignored)


def check_writable(folder: Path, key: str) -> None:
    """Raises ConfigError if no files can be created in a folder."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be written ({error.strerror}); choose another folder") from error


def refuse_others(folder: Path, key: str = RUN_DIR, ignored: Collection[str] = ()) -> None:
    """Raises ConfigError if a folder contains files that no run has written: the run's files could replace them.

    The folder need not exist. A sweep's folder (`SWEEP_DIR`) may also contain folders of runs.
    """
    if not folder.is_dir():
        return
    names = sorted(set(os.listdir(folder)) - {*ignored})  # noqa: PTH208
    files = RunFolder(folder)
    is_used = files.ledger.exists() if key == SWEEP_DIR else RunState.read(folder).has_begun
    if not names or is_used:  # another check refuses a second run in this folder
        return
    foreign = list_foreign(files, names, may_hold_runs=key == SWEEP_DIR)
    if foreign:
        raise ConfigError(
            f"{key}={os.path.relpath(folder)}: holds files that are not a run's ({join_first(foreign)}); choose a new "
            "or an empty folder"
        )


def list_foreign(files: RunFolder, names: Sequence[str], may_hold_runs: bool) -> list[str]:
    """Returns the names of a folder that no run has written. Folders without a file do not count.

    Args:
        files: the folder.
        names: the names in it.
        may_hold_runs: whether folders of runs in the folder count as written by a run.
    """
    run_names = []
    other_names = []
    for name in names:
        if files.is_own(name):
            run_names.append(name)
        elif holds_file(files.path / name):
            other_names.append(name)
    has_run = files.is_begun
    if may_hold_runs and all((files.path / name).is_dir() for name in other_names):
        run_folders = [name for name in other_names if holds_run(files.path / name)]
        other_names = [name for name in other_names if name not in run_folders]
        has_run = has_run or bool(run_folders)
    if has_run:
        return other_names
    return [*run_names, *other_names]  # no run wrote the files with a run's names, and a new run would replace them


def holds_file(path: Path) -> bool:
    """Whether a path is a file, or a folder with a file somewhere in it."""
    return not path.is_dir() or any(names for _, _, names in os.walk(path))


def holds_run(folder: Path) -> bool:
    """Whether a folder of a run or a sweep is somewhere in a folder."""
    return any(not RunFolder.MARKS.isdisjoint(names) for _, _, names in os.walk(folder))


class CheckFolders(Callback):
    """Checks the folder of a run or a sweep before Hydra writes there, and notes which of its parents are missing."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check(config, RUN_DIR)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check(config, SWEEP_DIR)

    def _check(self, config: DictConfig, key: str) -> None:
        with contextlib.suppress(OmegaConfBaseException):  # Hydra reports it
            folder = Path(str(OmegaConf.select(config, key)))
            note_missing(folder)
            try:
                check_current_folder(config)
                if OmegaConf.select(config, "resume") is None and folder.is_dir():  # a resumed run keeps its own folder
                    check_folder(folder, key)
            except ConfigError as refusal:
                raise FolderRefused(str(refusal)) from refusal
            except OSError:  # unreadable: Hydra reports that it cannot be written
                return
