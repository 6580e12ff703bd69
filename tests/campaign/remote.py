"""A real MLflow server behind a gate that can be shut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.tracking.test_server import Server

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
        self._server = Server(folder)
        self._gate = Gate(int(self._server.uri.rpartition(":")[2]))
        self.turn = threading.Lock()
        self.store = folder / "server.db"
        self.uri = f"http://127.0.0.1:{self._gate.port}"

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
        self._server.stop()
