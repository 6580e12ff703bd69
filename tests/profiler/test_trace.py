"""Steps that are really traced: the markers, the split, the files."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from scaleflow.interfaces.events import Event, MetricsLogged, Note, StepsProfiled
from scaleflow.profiler import analysis_process
from scaleflow.profiler.analysis_process import xplane_path
from scaleflow.runs import RunSpec, WorkerProcess
from scaleflow.worker.tasks import TrainModel
from tests.conftest import Command, make_once

E = TypeVar("E", bound=Event)

SHORT = ("tracking=none", "hardware=cpu", "checkpoint=none", "dataset.validation=null", "training.epochs=1")
#: The first step of the window. Two steps before it warm up.
FIRST = 12
#: On a busy machine the analysis takes more than a minute, and the end of the run waits for it.
PATIENT = "tracking.flush_seconds=400"
TRACE = ("profiler=trace", f"profiler.start_step={FIRST}", "profiler.steps=6", PATIENT)
INPUT_BOUND = (
    *("dataset._target_=tests.profiler.sources.Slow", "dataset.cache=none", "dataset.threads=1"),
    "training.batch_size=4",
)
COMPUTE_BOUND = (
    *("dataset=synthetic", "dataset.shape=[64]", "dataset.examples=4000", "training.batch_size=128"),
    *("model=mlp", "model.units=[1024,1024]"),
)
ENDS_WITHIN = ("dataset.limit=40", "training.batch_size=4", "profiler.start_step=[5,40]")


def train(plan: Any, folder: Path) -> list[Event]:
    """A run's events; it is trained in this process as a worker does it."""
    from scaleflow.worker.build import build_training
    from scaleflow.worker.train import make_session, make_worker_sync
    from scaleflow.worker.trainer import Trainer

    folder.mkdir()
    events: list[Event] = []
    spec = RunSpec(plan, folder, time.time(), TrainModel())
    trainer = Trainer(WorkerProcess(spec, events.append, bool))
    trainer.setup = build_training(plan, events.append)
    trainer.worker_sync = make_worker_sync(trainer)
    make_session(trainer).run()
    return events


def train_each(plans: dict[str, Any], folder: Path) -> dict[str, list[Event]]:
    return {name: train(plan, folder / name) for name, plan in plans.items()}


RUNS: dict[str, tuple[str, ...]] = {
    "slow": (*TRACE, *INPUT_BOUND),
    "fast": (*TRACE, *COMPUTE_BOUND),
    "plain": COMPUTE_BOUND,
    "fit": (*TRACE, *INPUT_BOUND, "training.engine=fit"),
    "short": (*TRACE, *ENDS_WITHIN),
}


@pytest.fixture
def runs(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> dict[str, list[Event]]:
    """The events of all runs, which share one process and one training each; the test has a copy of the files."""

    def train_all(folder: Path) -> dict[str, list[Event]]:
        plans = {name: plan(*SHORT, "strategy=one_device", *words) for name, words in RUNS.items()}
        events: dict[str, list[Event]] = isolated(train_each, plans, folder)
        return events

    folder, made = make_once(tmp_path_factory, "profiles", train_all)
    copied = shutil.copytree(folder, tmp_path / "profiles")

    def move(event: Event) -> Event:
        if not isinstance(event, StepsProfiled):
            return event
        return dataclasses.replace(event, folder=str(copied / Path(event.folder).relative_to(folder)))

    return {name: [move(event) for event in events] for name, events in made.items()}


def of_kind(kind: type[E], events: list[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def summary_of(event: StepsProfiled) -> dict[str, Any]:
    profile = analysis_process.analyze_window(event)
    (path,) = [path for path, _ in profile.files if path.endswith("summary.json")]
    summary: dict[str, Any] = json.loads(Path(path).read_text())
    return summary


@pytest.mark.slow
def test_an_input_bound_run_s_profile_says_so_and_a_compute_bound_one_s_does_not(
    runs: dict[str, list[Event]],
) -> None:
    (slow,), (fast,), (fit,) = (of_kind(StepsProfiled, runs[name]) for name in ("slow", "fast", "fit"))
    for event in (slow, fit):
        summary = summary_of(event)
        assert summary["percent"]["input"] > 50
        assert "the run is input-bound" in summary["advice"][0]
        assert "PyFunc" in summary["advice"][0]
    busy = summary_of(fast)
    assert busy["percent"]["input"] < 20
    assert busy["percent"]["compute"] > 50
    assert "the run is not input-bound" in busy["advice"][0]
    assert any(op["in_step"] and "MatMul" in op["type"] for op in busy["ops"])
    for summary in (busy, summary_of(slow)):
        assert [step["number"] for step in summary["each_step"]] == list(range(FIRST, FIRST + 6))
        assert sum(summary["percent"].values()) == pytest.approx(100, abs=0.1)
        assert summary["memory"]["perf/peak_host_mb"] > 0


def test_a_profile_is_complete(runs: dict[str, list[Event]]) -> None:
    (event,) = of_kind(StepsProfiled, runs["fast"])
    profile = analysis_process.analyze_window(event)
    by_name = {Path(path).name: (Path(path), folder) for path, folder in profile.files}
    assert set(by_name) == {"worker-0.xplane.pb", "summary.json", "summary.md", "profile.svg", "trace.json.gz"}
    assert by_name["worker-0.xplane.pb"][1] == f"profile/plugins/profile/steps_{FIRST}-{FIRST + 5}"
    assert by_name["summary.md"][1] == "profile"
    assert set(profile.values) == {"profile/step_ms", "profile/input_pct", "profile/allreduce_pct"}
    with gzip.open(by_name["trace.json.gz"][0], "rt") as file:
        trace = json.load(file)["traceEvents"]
    assert [e["name"] for e in trace if e.get("ph") == "X" and e["name"].startswith("train ")] == [
        f"train {step}" for step in range(FIRST, FIRST + 6)
    ]
    written = by_name["summary.json"][0].stat().st_mtime_ns
    assert (
        analysis_process.analyze_window(event) == profile
    )  # what the store did not take is sent again, and not read again
    assert by_name["summary.json"][0].stat().st_mtime_ns == written
    beside = by_name["worker-0.xplane.pb"][0].parent.iterdir()
    assert [path.name for path in beside] == ["worker-0.xplane.pb"]  # nothing of what xprof keeps for itself


def test_tensorboard_s_profiler_finds_the_markers(runs: dict[str, list[Event]]) -> None:
    from scaleflow.profiler.analyze import run_xprof_tool

    for name in ("slow", "fast", "fit"):
        (event,) = of_kind(StepsProfiled, runs[name])
        xplane = xplane_path(Path(event.folder), (event.first, event.last), "worker-0")
        tables = json.loads(run_xprof_tool(xplane, "input_pipeline_analyzer"))
        (steps,) = [table for table in tables if table.get("p", {}).get("steptime_ms_average")]
        assert float(steps["p"]["steptime_ms_average"]) > 0
        assert len(steps["rows"]) >= 4  # it leaves out those at the window's ends


@pytest.mark.slow
def test_the_losses_do_not_depend_on_the_profiler(runs: dict[str, list[Event]]) -> None:
    def losses(name: str) -> dict[int, float]:
        logged = of_kind(MetricsLogged, runs[name])
        return {event.step: event.values["train/loss"] for event in logged if "train/loss" in event.values}

    fast, plain = losses("fast"), losses("plain")
    both = set(fast) & set(plain)
    assert max(both) == max(plain)
    assert [fast[step] for step in both] == pytest.approx([plain[step] for step in both], rel=1e-5)
    assert not of_kind(StepsProfiled, runs["plain"])
    steps = sorted(fast)
    assert set(range(FIRST - 2, FIRST + 6)) <= set(steps)  # two to warm up, then the window
    assert len(steps) < steps[-1]  # and many steps a call after it


def test_a_run_that_ends_before_a_window_says_so_and_one_of_two_has_a_folder_of_its_own(
    runs: dict[str, list[Event]],
) -> None:
    (event,) = of_kind(StepsProfiled, runs["short"])
    assert (event.first, event.last, event.artifacts) == (5, 10, "profile/steps_5-10")
    notes = [note.text for note in of_kind(Note, runs["short"])]
    assert "profiler: steps 40 to 45 were not traced, because the run ended at step 10" in notes


@pytest.mark.slow
def test_without_xprof_the_trace_is_kept_and_the_line_says_what_to_install(
    runs: dict[str, list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (event,) = of_kind(StepsProfiled, runs["slow"])
    monkeypatch.setattr(analysis_process, "is_readable", lambda: False)
    profile = analysis_process.analyze_window(event)
    assert [Path(path).name for path, _ in profile.files] == ["worker-0.xplane.pb"]
    assert profile.values == {}
    assert "pip install 'scaleflow[profile]'" in profile.line


def test_a_trace_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    steps = (2, 3)
    broken = xplane_path(tmp_path / "profile", steps, "worker-0")
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no trace")
    event = StepsProfiled(str(tmp_path / "profile"), 2, 3, "profile")
    profile = analysis_process.analyze_window(event)
    assert [path for path, _ in profile.files] == [str(broken)]
    assert profile.line.startswith("steps 2 to 3: the trace could not be analyzed")


@pytest.mark.slow
def test_each_of_several_workers_is_traced_and_the_run_has_it_all(command: Command) -> None:
    from mlflow import MlflowClient

    ended = command(
        *("strategy=multi_worker", "hardware=cpu", "profiler=trace", "profiler.start_step=4", "profiler.steps=3"),
        *("training.max_steps=8", "dataset.limit=200", "checkpoint=none", "model.units=8"),
        *("tracking.system_metrics=false", PATIENT),
    )
    assert ended.returncode == 0, ended.stderr
    assert "steps 4 to 6: " in ended.stdout
    client = MlflowClient(f"sqlite:///{command.folder}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'scaleflow'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert {"profile/step_ms", "profile/input_pct", "profile/allreduce_pct"} <= set(run.data.metrics)
    (point,) = client.get_metric_history(run.info.run_id, "profile/step_ms")
    assert point.step == 6
    there = {file.path for file in client.list_artifacts(run.info.run_id, "profile")}
    assert {f"profile/{name}" for name in ("summary.json", "summary.md", "trace.json.gz")} <= there
    traces = client.list_artifacts(run.info.run_id, "profile/plugins/profile/steps_4-6")
    assert [Path(file.path).name for file in traces] == ["worker-0.xplane.pb", "worker-1.xplane.pb"]
    summary = json.loads((command.run_folder() / "profile" / "summary.json").read_text())
    assert [worker["name"] for worker in summary["workers"]] == ["worker-0", "worker-1"]
    assert summary["percent"]["allreduce"] > 0
