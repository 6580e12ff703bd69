"""A run that goes on by a command, with real signals and a real store."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from scaleflow.cli import main
from scaleflow.config.compose import compose_config
from scaleflow.interfaces.events import RunEnded, RunReady
from scaleflow.launcher.prepare import prepare_run
from scaleflow.launcher.recording.recovery import LAUNCHER_DIED, repair
from scaleflow.runs import EventWriter
from tests.conftest import Command
from tests.event_log import events_in
from tests.launcher.test_supervisor import LongRun, assert_all_points_are_kept, only_run, wait_for

#: Calls of a fixed length, so that a run has its points at the same steps whatever the machine does.
SHORT = (
    *("dataset=synthetic", "dataset.shape=[16]", "dataset.examples=640", "training.steps_per_loop=10"),
    "evaluation=none",
)
EXACT = ("hardware=cpu", "hardware.deterministic=true")


def history(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of the one run in the store, but for those of speed and of the machine."""
    from mlflow import MlflowClient

    client, run = MlflowClient(f"sqlite:///{folder}/mlflow.db"), only_run(folder)
    keys = [key for key in run.data.metrics if not key.startswith(("perf/", "system/"))]
    return {key: [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, key)] for key in keys}


def steps_in(events: list[dict[str, Any]]) -> list[int]:
    return [e["step"] for e in events if e["event"] == "metrics" and "train/loss" in e["values"]]


def forget_the_end(store: Path, folder: Path, run_id: str) -> None:
    from mlflow import MlflowClient

    MlflowClient(f"sqlite:///{store}/mlflow.db").update_run(run_id, status="RUNNING")
    offset = (folder / "events.jsonl").read_bytes().rindex(b'{"event": "end"')
    state = json.loads((folder / "record.json").read_text())
    assert state["done"]
    (folder / "record.json").write_text(json.dumps({**state, "done": False, "offset": offset}))


def weights_of(model: Path) -> list[np.ndarray[Any, Any]]:
    import keras

    return [np.asarray(v) for v in keras.models.load_model(model / "model.keras").weights]


def weights(command: Command, isolated: Callable[..., Any]) -> list[np.ndarray[Any, Any]]:
    values: list[np.ndarray[Any, Any]] = isolated(weights_of, command.run_folder() / "model")
    return values


def make_commands(folder: Path) -> list[Command]:
    """A command in a folder of its own that does not rest, and one in another that does."""
    commands = [Command(folder / name) for name in ("whole", "parts")]
    for command in commands:
        command.folder.mkdir()
    (commands[0].folder / "go").touch()
    return commands


def resume_and_kill(parts: Command) -> None:
    """Resumes the run, kills its launcher and its worker, and writes its end for them."""
    folder = parts.run_folder()
    begun = len(events_in(folder / "events.jsonl"))
    long = LongRun(parts, f"resume={only_run(parts.folder).info.run_id}", only=True)
    long.wait_for(lambda: any(event["event"] == "epoch" for event in events_in(folder / "events.jsonl")[begun:]))
    long.wait_for(lambda: only_run(parts.folder).info.status == "RUNNING")  # the recorder has opened it again
    worker = long.worker()
    long.launcher.kill()
    worker.kill()
    long.end()
    worker.wait(60)
    assert events_in(folder / "events.jsonl")[-1]["event"] != "end"
    assert only_run(parts.folder).info.status == "RUNNING"
    status = repair(folder)
    assert (status.result, status.status, status.was_open) == ("recorded", "KILLED", True), status
    run = only_run(parts.folder)
    assert (run.info.status, run.data.tags["scaleflow.error"]) == ("KILLED", LAUNCHER_DIED)


@pytest.mark.parametrize(
    ("strategy", "kills"), [("one_device", False), pytest.param("mirrored", True, marks=pytest.mark.slow)]
)
def test_a_preempted_killed_and_extended_run_equals_an_undisturbed_one(
    tmp_path: Path, isolated: Callable[..., Any], strategy: str, kills: bool
) -> None:
    """SIGTERM, then kill -9 of launcher and worker, whose end is written for them, then a longer run.

    One run, no point twice, none missing.
    """
    words = (*SHORT, *EXACT, f"strategy={strategy}", f"hardware.logical_devices={1 + kills}", "model.dropout=0.1")
    words += ("training.callbacks=[{_target_: tests.pace.Rest, seconds: 4}]",)  # 52 s are left after the first epoch
    whole, parts = make_commands(tmp_path)
    assert whole(*words, "training.epochs=18").returncode == 0

    long = LongRun(parts, *words, "training.epochs=14", only=True).until("epoch")
    os.kill(long.launcher.pid, signal.SIGTERM)
    assert long.end() == 143
    folder = parts.run_folder()
    run = only_run(parts.folder)
    assert (run.info.status, run.data.tags["scaleflow.folder"]) == ("KILLED", str(folder))
    assert run.data.tags["scaleflow.status"] == "KILLED"
    assert_all_points_are_kept(parts, run)
    assert "Traceback" not in long.err.read_text()
    line = f"python -m scaleflow resume={folder.relative_to(parts.folder)}"
    assert line in long.out.read_text()

    if kills:
        resume_and_kill(parts)

    (parts.folder / "go").touch()
    ended = parts(f"resume={folder}", "training.epochs=18")
    assert ended.returncode == 0, ended.stderr
    assert "resumed at step" in ended.stdout
    forget_the_end(parts.folder, folder, run.info.run_id)  # as if the launcher had died before it recorded that
    again = parts(f"resume={folder}")
    assert (again.returncode, again.stderr) == (0, "")
    assert "the run is finished; to train longer, add training.epochs=N, more than 18" in again.stdout

    assert history(parts.folder) == history(whole.folder)
    run = only_run(parts.folder)
    assert run.info.status == "FINISHED"
    assert run.data.params["training.epochs"] == "14"
    assert "scaleflow.error" not in run.data.tags
    artifacts = list((parts.folder / "mlartifacts").glob("*/*/artifacts/resume-*.yaml"))
    assert sorted(path.name for path in artifacts) == [f"resume-{n}.yaml" for n in range(1, 2 + kills)]
    for mine, theirs in zip(weights(parts, isolated), weights(whole, isolated), strict=True):
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.slow
def test_a_stalled_worker_is_started_again_and_a_time_limit_ends_the_run(command: Command) -> None:
    words = ("cluster.stall_seconds=10", "cluster.max_restarts=1", "checkpoint.max_seconds=60", "tracking=none")
    long = LongRun(command, *words).until("checkpoint")
    stopped = long.worker()
    stopped.suspend()
    wait_for(lambda: long.has_event("restart"))
    assert not stopped.is_running()
    assert long.end() == 143
    events = command.events()
    (restart,) = [event for event in events if event["event"] == "restart"]
    assert restart["reason"].startswith("no progress for cluster.stall_seconds=10")
    assert any(event.get("resumed", 0) > 0 for event in events)
    assert events[-1]["error"].startswith("checkpoint.max_seconds=60 reached: stopped at step ")
    steps = steps_in(events)
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_a_start_that_stalls_is_ended_too(command: Command) -> None:
    words = ("training.callbacks=[{_target_: tests.pace.Stuck}]", "cluster.stall_seconds=3", "cluster.start_seconds=4")
    words += ("tracking=none",)
    ended = command(*words)
    assert ended.returncode == 1
    assert "no progress for cluster.stall_seconds=3 + cluster.start_seconds=4, at step 0" in ended.stderr


@pytest.mark.slow
def test_workers_that_lose_one_start_again_from_the_checkpoint(tmp_path: Path, isolated: Callable[..., Any]) -> None:
    """It ends as one that lost none, and goes on with three workers where there were two."""
    words = ("training.epochs=15", "training.global_batch_size=48", *EXACT, "hardware.intra_op_threads=1")
    words += ("evaluation=none",)
    words += ("training.callbacks=[{_target_: tests.pace.Rest, seconds: 4, worker: 1}]", "tracking=none")
    words += ("training.steps_per_epoch=6", "training.steps_per_loop=3")
    whole, parts = make_commands(tmp_path)
    assert whole(*words, "training.epochs=17").returncode == 0
    long = LongRun(parts, *words, "strategy=multi_worker", "cluster.max_restarts=2", only=True).until("checkpoint")
    os.kill(long.children()[1].pid, signal.SIGKILL)
    (parts.folder / "go").touch()
    assert long.end() == 0, long.err.read_text()
    assert any(event["event"] == "restart" for event in parts.events())
    ended = parts(f"resume={parts.run_folder()}", "training.epochs=17", "cluster.workers=3")
    assert ended.returncode == 0, ended.stderr
    assert "3 replica(s)" in ended.stdout
    for mine, theirs in zip(weights(parts, isolated), weights(whole, isolated), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that ended by its limit."""
    command = Command(tmp_path_factory.mktemp("stopped"))
    ended = command(
        "training.max_steps=3", "checkpoint.folder=kept", "+tracking.tags={password: word}", "tracking=none"
    )
    assert ended.returncode == 0, ended.stderr
    return command.run_folder()


REFUSED = {
    ("dataset=synthetic",): ["dataset", "the run was started with"],
    ("training.batch_size=64",): [
        "training.batch_size=64: the run was started with training.batch_size=32",
        "max_steps",
    ],
    ("model.units=3",): ["model.units=3", "the run was started with model.units=[128, 128]"],
    ("seed=1",): ["seed=1: the run was started with seed=0"],
    ("experiment=digits_mirrored",): ["resume with experiment"],
    ("checkpoint.keep=0",): ["checkpoint.keep=0", "at least 1"],
    ("strategy=mirrored", "hardware.logical_devices=3", "training.max_steps=5", "hardware=cpu"): [
        "is not divisible by 3 replica(s) x training.accumulate=1; resume it with 1, 2, 4, 8 replica(s)"
    ],
}


@pytest.mark.parametrize("words", REFUSED)
def test_changes_that_make_another_run_are_refused(stopped: Path, words: tuple[str, ...]) -> None:
    before = sorted(path.name for path in stopped.iterdir())
    ended = Command(stopped.parents[2])(f"resume={stopped}", *words)
    assert ended.returncode == 2, ended.stderr
    for word in REFUSED[words]:
        assert word in ended.stderr
    assert len(ended.stderr.splitlines()) <= 2
    assert "Traceback" not in ended.stderr
    assert sorted(path.name for path in stopped.iterdir()) == before


@pytest.fixture(scope="module")
def folder_of_other_options(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run whose options have keys that the default options do not have."""
    words = ["model=cnn", "strategy=pipeline", "hardware.logical_devices=2", "tracking=none"]
    words += ["training.early_stopping={monitor: val/loss, patience: 2}"]
    composed = compose_config(words)
    folder = tmp_path_factory.mktemp("other")
    OmegaConf.save(composed.config, folder / "config.yaml")
    resolved = {"global_batch_size": "32", "cache": "none", "steps_per_epoch": "1"}
    params = {**composed.choices, **{f"resolved.{key}": value for key, value in resolved.items()}}
    emit = EventWriter(folder / "events.jsonl")
    emit(RunReady("", params=params, steps=1, epochs=1))
    emit(RunEnded("FINISHED"))
    emit.close()
    return folder


def test_a_key_that_only_the_runs_own_options_have_may_change(folder_of_other_options: Path) -> None:
    composed = compose_config([f"resume={folder_of_other_options}", "strategy.micro_batches=2"])
    run = prepare_run(composed)
    assert run.spec.plan.strategy.micro_batches == 2
    assert run.spec.plan.choices["model"] == "cnn"
    assert run.spec.folder == folder_of_other_options
    assert (run.resume_number, run.is_finished, run.composed.words.overrides) == (1, True, ["strategy.micro_batches=2"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.filters=[4]", "model.filters=[4]: the run was started with model.filters=["),
        (
            "training.early_stopping.patience=3",
            "patience=3: the run was started with training.early_stopping.patience=2",
        ),
        ("model.filtres=[4]", "model.filtres: the run's config has no such key; did you mean model.filters?"),
        ("modl.filters=[4]", "modl: the run's config has no such key; did you mean model"),
        (
            "strategy.micro_batch=2",
            "strategy.micro_batch: there is no such key; did you mean strategy.micro_batches?",
        ),
        ("training.epochs=many", "training.epochs=many: expected an integer, at least 1"),
    ],
)
def test_a_key_that_may_not_change_is_refused_by_its_value_in_the_run(
    folder_of_other_options: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, word: str, message: str
) -> None:
    words = [f"resume={folder_of_other_options}", word, f"hydra.run.dir={tmp_path}/x"]
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (
            "nowhere",
            "resume=nowhere: expected the folder of a run, which the run prints at its end, the id of a run, or",
        ),
        (".", "resume=.: this is not the folder of a run"),
        ("0123456789abcdef0123456789abcdea", "mlflow.db: there is no such store"),
    ],
)
def test_a_run_that_is_not_there_is_refused(command: Command, named: str, words: str) -> None:
    ended = command(f"resume={named}")
    assert ended.returncode == 2
    assert words in ended.stderr
    assert not (command.folder / "outputs").exists()


def test_a_folder_with_another_runs_checkpoints_is_refused(stopped: Path) -> None:
    ended = Command(stopped.parents[2])("training.max_steps=3", "checkpoint.folder=kept", "tracking=none")
    assert ended.returncode == 2
    assert "checkpoint.folder=kept: contains checkpoints of another run, up to step 3" in ended.stderr


@pytest.mark.slow
def test_a_run_goes_on_by_hand_from_a_damaged_checkpoint(command: Command) -> None:
    """Of two, the newest is damaged: the one before it is used, and what was kept says so."""
    assert command(*SHORT, "training.epochs=2", "tracking=none").returncode == 0
    folder = command.run_folder()
    newest = max((folder / "checkpoints").iterdir())
    (data,) = newest.glob("tensors.data*")
    data.write_bytes(data.read_bytes()[:-5])
    ended = command(f"resume={folder}", "training.epochs=3")
    assert ended.returncode == 0, ended.stderr
    assert "(tensors.data-00000-of-00001 has changed since it was written); the previous one is used" in ended.stdout
    steps = steps_in(command.events())
    assert steps == sorted(set(steps))
    assert events_in(folder / "events.jsonl")[-1]["status"] == "FINISHED"


@pytest.mark.slow
def test_a_run_with_initial_weights_does_not_begin_again_without_its_checkpoints(command: Command) -> None:
    base = ("hardware=cpu", "tracking=none", "evaluation=none", "dataset.limit=100", "model.units=8")
    first = command(*base, "training.max_steps=2", "hydra.run.dir=first")
    assert first.returncode == 0, first.stderr
    tuned = command(*base, "training.max_steps=2", "hydra.run.dir=tuned", "model.init_from=first")
    assert tuned.returncode == 0, tuned.stderr
    for manifest in (command.folder / "tuned").glob("checkpoints/step-*/checkpoint.json"):
        manifest.unlink()
    resumed = command("resume=tuned", "training.max_steps=4")
    assert resumed.returncode == 2, resumed.stdout
    assert "there is no usable checkpoint, and the run began with model.init_from" in resumed.stderr
