"""Sends messages to `tracking.notify`: at the end of a run or a sweep, and when processes are restarted.

A message is the object of `--json` with `event` (`ended` or `restarted`) and `text`, a readable line. Slack gets only
the line. If a message cannot be sent, a note says so, and nothing else changes.
"""

import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from scaleflow.features.notify.feature import NotifyOptions
from scaleflow.interfaces.events import Event, Restarted
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.formatting import list_metric_rows, to_json
from scaleflow.interfaces.hooks import FollowedRun, LauncherHook
from scaleflow.interfaces.secret_masking import mask_secrets

#: Prefix of the address of a Slack webhook, or of a service that takes Slack's messages.
SLACK = "slack:"

#: Number of retries after no answer or a temporary error, and seconds to wait for one answer.
RETRIES = 3
SECONDS = 5.0

#: Maximum number of metrics in a line.
MAX_METRICS = 3

#: HTTP statuses of temporary errors.
PASSING_ERRORS = (429, 500, 502, 503, 504)


class Messages(LauncherHook):
    """Sends the messages of a run or a sweep."""

    def __init__(self, run: FollowedRun) -> None:
        super().__init__(run)
        self._address = run.plan.of(NotifyOptions).notify

    def on_event(self, event: Event) -> None:
        """Sends a message about a restart in the background."""
        if self._address is None or not isinstance(event, Restarted):
            return
        answer = {"status": "RUNNING", "error": event.reason}
        threading.Thread(target=self._try_to_send, args=(self._address, answer, "restarted"), daemon=True).start()

    def after_run(self, answer: Mapping[str, Any]) -> None:
        """Sends the message about the end and waits for its arrival. The sweep's message covers jobs that finished."""
        is_told_by_sweep = self.run.is_job and answer["exit_code"] == 0
        if self._address is not None and not is_told_by_sweep:
            self._try_to_send(self._address, answer, "ended")

    def _try_to_send(self, address: str, answer: Mapping[str, Any], event: str) -> None:
        with guard_extra("the message to tracking.notify", self.run.print_note):
            reason = send(address, self.run.find_name(), answer, event)
            if reason:
                self.run.print_note(f"tracking.notify: a message was not sent: {mask_secrets(reason)}")


def send(address: str, name: str, answer: Mapping[str, Any], event: str = "ended") -> str:
    """Sends a message to an address.

    Args:
        address: `tracking.notify`.
        name: subject of the message, such as `sweep of model.units`.
        answer: the object of `--json`.
        event: `ended` or `restarted`.

    Returns:
        Why the address did not take it; empty if it did.
    """
    masked = to_json(mask_secrets({"event": event, "text": describe_end(name, answer, event), **answer}))
    body = {"text": masked["text"]} if address.startswith(SLACK) else masked
    return post(address.removeprefix(SLACK), body)


def describe_end(name: str, answer: Mapping[str, Any], event: str) -> str:
    """Returns a line about a run: status, error, and metrics of the test or the validation."""
    status = "was restarted" if event == "restarted" else answer.get("status")
    metrics = [f"{label} {value}" for label, value in list_metric_rows(answer.get("metrics") or {})[:MAX_METRICS]]
    parts = [answer.get("error"), *metrics, answer.get("run_id") and f"run {answer['run_id']}"]
    return f"{name} {status}: {'; '.join(filter(None, parts))}"


def post(url: str, body: Mapping[str, Any]) -> str:
    """Sends a JSON object. Returns why it did not arrive; empty if it did."""
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
