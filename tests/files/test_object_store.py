"""What a store's errors become, without a store."""

from __future__ import annotations

import threading

import pytest

from scaleflow.errors import ConfigError
from scaleflow.files.object_store import call_store, explain_store_error

UPLOAD = "When initiating multiple part upload for key 'run/x' in bucket 'b': AWS Error "


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"{UPLOAD}NO_SUCH_BUCKET during CreateMultipartUpload operation: The specified bucket does not exist",
            "there is no such bucket or prefix",
        ),
        (
            f"{UPLOAD}INVALID_ACCESS_KEY_ID during CreateMultipartUpload operation: The key does not exist",
            "the store refused the request (access denied)",
        ),
        (
            f"{UPLOAD}NETWORK_CONNECTION during CreateMultipartUpload operation: curlCode: 7, Could not connect",
            "the store does not answer there",
        ),
        (
            f"{UPLOAD}SLOW_DOWN during PutObject operation: Reduce your request rate (Request ID: abc)",
            "SLOW_DOWN Reduce your request rate",
        ),
        ("google::cloud::Status(NOT_FOUND: Permanent error)", "there is no such bucket or prefix"),
        ("google::cloud::Status(UNAUTHENTICATED: no)", "the store refused the request (access denied)"),
        ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted)", "the store does not answer there"),
        ("it failed with token=abc and key: def", "it failed with token=... and key: ..."),
        ("x" * 300, "x" * 197 + "..."),
    ],
)
def test_an_error_of_a_store_is_told_in_words(text: str, reason: str) -> None:
    assert explain_store_error(OSError(text)) == reason


def test_a_store_that_does_not_answer_is_refused_in_time() -> None:
    with pytest.raises(ConfigError) as refusal:
        call_store("some.key", "gs://bucket/x", threading.Event().wait, seconds=0.01)
    assert str(refusal.value).startswith("some.key=gs://bucket/x: the store did not answer within 0 s; check the")
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(refusal.value)
