"""Messages to an address of the web, which a server of the test's receives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.features.notify.feature import NotifyOptions
from scaleflow.features.notify.messages import Messages, post
from scaleflow.interfaces.hooks import FollowedRun
from tests.conftest import Command

FAST = ("model.units=[4]", "training.max_steps=2", "dataset.limit=64", "evaluation=none", "hardware=cpu")
METRICS = {"test/accuracy": 0.5, "test/accuracy_low": 0.4, "test/accuracy_high": 0.6}
ENDED = {"status": "FINISHED", "run_id": "4f", "metrics": METRICS}


class Receiver(HTTPServer):
    """Answers with the statuses of a list, then with 200.

    Attributes:
        received: the objects that were posted, also those that were answered with an error.
    """

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append(json.loads(body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def send(address: str, answer: dict[str, Any]) -> str:
    """Sends a message; returns the notes."""
    notes: list[str] = []
    made: Any = SimpleNamespace(of=lambda section: NotifyOptions(address))
    run = FollowedRun(made, Path("run"), is_job=False, find_name=lambda: "digits", print_note=notes.append)
    Messages(run).after_run({"exit_code": 0, **answer})
    return "\n".join(notes)


def test_a_message_has_the_answer_and_a_line_and_no_secret(receiver: Receiver) -> None:
    assert send(receiver.address, {**ENDED, "error": "password=sesame", "step": float("nan")}) == ""
    (message,) = receiver.received
    assert message["text"] == "digits FINISHED: password=****; test accuracy 0.5 (0.4 to 0.6); run 4f"
    assert message["event"] == "ended"
    assert message["metrics"] == ENDED["metrics"]
    assert message["step"] is None


def test_slack_gets_the_line(receiver: Receiver) -> None:
    assert send(f"slack:{receiver.address}", ENDED) == ""
    assert receiver.received == [{"text": "digits FINISHED: test accuracy 0.5 (0.4 to 0.6); run 4f"}]


def test_a_passing_error_is_tried_again_and_another_is_a_note(receiver: Receiver) -> None:
    receiver.statuses = [503]
    assert post(receiver.address, {}) == ""
    receiver.statuses = [404]
    assert "127.0.0.1 answers 404 Not Found" in send(receiver.address, ENDED)
    assert len(receiver.received) == 3


def test_an_address_that_nobody_answers_is_a_note_without_its_path() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        address = f"http://127.0.0.1:{closed.server_address[1]}/secret"
    note = send(address, ENDED)
    assert "127.0.0.1 does not answer" in note
    assert "secret" not in note


def test_runs_and_sweeps_send_their_end(receiver: Receiver, command: Command) -> None:
    words = (*FAST, f"tracking.notify={receiver.address}")
    done = command(*words, "--json")
    assert done.returncode == 0, done.stderr
    ended = receiver.received.pop()
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer.items() <= ended.items()
    assert ended["event"] == "ended"
    command("-m", *words, "tracking=none", "optimizer.learning_rate=0.1,1e30", "training.on_nan=stop")
    *jobs, sweep = receiver.received
    assert [job["status"] for job in jobs] == ["FAILED"]
    assert [job["status"] for job in sweep["jobs"]] == ["FINISHED", "FAILED"]
    assert sweep["text"].startswith("sweep of optimizer.learning_rate FAILED: 1 of 2 jobs did not finish")
