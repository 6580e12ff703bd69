"""Where the weights of `model.init_from` come from: a Keras file here, or a model in MLflow, which is fetched.

It is the launcher that looks and fetches; its worker knows no store. MLflow is imported only for a URI.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan, Tracking
from scaleflow.secret_masking import mask_secrets
from scaleflow.tracking.uri import resolve_store

#: There is one of MLflow's own in a process, whichever thread asks.
ONE_STORE = threading.Lock()

SCHEMES = ("runs:/", "models:/")

#: Where a folder that scaleflow, MLflow or a run left has its Keras file.
PLACES = ("model.keras", "data/model.keras", "model/model.keras")

#: What is exported of a model that Keras cannot write as such a file.
WEIGHTS_FILE = "model.weights.h5"

WHAT_WORKS = (
    "give a file that keras.Model.save wrote, a folder with a model that scaleflow exported, runs:/RUN_ID/model or "
    "models:/NAME/VERSION"
)


@contextlib.contextmanager
def locate_weights(plan: Plan) -> Iterator[Plan]:
    """The plan with the file that its `model.init_from` comes to; one that was fetched is there as long as the block.

    Raises:
        ConfigError: if there is no such file, or no such model in the store.
    """
    said = plan.model.init_from
    if said is None:
        yield plan
    elif said.startswith(SCHEMES):
        with tempfile.TemporaryDirectory(prefix="scaleflow-init-") as folder:
            yield set_initial_weights(plan, download_weights(said, plan.tracking, Path(folder)))
    else:
        yield set_initial_weights(plan, find_keras_file(Path(said).expanduser(), said))


def set_initial_weights(plan: Plan, file: Path) -> Plan:
    return replace(plan, model=replace(plan.model, init_from=str(file.absolute())))


def find_keras_file(path: Path, said: str) -> Path:
    """The Keras file that a path is, or that a folder holds."""
    if path.is_file():
        return path
    if not path.exists():
        raise ConfigError(f"model.init_from={said}: there is no such file or folder; {WHAT_WORKS}")
    found = [path / place for place in PLACES if (path / place).is_file()] or sorted(path.rglob("*.keras"))
    weights = sorted(path.rglob(WEIGHTS_FILE))
    if not found and weights:
        raise ConfigError(
            f"model.init_from={said}: holds a model that Keras could not write as a .keras file, only its weights; in "
            f"the code that builds the model, load_weights can take them ({weights[0].relative_to(path)})"
        )
    if not found:
        raise ConfigError(f"model.init_from={said}: holds no Keras file (.keras); {WHAT_WORKS}")
    return found[0]


def download_weights(uri: str, tracking: Tracking, folder: Path) -> Path:
    """Downloads the Keras file of a model in the run's store, or in the default one where nothing is tracked.

    Raises:
        ConfigError: if the store can't be used, or there is no such model.
    """
    store = tracking.uri or resolve_store(Tracking()).uri
    assert store is not None
    if store.startswith("sqlite:///") and not Path(store.removeprefix("sqlite:///")).exists():
        raise ConfigError(f"model.init_from={uri}: there is no store {store}; name another by tracking.uri")
    from scaleflow.tracking.store import PATIENCE, QUIET, migration_lock

    for key, value in (PATIENCE | QUIET).items():
        os.environ.setdefault(key, value)
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    def download(artifact: str) -> Path:
        return Path(download_artifacts(artifact, dst_path=str(folder)))

    with migration_lock(store), use_store(store):
        with contextlib.suppress(MlflowException, OSError):
            return download(f"{uri.rstrip('/')}/data/model.keras")  # without the SavedModel beside it
        shutil.rmtree(folder)
        try:
            return find_keras_file(download(uri), uri)
        except (MlflowException, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"model.init_from={uri}: cannot be had from {mask_secrets(store)}: {mask_secrets(reason)}"
            ) from error


@contextlib.contextmanager
def use_store(store: str) -> Iterator[None]:
    """MLflow's own store for a while: what a `runs:/` leads to is looked for there, whatever a call says."""
    from mlflow.tracking._tracking_service.utils import _use_tracking_uri

    with ONE_STORE:
        before = os.environ.get("MLFLOW_TRACKING_URI")
        try:
            with _use_tracking_uri(store):
                yield
        finally:  # it is not put back where it was set by the environment alone
            os.environ.pop("MLFLOW_TRACKING_URI", None)
            if before is not None:
                os.environ["MLFLOW_TRACKING_URI"] = before
