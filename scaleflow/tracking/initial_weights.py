"""Locates the weights of `model.init_from`: a local Keras file, or a model that is downloaded from MLflow.

The launcher does this, since workers have no access to the store. MLflow is imported only for a URI.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Plan, Tracking
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.tracking.connection import hold_migration_lock, set_mlflow_defaults, use_store
from scaleflow.tracking.model_uris import RUN_OR_MODEL, choose_result, find_model_version
from scaleflow.tracking.uri import resolve_store, sqlite_file

SCHEMES = ("runs:/", "models:/")

#: Where scaleflow's export, an MLflow model and a run's folder have the Keras file.
KERAS_FILES = ("model.keras", "data/model.keras", "model/model.keras")

#: The record of what the model's run learned, beside the Keras file.
LEARNED_FILES = ("learned_state.json", "learned_state.npz")

#: The file that is exported instead if Keras cannot write a model as a .keras file.
WEIGHTS_FILE = "model.weights.h5"

ADVICE = (
    "use a file that keras.Model.save wrote, a folder with a model that scaleflow exported, the id of a run in MLflow, "
    "models:/NAME/VERSION, models:/NAME@ALIAS or models:/m-..."
)


@contextlib.contextmanager
def locate_weights(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with `model.init_from` replaced by the path of a local Keras file.

    A downloaded file is deleted when the context ends. Raises ConfigError if there is no such file, or no such model in
    the store.
    """
    source = plan.model.init_from
    if source is None:
        yield plan
    elif source.startswith(SCHEMES) or (RUN_OR_MODEL.fullmatch(source) and not Path(source).exists()):
        with tempfile.TemporaryDirectory(prefix="scaleflow-init-") as folder:
            file = download_weights(source, plan.tracking, Path(folder))
            yield replace(plan, model=replace(plan.model, init_from=str(file)))
    else:
        file = find_keras_file(Path(source).expanduser(), source)
        yield replace(plan, model=replace(plan.model, init_from=str(file.absolute())))


def find_keras_file(path: Path, source: str) -> Path:
    """Returns the path itself if it is a file, or the Keras file in a folder; raises ConfigError if there is none."""
    if path.is_file():
        return path
    if not path.exists():
        raise ConfigError(f"model.init_from={source}: there is no such file or folder; {ADVICE}")
    files = [path / place for place in KERAS_FILES if (path / place).is_file()] or sorted(path.rglob("*.keras"))
    if files:
        return files[0]
    if weights := sorted(path.rglob(WEIGHTS_FILE)):
        raise ConfigError(
            f"model.init_from={source}: contains a model that Keras could not write as a .keras file, only its "
            f"weights; call load_weights in the code that builds the model ({weights[0].relative_to(path)})"
        )
    raise ConfigError(f"model.init_from={source}: contains no Keras file (.keras); {ADVICE}")


def download_weights(uri: str, tracking: Tracking, folder: Path) -> Path:
    """Downloads the Keras file of a model, and the record of what its run learned.

    They come from the run's store, or from the default store if the run is not tracked.
    """
    store = tracking.uri or resolve_store(Tracking()).uri
    assert store is not None
    if (database := sqlite_file(store)) and not database.exists():
        raise ConfigError(f"model.init_from={uri}: there is no tracking store {store}; set tracking.uri to another one")
    set_mlflow_defaults()
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    def download(artifact: str) -> Path:
        return Path(download_artifacts(artifact, dst_path=str(folder)))

    with hold_migration_lock(store), use_store(store):
        address = find_address(uri, store)
        with contextlib.suppress(MlflowException, OSError):
            file = download(f"{address}/data/model.keras")  # skips the SavedModel of the same model
            for name in LEARNED_FILES:  # a model that was logged by an older version has none
                with contextlib.suppress(MlflowException, OSError):
                    download(f"{address}/data/{name}")
            return file
        shutil.rmtree(folder)
        try:
            return find_keras_file(download(address), uri)
        except (MlflowException, OSError) as error:
            reason = read_reason(error)
            raise ConfigError(
                f"model.init_from={uri}: cannot be loaded from {mask_secrets(store)}: {mask_secrets(reason)}"
            ) from error


def find_address(uri: str, store: str) -> str:
    """Returns the URI to download: of a run that scaleflow recorded, the model that is its result.

    Raises ConfigError if there is no such version of a registered model.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    parts, client = RUN_OR_MODEL.fullmatch(uri), MlflowClient(tracking_uri=store)
    with contextlib.suppress(MlflowException):  # the download explains it
        if parts and parts["name"]:
            try:
                find_model_version(client, uri)
            except ConfigError as error:
                raise ConfigError(f"model.init_from={error}") from error  # its message begins with the URI
        elif parts and parts["run"]:
            run = client.get_run(parts["run"])
            result = choose_result(run) if "scaleflow.folder" in run.data.tags else None
            return f"models:/{result.model_id}" if result and result.model_id else f"runs:/{parts['run']}/model"
    return uri.rstrip("/")
