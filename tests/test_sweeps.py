"""`scaleflow.run_sweep`, `scaleflow.best_run` and `scaleflow best`: of jobs that do not train, without a store."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase
from packaging.version import Version

import scaleflow
from scaleflow import best
from scaleflow.interfaces.events import MetricsLogged
from scaleflow.runs import EventReader, RunFolder
from scaleflow.sweep import runner
from tests.sweep.fake_runs import FakeLaunch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from scaleflow.launcher.processes.handover import SERVER_ENV

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SERVER_ENV, "no server is needed")
    return tmp_path


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """The object that `scaleflow best ... --json` prints."""
    best.main([*words, "--json"])
    answer: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return answer


def test_a_sweep_from_python_returns_its_jobs_and_the_best_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(VersionBase.instance(), "version_base", Version("1.3"))  # whichever test set it before
    before = (GlobalHydra.instance().hydra, VersionBase.instance().getbase(), HydraConfig.instance().cfg)
    monkeypatch.setattr(runner, "launch_run", FakeLaunch(["FINISHED", "FAILED"]))
    words = ("tracking=none", "training.epochs=1,3,2")
    result = scaleflow.run_sweep(*words, folder="my sweep", n_jobs=1)
    assert (GlobalHydra.instance().hydra, VersionBase.instance().getbase(), HydraConfig.instance().cfg) == before
    assert (result.status, result.run_id, result.folder) == ("FAILED", None, folder / "my sweep")
    assert [job.result.status for job in result.jobs] == ["FINISHED", "FAILED", "FINISHED"]
    assert result.jobs[1].result.error == "the test lets it fail"
    assert result.best is not None
    assert result.best.overrides == ("tracking=none", "training.epochs=2")
    assert result.best.result.metrics == {"val/loss": 0.5}
    assert scaleflow.best_run("my sweep") == result.best
    assert best.main(["my sweep"]) == 0
    assert "#2 tracking=none training.epochs=2" in capsys.readouterr().out
    monkeypatch.setattr(runner, "launch_run", FakeLaunch())
    again = scaleflow.run_sweep(*words, folder="my sweep")
    assert (again.status, again.best and again.best.number) == ("FINISHED", 1)
    assert [job.result.folder.name for job in again.jobs] == ["0", "1", "2"]
    events = EventReader(RunFolder(result.folder).events).read()
    told = [(event.step, event.values) for event in events if isinstance(event, MetricsLogged)]
    assert told[0][1] == {"val/loss": 1.0}
    assert told[-1] == (3, {"val/loss": pytest.approx(1 / 3)})  # the best values when three jobs had finished
    answer = answer_of(capsys, "my sweep")
    assert (answer["job"], answer["metric"], answer["value"]) == (1, "val/loss", pytest.approx(1 / 3))
    assert answer["overrides"] == ["tracking=none", "training.epochs=3"]


def test_a_sweep_runs_in_a_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch_run", FakeLaunch())
    results: list[scaleflow.SweepResult] = []
    thread = threading.Thread(
        target=lambda: results.append(scaleflow.run_sweep("tracking=none", "seed=1,2", n_jobs=2, folder="s"))
    )
    thread.start()
    thread.join(240)
    assert [result.status for result in results] == ["FINISHED"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["modle.units=1,2"], "modle.units: there is no such key; did you mean model.units=1?"),
        (["training.epochs=0,-1"], "training.epochs=0: expected an integer, at least 1"),
        (["--config-dir"], "--config-dir: expected an override KEY=VALUE, not a flag"),
        (["hydra/launcher=basic", "seed=1,2"], "hydra/launcher=basic: run_sweep needs a launcher of scaleflow"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused_and_leaves_nothing(folder: Path, words: list[str], wanted: str) -> None:
    with pytest.raises(scaleflow.ConfigError) as error:
        scaleflow.run_sweep("tracking=none", *words)
    assert wanted in str(error.value)
    assert list(folder.iterdir()) == []


def test_what_is_no_sweep_or_has_no_best_job_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "launch_run", FakeLaunch(["FAILED"]))
    failed = scaleflow.run_sweep("tracking=none", "seed=1", folder="s")
    assert (failed.status, failed.best) == ("FAILED", None)
    wanted = {
        "s": "s: this sweep has no best job: no finished job has its sweep.metric yet",
        "s/0": "s/0: expected the folder of a sweep, or the id of its run in MLflow",
        "models:/m@champion": "models:/m@champion: expected the folder of a sweep",
        "0" * 32: "there is no such store",
    }
    for named, message in wanted.items():
        assert best.main([named]) == 2
        assert message in capsys.readouterr().err
