"""A project whose folder was moved or copied: its store has absolute paths, and the records of its runs, too."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from scaleflow import sync
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking
from scaleflow.launcher.recording.recovery import repair
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs import RunFolder
from scaleflow.runs.run import Run, find_tracking_options
from scaleflow.tracking import make_tracker
from scaleflow.tracking.moved_store import ExperimentFolder, is_moved
from scaleflow.tracking.uri import resolve_store
from tests.tracking.example_runs import MadeRun, assert_has_one_model, only_run

pytestmark = pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")


@pytest.fixture
def project(empty_store: Path, tmp_path: Path) -> Path:
    """A project with a sweep of one job, which are recorded."""
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    uri = f"sqlite:///{folder}/mlflow.db"
    sweep = MadeRun(folder / "sweep", uri=uri).ready().end()
    job = MadeRun(folder / "jobs" / "first", uri=uri).ready(parent=str(sweep.folder))
    job.train(1, 3).files().end()
    assert [repair(made.folder).result for made in (sweep, job)] == ["recorded", "recorded"]
    return folder


def correct(project: Path) -> int:
    return sync.main([str(project), "--moved"])


def list_paths(project: Path) -> list[Path]:
    return sorted(path.relative_to(project) for path in (project / "mlartifacts").rglob("*") if path.is_file())


def find_old_paths(file: Path, old: Path) -> list[Any]:
    """Returns all values in a store that contain the old path."""
    found = []
    with sqlite3.connect(file) as store:
        for (table,) in store.execute("select name from sqlite_master where type = 'table'").fetchall():
            found += [row for row in store.execute(f'select * from "{table}"') if f"{old}/" in str(row)]
    return found


@pytest.mark.parametrize("event", ["moved", "copied"])
def test_a_store_in_another_place_is_refused_until_its_paths_are_corrected(
    project: Path, tmp_path: Path, event: str
) -> None:
    new = tmp_path / "a new place"
    (shutil.move if event == "moved" else shutil.copytree)(project, new)
    before = list_paths(project) if event == "copied" else []
    uri = f"sqlite:///{new}/mlflow.db"
    for tracking in (Tracking(uri=uri), Tracking(uri=uri, offline=True), Tracking(uri=uri, experiment="another")):
        with pytest.raises(ConfigError, match=rf"this store was {event}: .*sync '{new}' --moved` changes"):
            resolve_store(tracking)
    assert correct(new) == 0
    assert find_old_paths(new / "mlflow.db", project) == []
    resolve_store(Tracking(uri=uri))

    run = only_run(uri, "first")
    assert Run.find(run.info.run_id, Tracking(uri=uri)).path == new / "jobs" / "first"
    later = MadeRun(new / "later", uri=uri, experiment="first").ready().files().end()
    shutil.rmtree(RunFolder(later.folder).model)
    assert repair(later.folder).result == "not recorded"  # its files are looked for here
    assert list_paths(project) == before if event == "copied" else not project.exists()


def test_runs_are_sent_to_the_store_that_was_moved_with_them(project: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    shutil.move(project, new)
    project.mkdir()  # as a mount point would be
    assert correct(new) == 0
    uri = f"sqlite:///{new}/mlflow.db"
    for folder in (new / "sweep", new / "jobs" / "first"):
        assert RunFolder(folder).read_record()["uri"] == uri
        status = repair(folder)
        assert (status.result, status.reason) == ("complete", "")
    run = only_run(uri, "first")
    assert_has_one_model(uri, run)
    assert run.data.tags["scaleflow.folder"] == str(new / "jobs" / "first")
    assert list(project.iterdir()) == []


def test_a_job_that_was_not_recorded_finds_its_files_and_its_sweep_after_a_move(project: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{project}/mlflow.db"
    job = MadeRun(project / "jobs" / "second", uri=uri).ready(parent=str(project / "sweep")).files().end()
    EventTransfer(make_tracker(find_tracking_options(job.folder, None)), job.events).record.save()  # as a launcher does
    new = tmp_path / "new"
    shutil.copytree(project, new)
    shutil.rmtree(project / "sweep")
    assert correct(new) == 0
    moved = f"sqlite:///{new}/mlflow.db"
    run = only_run(moved, "second")
    assert run.data.tags["mlflow.parentRunId"] == only_run(moved, "sweep").info.run_id


def test_a_folder_that_was_chosen_or_linked_is_no_move(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other / "mlartifacts" / "chosen"):
        folder.mkdir(parents=True)
    store = here / "mlflow.db"
    store.touch()

    def is_folder_moved(path: Path) -> bool:
        return is_moved(ExperimentFolder("1", "x", path), store)

    assert not is_folder_moved(here / "mlartifacts" / "x")
    assert not is_folder_moved(other / "mlartifacts" / "chosen")
    assert not is_folder_moved(other / "mlartifacts" / "planned")
    assert is_folder_moved(tmp_path / "gone" / "mlartifacts" / "x")
    (tmp_path / "gone").symlink_to(here)  # another machine sees the folder under this path
    assert not is_folder_moved(tmp_path / "gone" / "mlartifacts" / "x")
    (here / "mlartifacts" / "chosen").mkdir(parents=True)
    assert is_folder_moved(other / "mlartifacts" / "chosen")


def test_a_store_that_a_program_used_from_a_folder_with_another_store_is_no_copy(
    empty_store: Path, tmp_path: Path
) -> None:
    """MLflow itself puts the files of an experiment into the current folder, wherever the store is."""
    from mlflow import MlflowClient

    project, shared = tmp_path / "project" / "mlflow.db", tmp_path / "shared" / "mlflow.db"
    for store, name in ((project, "own"), (shared, "common")):
        store.parent.mkdir()
        shutil.copy(empty_store, store)
        client = MlflowClient(f"sqlite:///{store}")
        client.create_experiment(name, artifact_location=str(project.parent / "mlruns" / "1"))
        time.sleep(0.002)  # MLflow tells experiments apart by milliseconds
    resolve_store(Tracking(uri=f"sqlite:///{shared}", experiment="common"))
    shutil.copy(project, shared)
    with pytest.raises(ConfigError, match="this store was copied"):
        resolve_store(Tracking(uri=f"sqlite:///{shared}", experiment="own"))
