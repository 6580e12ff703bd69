"""Corrects the paths in an SQLite store that was moved or copied. Does not import MLflow."""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleflow.compat.mlflow import LOCATION_COLUMNS
from scaleflow.errors import ConfigError
from scaleflow.tracking.moved_store import (
    ARTIFACTS,
    LOCK_SECONDS,
    MLFLOW_ARTIFACTS,
    is_moved,
    list_experiment_folders,
    to_local_path,
)
from scaleflow.tracking.store import DESCRIPTION, WRITTEN, compute_digest


@dataclass(frozen=True)
class CorrectedStore:
    """The former folders of a store, the number of changed paths, and the number of runs with files left there."""

    roots: Sequence[Path]
    changed: int
    left_behind: int


def correct_moved_store(file: Path) -> CorrectedStore:
    """Changes the paths in a moved or copied store to its present folder.

    A run whose files are only in the old folder keeps its path. Raises ConfigError if the store cannot be written.
    """
    experiments = [folder for folder in list_experiment_folders(file) if is_moved(folder, file)]
    roots = list(dict.fromkeys(folder.root for folder in experiments))
    changed = 0
    left_behind = 0
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=LOCK_SECONDS)) as store, store:
            store.execute("begin immediate")  # fails now if another program holds the store
            for table, column in LOCATION_COLUMNS:
                for row, location in list_values(store, table, column):
                    path = to_local_path(location)
                    moved = find_new_place(path, roots, file.parent) if path else None
                    if path is None or moved is None:
                        continue
                    if table != "experiments" and path.exists() and not moved.exists():
                        left_behind += table == "runs"
                        continue
                    text = moved.as_uri() if location.startswith("file:") else str(moved)
                    store.execute(f"update {table} set {column} = ? where rowid = ?", (text, row))
                    changed += 1
            changed += correct_tags(store, roots, file.parent)
            for root in roots:
                correct_descriptions(store, root, file)
    except sqlite3.Error as error:
        raise ConfigError(f"tracking.uri=sqlite:///{file}: cannot be changed: {error}") from error
    return CorrectedStore(roots, changed, left_behind)


def correct_tags(store: sqlite3.Connection, roots: Sequence[Path], new: Path) -> int:
    """Changes the paths in scaleflow's tags, if the new path exists. Returns the number of changed tags."""
    changed = 0
    for row, value in list_values(store, "tags", "value", "where key like 'scaleflow.%' and value like '/%'"):
        for root in roots:
            moved = os.path.normpath(new / os.path.relpath(value, root))
            if moved != value and Path(moved).exists():
                store.execute("update tags set value = ? where rowid = ?", (moved, row))
                changed += 1
                break
    return changed


def correct_descriptions(store: sqlite3.Connection, root: Path, file: Path) -> None:
    """Replaces old paths in the descriptions of runs. They contain commands to load the model and to resume the run."""
    replacements = {
        f"sqlite:///{root / file.name}": f"sqlite:///{file}",
        f"resume={root}/": f"resume={file.parent}/",
    }
    for run_id, text in store.execute("select run_uuid, value from tags where key = ?", (DESCRIPTION,)).fetchall():
        changed = text
        for old, new in replacements.items():
            changed = changed.replace(old, new)
        if changed == text:
            continue
        digests = compute_digest(changed), compute_digest(text)
        store.execute("update tags set value = ? where run_uuid = ? and key = ?", (changed, run_id, DESCRIPTION))
        # The digest marks the description as written by scaleflow, which may then rewrite it later.
        store.execute(
            "update tags set value = ? where value = ? and run_uuid = ? and key = ?", (*digests, run_id, WRITTEN)
        )


def list_values(store: sqlite3.Connection, table: str, column: str, condition: str = "") -> Iterator[tuple[int, str]]:
    """Yields (row id, value) for the text values of a column; nothing if an older MLflow did not create the column."""
    with contextlib.suppress(sqlite3.OperationalError):
        for row, value in store.execute(f"select rowid, {column} from {table} {condition}").fetchall():
            if isinstance(value, str):
                yield row, value


def find_new_place(path: Path, roots: Iterable[Path], new: Path) -> Path | None:
    """Converts an artifact path below one of the old folders to the new folder; None for any other path."""
    for root in roots:
        for name in (ARTIFACTS, MLFLOW_ARTIFACTS):
            if path.is_relative_to(root / name):
                return new / path.relative_to(root)
    return None
