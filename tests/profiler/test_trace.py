"""Steps that are really traced: the markers, the split, the files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.profiler import analysis_process
from scaleflow.profiler.paths import xplane_path
from tests.conftest import Command

Event = dict[str, Any]

SHORT = ("tracking=none", "hardware=cpu", "checkpoint=none", "dataset.validation=null", "training.epochs=1")
TRACE = ("profiler=trace", "profiler.start_step=30", "profiler.steps=6")
INPUT_BOUND = (
    *("dataset._target_=tests.profiler.sources.Slow", "dataset.cache=none", "dataset.threads=1"),
    "training.batch_size=4",
)
COMPUTE_BOUND = (
    *("dataset=synthetic", "dataset.examples=6000", "training.batch_size=128", "model.units=[1024,1024]"),
    "model=mlp",
)
ENDS_WITHIN = ("dataset.limit=40", "training.batch_size=4", "profiler.start_step=[5,40]")


def trained(plan: Any, folder: Path) -> list[Event]:
    """A run's events; it is trained in this process as a worker does it."""
    import time

    from scaleflow.worker.main import RunSpec, begin_training, build_training, make_worker_sync

    folder.mkdir()
    events: list[Event] = []

    def emit(event: str, /, **fields: Any) -> None:
        events.append({"event": event, **fields})

    job = RunSpec(plan, folder, time.time())
    built = build_training(plan, emit)
    begin_training(job, built, make_worker_sync(job, built, bool), emit).run()
    return events


def profiled(plans: dict[str, Any], folder: Path) -> dict[str, list[Event]]:
    return {name: trained(plan, folder / name) for name, plan in plans.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


RUNS: dict[str, tuple[str, ...]] = {
    "slow": (*TRACE, *INPUT_BOUND),
    "fast": (*TRACE, *COMPUTE_BOUND),
    "plain": COMPUTE_BOUND,
    "fit": (*TRACE, *INPUT_BOUND, "training.engine=fit"),
    "short": (*TRACE, *ENDS_WITHIN),
}

_events: dict[str, list[Event]] = {}


@pytest.fixture
def runs(isolated: Callable[..., Any], plan: Callable[..., Any], folder: Path) -> dict[str, list[Event]]:
    """The events of all runs, which share one process and one training each."""
    if not _events:
        plans = {name: plan(*SHORT, "strategy=one_device", *words) for name, words in RUNS.items()}
        _events.update(isolated(profiled, plans, folder))
    return _events


def told(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def summary_of(event: Event) -> dict[str, Any]:
    found = analysis_process.analyze_window(event)
    (path,) = [path for path, _ in found.files if path.name == "summary.json"]
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def test_an_input_bound_run_s_profile_says_so_and_a_compute_bound_one_s_does_not(
    runs: dict[str, list[Event]],
) -> None:
    (slow,), (fast,), (fit,) = (told(runs[name], "profile") for name in ("slow", "fast", "fit"))
    for event in (slow, fit):
        found = summary_of(event)
        assert found["percent"]["input"] > 50
        assert "the run is input-bound" in found["advice"][0]
        assert "PyFunc" in found["advice"][0]
    busy = summary_of(fast)
    assert busy["percent"]["input"] < 20
    assert busy["percent"]["compute"] > 50
    assert "the run is not input-bound" in busy["advice"][0]
    assert any(op["in_step"] and "MatMul" in op["type"] for op in busy["ops"])
    for found in (busy, summary_of(slow)):
        assert [step["number"] for step in found["each_step"]] == list(range(30, 36))
        assert sum(found["percent"].values()) == pytest.approx(100, abs=0.1)
        assert found["memory"]["perf/peak_host_mb"] > 0


def test_a_profile_is_complete(runs: dict[str, list[Event]]) -> None:
    (event,) = told(runs["fast"], "profile")
    found = analysis_process.analyze_window(event)
    by_name = {path.name: (path, place) for path, place in found.files}
    assert set(by_name) == {"worker-0.xplane.pb", "summary.json", "summary.md", "profile.png", "trace.json.gz"}
    assert by_name["worker-0.xplane.pb"][1] == "profile/plugins/profile/steps_30-35"
    assert by_name["summary.md"][1] == "profile"
    assert set(found.values) == {"profile/step_ms", "profile/input_pct", "profile/allreduce_pct"}
    with gzip.open(by_name["trace.json.gz"][0], "rt") as file:
        trace = json.load(file)["traceEvents"]
    assert [e["name"] for e in trace if e.get("ph") == "X" and e["name"].startswith("train ")] == [
        f"train {step}" for step in range(30, 36)
    ]
    written = by_name["summary.json"][0].stat().st_mtime_ns
    assert (
        analysis_process.analyze_window(event) == found
    )  # what the store did not take is sent again, and not read again
    assert by_name["summary.json"][0].stat().st_mtime_ns == written
    beside = by_name["worker-0.xplane.pb"][0].parent.iterdir()
    assert [path.name for path in beside] == ["worker-0.xplane.pb"]  # nothing of what xprof keeps for itself


def test_tensorboard_s_profiler_finds_the_markers(runs: dict[str, list[Event]]) -> None:
    from scaleflow.profiler.analyze import run_xprof_tool

    for name in ("slow", "fast", "fit"):
        (event,) = told(runs[name], "profile")
        xplane = xplane_path(Path(event["folder"]), (event["first"], event["last"]), "worker-0")
        tables = json.loads(run_xprof_tool(xplane, "input_pipeline_analyzer"))
        (steps,) = [table for table in tables if table.get("p", {}).get("steptime_ms_average")]
        assert float(steps["p"]["steptime_ms_average"]) > 0
        assert len(steps["rows"]) >= 4  # it leaves out those at the window's ends


def test_what_is_trained_does_not_depend_on_it(runs: dict[str, list[Event]]) -> None:
    def losses(name: str) -> dict[int, float]:
        return {
            e["step"]: e["values"]["train/loss"] for e in told(runs[name], "metrics") if "train/loss" in e["values"]
        }

    fast, plain = losses("fast"), losses("plain")
    both = set(fast) & set(plain)
    assert max(both) == max(plain)
    assert [fast[step] for step in both] == pytest.approx([plain[step] for step in both], rel=1e-5)
    assert not told(runs["plain"], "profile")
    steps = sorted(fast)
    assert set(range(28, 36)) <= set(steps)  # two to warm up, then the window
    assert len(steps) < steps[-1]  # and many steps a call behind it


def test_a_run_that_ends_before_a_window_says_so_and_one_of_two_has_a_folder_of_its_own(
    runs: dict[str, list[Event]],
) -> None:
    (event,) = told(runs["short"], "profile")
    assert (event["first"], event["last"], event["artifacts"]) == (5, 10, "profile/steps_5-10")
    notes = [note["text"] for note in told(runs["short"], "note")]
    assert "profiler: nothing of steps 40 to 45 was traced: the run ended at step 10" in notes


def test_without_xprof_the_trace_is_kept_and_the_line_says_what_to_install(
    runs: dict[str, list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (event,) = told(runs["slow"], "profile")
    monkeypatch.setattr(analysis_process, "is_readable", lambda: False)
    found = analysis_process.analyze_window(event)
    assert [path.name for path, _ in found.files] == ["worker-0.xplane.pb"]
    assert found.values == {}
    assert "pip install 'scaleflow[profile]'" in found.line


def test_a_trace_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    steps = (2, 3)
    broken = xplane_path(tmp_path / "profile", steps, "worker-0")
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no trace")
    event = {"folder": str(tmp_path / "profile"), "first": 2, "last": 3, "artifacts": "profile", "facts": {}}
    found = analysis_process.analyze_window(event)
    assert [path for path, _ in found.files] == [broken]
    assert found.line.startswith("steps 2 to 3: the trace could not be read")


@pytest.mark.slow
def test_each_of_several_workers_is_traced_and_the_run_has_it_all(command: Command) -> None:
    from mlflow import MlflowClient

    ended = command(
        *("strategy=multi_worker", "hardware=cpu", "profiler=trace", "profiler.start_step=4", "profiler.steps=3"),
        *("training.max_steps=10", "dataset.limit=400", "checkpoint=none", "model.units=8"),
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
