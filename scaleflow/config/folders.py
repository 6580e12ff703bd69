"""Notes the folders that this command creates for a run or a sweep, so that a refused command removes only these."""

from __future__ import annotations

import contextlib
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from scaleflow.errors import ConfigError

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


def check_current_folder(config: DictConfig) -> None:
    """Raises ConfigError if Hydra is to change the current folder: relative paths are of the one that was typed in."""
    if OmegaConf.select(config, "hydra.job.chdir"):
        raise ConfigError(
            "hydra.job.chdir=true: relative paths are those of the folder where the command was typed, and it stays "
            "the current one; leave this key out, and name files in the run's folder as "
            "${hydra:runtime.output_dir}/FILE"
        )
