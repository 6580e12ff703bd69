"""Finds the active MLflow run of the caller's thread. A run that starts there becomes its child."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from scaleflow.interfaces import Tracking
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.tracking.connection import hold_migration_lock, set_mlflow_defaults
from scaleflow.tracking.uri import sqlite_file

#: MLflow's tag of a child run.
PARENT = "mlflow.parentRunId"


@dataclass(frozen=True)
class ActiveRun:
    """A run that `mlflow.start_run` has opened in the caller's thread.

    Attributes:
        run_id: its ID.
        store: the address of the new run's store.
        is_in_store: whether this store has the active run. Only then can the new run be its child.
    """

    run_id: str
    store: str
    is_in_store: bool

    @property
    def tags(self) -> dict[str, str]:
        """The tags that make a new run a child of the active run."""
        return {PARENT: self.run_id} if self.is_in_store else {}

    @property
    def notes(self) -> list[str]:
        """A note if the new run cannot be a child of the active run."""
        if self.is_in_store:
            return []
        return [
            f"note: the active MLflow run {self.run_id} is not in the store {mask_secrets(self.store)}, so the new run "
            "is not its child; to make it one, set tracking.uri to the store of the active run"
        ]


def find_active_run(options: Tracking) -> ActiveRun | None:
    """Returns the active run of this thread; None if there is no active run, or with `tracking=none`.

    Does not import MLflow: if nothing has imported it, there is no active run.
    """
    active_run = getattr(sys.modules.get("mlflow.tracking.fluent"), "active_run", None)
    if options.uri is None or options.name == "none" or active_run is None:
        return None
    active = active_run()
    if active is None:
        return None
    run_id = str(active.info.run_id)
    return ActiveRun(run_id, options.uri, has_run(options.uri, run_id))


def has_run(uri: str, run_id: str) -> bool:
    """Returns whether a store has the active run.

    If the store does not answer, returns whether its address is MLflow's current tracking URI.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    set_mlflow_defaults()
    current = mlflow.get_tracking_uri()
    file = sqlite_file(current)
    if file:
        current = f"sqlite:///{os.path.abspath(file)}"  # noqa: PTH100
    file = sqlite_file(uri)
    if file is not None and not Path(file).exists():
        return False
    try:
        with hold_migration_lock(uri):
            mlflow.MlflowClient(tracking_uri=uri).get_run(run_id)
    except MlflowException as error:
        return bool(error.error_code != "RESOURCE_DOES_NOT_EXIST" and current == uri)
    except Exception:  # the recorder reports errors of the store
        return bool(current == uri)
    return True
