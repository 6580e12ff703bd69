"""A real MLflow server, and what happens when it goes away."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Command
from tests.test_launch import LongRun, wait_for


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """`mlflow server` on loopback, with a store in a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        self.start()

    def start(self) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", self.uri.rpartition(":")[2]]
                + ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder}/server.db"]
                + ["--artifacts-destination", str(self._folder / "artifacts")],
                cwd=self._folder,
                env=Command(self._folder).environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_for(self.answers, timeout=90)

    def answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200
        except OSError:
            return False

    def stop(self) -> None:
        if self._process.poll() is None:
            family = [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]
            for process in family:
                process.kill()
            self._process.wait(10)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.stop()


def only_run(uri: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("scaleflow").experiment_id])
    return run


@pytest.mark.slow
def test_a_run_is_recorded_by_a_server(command: Command, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = command("training.epochs=2", MLFLOW_TRACKING_URI=server.uri)
    assert ended.returncode == 0, ended.stderr
    run = only_run(server.uri)
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
def test_a_server_that_goes_away_costs_training_nothing_and_what_it_missed_stays_on_disk(
    command: Command, server: Server
) -> None:
    words = (f"tracking.uri={server.uri}", "training.epochs=4", "tracking.flush_seconds=1")
    long = LongRun(command, *words).until("epoch")
    server.stop()
    assert long.end() == 0
    assert command.events()[-1]["status"] == "FINISHED"
    assert "events.jsonl" in long.err.read_text()
    assert "Traceback" not in long.err.read_text()


@pytest.mark.slow
def test_a_server_that_comes_back_gets_everything(command: Command, server: Server) -> None:
    long = LongRun(command, f"tracking.uri={server.uri}", "training.epochs=6").until("epoch")
    server.stop()
    time.sleep(3)
    server.start()
    assert long.end(120) == 0, long.err.read_text()
    run = only_run(server.uri)
    assert run.info.status == "FINISHED"
    from mlflow import MlflowClient

    history = MlflowClient(server.uri).get_metric_history(run.info.run_id, "val/loss")
    assert len({m.step for m in history}) == len(history) == 6
