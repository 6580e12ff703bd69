"""The sweeper: what it draws, how a search goes on, which jobs it stops."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from hydra.test_utils.test_utils import TSweepRunner
from omegaconf import DictConfig

from hydra_plugins.scaleflow import optuna5
from scaleflow.cli import main
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.sweep import plots
from scaleflow.sweep import runner as runner_module
from tests.conftest import Command
from tests.launcher.test_supervisor import wait_for
from tests.sweep.fake_runs import FakeLaunch

pytestmark = [
    pytest.mark.skipif(find_spec("optuna") is None, reason="the extra optuna is not installed"),
    pytest.mark.filterwarnings("ignore"),  # Hydra's and Optuna's own
]


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


def load(storage: Any) -> Any:
    """The study of a storage."""
    import optuna  # late: each of pytest's workers collects this module

    return optuna.load_study(study_name="sweep", storage=storage)


def study(folder: Path) -> Any:
    return load(storage(folder))


def ask_seed(study: Any) -> Any:
    """A trial that another command runs."""
    from optuna.distributions import IntDistribution

    return study.ask({"seed": IntDistribution(1, 1000000)})


@pytest.mark.slow
def test_it_finds_what_is_best(hydra_sweep_runner: TSweepRunner, tmp_path: Path) -> None:
    words = ("foo=interval(0.0,10.0)", "hydra.sweeper.n_trials=25")
    best = search(hydra_sweep_runner, bowl, tmp_path, *words)
    assert best["best_params"]["foo"] == pytest.approx(3, abs=1)
    assert len(study(tmp_path).trials) == 25


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
def test_impossible_options_are_refused(
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
    monkeypatch.setattr(plots, "draw_plots", lambda *arguments: [])

    def search(launch: FakeLaunch, *words: str) -> int:
        monkeypatch.setattr(runner_module, "launch_run", launch)
        return main(["-m", "hydra/sweeper=optuna5", "tracking=none", "hydra.sweep.dir=s", *words])

    return search


@pytest.mark.slow
def test_a_search_that_ended_before_its_first_job_begins_anew(
    tmp_path: Path, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, sweep = ("seed=int(interval(0,9))", "hydra.sweeper.n_trials=1"), tmp_path / "s"
    assert ours(FakeLaunch(), *words, "strategy=tpu") == 2
    assert not sweep.exists()
    with monkeypatch.context() as patch:
        patch.setattr(optuna5.OptunaSweeper, "_search", lambda *_, **__: 1 // 0)  # where kill -9 leaves the same files
        assert ours(FakeLaunch(), *words) == 2
    assert sorted(path.name for path in sweep.iterdir()) == ["multirun.yaml", "optuna.db", "optuna.db.lock"]
    assert ours(FakeLaunch(), *words) == 0
    (sweep / "sweep.json").unlink()
    (sweep / "mine.txt").touch()
    assert ours(FakeLaunch(), *words) == 2


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


@pytest.mark.slow
def test_quoted_values_reach_the_jobs_and_impossible_combinations_are_trials_that_fail(
    tmp_path: Path, ours: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "dataset=table",
        "dataset.target=y",
        'dataset.data_dir="a.csv","b,c.csv","it\'s (1).csv"',
        "training.epochs=2",
    ]
    for name in ("a.csv", "b,c.csv", "it's (1).csv"):
        (tmp_path / name).write_text("x,y\n1,2\n3,4\n5,6\n")
    fake = FakeLaunch()
    assert ours(fake, "hydra.sweeper.n_trials=12", "hydra.sweeper.sampler=random", *words) == 0
    assert {plan.dataset.target.arguments["data_dir"] for plan in fake.plans} == {"a.csv", "b,c.csv", "it's (1).csv"}

    words = ["hydra.sweep.dir=t", "hydra.sweeper.n_trials=8", "hydra.sweeper.sampler=random"]
    fake = FakeLaunch()
    assert ours(fake, *words, "model=mlp,linear", "model.units=8,16") == 0  # as with other failed trials of a search
    assert 0 < len(fake.plans) < 8
    assert "model.units: there is no such key" in capsys.readouterr().err
    with (tmp_path / "t" / "trials.csv").open() as file:
        states = {(row["model"], row["state"]) for row in csv.DictReader(file)}
    assert states == {("mlp", "COMPLETE"), ("linear", "FAIL")}


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


@pytest.mark.slow
def test_a_search_goes_on_with_what_was_left(tmp_path: Path, ours: Any) -> None:
    words = ("seed=choice(1,2,3,4)", "training.epochs=range(1,9,4)")
    assert ours(FakeLaunch(), *words, "hydra.sweeper.n_trials=2") == 0
    interrupted = study(tmp_path / "s").ask(dict(study(tmp_path / "s").trials[0].distributions))
    fake = FakeLaunch()
    assert ours(fake, *words, "hydra.sweeper.n_trials=4") == 0
    trials = study(tmp_path / "s").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    assert trials[2].number == interrupted.number
    assert trials[2].value == 1 / interrupted.params["training.epochs"]
    assert {trial.params["training.epochs"] for trial in trials} <= {1, 5}


@pytest.mark.parametrize("kind", [pytest.param("sqlite:///", marks=pytest.mark.slow), "journal:"])
@pytest.mark.slow
def test_commands_that_share_a_study_leave_each_other_their_trials(
    tmp_path: Path, ours: Any, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = f"{kind}{tmp_path / 'shared'}"
    words = ("seed=int(interval(1,1000000))", "hydra.sweeper.sampler=random", f"hydra.sweeper.storage='{shared}'")

    def search(folder: str, count: int) -> list[Any]:
        fake = FakeLaunch(measured=lambda plan: {"val/loss": float(plan.seed)})
        assert ours(fake, *words, f"hydra.sweep.dir={folder}", f"hydra.sweeper.n_trials={count}") == 0
        return fake.plans

    assert len(search("a", 2)) == 2
    other = load(optuna5.open_storage(shared))
    elsewhere = ask_seed(other)
    assert len(search("b", 4)) == 1  # the third one is still run by another command
    trials = other.get_trials()
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "RUNNING", "COMPLETE"]
    assert len({trial.params["seed"] for trial in trials}) == 4  # though the commands have the same seed
    assert "best of 3" in (output := capsys.readouterr().out)
    assert "1 of other commands still run" in output
    other.tell(elsewhere, 0.5)
    assert search("a", 4) == []
    assert "best of 4: 0.5" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "a" / "trials.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["COMPLETE"] * 4
    assert [row["seed"] for row in rows] == [str(trial.params["seed"]) for trial in trials]
    assert [row["sweep"].rpartition(":")[2] for row in rows] == [str(tmp_path / name) for name in "aa"] + [
        "",
        str(tmp_path / "b"),
    ]


def test_a_command_runs_the_trials_again_that_it_left_in_a_shared_study(tmp_path: Path, ours: Any) -> None:
    words = ("seed=int(interval(1,1000000))", f"hydra.sweeper.storage=sqlite:///{tmp_path}/shared.db")
    ours(FakeLaunch(), *words, "hydra.sweeper.n_trials=1")
    shared = load(f"sqlite:///{tmp_path}/shared.db")
    killed = ask_seed(shared)
    killed.set_user_attr(optuna5.OWNER, shared.trials[0].user_attrs[optuna5.OWNER])
    fake = FakeLaunch()
    assert ours(fake, *words, "hydra.sweeper.n_trials=3") == 0
    assert [plan.seed for plan in fake.plans] == [trial.params["seed"] for trial in shared.trials[1:]]
    assert fake.plans[0].seed == killed.params["seed"]


def test_a_search_that_is_stopped_goes_on_with_the_stopped_trial(tmp_path: Path, ours: Any) -> None:
    class Stopped(FakeLaunch):
        def __call__(self, *arguments: Any, **options: Any) -> int:
            if len(self.runs) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__call__(*arguments, **options)

    words = ("seed=int(interval(1,1000000))", f"hydra.sweeper.storage=sqlite:///{tmp_path}/shared.db")
    first, second = Stopped(["FINISHED", "KILLED"]), FakeLaunch()
    assert ours(first, *words, "hydra.sweeper.n_trials=4") == 130
    study = load(f"sqlite:///{tmp_path}/shared.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "RUNNING"]
    assert ours(second, *words, "hydra.sweeper.n_trials=4") == 0
    assert [plan.seed for plan in second.plans] == [trial.params["seed"] for trial in study.trials[1:]]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4


@pytest.mark.slow
def test_a_storage_that_does_not_fit_is_refused(ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    search = ("seed=1,2", "hydra.sweeper.n_trials=1")
    assert ours(FakeLaunch(), *search) == 0
    for word, message in (
        ("hydra.sweeper.storage=sqlite:////nowhere/at/all.db", "hydra.sweeper.storage=sqlite:////nowhere/at/all.db"),
        ("hydra.sweeper.storage=sheet://x", "hydra.sweeper.storage=sheet://x: can't be opened"),
        ("sweep.mode=max", "hydra.sweeper.study_name=sweep: this study is there to minimize"),
    ):
        assert ours(FakeLaunch(), *search, word) == 2
        assert message in capsys.readouterr().err


def search_slowly(folder: Path, name: str, words: Sequence[str]) -> int:
    """A command whose jobs do not train. The first ends when the other command has a job, too."""

    def measure(plan: Any) -> dict[str, float]:
        (folder / name / "begun").touch()
        wait_for(lambda: all((folder / each / "begun").exists() for each in "ab"))
        return {"val/loss": float(plan.seed)}

    os.chdir(folder)
    sys.argv = ["scaleflow"]
    os.environ[SERVER_ENV] = "nobody forks here"
    runner_module.launch_run = FakeLaunch(measured=measure)  # type: ignore[assignment]
    return main([*words, f"hydra.sweep.dir={name}"])


def assert_shared(folder: Path, shared: str, trials: int) -> Any:
    """Both commands have run jobs, none twice; returns the study."""
    both = load(optuna5.open_storage(shared))
    assert {trial.state.name for trial in both.trials} == {"COMPLETE"}
    assert trials <= len(both.trials) <= trials + 1  # one more if both proposed the last one at the same moment
    ran = [json.loads((folder / name / "sweep.json").read_text())["jobs"] for name in "ab"]
    assert all(ran)
    asked = sorted(job["overrides"][-1] for jobs in ran for job in jobs)
    assert asked == sorted(f"seed={trial.params['seed']}" for trial in both.trials)
    return both


@pytest.mark.slow
def test_two_commands_at_once_share_a_journal(isolated: Any, tmp_path: Path) -> None:
    """As two machines do."""
    shared = f"journal:{tmp_path / 'shared'}"
    words = ("-m", "hydra/sweeper=optuna5", "tracking=none", "seed=int(interval(0,1000000))")
    words += (f"hydra.sweeper.storage='{shared}'", "hydra.sweeper.n_trials=8")
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda name: isolated(search_slowly, tmp_path, name, words), "ab"))
    assert codes == [0, 0]
    assert_shared(tmp_path, shared, 8)


@pytest.mark.slow
def test_two_commands_that_train_share_one_study(command: Command) -> None:
    """Each runs its own jobs; one then reports all results."""
    small = ("dataset=synthetic", "dataset.shape=[16]", "dataset.examples=64", "dataset.validation=null")
    words = ("-m", "hydra/sweeper=optuna5", *small, "training.max_steps=3", "sweep.metric=test/loss")
    words += ("tracking=none", "checkpoint=none", "evaluation=none", "model.units=[4]")
    words += ("training.callbacks=[{_target_: tests.pace.Meet, patterns: [a/*/events.jsonl, b/*/events.jsonl]}]",)
    shared = f"sqlite:///{command.folder / 'shared'}"
    words += ("seed=int(interval(0,1000000))", f"hydra.sweeper.storage='{shared}'", "hydra.sweeper.n_trials=8")
    sweeps = [command.start(*words, f"hydra.sweep.dir={name}") for name in "ab"]
    outputs = [sweep.communicate(timeout=240) for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], outputs
    both = assert_shared(command.folder, shared, 8)
    again = command(*words, "hydra.sweep.dir=a")
    assert f"best of {len(both.trials)}: " in again.stdout, again.stderr
    assert f"with seed={both.best_params['seed']}" in again.stdout
    rows = list(csv.DictReader((command.folder / "a" / "trials.csv").read_text().splitlines()))
    assert [float(row["value"]) for row in rows] == [trial.value for trial in both.trials]


def test_another_search_in_the_same_study_is_refused(
    tmp_path: Path, ours: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = f"hydra.sweeper.storage=sqlite:///{tmp_path}/shared.db"
    words = ("seed=1,2", "training.epochs=1", shared, "hydra.sweeper.n_trials=1")
    assert ours(FakeLaunch(), *words, "strategy=tpu") == 2  # a search that was refused leaves the study to another one
    words = (*words, "hydra.sweeper.n_trials=2")
    assert ours(FakeLaunch(), *words) == 0
    for word, message in (
        ("training.epochs=3", "this study belongs to another search: training.epochs=3 (was 1); choose another"),
        ("dataset=synthetic", "this study belongs to another search: dataset._target_="),
        ("sweep.metric=val/mine_loss", "its trials were judged by val/loss"),
        ("sweep.folds=2", "sweep.folds=2 (was null)"),
    ):
        assert ours(FakeLaunch(), *words, "sweep.mode=min", "hydra.sweep.dir=t", word) == 2  # it has all its trials
        assert message in (error := capsys.readouterr().err)
        assert "choose another hydra.sweeper.study_name" in error
    assert list((tmp_path / "t").iterdir()) == []
    assert ours(FakeLaunch(), *words, "hydra.sweeper.n_trials=3", "model.units=8,16") == 0  # one more key is searched
    assert len(load(f"sqlite:///{tmp_path}/shared.db").trials) == 3


def test_a_search_continues_with_changed_values_if_optuna_accepts_them(
    tmp_path: Path, ours: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model.units=8,16", "seed=int(interval(1,9))", "model.dropout=interval(0.1,0.2)")
    count = 0
    for changed in (
        (),
        ("model.units=16,8", "seed=int(interval(5,20))", "model.dropout=interval(0.15,0.5)"),
        ("seed=range(1,30,2)", "optimizer.learning_rate=tag(log,interval(0.001,0.1))", "model.dropout=0.15"),
    ):
        count += 1
        assert ours(FakeLaunch(), *words, *changed, f"hydra.sweeper.n_trials={count}") == 0, changed
    for changed, message in (
        (("model.units=8,16,32",), "model.units=8,16,32: this study has searched 8,16 before; Optuna cannot change"),
        (("model.units=int(interval(8,16))",), "model.units=int(interval(8,16)): this study has searched 8,16"),
        (("seed=interval(1.5,9)",), "this study has searched int(interval(1,9)) before; Optuna can change the ends"),
        (("model.dropout=tag(log,interval(0.1,0.2))",), "model.dropout=tag(log, interval(0.1,0.2)): this study"),
    ):
        assert ours(FakeLaunch(), *words, *changed, "hydra.sweeper.n_trials=20") == 2
        assert message in (error := capsys.readouterr().err)
        assert len(error.splitlines()) == 1
        assert "choose another folder (hydra.sweep.dir)" in error
    assert len(study(tmp_path / "s").trials) == count


def test_searches_of_another_app_do_not_mix_either(hydra_sweep_runner: TSweepRunner, tmp_path: Path) -> None:
    words = ("foo=interval(0.0,10.0)", "hydra.sweeper.n_trials=1")
    search(hydra_sweep_runner, bowl, tmp_path, *words)
    with pytest.raises(HydraException, match=r"belongs to another search: bar=2 \(was 100\)"):
        search(hydra_sweep_runner, bowl, tmp_path, *words, "bar=2", "hydra.sweeper.n_trials=2")
