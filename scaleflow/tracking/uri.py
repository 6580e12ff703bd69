"""Resolves and checks tracking URIs without importing MLflow. Detects an unreachable server in seconds, not minutes."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import sqlite3
from pathlib import Path
from urllib.parse import urlsplit

from scaleflow.errors import ConfigError, StoreUnreachable
from scaleflow.interfaces import Tracking
from scaleflow.interfaces.secret_masking import MASK, mask_secrets
from scaleflow.tracking.moved_store import refuse_moved_store

PROBE_SECONDS = 3.0

#: The default of `tracking.experiment`. MLflow's environment variables count only if the config has this default.
DEFAULT_EXPERIMENT = "scaleflow"

#: Maximum length of the names of experiments and models in MLflow and in the databases of its servers.
MAX_EXPERIMENT_NAME = 500
MAX_MODEL_NAME = 256


def resolve_store(tracking: Tracking) -> Tracking:
    """Returns the tracking options with an absolute URI, after checks of the store that do not need MLflow.

    Raises:
        StoreUnreachable: if the store is unavailable and `tracking.offline` is false.
        ConfigError: if the URI is not a store's, if it is a file that was moved or copied, or if MLflow would reject
            the name of the experiment, the registered model or its alias.
    """
    if tracking.name == "none":
        return tracking
    check_registered_name(tracking)
    check_experiment_name(tracking.experiment)
    typed = (tracking.uri or "").strip()
    origin = "tracking.uri" if typed else "MLFLOW_TRACKING_URI"
    uri = typed or os.environ.get("MLFLOW_TRACKING_URI", "").strip() or "sqlite:///mlflow.db"
    scheme = uri.partition(":")[0].lower() if ":" in uri else ""
    meant = translate_address(uri)
    if meant:
        raise ConfigError(f"{origin}={uri}: is no address of a store; type tracking.uri={meant}")
    if uri in ("sqlite://", "sqlite:///:memory:"):
        raise ConfigError(
            f"{origin}={uri}: a store in memory would be lost at the end of the command; use sqlite:///mlflow.db"
        )
    file = sqlite_file(uri)
    if file:
        uri = absolute_sqlite(file, uri, origin, offline=tracking.offline)
        refuse_moved_store(Path(uri.removeprefix("sqlite:///")), name_experiments(tracking))
    elif scheme in ("http", "https"):
        if not tracking.offline:
            probe_server(uri, origin)
    elif scheme in ("", "file"):
        raise ConfigError(
            f"{origin}={mask_secrets(uri)}: MLflow 3 does not store runs in plain folders; use "
            "sqlite:///mlflow.db or http://HOST:PORT"
        )
    return dataclasses.replace(tracking, uri=uri)


def translate_address(uri: str) -> str:
    """Completes an address without a scheme, such as `host:5000` or `runs.db`; "" for any other address."""
    if re.fullmatch(r"[\w.-]+:\d+/?", uri):
        return f"http://{uri}"
    return f"sqlite:///{uri}" if re.fullmatch(r"[^:]+\.(db|sqlite3?)", uri) else ""


def check_registered_name(tracking: Tracking) -> None:
    """Raises ConfigError for a registered model's name or alias that MLflow would reject, at the end of the run."""
    name = tracking.register_as
    alias = tracking.alias
    if name is not None:
        check_model_name("tracking.register_as=", name)
    if alias is None:
        return
    if not re.fullmatch(r"[\w\-]{1,255}", alias):
        raise ConfigError(f"tracking.alias={alias}: expected letters, digits, _ and -, such as newest, or null")
    if alias.lower() == "latest" or re.match(r"[vV]\d+$", alias):
        raise ConfigError(f"tracking.alias={alias}: MLflow reserves this name; choose another, such as newest")


def check_experiment_name(name: str) -> None:
    """Raises ConfigError for an experiment's name that MLflow would reject at the start of the run."""
    origin = "tracking.experiment"
    variable = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if name == DEFAULT_EXPERIMENT and variable:
        origin = "MLFLOW_EXPERIMENT_NAME"
        name = variable
    if not name.strip() or len(name) > MAX_EXPERIMENT_NAME:
        shown = f"{name[:20]}..." if name.strip() else name
        raise ConfigError(
            f"{origin}={shown}: expected a name of 1 to {MAX_EXPERIMENT_NAME} characters, and it has {len(name)}"
        )


def name_experiments(tracking: Tracking) -> list[str]:
    """Returns the names and ids of experiments in the config and the environment."""
    variables = os.environ.get("MLFLOW_EXPERIMENT_NAME"), os.environ.get("MLFLOW_EXPERIMENT_ID")
    return [tracking.experiment, *filter(None, variables)]


def check_model_name(key: str, name: str) -> None:
    """Raises ConfigError for a registered model's name that MLflow would reject. `key` starts the message."""
    if not name.strip() or set(name) & set("/:'\"%\n") or name.startswith("..") or name == ".":
        raise ConfigError(f"{key}{name}: expected a name without / : % and quotes, such as digits-mlp")
    if len(name) > MAX_MODEL_NAME:
        raise ConfigError(f"{key}{name[:20]}...: has {len(name)} characters; expected at most {MAX_MODEL_NAME}")


def sqlite_file(uri: str) -> Path | None:
    """Returns the file of an SQLite store, even if it does not exist; None for any other store."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def artifact_location(uri: str, experiment: str) -> str | None:
    """Returns the URI of an artifact folder next to an SQLite file; None for a server, which chooses the location.

    The folder is named after the experiment, cut to 60 characters (file systems allow 255 bytes). Two experiments may
    share a folder, because the folders in it have random ids.
    """
    file = sqlite_file(uri)
    name = re.sub(r"^\.+|[^\w.-]", "_", experiment)[:60]
    return None if file is None else (file.parent / "mlartifacts" / name).as_uri()


def absolute_sqlite(file: Path, uri: str, origin: str, offline: bool) -> str:
    path = file.expanduser().absolute()
    if path.is_dir():
        raise ConfigError(f"{origin}={uri}: {path} is a folder; use a file in it, such as {path}/mlflow.db")
    refuse_other_database(path, f"{origin}={uri}")
    if offline:
        return f"sqlite:///{path}"
    if not path.parent.is_dir():
        raise StoreUnreachable(f"{origin}={uri}: there is no folder {path.parent}; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{origin}={uri}: {path} cannot be written; choose another file")
    return f"sqlite:///{path}"


def refuse_other_database(path: Path, word: str) -> None:
    """Raises ConfigError for a database of another program, to which MLflow would add its tables."""
    # A lock file shows that MLflow has opened or is creating this store.
    if not path.is_file() or path.stat().st_size == 0 or Path(f"{path}.lock").exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=PROBE_SECONDS)) as store:
            tables = {name for (name,) in store.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.OperationalError:  # it is locked or unreadable: MLflow will report that
        return
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{word}: {path} is no SQLite file ({error}); choose another file") from error
    if tables and "experiments" not in tables:
        others = ", ".join(sorted(tables)[:3])
        raise ConfigError(f"{word}: {path} is a database of another program (tables {others}); choose another file")


def probe_server(uri: str, origin: str) -> None:
    """Raises StoreUnreachable if the server does not accept a TCP connection within `PROBE_SECONDS`."""
    try:
        parts = urlsplit(uri)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise StoreUnreachable(
            f"{origin}={mask_secrets(uri)}: no tracking server answers there ({reason}); start one with `mlflow "
            "server`, use tracking.uri=sqlite:///mlflow.db, or start without it: tracking.offline=true"
        ) from None


def drop_credentials(uri: str) -> str:
    """Removes credentials from an address. MLflow reads them from MLFLOW_TRACKING_USERNAME and similar variables."""
    return str(mask_secrets(uri)).replace(f"{MASK}@", "")


def format_loading(uri: str, model_uri: str) -> list[str]:
    """Returns lines of Python code that load a logged model and apply it to its input example."""
    return [
        "import mlflow",
        "",
        f"mlflow.set_tracking_uri({json.dumps(drop_credentials(uri))})",
        f"model = mlflow.pyfunc.load_model({json.dumps(model_uri)})",
        "outputs = model.predict(model.input_example)  # raw inputs, as the dataset has them",
    ]
