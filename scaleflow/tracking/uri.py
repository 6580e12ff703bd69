"""Tracking URIs, looked at from outside: no MLflow is imported, and an unreachable server costs seconds."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from scaleflow.errors import ConfigError, StoreUnreachable
from scaleflow.interfaces import Tracking
from scaleflow.secret_masking import mask_secrets

PROBE_SECONDS = 3.0


def resolve_store(tracking: Tracking) -> Tracking:
    """The tracking options with an absolute URI, its store looked at from outside.

    Raises:
        StoreUnreachable: if it is not there, and not allowed to be away.
        ConfigError: if there can't be one, or none that takes a model by the name asked for.
    """
    if tracking.name == "none":
        return tracking
    check_names(tracking)
    origin = "tracking.uri" if tracking.uri is not None else "MLFLOW_TRACKING_URI"
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    scheme = uri.partition(":")[0].lower() if ":" in uri else ""
    if uri in ("sqlite://", "sqlite:///:memory:"):
        raise ConfigError(f"{origin}={uri}: would be gone with the run; use sqlite:///mlflow.db")
    if uri.startswith("sqlite:///"):
        uri = absolute_sqlite(uri, origin, tracking.offline)
    elif scheme in ("http", "https"):
        if not tracking.offline:
            probe_server(uri, origin)
    elif scheme in ("", "file"):
        raise ConfigError(
            f"{origin}={mask_secrets(uri)}: MLflow 3 keeps no runs in plain folders; use sqlite:///mlflow.db or http://HOST:PORT"
        )
    return dataclasses.replace(tracking, uri=uri)


def check_names(tracking: Tracking) -> None:
    """Refuses a registered model's name or alias that MLflow would, at the end of the run.

    Raises:
        ConfigError: if it would.
    """
    name, alias = tracking.register_as, tracking.alias
    if name is not None and (not name.strip() or set(name) & set("/:'\"%\n") or name.startswith("..") or name == "."):
        raise ConfigError(f"tracking.register_as={name}: expected a name without / : % and quotes, such as digits-mlp")
    if alias is None:
        return
    if not re.fullmatch(r"[\w\-]{1,255}", alias):
        raise ConfigError(f"tracking.alias={alias}: expected letters, digits, _ and -, such as newest, or null")
    if alias.lower() == "latest" or re.match(r"[vV]\d+$", alias):
        raise ConfigError(f"tracking.alias={alias}: MLflow keeps that name for itself; choose another, such as newest")


def absolute_sqlite(uri: str, origin: str, offline: bool = False) -> str:
    path = Path(uri.removeprefix("sqlite:///")).expanduser().absolute()
    if path.is_dir():
        raise ConfigError(f"{origin}={uri}: {path} is a folder; name a file in it, such as {path}/mlflow.db")
    if offline:
        return f"sqlite:///{path}"
    if not path.parent.is_dir():
        raise StoreUnreachable(f"{origin}={uri}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{origin}={uri}: {path} cannot be written; choose a file in a folder of yours")
    return f"sqlite:///{path}"


def probe_server(uri: str, origin: str) -> None:
    """Opens a TCP connection to the server, so that an unreachable one costs seconds, not minutes."""
    try:
        parts = urlsplit(uri)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise StoreUnreachable(
            f"{origin}={mask_secrets(uri)}: no tracking server answers there ({reason}); start one with "
            "`mlflow server`, use tracking.uri=sqlite:///mlflow.db, or begin without it: tracking.offline=true"
        ) from None
