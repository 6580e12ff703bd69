"""The sweeper: what it draws, how a search goes on, which jobs it stops."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from hydra.test_utils.test_utils import TSweepRunner
from omegaconf import DictConfig

from scaleflow.cli import main
from scaleflow.launcher.worker_process import SERVER_ENV
from scaleflow.sweep import runner as runner_module
from tests.sweep.fake_runs import FakeLaunch

optuna = pytest.importorskip("optuna")

pytestmark = pytest.mark.filterwarnings("ignore")  # Hydra's and Optuna's own


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Hydra's test apps change into folders of theirs."""
    before = Path.cwd()
    yield
    os.chdir(before)


def bowl(config: DictConfig) -> float:
    return float((config.foo - 3) ** 2)


def fails_below_zero(config: DictConfig) -> float:
    return float("nan") if config.foo < 0 else float(config.foo)


def search(runner: TSweepRunner, task: Any, folder: Path, *words: str) -> Any:
    with runner(
        calling_file=None,
        calling_module="hydra.test_utils.a_module",
        task_function=task,
        config_path="configs",
        config_name="compose.yaml",
        overrides=[
            "hydra/sweeper=optuna5",
            "hydra/launcher=basic",
            f"hydra.sweeper.storage={storage(folder)}",
            *words,
        ],
        temp_dir=folder / "sweep",
    ) as ran:  # which takes its folder away
        return ran.returns


def storage(folder: Path) -> str:
    return f"sqlite:///{folder}/optuna.db"


def study(folder: Path) -> Any:
    return optuna.load_study(study_name="sweep", storage=storage(folder))


@pytest.mark.slow
def test_it_finds_what_is_best(hydra_sweep_runner: TSweepRunner, tmp_path: Path) -> None:
    words = ("foo=interval(0.0,10.0)", "hydra.sweeper.n_trials=25")
    best = search(hydra_sweep_runner, bowl, tmp_path, *words)
    assert best["best_params"]["foo"] == pytest.approx(3, abs=1)
    assert len(study(tmp_path).trials) == 25


def test_a_search_goes_on_with_what_was_left(hydra_sweep_runner: TSweepRunner, tmp_path: Path) -> None:
    words = ("foo=choice(1,2,3,4)", "bar=range(0,10,5)")
    search(hydra_sweep_runner, bowl, tmp_path, *words, "hydra.sweeper.n_trials=2")
    interrupted = study(tmp_path).ask(dict(study(tmp_path).trials[0].distributions))
    search(hydra_sweep_runner, bowl, tmp_path, *words, "hydra.sweeper.n_trials=4")
    trials = study(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    assert trials[2].number == interrupted.number
    assert trials[2].value == (trials[2].params["foo"] - 3) ** 2
    assert {trial.params["bar"] for trial in trials} <= {0, 5}


def test_a_job_that_tells_nothing_is_a_trial_that_failed(hydra_sweep_runner: TSweepRunner, tmp_path: Path) -> None:
    search(hydra_sweep_runner, fails_below_zero, tmp_path, "foo=choice(-1,1)", "hydra.sweeper.n_trials=6")
    assert {(t.params["foo"], t.state.name) for t in study(tmp_path).trials} == {(-1, "FAIL"), (1, "COMPLETE")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hydra.sweeper.sampler=magic", "foo=1,2"), "hydra.sweeper.sampler=magic: expected one of tpe"),
        (("hydra.sweeper.direction=up", "foo=1,2"), "hydra.sweeper.direction=up"),
        (("hydra.sweeper.n_trials=0", "foo=1,2"), "hydra.sweeper.n_trials=0"),
        (("hydra.sweeper.direction=minimize", "+sweep.mode=max", "foo=1,2"), "sweep.mode=max is the opposite"),
        (("+sweep.metric=val/mine", "foo=1,2"), "sweep.metric=val/mine: scaleflow does not know whether larger"),
        (("foo=1",), "there is no parameter to search"),
        (("foo=1,2", "hydra.sweeper.pruner=median"), "only jobs of scaleflow's own command"),
    ],
)
def test_what_makes_no_sense_is_refused(
    hydra_sweep_runner: TSweepRunner, tmp_path: Path, words: Sequence[str], message: str
) -> None:
    with pytest.raises(HydraException, match=message):
        search(hydra_sweep_runner, bowl, tmp_path, *words)


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sweeps with jobs of our own command, which do not train."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scaleflow"])
    monkeypatch.setenv(SERVER_ENV, "nobody forks here")

    def search(launch: FakeLaunch, *words: str) -> int:
        monkeypatch.setattr(runner_module, "launch_run", launch)
        return main(["-m", "hydra/sweeper=optuna5", "tracking=none", "hydra.sweep.dir=s", *words])

    return search


@pytest.mark.parametrize("launcher", ["isolated", "ray"])
def test_our_own_jobs_are_stopped_where_they_do_worse(
    tmp_path: Path, ours: Any, launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([*[1.0] * 6, 9.0, 0.5])
    fake = FakeLaunch(measured=lambda plan: {"val/loss": next(losses)})
    words = [f"hydra/launcher={launcher}", "hydra.launcher.n_jobs=1", "strategy=multi_worker", "cluster.workers=2"]
    looked = ["n_trials=8", "pruner=median", "sampler=random"]
    words += ["seed=int(interval(0,1000000))", *(f"hydra.sweeper.{word}" for word in looked)]
    assert ours(fake, *words) == 0
    assert {plan.cluster.name for plan in fake.plans} == {"ray" if launcher == "ray" else "local"}
    assert "7 of 8 FINISHED" in (output := capsys.readouterr().out)
    assert "go on" not in output  # a job that was pruned is through
    states = [trial.state.name for trial in study(tmp_path / "s").trials]
    assert states == ["COMPLETE"] * 6 + ["PRUNED", "COMPLETE"]
    assert (tmp_path / "s" / "optimization_results.yaml").is_file()
    statuses = [job["status"] for job in json.loads((tmp_path / "s" / "sweep.json").read_text())["jobs"]]
    assert statuses == ["FINISHED"] * 6 + ["PRUNED", "FINISHED"]


@pytest.mark.parametrize("launcher", ["n_jobs=1", "n_jobs=4"])
def test_a_value_that_is_proposed_twice_runs_once_and_is_told_twice(tmp_path: Path, ours: Any, launcher: str) -> None:
    fake = FakeLaunch()
    assert ours(fake, f"hydra.launcher.{launcher}", "seed=choice(1,2)", "hydra.sweeper.n_trials=4") == 0
    assert len(fake.plans) == len({trial.params["seed"] for trial in study(tmp_path / "s").trials}) <= 2
    assert [trial.value for trial in study(tmp_path / "s").trials] == [0.05] * 4


@pytest.mark.parametrize(
    ("words", "best"),
    [
        (("sweep.metric=val/accuracy",), 2),
        (("sweep.metric=val/accuracy", "sweep.mode=min"), 1),
        (("sweep.metric=val/accuracy", "hydra.sweeper.direction=minimize"), 1),
        (("sweep.metric=val/loss", "hydra.sweeper.direction=maximize"), 2),
        ((), 1),
    ],
)
def test_the_search_and_the_report_agree_on_what_is_better(
    tmp_path: Path, ours: Any, words: Sequence[str], best: int
) -> None:
    fake = FakeLaunch(measured=lambda plan: dict.fromkeys(("val/loss", "val/accuracy"), float(plan.seed)))
    assert ours(fake, "seed=choice(1,2)", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler=random", *words) == 0
    assert study(tmp_path / "s").best_value == best
    rows = list(csv.DictReader((tmp_path / "s" / "report.csv").read_text().splitlines()))
    assert [row["seed"] for row in rows] == [str(best), str(3 - best)]
