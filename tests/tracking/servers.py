"""A real MLflow server on loopback, and a proxy before it that does what networks do."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.conftest import Command
from tests.launcher.test_supervisor import wait_for

Fault = Literal["none", "delay", "reset", "reset after", "error", "error after", "hang"]

#: Requests go through, or fare badly, in this proportion.
WEATHER: dict[Fault, int] = {"none": 20, "delay": 4, "reset": 1, "reset after": 1, "error": 1, "error after": 1}

#: Of the server: no processes beside it, and neither it nor its pages tell anybody of their use.
SETTINGS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}

#: Of one request's way between the proxy and the server.
NOT_FORWARDED = {"host", "connection", "transfer-encoding", "keep-alive"}


def free_port() -> int:
    """A port below those that the kernel hands out, so that no other process gets it before the server does."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class Server:
    """`mlflow server` with a store in a folder of the test's; it may be stopped, and started again.

    Args:
        folder: the test's.
        store: an SQLite file, copied there; or the address of a database.
        artifacts: where they are kept; None: in the folder.
        environment: further variables.
        workers: the server's processes.
    """

    def __init__(
        self,
        folder: Path,
        store: Path | str,
        artifacts: str | None = None,
        environment: Mapping[str, str] | None = None,
        workers: int = 1,
    ) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._environment = environment or {}
        self._words = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", str(workers)]
        self._words += ["--artifacts-destination", artifacts or str(folder / "artifacts")]
        if isinstance(store, Path):
            shutil.copy(store, folder / "server.db")
            store = f"sqlite:///{folder}/server.db"
        self._words += ["--backend-store-uri", store]

    def start(self) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *self._words],
                cwd=self._folder,
                env={**Command(self._folder).environment, **SETTINGS, **self._environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_for(self.answers)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=2).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def stop(self) -> None:
        if self._process.poll() is None:
            parent = psutil.Process(self._process.pid)
            for process in (parent, *parent.children(recursive=True)):  # one that lives starts its workers again
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait(10)


class Proxy:
    """Hands requests on to a server, or does not, as a plan says.

    Args:
        port: the server's.
        own: the proxy's; 0: any that is free.

    Attributes:
        plan: gives each request's fate.
        met: all that were given.
        seconds: of a delay.
    """

    def __init__(self, port: int, own: int = 0) -> None:
        self.plan: Callable[[], Fault] = lambda: "none"
        self.met: list[Fault] = []
        self.seconds = 0.05
        self.is_over = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.serve(self, body, port)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = serve  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", own), Handler)
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def serve(self, asked: BaseHTTPRequestHandler, body: bytes, port: int) -> None:
        if self.is_over.is_set():  # a connection that is still open
            return reset(asked)
        fault = self.plan()
        self.met.append(fault)
        if fault == "hang":
            self.is_over.wait(240)
        if fault == "delay":
            time.sleep(self.seconds)
        if fault == "reset":
            return reset(asked)
        if fault == "error":
            return fail(asked)
        status, headers, answer = forwarded(asked, body, port)
        if fault == "reset after":
            return reset(asked)
        if fault == "error after":
            return fail(asked)
        with contextlib.suppress(OSError):  # whoever asked is gone
            answer_with(asked, status, headers, answer)
        return None

    def stop(self) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def forwarded(asked: BaseHTTPRequestHandler, body: bytes, port: int) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {name: value for name, value in asked.headers.items() if name.lower() not in NOT_FORWARDED}
        connection.request(asked.command, asked.path, body or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()


def answer_with(asked: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], answer: bytes) -> None:
    asked.send_response(status)
    for name, value in headers:
        if name.lower() not in {*NOT_FORWARDED, "content-length"}:
            asked.send_header(name, value)
    asked.send_header("Content-Length", str(len(answer)))
    asked.end_headers()
    asked.wfile.write(answer)


def reset(asked: BaseHTTPRequestHandler) -> None:
    """The other end sees its connection reset."""
    asked.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    asked.close_connection = True


def fail(asked: BaseHTTPRequestHandler) -> None:
    asked.send_response(500)
    asked.send_header("Content-Length", "0")
    asked.end_headers()


def weather(seed: int) -> Callable[[], Fault]:
    """A plan of faults, the same every time."""
    chosen = random.Random(seed)
    return lambda: chosen.choices(list(WEATHER), list(WEATHER.values()))[0]


def serving(folder: Path, store: Path) -> Iterator[Server]:
    """A server that is there until the end, whoever stopped it in between."""
    server = Server(folder, store)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def serve_model(command: Command, model: str) -> Iterator[str]:
    """`mlflow models serve` of a model in the store of a command's folder; yields its address."""
    uri, log_file = f"http://127.0.0.1:{free_port()}", command.folder / "serve.log"
    words = ["models", "serve", "--model-uri", model, "--env-manager", "local"]

    def is_up() -> bool:
        assert process.poll() is None, log_file.read_text()
        try:
            return bool(urllib.request.urlopen(f"{uri}/ping", timeout=2).status == 200)
        except OSError:
            return False

    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words, "--host", "127.0.0.1", "--port", uri.rpartition(":")[2]],
            cwd=command.folder,
            env=command.environment
            | {"MLFLOW_TRACKING_URI": f"sqlite:///{command.folder}/mlflow.db"}
            | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},  # it calls uvicorn
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    family = [psutil.Process(process.pid)]
    try:
        wait_for(is_up)
        family += family[0].children(recursive=True)
        yield uri
    finally:
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(10)
        log_file.unlink()
