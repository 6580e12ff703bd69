"""A real MLflow server: what it has of a run, also when it goes away, is slow, or fails now and then.

One server serves the module. Where nothing depends on training, a run's events are written by hand.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces import Tracking
from scaleflow.launcher.recording import recorder as recorder_module
from scaleflow.launcher.recording import request_cursor
from scaleflow.launcher.recording.recorder import Recorder
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.tracking.store import MlflowTracker
from tests.conftest import Command
from tests.launcher.test_supervisor import LongRun, wait_for
from tests.tracking.example_runs import MadeRun, assert_has_one_model, assert_is_all_there, only_run, steps_of
from tests.tracking.servers import Proxy, Server, free_port, serving, weather

#: MLflow's own, where it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")

#: A run of two steps a second, for hours.
SLOW = (
    *("dataset=synthetic", "dataset.shape=[4]", "dataset.examples=40", "dataset.validation=0.5"),
    *("training.steps_per_loop=1", "training.callbacks=[{_target_: tests.pace.Pace, seconds: 0.5}]"),
    *("model.units=4", "checkpoint=none", "training.epochs=9999"),
)


@pytest.fixture(scope="module")
def the_server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Server]:
    yield from serving(tmp_path_factory.mktemp("server"), empty_store)


@pytest.fixture
def server(the_server: Server) -> Server:
    """The server, started again where a test before has left it stopped."""
    if not the_server.is_running:
        the_server.start()
    return the_server


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder asks again soon, and sends little at a time."""
    monkeypatch.setattr(recorder_module, "PASS_SECONDS", 0.02)
    monkeypatch.setattr(recorder_module, "MAX_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(request_cursor, "EVENTS_A_PASS", 25)


def recording(made: MadeRun, uri: str, offline: bool = False, **options: Any) -> Recorder:
    tracking = Tracking(uri=uri, experiment=made.folder.name, **options)
    recorder = Recorder(EventTransfer(MlflowTracker(tracking), made.events), offline=offline)
    recorder.start()
    return recorder


def steps_reported(command: Command, key: str) -> list[int]:
    """The steps of a metric that the worker wrote."""
    return [e["step"] for e in command.events() if e["event"] == "metrics" and key in e["values"]]


def sync(command: Command, *words: str) -> subprocess.CompletedProcess[str]:
    return command.python("-m", "scaleflow", "sync", *words)


@pytest.mark.slow
def test_through_delays_resets_and_errors_everything_comes_once(
    proxy: Proxy, server: Server, tmp_path: Path, quick: None
) -> None:
    """A request may have been done when it fails: nothing that is asked for again is there twice."""
    proxy.plan = weather(seed=3)
    made = MadeRun(tmp_path / "weather").ready().train(1, 60)
    recorder = recording(made, proxy.uri, offline=True, register_as="weather")
    for first in range(61, 150, 10):
        made.train(first, first + 9)
        time.sleep(0.02)
    made.files(step=150).end()
    assert recorder.finish(240), recorder.reason
    assert {"delay", "reset", "reset after", "error", "error after"} <= set(proxy.met)
    run = assert_is_all_there(server.uri, made, files=["plot.txt"])
    model = assert_has_one_model(server.uri, run)
    assert [(metric.key, metric.step) for metric in model.metrics] == [("val/loss", 150)]
    from mlflow import MlflowClient

    assert len(MlflowClient(server.uri).search_model_versions("name = 'weather'")) == 1


@pytest.mark.slow
def test_a_server_that_hangs_holds_up_the_end_for_flush_seconds_alone(
    proxy: Proxy, tmp_path: Path, quick: None
) -> None:
    made = MadeRun(tmp_path / "hangs").ready().train(1, 20).end()
    recorder = recording(made, proxy.uri, offline=True)
    while not recorder.recorded:
        time.sleep(0.01)
    proxy.plan = lambda: "hang"
    made.train(21, 40).end()
    began = time.monotonic()
    assert not recorder.finish(0.5)
    assert time.monotonic() - began < 30  # MLflow's own retries take minutes


@pytest.mark.slow
def test_a_server_that_is_slow_does_not_either(
    proxy: Proxy, server: Server, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has taken by then is not sent again."""
    proxy.plan = lambda: "delay"
    made = MadeRun(tmp_path / "slow", uri=server.uri).ready().train(1, 200).end()
    with monkeypatch.context() as patch:
        patch.setattr(request_cursor, "EVENTS_A_PASS", 2)
        recorder = recording(made, proxy.uri)
        end_too_soon(recorder)
    part = steps_of(server.uri, only_run(server.uri, "slow"), "train/loss")
    assert 0 < len(part) < 200
    from scaleflow.launcher.recording.recovery import repair

    assert repair(made.folder, server.uri).result == "recorded"
    assert_is_all_there(server.uri, made)


def end_too_soon(recorder: Recorder) -> None:
    while not recorder.recorded:
        time.sleep(0.01)
    assert not recorder.finish(1.0)
    recorder.join(60)


@pytest.mark.slow  # launcher/test_recorder.py has the outages of a store that is faked
def test_a_server_that_is_stopped_and_started_gets_everything(server: Server, tmp_path: Path, quick: None) -> None:
    made = MadeRun(tmp_path / "away").ready().train(1, 50)
    recorder = recording(made, server.uri)
    while not recorder.recorded:
        time.sleep(0.01)
    server.stop()
    made.train(51, 100).files()
    time.sleep(0.3)
    assert recorder.refusal is None
    starting = threading.Thread(target=server.start)
    starting.start()
    made.train(101, 150).end()
    assert recorder.finish(240), recorder.reason
    starting.join()
    assert_has_one_model(server.uri, assert_is_all_there(server.uri, made, files=["plot.txt"]))


@pytest.mark.slow
def test_the_terminal_says_once_that_the_server_is_away_and_once_that_it_is_back(
    command: Command, server: Server
) -> None:
    words = (f"tracking.uri={server.uri}", "tracking.experiment=told")
    long = LongRun(command, *SLOW, *words, only=True).until("epoch")
    server.stop()
    wait_for(lambda: "does not answer" in long.out.read_text())
    time.sleep(3)  # it fails again
    server.start()
    wait_for(lambda: "answers again" in long.out.read_text())
    os.kill(long.launcher.pid, signal.SIGTERM)
    assert long.end() == 143, long.err.read_text()
    notes = [line for line in long.out.read_text().splitlines() if "the tracking server" in line]
    assert notes == [
        f"note: the tracking server {server.uri} does not answer: recording locally; training goes on",
        f"note: the tracking server {server.uri} answers again, and gets what was recorded locally",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stores_files", [False, True])
def test_a_wrong_artifact_root_is_said_to_be_the_servers(
    server: Server, tmp_path: Path, empty_store: Path, quick: None, monkeypatch: pytest.MonkeyPatch, stores_files: bool
) -> None:
    """It is a folder of this machine that cannot be made, or one of the server's."""
    monkeypatch.setattr(recorder_module, "OUTAGE_SECONDS", 0.0)
    wrong, other = "/dev/null/artifacts", Server(tmp_path, empty_store, "/dev/null/artifacts")
    if stores_files:
        other.start()
        uri, reason = other.uri, f"the server {other.uri} answers, but stores no files ("
    else:
        from mlflow import MlflowClient

        MlflowClient(server.uri).create_experiment("wrong", f"file://{wrong}")
        uri, reason = server.uri, f"the server {server.uri} has the artifact root file://{wrong}/"
    try:
        made = MadeRun(tmp_path / "wrong", uri=uri).ready().train(1, 20).end()
        recorder = recording(made, uri)
        wait_for(lambda: recorder.outage)
        assert recorder.outage.startswith(f"does not take the run ({reason}")
        assert not recorder.finish(240)
        assert recorder.reason.startswith(reason)
        assert steps_of(uri, only_run(uri, "wrong"), "train/loss") == list(range(1, 21))
    finally:
        if stores_files:
            other.stop()


@pytest.mark.slow
def test_a_run_is_recorded_by_a_server(command: Command, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("training.epochs=2", "tracking.experiment=whole", "checkpoint=none")
    ended = command(*words, MLFLOW_TRACKING_URI=server.uri)
    assert ended.returncode == 0, ended.stderr
    run = only_run(server.uri, "whole")
    assert run.info.status == "FINISHED"
    assert run.data.params["training.epochs"] == "2"
    assert run.data.metrics["test/accuracy"] > 0.5
    assert len(run.outputs.model_outputs) == 1
    assert f"{server.uri}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}" in ended.stdout
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    from mlflow import artifacts

    model_id = run.outputs.model_outputs[0].model_id
    model = Path(artifacts.download_artifacts(f"models:/{model_id}", dst_path=str(command.folder)))
    assert (model / "data" / "saved_model" / "saved_model.pb").is_file()


@pytest.mark.slow
def test_a_server_that_comes_late_and_goes_early_gets_the_rest_by_the_command_that_is_printed(
    command: Command, server: Server
) -> None:
    """The server is the proxy before one that runs."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    words = (f"tracking.uri={uri}", "tracking.experiment=late")
    refused = command(*words)
    assert refused.returncode == 2
    assert "tracking.offline=true" in refused.stderr
    offline = (*words, "tracking.offline=true", "tracking.flush_seconds=1")
    long = LongRun(command, *SLOW, *offline, only=True).until("epoch")
    proxy = Proxy(server.port, port)
    wait_for(lambda: (command.run_folder() / "record.json").read_text().count('"run_id": "'))
    proxy.stop()
    os.kill(long.launcher.pid, signal.SIGTERM)
    assert long.end() == 143, long.err.read_text()
    errors = long.err.read_text()
    assert "Traceback" not in errors
    line = f"python -m scaleflow sync {command.run_folder().relative_to(command.folder)}"
    assert errors.strip().endswith(line)
    away = sync(command, *line.split()[3:])
    assert (away.returncode, away.stderr) == (1, "")
    assert "NOT RECORDED" in away.stdout
    proxy = Proxy(server.port, port)
    synced = sync(command, "outputs")
    proxy.stop()
    assert synced.returncode == 0, synced.stdout + synced.stderr
    run = only_run(server.uri, "late")
    assert run.info.status == "KILLED"
    for key in ("train/loss", "val/loss"):
        assert steps_of(server.uri, run, key) == steps_reported(command, key)
