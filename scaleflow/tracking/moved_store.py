"""Finds out whether an SQLite store was moved or copied. Imports no MLflow.

MLflow keeps the artifact folders of experiments, runs and models as absolute paths. After a move they name the old
place, and after a copy they name the original.
"""

import contextlib
import shlex
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from scaleflow.errors import ConfigError
from scaleflow.interfaces import name_command

#: Names of the folders next to a store that have artifacts: scaleflow's, and MLflow's own.
ARTIFACTS = "mlartifacts"
MLFLOW_ARTIFACTS = "mlruns"

#: Seconds to wait for another program that writes to the store.
LOCK_SECONDS = 10.0


@dataclass(frozen=True)
class ExperimentFolder:
    """The artifact folder of an experiment, as the store has it."""

    experiment_id: str
    name: str
    path: Path
    created_at: int | None = None  # milliseconds since 1970; None in the store of an older MLflow

    @property
    def root(self) -> Path:
        """The folder in which the store was when the experiment was created."""
        return self.path.parent.parent


def refuse_moved_store(file: Path, names: Iterable[str] = ()) -> None:
    """Raises ConfigError if an SQLite store has the artifact folders of the place where it was before.

    Args:
        file: the store.
        names: names or ids of experiments to check even if MLflow has created them.
    """
    moved = [
        folder
        for folder in list_experiment_folders(file)
        if folder.path.parent.name == ARTIFACTS or not {folder.name, folder.experiment_id}.isdisjoint(names)
    ]
    moved = [folder for folder in moved if is_moved(folder, file)]
    if not moved:
        return
    old = moved[0].root
    new = file.parent
    command = f"{name_command('sync')} {shlex.quote(str(new))} --moved"
    if file.name != "mlflow.db":
        command += f" --uri {shlex.quote(f'sqlite:///{file}')}"
    event = "copied"
    more = ""
    if not (old / file.name).exists():
        link = shlex.join(["ln", "-s", str(new), str(old)])
        event = "moved"
        more = f"; if another machine sees this folder as {old}, make a link here instead: `{link}`"
    raise ConfigError(
        f"tracking.uri=sqlite:///{file}: this store was {event}: its experiment {moved[0].name} has its files in "
        f"{moved[0].path}; `{command}` changes the paths in the store from {old} to {new}{more}"
    )


def list_experiment_folders(file: Path, stages: Sequence[str] = ("active",)) -> list[ExperimentFolder]:
    """Returns the local artifact folders of all experiments; none if the store is empty or cannot be read now.

    Args:
        file: the store.
        stages: `active` experiments, `deleted` ones.
    """
    if not file.is_file() or file.stat().st_size == 0:
        return []
    query = "select experiment_id, name, artifact_location, lifecycle_stage, creation_time from experiments"
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)) as store:
            rows = store.execute(query).fetchall()
    except sqlite3.Error:  # it is being created, or it is locked: MLflow says so
        return []
    folders = []
    for experiment_id, name, location, stage, created_at in rows:
        path = to_local_path(str(location))
        if stage in stages and path is not None and path.parent.name in (ARTIFACTS, MLFLOW_ARTIFACTS):
            folders.append(ExperimentFolder(str(experiment_id), str(name), path, created_at))
    return folders


def is_moved(folder: ExperimentFolder, file: Path) -> bool:
    """Returns whether an experiment's artifact folder was next to a store that is now somewhere else.

    A folder that was chosen by hand, or by a program that used the store from another folder, also has another place
    than the store. It exists, and there is neither such a folder next to the store nor the original of the store next
    to it.
    """
    path = folder.path
    root = folder.root
    here = file.parent / path.parent.name / path.name
    if is_same(root, file.parent) or is_same(path, here):
        return False
    if not is_same(root / file.name, file) and has_experiment(root / file.name, folder):
        return True
    return here.exists() or not (path.exists() or root.exists())


def has_experiment(file: Path, folder: ExperimentFolder) -> bool:
    """Returns whether another store has an experiment, maybe under another name: one of the two is a copy."""
    return any(
        (each.experiment_id, each.path, each.created_at) == (folder.experiment_id, folder.path, folder.created_at)
        for each in list_experiment_folders(file, ("active", "deleted"))
    )


def is_same(one: Path, other: Path) -> bool:
    """Returns whether two paths name the same file or folder, maybe through a link."""
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False


def to_local_path(location: str) -> Path | None:
    """Returns the path of a local artifact location; None for a server's or an object store's."""
    if location.startswith("file:"):
        parts = urlsplit(location)
        return Path(unquote(parts.path)) if parts.netloc in ("", "localhost") else None
    return Path(location) if location.startswith("/") else None


def has_run(file: Path, run_id: str) -> bool:
    """Returns whether an SQLite store has a run, deleted ones included."""
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)) as store:
            return store.execute("select 1 from runs where run_uuid = ?", (run_id,)).fetchone() is not None
    except sqlite3.Error:
        return False
