"""moto's S3 server, and a connection to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SECRET = "not-to-be-printed"


@contextlib.contextmanager
def serve_store(log: Path) -> Iterator[dict[str, str]]:
    """Runs an empty server while the block lasts; yields the environment variables of its clients."""
    port = find_port()
    with run_server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, log):
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextlib.contextmanager
def run_server(line: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """Runs a server while the block lasts, which begins when its port answers."""
    with log.open("w") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output, cwd=log.parent)
        try:
            deadline = time.monotonic() + 240
            while not is_listening(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def upload(folder: Path, bucket: str) -> None:
    """Makes a bucket with the files of a folder, in a process that has the server's variables."""
    from pyarrow import fs

    system = fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"], allow_bucket_creation=True)
    system.create_dir(bucket)
    fs.copy_files(str(folder), bucket, destination_filesystem=system)


def make_bucket(store: Mapping[str, str], name: str) -> None:
    """Makes an empty bucket, from any process: moto checks no signatures."""
    request = urllib.request.Request(f"{store['AWS_ENDPOINT_URL']}/{name}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request")
    urllib.request.urlopen(request, timeout=120).close()


def allow_requests(store: Mapping[str, str], count: bytes) -> None:
    """Lets the server accept so many requests before it checks credentials."""
    address = f"{store['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    request = urllib.request.Request(address, data=count, headers={"Content-Type": "text/plain"}, method="POST")
    urllib.request.urlopen(request, timeout=120).close()


class Relay:
    """A way to the server that can be cut: connections are closed, and no new ones are taken until `restore`.

    Attributes:
        environment: the variables of clients that go this way.
    """

    def __init__(self, store: Mapping[str, str]) -> None:
        self._target = int(store["AWS_ENDPOINT_URL"].rpartition(":")[2])
        self._port = find_port()
        self.environment = {**store, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}"}
        self._open: list[socket.socket] = []
        self.restore()

    def restore(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
