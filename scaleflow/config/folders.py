"""The folders that this command creates for a run or a sweep: a refused command removes these and no others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

_created: set[Path] = set()


def create_folder(folder: Path) -> None:
    """Creates a folder with its parents."""
    note_missing(folder)
    folder.mkdir(parents=True, exist_ok=True)


def note_missing(folder: Path) -> None:
    """Notes which of a folder and its parents do not exist, just before they are created."""
    with contextlib.suppress(OSError):  # a folder that cannot be read cannot be created in either
        _created.update(place for place in lineage(folder) if not place.exists())


def remove_created(folder: Path) -> None:
    """Removes a folder, then its parents, as far as this command created them and they are empty."""
    with contextlib.suppress(OSError):
        for place in lineage(folder):
            if place not in _created:
                break
            place.rmdir()
            _created.discard(place)


def lineage(folder: Path) -> list[Path]:
    absolute = folder.resolve()  # without "..", as Hydra names a run's folder
    return [absolute, *absolute.parents]


class NoteFolders(Callback):
    """Hydra creates the folder of a run or a sweep before it calls the task; this notes before that what is missing."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with contextlib.suppress(OmegaConfBaseException):  # Hydra says so itself
            note_missing(Path(str(config.hydra.run.dir)))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with contextlib.suppress(OmegaConfBaseException):
            note_missing(Path(str(config.hydra.sweep.dir)))
