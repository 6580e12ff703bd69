"""What a run's folder may hold before, and which of its files are the run's afterwards."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import scaleflow
from scaleflow.cli import main
from scaleflow.commands.frame import check_page
from scaleflow.config.interpolations import keep_values
from scaleflow.errors import ConfigError
from scaleflow.features.pipelines.ledger import PipelineLedger
from scaleflow.interfaces import Tracking
from scaleflow.interfaces.formatting import GENERATOR
from scaleflow.runs import RunFolder
from scaleflow.runs.folder_use import RUN_DIR, SWEEP_DIR, create_folder, refuse_others, remove_created
from scaleflow.tracking.uri import resolve_store
from tests.tracking.example_runs import MadeRun


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"of the user: {name}")
    return folder


def digest(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


#: Files of a user's whose names a run, a sweep or Hydra gives, and others.
MINE = ("train.py", "config.yaml", "multirun.yaml", "evaluation/report.html", "model/net.py", "mlflow.db", ".hydra/a")

STARTS: dict[str, tuple[str, Callable[[], object]]] = {
    "run": (RUN_DIR, lambda: main(["tracking=none", "hydra.run.dir=.", "hydra.output_subdir=.hydra"])),
    "sweep": (SWEEP_DIR, lambda: main(["-m", "tracking=none", "seed=1,2", "hydra.sweep.dir=."])),
    "basic": (
        SWEEP_DIR,
        lambda: main(["-m", "tracking=none", "seed=1,2", "hydra.sweep.dir=.", "hydra/launcher=basic"]),
    ),
    "optuna": (
        SWEEP_DIR,
        lambda: main(["-m", "tracking=none", "seed=1,2", "hydra/sweeper=optuna5", "hydra.sweep.dir=."]),
    ),
    "api": (RUN_DIR, lambda: scaleflow.run("tracking=none", folder=".")),
    "api-sweep": (SWEEP_DIR, lambda: scaleflow.run_sweep("tracking=none", "seed=1,2", folder=".")),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_folder_with_other_files_is_refused_before_anything_is_written(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write(tmp_path, *MINE))
    before, (key, call) = digest(tmp_path), STARTS[start]
    if start.startswith("api"):
        with pytest.raises(ConfigError) as refused:
            call()
        said = str(refused.value)
    else:
        assert call() == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
    others = "(.hydra, config.yaml, evaluation and 4 more)"
    assert f"{key}=.: holds files that are not a run's {others}; choose a new or an empty folder" in said
    assert digest(tmp_path) == before


def test_a_folder_of_a_run_or_of_a_sweep_is_used_again(tmp_path: Path) -> None:
    """That of a run that never began, of other processes of the run, of earlier jobs; and with a file more, not."""
    write(tmp_path / "left", "record.lock", "config.yaml", "worker-0.log")
    write(tmp_path / "worker", "worker-1.log", "events-worker-1.jsonl")
    write(tmp_path / "jobs", "multirun.yaml", "a=1/b=2/events.jsonl")
    write(tmp_path / "sweep", "sweep.json", "multirun.yaml", "mine")
    MadeRun(tmp_path / "run").ready()
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    for name in ("left", "worker", "run", "nowhere", "empty"):
        refuse_others(tmp_path / name)
    for name in ("jobs", "sweep"):
        refuse_others(tmp_path / name, SWEEP_DIR)
    for name in ("left", "worker"):
        with pytest.raises(ConfigError, match=r"\(mine\)"):
            refuse_others(write(tmp_path / name, "mine"))
    with pytest.raises(ConfigError, match=r"\(multirun\.yaml, a=1\)"):
        refuse_others(tmp_path / "jobs")
    with pytest.raises(ConfigError, match=r"\(src\)"):
        refuse_others(write(tmp_path / "jobs", "src/net.py"), SWEEP_DIR)


def test_the_manifest_has_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    files = RunFolder(
        write(tmp_path, "data-0123456789abcdef.feather", "stage.log")
    )  # a command may write before the run begins
    with files.track_files():
        write(tmp_path, "config.yaml", "model/model.keras", "events.jsonl")
    write(tmp_path, "model/mine.py", "notes.md", "worker-1.log")  # the last is of another machine
    other = {"model/mine.py", "notes.md"}
    assert set(files.split_files()[1]) == other
    with files.track_files():  # the run is continued
        write(tmp_path, "evaluation/report.html", "inner/events.jsonl")
        assert set(files.split_files()[1]) == other, "if the command is killed here"
    own, others = files.split_files()
    assert set(others) == other, "files of another run in the folder are neither"
    assert {"config.yaml", "model/model.keras", "evaluation/report.html", "worker-1.log", "files.json"} <= {*own}
    assert {"data-0123456789abcdef.feather", "stage.log"} <= {*own}


def test_nothing_is_left_of_a_run_that_was_refused(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    with files.track_files():
        files.manifest.unlink()
    assert list(tmp_path.iterdir()) == []


def test_another_current_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("tracking=none", "hydra.job.chdir=true")
    for command in (list(words), ["-m", "seed=1,2", *words], ["-m", "seed=1,2", "hydra/launcher=basic", *words]):
        assert main(command) == 2
        assert "hydra.job.chdir=true: relative paths are those of the folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"hydra\.job\.chdir=true"):
        scaleflow.run(*words)
    with pytest.raises(ConfigError, match=r"hydra\.job\.chdir=true"):
        scaleflow.run_sweep("seed=1,2", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_pipeline_takes_no_folder_with_other_files(tmp_path: Path) -> None:
    for name in ("new", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with PipelineLedger(tmp_path / name).lock(may_create=True):
            pass
        with PipelineLedger(write(tmp_path / name, "notes.md")).lock(may_create=True):
            pass
    with (
        pytest.raises(ConfigError, match=r"holds files that are not a pipeline's \(fit\); choose"),
        PipelineLedger(write(tmp_path / "mine", "fit/1/config.yaml")).lock(may_create=True),
    ):
        pass
    assert digest(tmp_path / "mine").keys() == {"fit/1/config.yaml"}


def test_a_page_replaces_only_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    check_page("--report", page)
    page.write_text(f"<!DOCTYPE html><html><head>{GENERATOR}</head></html>")
    check_page("--report", page)
    for path, said in ((write(tmp_path, "a.html") / "a.html", "no page"), (tmp_path / "no/b.html", "no folder")):
        with pytest.raises(ConfigError, match=f"--report .*{said}"):
            check_page("--report", path)
    with pytest.raises(ConfigError, match="is a folder"):
        check_page("--report", tmp_path)


def test_a_store_is_no_file_of_another_program(empty_store: Path, tmp_path: Path) -> None:
    """MLflow would add its tables to a database."""
    with sqlite3.connect(tmp_path / "shop.db") as shop:
        shop.execute("create table orders (id)")
    for name, said in (("shop.db", r"database of another program \(tables orders\)"), ("a.csv", "is no SQLite file")):
        before = digest(write(tmp_path, "a.csv"))
        with pytest.raises(ConfigError, match=said):
            resolve_store(Tracking(uri=f"sqlite:///{tmp_path / name}"))
        assert digest(tmp_path) == before
    resolve_store(Tracking(uri=f"sqlite:///{empty_store}"))
    (tmp_path / "new.db").touch()
    resolve_store(Tracking(uri=f"sqlite:///{tmp_path}/new.db"))


def test_what_only_the_command_knows_is_written_as_a_value() -> None:
    """A command that resumes the run has another folder."""
    raw = {"a": ["${hydra:runtime.output_dir}/log.csv", "${seed}"], "b": {"c": "${oc.env:HOME}"}, "d": 1}
    resolved = {"a": ["/run/log.csv", 0], "b": {"c": "/home"}, "d": 1}
    assert keep_values(raw, resolved)[0] == {"a": ["/run/log.csv", "${seed}"], "b": {"c": "/home"}, "d": 1}


def test_created_folders_are_removed_up_to_an_earlier_one(tmp_path: Path) -> None:
    create_folder(tmp_path / "data" / "exp" / "a")
    remove_created(tmp_path / "data" / "exp" / "a")
    assert list(tmp_path.iterdir()) == []


def test_earlier_folders_stay_even_if_empty(tmp_path: Path) -> None:
    (tmp_path / "data" / "exp").mkdir(parents=True)
    create_folder(tmp_path / "data" / "exp" / "a")
    remove_created(tmp_path / "data" / "exp" / "a")
    assert list((tmp_path / "data").iterdir()) == [tmp_path / "data" / "exp"]
    remove_created(tmp_path / "data" / "exp")
    assert (tmp_path / "data" / "exp").is_dir()


def test_folders_with_files_stay(tmp_path: Path) -> None:
    create_folder(tmp_path / "exp" / "a")
    (tmp_path / "exp" / "a" / "note").touch()
    remove_created(tmp_path / "exp" / "a")
    assert (tmp_path / "exp" / "a" / "note").exists()


def test_a_folder_is_the_same_however_its_path_is_written(tmp_path: Path) -> None:
    create_folder(tmp_path / "here" / ".." / "data" / "a")
    remove_created(tmp_path / "data" / "a")
    assert not (tmp_path / "data").exists()
