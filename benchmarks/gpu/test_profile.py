"""Whether a run on a GPU can be traced, divided into its parts, and watched."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.gpu.bench import Bench, Run, expect
from benchmarks.gpu.models import MODELS

FIRST, STEPS = 12, 8

#: How far the parts of a step may be from 100 percent together.
ROUNDING = 0.5

#: Percent of a step that computes, at least, if the model is large.
COMPUTES = 50.0

#: Seconds of a run that is watched: system metrics come every ten seconds.
WATCHED_SECONDS = 25

FILES = ("summary.md", "summary.json", "profile.svg", "trace.json.gz")
NO_DEVICE_EVENTS = "The trace has no events of the GPU itself"


@pytest.mark.gpu(seconds=120, tolerance=f"all files; the parts sum to 100 % within {ROUNDING}")
def test_trace(bench: Bench) -> None:
    """A trace of a small model: its files, its steps, and the GPU's own events."""
    words = [*MODELS["cnn"].overrides(bench, "cnn"), "training.batch_size=64"]
    run, summary = run_traced(bench, words)
    missing = [name for name in FILES if not (run.folder / "profile" / name).exists()]
    expect(not missing, f"profile/ has no {', '.join(missing)}")
    expect(len(summary["each_step"]) == STEPS, f"{len(summary['each_step'])} steps were traced, expected {STEPS}")
    total = sum(summary["percent"].values())
    expect(abs(total - 100) <= ROUNDING, f"the parts of a step sum to {total} %: {summary['percent']}")


@pytest.mark.gpu(seconds=180, tolerance=f"at least {COMPUTES:.0f} % compute")
def test_breakdown(bench: Bench) -> None:
    """A large model computes most of a step."""
    if bench.device.kind == "gpu":
        words = ["model.depth=50", "dataset.shape=[224,224,3]", "dataset.examples=1000", "training.batch_size=32"]
    else:
        words = ["dataset.shape=[16,16,3]", "dataset.examples=500", "training.batch_size=16"]
    _, summary = run_traced(bench, ["dataset=synthetic", "model=resnet", *words])
    compute = summary["percent"]["compute"]
    if not has_device_events(summary, bench):
        pytest.skip("the driver gives the GPU's events to administrators only, so its kernels are not seen")
    expect(compute >= COMPUTES, f"a step of a large model computes {compute} % of its time: {summary['percent']}")


def run_traced(bench: Bench, words: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """Trains with a trace; returns the run and the summary of the trace."""
    if find_spec("xprof") is None:
        pytest.skip("xprof is not installed: pip install 'scaleflow[profile]'")
    window = ("profiler=trace", f"profiler.start_step={FIRST}", f"profiler.steps={STEPS}", "training.max_steps=30")
    # The end of the run waits for the analysis.
    plain = ("tracking=none", "tracking.flush_seconds=300", "checkpoint=none", "strategy=one_device")
    run = bench.train([*words, *plain, *window, *bench.device.words()])
    path = run.folder / "profile" / "summary.json"
    expect(path.exists(), f"there is no summary: {' | '.join(run.notes)}")
    summary: dict[str, Any] = json.loads(path.read_text())
    bench.values["step ms"] = summary["step_ms"]["p50"]
    bench.values |= {f"{part} %": share for part, share in summary["percent"].items()}
    bench.values["GPU events"] = "yes" if has_device_events(summary, bench) else "no, for administrators only"
    return run, summary


def has_device_events(summary: dict[str, Any], bench: Bench) -> bool:
    return bench.device.kind == "cpu" or not summary["advice"][0].startswith(NO_DEVICE_EVENTS)


@pytest.mark.gpu(seconds=90, tolerance="recorded, and above 0")
def test_utilisation(bench: Bench) -> None:
    """System metrics of a run that trains for some seconds: how busy the GPU is, its memory, its power."""
    if bench.device.kind == "gpu" and find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed: pip install 'scaleflow[gpu]'")
    words = [*MODELS["cnn"].overrides(bench, "cnn"), "training.batch_size=256", "training.epochs=100000"]
    limit = f"checkpoint.max_seconds={WATCHED_SECONDS}"
    folder = bench.folder / "run"
    command = ["-m", "scaleflow", *words, limit, "strategy=one_device", *bench.device.words()]
    ended = bench.wait(bench.start([*command, f"hydra.run.dir={folder}"]))
    run = Run(folder, ended)
    expect(run.end.get("status") == "KILLED", f"the run ended otherwise than by {limit}: {ended.last_lines}")
    pattern = r"system/gpu_\d+_(\w+)" if bench.device.kind == "gpu" else r"system/(cpu_utilization_percentage)"
    found: dict[str, float] = {}
    for event in run.events:
        if event["event"] == "system":
            for name, value in event["values"].items():
                if match := re.fullmatch(pattern, name):
                    found[match[1]] = max(value, found.get(match[1], 0.0))
    bench.values |= found
    expect(any(name.endswith("utilization_percentage") for name in found), f"there are only {sorted(found)}")
    expect(max(value for name, value in found.items() if "utilization" in name) > 0, "nothing was busy")
