"""A real MLflow server behind a gate that can be shut."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.bench import until
from tests.conftest import clean_environment

OPEN, REFUSES = "open", "refuses"


class Gate:
    """A port that hands everything on to another; or refuses it, or takes it and does not answer.

    Args:
        port: the other.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._mode = OPEN
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: str) -> None:
        with self._changed:
            self._mode = mode
            self._changed.notify_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            if not self._may_pass():
                return
            with socket.create_connection(("127.0.0.1", self._port)) as server:
                back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
                back.start()
                self._pump(client, server)
                back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and self._may_pass():
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _may_pass(self) -> bool:
        """Waits while nothing is answered; whether it goes on then."""
        with self._changed:
            self._changed.wait_for(lambda: self._mode in (OPEN, REFUSES))
            return self._mode == OPEN

    def close(self) -> None:
        self.set(REFUSES)
        self._listener.close()


class Remote:
    """A server that one case at a time has to itself.

    Args:
        folder: for its store.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
                + ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
                + ["--artifacts-destination", str(folder / "artifacts")],
                cwd=folder,
                env=clean_environment() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(self._answers, 120, "the MLflow server did not answer")
        self._gate = Gate(self._port)
        self.turn = threading.Lock()
        self.store = folder / "server.db"
        self.uri = f"http://127.0.0.1:{self._gate.port}"

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2).status == 200
        return False

    @contextlib.contextmanager
    def away(self, how: str) -> Iterator[None]:
        """For as long as the block lasts: it `refuses`, or `does not answer`."""
        self._gate.set(how)
        try:
            yield
        finally:
            self._gate.set(OPEN)

    def close(self) -> None:
        self._gate.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
