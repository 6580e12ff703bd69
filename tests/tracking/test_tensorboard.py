"""A run's events as TensorBoard reads them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scaleflow.config.compose import ComposedConfig
from scaleflow.errors import ConfigError
from scaleflow.interfaces.events import MetricsLogged, Note, WeightHistograms
from scaleflow.launcher.prepare import make_plan
from scaleflow.tracking import TensorBoardWriter
from tests.conftest import Command

METRICS = [
    MetricsLogged(1, {"perf/seconds_to_first_step": 2.5}, time=1000),
    MetricsLogged(8, {"train/loss": 0.5, "train/accuracy": 0.25}, time=2000),
    Note("nothing to see", time=2500),
    MetricsLogged(16, {"train/loss": 0.125}, time=3000),
    MetricsLogged(16, {}, time=3000),
]
WEIGHTS = WeightHistograms(
    16,
    {
        "weights/dense/kernel": {
            "min": -1.0,
            "max": 1.0,
            "sum": 0.5,
            "sum_squares": 2.0,
            "limits": [0.0, 1.0],
            "counts": [1, 3],
        }
    },
    time=3000,
)


def seen(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    found.Reload()
    return found


def points(found: EventAccumulator, tag: str) -> list[tuple[int, float, float]]:
    return [(event.step, event.value, event.wall_time) for event in found.Scalars(tag)]


def test_metrics_are_scalars_and_weights_histograms(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "tensorboard")
    writer.write_events(METRICS[:2])
    writer.write_events([*METRICS[2:], WEIGHTS])
    found = seen(writer.folder)
    assert points(found, "train/loss") == [(8, 0.5, 2.0), (16, 0.125, 3.0)]
    assert points(found, "perf/seconds_to_first_step") == [(1, 2.5, 1.0)]
    (histogram,) = found.Histograms("weights/dense/kernel")
    value = histogram.histogram_value
    assert (histogram.step, value.num, value.min, value.bucket_limit, value.bucket) == (16, 4, -1, [0, 1], [1, 3])
    writer.close()


def test_a_run_that_goes_on_is_written_anew_and_no_point_is_there_twice(tmp_path: Path) -> None:
    for events in (METRICS[:2], METRICS):
        writer = TensorBoardWriter(tmp_path)
        writer.write_events(events)
        writer.close()
    assert len(points(seen(tmp_path), "train/loss")) == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_of_tensorflow_is_imported_for_it() -> None:
    import subprocess

    code = f"""
from pathlib import Path; import sys, tempfile
from scaleflow.interfaces.events import MetricsLogged, Note, WeightHistograms
from scaleflow.tracking import TensorBoardWriter
with tempfile.TemporaryDirectory() as folder: TensorBoardWriter(Path(folder)).write_events({METRICS + [WEIGHTS]!r})
print("tensorflow" in sys.modules, "mlflow" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == ["False", "False"]


def test_without_tensorboard_it_is_refused_with_what_to_install(
    compose: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else there(name))
    with pytest.raises(ConfigError, match=r"^tracking\.tensorboard=true: .*pip install 'scaleflow\[tensorboard\]'"):
        make_plan(ComposedConfig(compose("tracking=none", "tracking.tensorboard=true")))
    make_plan(ComposedConfig(compose("tracking=none")))


def distributed(values: list[float]) -> Any:
    import numpy as np

    from scaleflow.training.metrics_log import compute_histogram

    return compute_histogram(np.asarray(values))


def test_weights_are_counted_in_buckets(isolated: Callable[..., Any]) -> None:
    found = isolated(distributed, [0.0, 0.0, 1.0, 3.0])
    assert (found["min"], found["max"], found["sum"], found["sum_squares"]) == (0.0, 3.0, 4.0, 10.0)
    assert len(found["counts"]) == len(found["limits"]) == 30
    assert (found["counts"][0], found["counts"][10], found["counts"][-1], sum(found["counts"])) == (2, 1, 1, 4)
    assert json.dumps(found)


def test_a_run_s_event_file_is_an_artifact(command: Command) -> None:
    ended = command(
        *("tracking.tensorboard=true", "tracking.histograms_every_epochs=2", "hardware=cpu", "training.epochs=3"),
        *("dataset.limit=200", "checkpoint=none", "evaluation=none", "model.units=8"),
    )
    assert ended.returncode == 0, ended.stderr
    found = seen(command.run_folder() / "tensorboard")
    logged = [event for event in command.events() if event["event"] == "metrics"]
    wanted = [(e["step"], e["values"]["train/loss"]) for e in logged if "train/loss" in e["values"]]
    assert {step: value for step, value, _ in points(found, "train/loss")} == pytest.approx(dict(wanted), rel=1e-6)
    assert {"val/loss", "test/accuracy", "perf/step_ms_p95"} <= set(found.Tags()["scalars"])
    kernels = [tag for tag in found.Tags()["histograms"] if "kernel" in tag]
    assert kernels
    assert len(found.Histograms(kernels[0])) == 1  # after the second of three epochs
    kept = list(command.folder.glob("mlartifacts/**/tensorboard/events.out.tfevents.*"))
    assert len(kept) == 1
    assert seen(kept[0].parent).Tags()["histograms"] == found.Tags()["histograms"]
