"""Sends the messages that `tracking.notify` asks for: at the end of a run or a sweep, and when processes are restarted.

A message is the object of `--json`, with `event` (`ended` or `restarted`) and `text`, a line for people; to Slack it is
that line. A message that cannot be sent is a note, and changes nothing else.
"""

import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.formatting import list_metric_rows, to_json
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.display import Display

#: The start of the address of a webhook of Slack, or of what takes its messages.
SLACK = "slack:"

#: How often a message is sent again after no answer or a passing error, and the seconds for one answer.
RETRIES, SECONDS = 3, 5.0

#: The most metrics in a line.
MOST_METRICS = 3

#: The statuses of errors that may pass.
PASSING_ERRORS = (429, 500, 502, 503, 504)


def notify(address: str | None, name: str, answer: Mapping[str, Any], display: Display, event: str = "ended") -> None:
    """Sends a message, and waits for its end; a note says why it was not sent.

    Args:
        address: `tracking.notify`; None sends nothing.
        name: what the message is about, such as `sweep of model.units`.
        answer: the object of `--json`.
    """
    if address is None:
        return
    with guard_extra("the message to tracking.notify", lambda text: display.print_line(f"note: {text}", "yellow")):
        send(address, name, answer, display, event)


def send(address: str, name: str, answer: Mapping[str, Any], display: Display, event: str) -> None:
    """Sends a message to an address; a note says why the address has not taken it."""
    masked = to_json(mask_secrets({"event": event, "text": describe_end(name, answer, event), **answer}))
    body = {"text": masked["text"]} if address.startswith(SLACK) else masked
    if reason := post(address.removeprefix(SLACK), body):
        display.print_line(f"note: tracking.notify: a message was not sent: {mask_secrets(reason)}", "yellow")


def notify_meanwhile(address: str | None, name: str, reason: str, display: Display) -> None:
    """Sends a message on a restart, while the run goes on."""
    answer = {"status": "RUNNING", "error": reason}
    if address is not None:
        threading.Thread(target=notify, args=(address, name, answer, display, "restarted"), daemon=True).start()


def describe_end(name: str, answer: Mapping[str, Any], event: str) -> str:
    """Returns the line about a run: its status, its error, and its metrics of the test or the validation."""
    status = "was restarted" if event == "restarted" else answer.get("status")
    metrics = [f"{label} {value}" for label, value in list_metric_rows(answer.get("metrics") or {})[:MOST_METRICS]]
    parts = [answer.get("error"), *metrics, answer.get("run_id") and f"run {answer['run_id']}"]
    return f"{name} {status}: {'; '.join(filter(None, parts))}"


def post(url: str, body: Mapping[str, Any]) -> str:
    """Sends a JSON object; returns why it has not arrived, else an empty text."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    again = Retry(
        RETRIES, backoff_factor=0.5, status_forcelist=PASSING_ERRORS, allowed_methods=None, raise_on_status=False
    )
    try:
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, HTTPAdapter(max_retries=again))
            answer = session.post(url, json=body, timeout=SECONDS)
    except requests.RequestException:  # its text has the whole address, which may be a secret
        return f"{urlsplit(url).hostname} does not answer"
    return "" if answer.ok else f"{urlsplit(url).hostname} answers {answer.status_code} {answer.reason}"
