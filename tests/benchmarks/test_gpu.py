"""The benchmark of GPUs: that it refuses where there are none, and that what it does works on logical CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import Machine, main
from scaleflow.cluster.gpus import CUDA_DEVICES
from scaleflow.launcher.worker_process import SERVER_ENV
from tests.processes import server


def test_without_a_gpu_it_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CUDA_DEVICES, "")
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.err == "benchmarks.gpu: there is no NVIDIA GPU here: nvidia-smi lists none that may be used\n"
    assert not told.out


@pytest.mark.parametrize(("devices", "counts"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 8])])
def test_one_two_and_all_gpus_are_measured(devices: int, counts: list[int]) -> None:
    machine = Machine(devices, "gpu", 128, [])
    names = [f"{precision} on {count}" for precision in ("float32", "mixed") for count in counts]
    assert list(machine.benchmark().contestants) == names
    assert machine.words_for(devices)[1:] == ["hardware=gpu", f"hardware.devices={[*range(devices)]}".replace(" ", "")]


def test_the_rows_are_mixed_against_float32_many_against_one_and_utilisation() -> None:
    machine = Machine(2, "gpu", 128, [], {"mixed on 2": [0.3]})
    rates = {"float32 on 1": [10.0], "float32 on 2": [18.0], "mixed on 1": [20.0], "mixed on 2": [30.0]}
    rows = [(row.work, row.against, row.ratio, row.verdict) for row in machine.rows(rates)]
    assert rows == [
        ("mixed, 1 GPU", "float32", 2.0, ""),
        ("mixed, 2 GPUs", "float32", pytest.approx(30 / 18), ""),
        ("float32, 2 GPUs", "2 x one", 0.9, ""),
        ("mixed, 2 GPUs", "2 x one", 0.75, ""),
        ("mixed, 2 GPUs, mfu", "the GPUs' peak", 0.3, ""),
    ]


@pytest.mark.slow
def test_it_works_on_logical_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SERVER_ENV, server())
    monkeypatch.setattr(gpu, "STEPS_PER_EPOCH", 4)
    machine = Machine(2, "cpu", 8, ("model=mlp", "model.units=8", "dataset.shape=[16]", "training.epochs=2"))
    assert machine.rate("mixed", 2, tmp_path) > 0
    assert machine.mfu == {}  # nothing is said of a CPU's peak


def told_of(losses: Sequence[float], replicas: str) -> Any:
    """What a run would tell, in the place of one."""

    def ran(words: Sequence[str], folder: Path, is_recorded: bool) -> Any:
        count = replicas or ("2" if "strategy=mirrored" in words else "1")
        events: list[Any] = [{"event": "ready", "params": {"resolved.replicas": count}}]
        for loss in losses:
            values = {"train/loss": loss, "perf/examples_per_second": 10.0, "perf/mfu": 0.5}
            events.append({"event": "metrics", "values": values})
        return events, 1.0

    return ran


def test_the_table_has_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "run_scaleflow", told_of((2.0, 1.0), ""))
    assert main(["--cpus", "2", "--rounds", "2", "optimizer.learning_rate=0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == [
        *("mixed, 1 CPU", "mixed, 2 CPUs", "float32, 2 CPUs", "mixed, 2 CPUs"),
        *("float32, 1 CPU, mfu", "float32, 2 CPUs, mfu", "mixed, 1 CPU, mfu", "mixed, 2 CPUs, mfu"),
    ]


@pytest.mark.parametrize(("losses", "replicas"), [((2.0, 1.0), "3"), ((2.0, 3.0), ""), ((2.0, float("nan")), "")])
def test_a_run_that_does_something_else_is_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], losses: Sequence[float], replicas: str
) -> None:
    monkeypatch.setattr(gpu, "run_scaleflow", told_of(losses, replicas))
    assert main(["--cpus", "1", "--rounds", "1"]) == 1
    assert "FAILED: cpu gave a wrong result: float32 on 1: " in capsys.readouterr().err
