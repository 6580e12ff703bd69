"""Several worker processes on this machine, as one run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command
from tests.launcher.test_supervisor import LongRun, assert_all_points_are_kept, only_run

CPU = ("hardware=cpu", "hardware.intra_op_threads=1")
WORKERS = ("strategy=multi_worker", *CPU)

#: 30 steps of the same global batches on one, two and three devices, one step to a call; the first epoch has 27.
SAME = (
    *("training.global_batch_size=48", "training.max_steps=30", "training.steps_per_loop=1", "tracking=none"),
    *("evaluation=none", *CPU),
)
SPREAD = {
    "one_device": ("strategy=one_device",),
    "multi_worker(2)": ("strategy=multi_worker",),
    "multi_worker(2) with XLA": ("strategy=multi_worker", "hardware.xla=true"),
    "multi_worker(3)": ("strategy=multi_worker", "cluster.workers=3", "training.accumulate=2"),
}


def weights_of(model: Path) -> list[np.ndarray[Any, Any]]:
    import keras

    return [np.asarray(v) for v in keras.models.load_model(model / "model.keras").trainable_variables]


def course(folder: Path, isolated: Callable[..., Any], *words: str) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    """Every step's running mean of the loss, and the last weights."""
    folder.mkdir()
    command = Command(folder)
    ended = command(*words, timeout=240)
    assert ended.returncode == 0, ended.stderr
    losses = [e["values"]["train/loss"] for e in command.events() if "train/loss" in e.get("values", {})]
    return losses, isolated(weights_of, command.run_folder() / "model")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "convolutions"])
def test_several_workers_give_the_losses_and_weights_of_one(
    tmp_path: Path, isolated: Callable[..., Any], model: str
) -> None:
    words = () if model == "mlp" else ("model._target_=tests.strategy.models.smooth_convolutions",)
    wanted, weights = course(tmp_path / "one", isolated, *words, *SAME, *SPREAD["one_device"])
    others = SPREAD if model == "mlp" else ["multi_worker(2)"]
    for number, name in enumerate(others):
        losses, found = course(tmp_path / str(number), isolated, *words, *SAME, *SPREAD[name])
        assert losses == pytest.approx(wanted, abs=1e-5), name
        assert max(float(np.abs(a - b).max()) for a, b in zip(found, weights, strict=True)) < 1e-4, name


@pytest.mark.slow
def test_micro_batches_are_normalized_over_all_workers(tmp_path: Path, isolated: Callable[..., Any]) -> None:
    words = (*SAME, "model.batch_norm=true", "model.units=8", "training.accumulate=2", "training.max_steps=6")
    wanted, weights = course(tmp_path / "one", isolated, *words, "strategy=mirrored", "hardware.logical_devices=2")
    losses, found = course(tmp_path / "two", isolated, *words, "strategy=multi_worker")
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert max(float(np.abs(a - b).max()) for a, b in zip(found, weights, strict=True)) < 1e-4


@pytest.mark.slow
def test_workers_are_one_run_with_a_log_of_each(command: Command) -> None:
    ended = command(*WORKERS, "precision=mixed_float16", "training.epochs=2", timeout=240)
    assert ended.returncode == 0, ended.stderr
    run = only_run(command.folder)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "digits-mlp-multi_worker-mixed_float16"
    resolved = {key: run.data.params[f"resolved.{key}"] for key in ("workers", "replicas", "global_batch_size")}
    assert resolved == {"workers": "2", "replicas": "2", "global_batch_size": "64"}
    assert len(run.outputs.model_outputs) == 1
    assert_all_points_are_kept(command, run)
    logs = sorted(path.name for path in command.run_folder().glob("worker-*.log"))
    assert logs == ["worker-0.log", "worker-1.log"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_that_dies_ends_all_with_its_name(command: Command, number: int) -> None:
    """The killed worker sleeps most of the time, and the other one waits for it."""
    rests = f"training.callbacks=[{{_target_: tests.pace.Rest, worker: {number}}}]"
    long = LongRun(command, *WORKERS, rests).until("epoch")
    workers = long.children()
    assert len(workers) == 2
    os.kill(workers[number].pid, signal.SIGKILL)
    assert long.end() == 1
    assert not any(worker.is_running() for worker in workers)
    run = only_run(command.folder)
    assert run.info.status == "FAILED"
    assert f"worker {number} was killed by SIGKILL" in run.data.tags["scaleflow.error"]
    assert_all_points_are_kept(command, run)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["launcher", "worker 1"])
def test_a_signal_to_one_stops_all_together(command: Command, target: str) -> None:
    long = LongRun(command, *WORKERS).until("epoch")
    pid = long.launcher.pid if target == "launcher" else long.children()[1].pid
    os.kill(pid, signal.SIGTERM)
    assert long.end() == 143
    assert only_run(command.folder).info.status == "KILLED"
    assert "stopped at step" in command.events()[-1]["error"]


@pytest.mark.slow
def test_refusal_of_a_worker_is_a_refusal(command: Command) -> None:
    ended = command(*WORKERS, "training.global_batch_size=33", "hardware=auto")
    assert ended.returncode == 2
    assert "training.global_batch_size=33: is not divisible by 2 replica(s)" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (command.folder / "outputs").exists()
