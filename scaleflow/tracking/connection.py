"""Prepares access to an MLflow store: client defaults, the lock for migrations, and MLflow's global tracking URI.

It also contains the code that depends on the installed version of MLflow, and explains errors of stores.
"""

import contextlib
import hashlib
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock

from scaleflow.compat.mlflow import use_tracking_uri
from scaleflow.errors import ConfigError, RunError, ScaleflowError, StoreUnreachable, read_reason
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.interfaces.versions import to_series
from scaleflow.tracking.uri import sqlite_file

#: Seconds to wait for another process that opens the same store.
MIGRATION_SECONDS = 120.0

MLFLOW_DEFAULTS = {
    # By default MLflow retries for minutes, and can repeat a request that succeeded. The recorder retries instead.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # The launcher prints the run's links itself.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

#: HTTP status codes of a server that is overloaded: request timeout, too early, too many requests.
BUSY = (408, 425, 429)

#: MLflow's tracking URI is global to the process, so only one thread at a time may change it.
STORE_LOCK = threading.Lock()


def set_mlflow_defaults() -> None:
    for key, value in MLFLOW_DEFAULTS.items():
        os.environ.setdefault(key, value)


def migration_lock(uri: str) -> FileLock:
    """Returns a lock to hold while opening a store, because processes that open a new database race to migrate it.

    The lock of an SQLite file is a file next to it, shared by all its users. For other stores, or if that place is not
    writable, it is this user's file in the temporary folder (`name_lock`).
    """
    file = sqlite_file(uri)
    if file:
        lock = Path(f"{file}.lock")
        if os.access(lock if lock.exists() else lock.parent, os.W_OK):
            return FileLock(lock, timeout=MIGRATION_SECONDS, mode=0o666)
    # The query of some stores contains a password.
    return FileLock(name_lock(uri.partition("?")[0]), timeout=MIGRATION_SECONDS, mode=0o600)


@contextlib.contextmanager
def hold_migration_lock(uri: str) -> Iterator[None]:
    """Holds the `migration_lock` in a `with` block, and hides the log messages of a first migration.

    It disables logging globally, because the migration in older versions of MLflow resets the levels of its loggers.
    """
    before = logging.root.manager.disable
    with migration_lock(uri):
        logging.disable(max(before, logging.INFO))
        try:
            yield
        finally:
            logging.disable(before)


def name_lock(uri: str) -> Path:
    """Returns the path of this user's lock file in the temporary folder.

    Its name has a digest of the URI without the user and password.
    """
    public = re.sub(r"//[^/]*@", "//", uri)
    name = f"scaleflow-{os.getuid()}-{hashlib.sha256(public.encode()).hexdigest()[:16]}.lock"
    return Path(tempfile.gettempdir(), name)


@contextlib.contextmanager
def use_store(store: str) -> Iterator[None]:
    """Sets MLflow's global tracking URI in a `with` block. MLflow resolves `runs:/` URIs only against this URI."""
    with STORE_LOCK:
        before = os.environ.get("MLFLOW_TRACKING_URI")
        try:
            with use_tracking_uri(store):
                yield
        finally:  # MLflow does not restore a value that was set only in the environment
            os.environ.pop("MLFLOW_TRACKING_URI", None)
            if before is not None:
                os.environ["MLFLOW_TRACKING_URI"] = before


def is_unreachable(error: BaseException) -> bool:
    """Returns whether an MLflow exception means that a server does not answer. Does not import MLflow."""
    module = sys.modules.get("mlflow.exceptions")
    if isinstance(error, StoreUnreachable) and error.__cause__ is not None:
        error = error.__cause__
    if module is None or not isinstance(error, module.MlflowException):
        return False
    cause = error.__cause__ or error.__context__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def opens_by_default(file: Path) -> bool:
    """Returns whether `mlflow ui` without options, in the current folder, opens this SQLite file.

    Since 3.7, MLflow opens mlflow.db, unless the folder has runs in plain files or the environment sets a store.
    """
    return (
        to_series(version("mlflow")) >= (3, 7)
        and file == Path("mlflow.db").absolute()
        and not os.environ.get("MLFLOW_BACKEND_STORE_URI")
        and not any(Path("mlruns").glob("[0-9]*/meta.yaml"))
    )


def is_default_store(uri: str) -> bool:
    """Returns whether MLflow uses this store in the current folder by default. `uri` has masked credentials."""
    named = os.environ.get("MLFLOW_TRACKING_URI")
    file = sqlite_file(uri)
    return uri == str(mask_secrets(named)) if named else file is not None and opens_by_default(file)


def explain_versions(error: Exception) -> str | None:
    """Explains an error that comes from the installed version of MLflow, and says how to fix it; None for others."""
    if isinstance(error, ImportError) and "sqlalchemy" in str(error):
        return (
            f"MLflow {version('mlflow')} does not work beside SQLAlchemy {version('sqlalchemy')}; install "
            "'sqlalchemy<2.1', or MLflow 3.10 or newer"
        )
    if type(error).__module__.startswith("alembic.") and "revision" in str(error):
        return (
            f"a newer MLflow than {version('mlflow')} has written this database; install that version, or name another "
            "database, such as tracking.uri=sqlite:///other.db"
        )
    return None


def format_store_error(error: BaseException, uri: str | None = None) -> str:
    """Formats an error of a store as one line without secrets. Errors of scaleflow keep their message."""
    if isinstance(error, ScaleflowError):
        return str(mask_secrets(str(error)))
    line = str(error).strip().partition("\n")[0]
    reason = f"{type(error).__name__}: {line}".removesuffix(": ")
    return explain_denial(error, uri or "") or str(mask_secrets(reason))


def explain_unusable(uri: str, error: Exception) -> ConfigError:
    """Returns the error to raise if a store cannot be used: StoreUnreachable if it may work later, else ConfigError."""
    denial = explain_denial(error, uri)
    reason = explain_versions(error) or denial or read_reason(error)
    kind = StoreUnreachable if is_transient(error) and not denial else ConfigError
    return kind(f"tracking.uri={mask_secrets(uri)}: the store cannot be used: {mask_secrets(reason)}")


def is_transient(error: Exception) -> bool:
    """Returns whether an error means that the store is unavailable now, so that a retry may succeed."""
    from mlflow.exceptions import MlflowException, RestException

    if isinstance(error, RestException):
        return error.get_http_status_code() in BUSY or error.get_http_status_code() >= 500
    if isinstance(error, MlflowException):  # raised by the client itself: no answer, or a locked database
        return error.error_code in ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")
    return isinstance(error, OSError)


def find_http_status(error: BaseException) -> int | None:
    """Returns the HTTP status of an error response; None if the error has another cause. Does not import MLflow."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return int(status)
    module = sys.modules.get("mlflow.exceptions")
    if module is None or not isinstance(error, module.MlflowException):
        return None
    answer = getattr(error, "json", {})
    if "error_code" not in answer:  # a gateway answered, not MLflow's server, and MLflow lost its status
        for status, sign in ((401, "unauthori|authenticat"), (403, "forbidden")):
            if re.search(sign, str(answer), re.IGNORECASE):
                return status
    return int(error.get_http_status_code())


def explain_denial(error: BaseException, uri: str) -> str:
    """Explains status 401 or 403: the credentials that were sent, and the variables to set; "" for other errors."""
    status = find_http_status(error)
    if status not in (401, 403):
        return ""
    from mlflow.utils.credentials import get_default_host_creds

    credentials = get_default_host_creds(uri)
    sources = {
        "the name and password of MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD": credentials.username
        and credentials.password,
        "the token of MLFLOW_TRACKING_TOKEN": credentials.token,
        "the name and password of the address": "@" in urlsplit(uri).netloc,
    }
    sent = next((f"it got {source}" for source, is_set in sources.items() if is_set), "no credentials were sent")
    return (
        f"the server denies access ({status}), and {sent}; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
        "or MLFLOW_TRACKING_TOKEN, to those of a user who may record there"
    )


@contextlib.contextmanager
def explain_artifact_root(uri: str, find_root: Callable[[], str]) -> Iterator[None]:
    """Explains a failed upload in a `with` block: if the server answers other requests, its artifact root is wrong.

    `find_root` asks the server for its artifact root. Raises RunError instead of the upload's error.
    """
    try:
        yield
    except Exception as error:  # an object store may raise anything
        if not uri.startswith("http") or find_http_status(error) in (401, 403):
            raise
        try:
            root = find_root()
        except Exception:  # the server may have closed the upload's connection; if it is down, this raises again
            root = find_root()
        reason = re.sub(r".*\(Caused by (.*)\)$", r"\1", read_reason(error))[:200]
        text = (
            f"the server {uri} answers, but stores no files ({reason}); check its --artifacts-destination"
            if root.startswith(("mlflow-artifacts:", "http"))
            else f"the server {uri} has the artifact root {root}, and this machine cannot write there ({reason}); "
            "start it with --artifacts-destination, so that it stores the files itself"
        )
        raise RunError(str(mask_secrets(text))) from error
