"""Notes the folders that this command creates for a run or a sweep, so that a refused command removes only these."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

_created: set[Path] = set()


def create_folder(folder: Path) -> None:
    note_missing(folder)
    folder.mkdir(parents=True, exist_ok=True)


def note_missing(folder: Path) -> None:
    """Notes which of a folder and its parents do not exist. Call it just before they are created."""
    with contextlib.suppress(OSError):  # if a folder cannot be read, nothing can be created in it
        _created.update(path for path in lineage(folder) if not path.exists())


def remove_created(folder: Path) -> None:
    """Removes a folder, then its parents, until one is not empty or is not noted as created by this command."""
    with contextlib.suppress(OSError):
        for path in lineage(folder):
            if path not in _created:
                break
            path.rmdir()
            _created.discard(path)


def lineage(folder: Path) -> list[Path]:
    absolute = folder.resolve()  # without "..", so that `parents` are the real ones
    return [absolute, *absolute.parents]


class NoteFolders(Callback):
    """Notes missing folders before Hydra creates the folder of a run or a sweep, which it does before the task."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with contextlib.suppress(OmegaConfBaseException):  # Hydra reports it
            note_missing(Path(str(config.hydra.run.dir)))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with contextlib.suppress(OmegaConfBaseException):
            note_missing(Path(str(config.hydra.sweep.dir)))
