"""Detects an SQLite store that was moved or copied. Does not import MLflow.

MLflow stores the artifact folders of experiments, runs and models as absolute paths. After a move these paths point to
the old place, and after a copy to the original.
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

#: Names of the artifact folders next to a store: scaleflow's, and MLflow's own.
ARTIFACTS = "mlartifacts"
MLFLOW_ARTIFACTS = "mlruns"

#: Seconds to wait for another program that writes to the store.
LOCK_SECONDS = 10.0


@dataclass(frozen=True)
class ExperimentFolder:
    """The artifact folder of an experiment, as recorded in the store."""

    experiment_id: str
    name: str
    path: Path
    created_at: int | None = None  # milliseconds since 1970; None in the store of an older MLflow

    @property
    def root(self) -> Path:
        """The folder of the store at the time when the experiment was created."""
        return self.path.parent.parent


def refuse_moved_store(file: Path, names: Iterable[str] = ()) -> None:
    """Raises ConfigError if the artifact folders in an SQLite store are still at the store's former place.

    Checks the experiments that scaleflow created, and those in `names`.

    Args:
        file: the store.
        names: names or ids of experiments to check even if MLflow created them.
    """
    moved = []
    for folder in list_experiment_folders(file):
        is_own = folder.path.parent.name == ARTIFACTS
        is_named = not {folder.name, folder.experiment_id}.isdisjoint(names)
        if (is_own or is_named) and is_moved(folder, file):
            moved.append(folder)
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
    """Returns the local artifact folders of all experiments; [] if the store is empty or cannot be read now.

    Args:
        file: the store.
        stages: `active` and/or `deleted` experiments.
    """
    if not file.is_file() or file.stat().st_size == 0:
        return []
    query = "select experiment_id, name, artifact_location, lifecycle_stage, creation_time from experiments"
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)) as store:
            rows = store.execute(query).fetchall()
    except sqlite3.Error:  # it is being created, or it is locked: MLflow will report that
        return []
    folders = []
    for experiment_id, name, location, stage, created_at in rows:
        path = to_local_path(str(location))
        if stage in stages and path is not None and path.parent.name in (ARTIFACTS, MLFLOW_ARTIFACTS):
            folders.append(ExperimentFolder(str(experiment_id), str(name), path, created_at))
    return folders


def is_moved(folder: ExperimentFolder, file: Path) -> bool:
    """Returns whether an experiment's artifact folder shows that its store was moved or copied.

    The folder may be elsewhere for another reason: the user chose it, or a program used the store from another folder.
    Then the folder exists, there is no folder of this name next to the store, and no original of the store next to the
    folder.
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
    """Returns whether another store has the same experiment, even renamed. One of the two stores is then a copy."""
    for other in list_experiment_folders(file, ("active", "deleted")):
        is_same_id = other.experiment_id == folder.experiment_id and other.created_at == folder.created_at
        if is_same_id and other.path == folder.path:
            return True
    return False


def is_same(one: Path, other: Path) -> bool:
    """Returns whether two paths lead to the same file or folder, also through links."""
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False


def to_local_path(location: str) -> Path | None:
    """Returns the path of a local artifact location; None for a location on a server or in an object store."""
    if location.startswith("file:"):
        parts = urlsplit(location)
        return Path(unquote(parts.path)) if parts.netloc in ("", "localhost") else None
    return Path(location) if location.startswith("/") else None


def has_run(file: Path, run_id: str) -> bool:
    """Returns whether an SQLite store has a run, even a deleted one."""
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)) as store:
            return store.execute("select 1 from runs where run_uuid = ?", (run_id,)).fetchone() is not None
    except sqlite3.Error:
        return False
