"""Tracking URIs, looked at from outside: no MLflow is imported, and an unreachable server costs seconds."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from scaleflow.errors import Refusal
from scaleflow.interfaces import Tracking
from scaleflow.masking import masked

PROBE_SECONDS = 3.0


def resolve(tracking: Tracking) -> Tracking:
    """The tracking options with an absolute URI, its store looked at from outside."""
    if tracking.name == "none":
        return tracking
    origin = "tracking.uri" if tracking.uri is not None else "MLFLOW_TRACKING_URI"
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    scheme = uri.partition(":")[0].lower() if ":" in uri else ""
    if uri in ("sqlite://", "sqlite:///:memory:"):
        raise Refusal(f"{origin}={uri}: would be gone with the run; use sqlite:///mlflow.db")
    if uri.startswith("sqlite:///"):
        uri = absolute_sqlite(uri, origin)
    elif scheme in ("http", "https"):
        probe(uri, origin)
    elif scheme in ("", "file"):
        raise Refusal(
            f"{origin}={masked(uri)}: MLflow 3 keeps no runs in plain folders; use sqlite:///mlflow.db or http://HOST:PORT"
        )
    return dataclasses.replace(tracking, uri=uri)


def absolute_sqlite(uri: str, origin: str) -> str:
    path = Path(uri.removeprefix("sqlite:///")).expanduser().absolute()
    if path.is_dir():
        raise Refusal(f"{origin}={uri}: {path} is a folder; name a file in it, such as {path}/mlflow.db")
    if not path.parent.is_dir():
        raise Refusal(f"{origin}={uri}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Refusal(f"{origin}={uri}: {path} cannot be written; choose a file in a folder of yours")
    return f"sqlite:///{path}"


def probe(uri: str, origin: str) -> None:
    """Opens a TCP connection to the server, so that an unreachable one costs seconds, not minutes."""
    try:
        parts = urlsplit(uri)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Refusal(
            f"{origin}={masked(uri)}: no tracking server answers there ({reason}); start one with "
            "`mlflow server`, or use tracking.uri=sqlite:///mlflow.db"
        ) from None
