"""What depends on the version of MLflow beside which scaleflow is installed."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.interfaces.versions import to_series
from scaleflow.tracking.uri import sqlite_file


def opens_by_default(file: Path) -> bool:
    """Returns whether `mlflow ui` without options, in this folder, opens this SQLite file.

    MLflow opens mlflow.db since 3.7, unless the folder has runs in plain files or the environment names a store.
    """
    return (
        to_series(version("mlflow")) >= (3, 7)
        and file == Path("mlflow.db").absolute()
        and not os.environ.get("MLFLOW_BACKEND_STORE_URI")
        and not any(Path("mlruns").glob("[0-9]*/meta.yaml"))
    )


def is_default_store(uri: str) -> bool:
    """Returns whether MLflow uses a store, whose credentials are masked, in this folder if nobody names one."""
    named = os.environ.get("MLFLOW_TRACKING_URI")
    file = sqlite_file(uri)
    return uri == str(mask_secrets(named)) if named else file is not None and opens_by_default(file)


def explain_versions(error: Exception) -> str | None:
    """Returns why this MLflow cannot use a store, and what works; None if the error has another reason."""
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
