"""What is said of a server that denies access."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scaleflow.errors import ConfigError, StoreUnreachable
from scaleflow.interfaces import Tracking
from scaleflow.tracking.connection import format_store_error
from scaleflow.tracking.store import MlflowTracker

#: MLflow's own, where it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")

USER, PASSWORD, TOKEN = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"

PLAIN = "You are not authenticated."
OF_MLFLOW = json.dumps({"error_code": "PERMISSION_DENIED", "message": "Permission denied"})
OF_A_GATEWAY = json.dumps({"message": "Forbidden"})


class DenyingServer(ThreadingHTTPServer):
    """Answers each request with `answer`, and keeps the header with the credentials of the last one."""

    answer = (401, PLAIN)
    sent: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: DenyingServer

    def do_GET(self) -> None:
        self.server.sent = self.headers.get("Authorization")
        status, text = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: object) -> None: ...


@pytest.fixture(scope="module")
def denying() -> Iterator[DenyingServer]:
    with DenyingServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def refuse(server: DenyingServer, before: str = "") -> ConfigError:
    uri = f"http://{before}127.0.0.1:{server.server_port}"
    with pytest.raises(ConfigError) as refused:
        MlflowTracker(Tracking(uri=uri)).connect()
    assert not isinstance(refused.value, StoreUnreachable)  # it would be tried again
    return refused.value


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (USER, PASSWORD, TOKEN):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "before", "sent"),
    [
        ({}, "", None),
        ({USER: "me"}, "", None),  # MLflow sends no name without a password
        ({USER: "me", PASSWORD: "word"}, "", f"the name and password of {USER} and {PASSWORD}"),
        ({TOKEN: "t0ken"}, "", f"the token of {TOKEN}"),
        ({USER: "me", PASSWORD: "word", TOKEN: "t0ken"}, "", f"the name and password of {USER} and {PASSWORD}"),
        ({}, "me:word@", "the name and password of the address"),
    ],
)
def test_a_server_that_denies_access_is_told_with_the_credentials_that_it_got(
    denying: DenyingServer, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], before: str, sent: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    denying.answer = 401, PLAIN
    text = str(refuse(denying, before))
    got = f"it got {sent}" if sent else "no credentials were sent"
    assert f"the server denies access (401), and {got}; set {USER} and {PASSWORD}, or {TOKEN}, to those" in text
    assert (denying.sent is not None) == (sent is not None)  # what was sent indeed
    assert "word" not in text.replace("password", "")
    assert "t0ken" not in text


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ((403, "no"), 403),
        ((403, OF_MLFLOW), 403),
        ((403, OF_A_GATEWAY), 403),
        ((401, json.dumps({"detail": "Not authenticated"})), 401),
    ],
)
def test_each_form_of_the_answer_is_understood(denying: DenyingServer, answer: tuple[int, str], status: int) -> None:
    denying.answer = answer
    assert f"the server denies access ({status}), and no credentials were sent" in str(refuse(denying))


def test_access_that_is_denied_later_is_told_in_the_same_way(denying: DenyingServer) -> None:
    tracker = MlflowTracker(Tracking(uri=f"http://127.0.0.1:{denying.server_port}"))
    denying.answer = 200, json.dumps({"experiment": {"experiment_id": "1", "name": "scaleflow"}})
    tracker.connect()
    denying.answer = 403, OF_MLFLOW
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException) as denied:
        tracker.select_run("0" * 32)
    text = format_store_error(denied.value, tracker.uri)
    assert text.startswith("the server denies access (403), and no credentials were sent; set ")
