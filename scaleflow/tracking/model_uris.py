"""Resolves run IDs and model URIs to a run and a logged model, and `model.init_from` to a Keras file.

The Keras file is local, or comes from a model in MLflow. The launcher downloads it, because workers have no access to
the store. MLflow is imported only for run IDs and URIs, TensorFlow never.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import LEARNED_FILES, Plan, Tracking, name_command
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.tracking.connection import hold_migration_lock, set_mlflow_defaults, use_store
from scaleflow.tracking.store import RESULT_TAG, STEP_TAG, refuse_missing
from scaleflow.tracking.uri import resolve_store, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient


#: A run's ID or a model's URI.
RUN_OR_MODEL = re.compile(
    r"(?P<prefix>runs:/)?(?P<run>[0-9a-f]{32})(?(prefix)(/model)?/?)"
    r"|models:/(?P<model>m-[0-9a-f]{32})/?"
    r"|models:/(?P<name>[^/]+?)(/(?P<version>[^/]+)|@(?P<alias>[^/@]+))?/?"
)

#: The accepted forms of a reference, for messages.
FORMS = (
    "the id of a run in MLflow (32 hexadecimal digits), the folder of a run, models:/NAME/VERSION, models:/NAME@ALIAS "
    "or models:/m-..."
)

#: A message lists at most this number of names.
MAX_LISTED = 10


@dataclass(frozen=True)
class ModelReference:
    """A run, and one of its logged models."""

    run_id: str
    model_id: str | None = None  # None: the model that is the run's result
    step: int = 0  # the update after which the model was exported; 0 without a model


def resolve_reference(named: str, store: str) -> ModelReference:
    """Returns the run and the model for a run's ID or a model's URI.

    Does not check that a run with this ID exists. Raises ConfigError if `named` has another form, or if the store has
    no such model, scaleflow did not log it, or its upload is incomplete.
    """
    from mlflow import MlflowClient

    parts = RUN_OR_MODEL.fullmatch(named)
    if parts is None:
        raise ConfigError(f"{named}: expected {FORMS}")
    if parts["run"]:
        return ModelReference(parts["run"])
    client = MlflowClient(tracking_uri=store)
    model_id = parts["model"]
    if model_id is None:
        version = find_model_version(client, named)
        model_id = version.model_id or str(version.source).removeprefix("models:/")
    with refuse_missing(f"{named}: the store {mask_secrets(store)} has no logged model {model_id}"):
        model = client.get_logged_model(model_id)
    if not model.source_run_id or STEP_TAG not in model.tags:
        raise ConfigError(
            f"{named}: this model was not logged by scaleflow; load it with mlflow.pyfunc.load_model('{named}')"
        )
    if str(model.status) != "READY":
        raise ConfigError(f"{named}: the files of this model are not all in the store; {name_command('sync')} FOLDER "
                          "sends the rest, with the folder of its run")  # fmt: skip
    return ModelReference(model.source_run_id, model_id, int(model.tags[STEP_TAG]))


def find_model_version(client: MlflowClient, uri: str) -> Any:
    """Returns the version of a registered model for a URI such as models:/NAME@ALIAS.

    Raises ConfigError with the existing names if there is no such version.
    """
    from mlflow.exceptions import MlflowException

    parts = RUN_OR_MODEL.fullmatch(uri)
    assert parts is not None
    name = parts["name"]
    wanted = parts["version"]
    alias = parts["alias"]
    try:
        aliases = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        known = [model.name for model in client.search_registered_models()]
        raise ConfigError(f"{uri}: there is no registered model {name}{list_known(name, known)}") from error
    versions = [str(version.version) for version in client.search_model_versions(f"name='{name}'")]
    versions.sort(key=int)
    if "latest" in (wanted, alias) and versions:
        wanted = versions[-1]
    elif alias is not None:
        if alias not in aliases:
            raise ConfigError(f"{uri}: the model {name} has no alias {alias}{list_known(alias, list(aliases))}")
        wanted = str(aliases[alias])
    if wanted is None:
        raise ConfigError(f"{uri}: expected a version, such as models:/{name}/1{list_known('', versions)}")
    if wanted not in versions:
        raise ConfigError(f"{uri}: the model {name} has no version {wanted}{list_known(wanted, versions)}")
    return client.get_model_version(name, wanted)


def list_known(word: str, names: Sequence[str]) -> str:
    """Returns `; there is X, Y; did you mean X?` with the names that exist, for the message about a wrong word."""
    similar = difflib.get_close_matches(word, names, n=1)
    shown = ", ".join(names[-MAX_LISTED:]) + (f" and {len(names) - MAX_LISTED} more" * (len(names) > MAX_LISTED))
    exist = f"; there is {shown}" if names else "; there is none"
    return exist + (f"; did you mean {similar[0]}?" if similar else "")


def choose_result(run: Any) -> ModelReference:
    """Returns the logged model that is the result of a run: the tagged model, else the one with the largest step."""
    outputs = sorted(run.outputs.model_outputs if run.outputs else [], key=lambda output: output.step)
    tagged = [output for output in outputs if output.model_id == run.data.tags.get(RESULT_TAG)]
    for output in (tagged or outputs)[-1:]:
        return ModelReference(run.info.run_id, output.model_id, output.step)
    return ModelReference(run.info.run_id)


SCHEMES = ("runs:/", "models:/")

#: Paths of the Keras file in scaleflow's export, an MLflow model and a run's folder.
KERAS_FILES = ("model.keras", "data/model.keras", "model/model.keras")

#: The exported file if Keras cannot write a model as a .keras file.
WEIGHTS_FILE = "model.weights.h5"

ADVICE = (
    "use a file that keras.Model.save wrote, a folder with a model that scaleflow exported, the id of a run in MLflow, "
    "models:/NAME/VERSION, models:/NAME@ALIAS or models:/m-..."
)


@contextlib.contextmanager
def locate_weights(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with the path of a local Keras file for `model.init_from`.

    Deletes a downloaded file at the end of the `with` block. Raises ConfigError if there is no such file, or no such
    model in the store.
    """
    source = plan.model.init_from
    if source is None:
        yield plan
    elif source.startswith(SCHEMES) or (RUN_OR_MODEL.fullmatch(source) and not Path(source).exists()):
        with tempfile.TemporaryDirectory(prefix="scaleflow-init-") as folder:
            file = download_weights(source, plan.tracking, Path(folder))
            yield replace(plan, weights=str(file))
    else:
        file = find_keras_file(Path(source).expanduser(), source)
        yield replace(plan, weights=str(file.absolute()))


def find_keras_file(path: Path, source: str) -> Path:
    """Returns `path` if it is a file, or the Keras file in this folder. Raises ConfigError if there is no such file."""
    if path.is_file():
        return path
    if not path.exists():
        raise ConfigError(f"model.init_from={source}: there is no such file or folder; {ADVICE}")
    files = [path / place for place in KERAS_FILES if (path / place).is_file()] or sorted(path.rglob("*.keras"))
    if files:
        return files[0]
    weights = sorted(path.rglob(WEIGHTS_FILE))
    if weights:
        raise ConfigError(
            f"model.init_from={source}: contains a model that Keras could not write as a .keras file, only its "
            f"weights; call load_weights in the code that builds the model ({weights[0].relative_to(path)})"
        )
    raise ConfigError(f"model.init_from={source}: contains no Keras file (.keras); {ADVICE}")


def download_weights(uri: str, tracking: Tracking, folder: Path) -> Path:
    """Downloads the Keras file of a model and the learned state of its run.

    They come from the store of the new run, or from the default store if the new run is not tracked. Raises ConfigError
    if there is no such store or model.
    """
    store = tracking.uri or resolve_store(Tracking()).uri
    assert store is not None
    database = sqlite_file(store)
    if database and not database.exists():
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
            for name in LEARNED_FILES:  # a model that scaleflow did not log has none
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
    """Returns the URI to download. For a run of scaleflow, this is the model that is its result.

    Raises ConfigError if a registered model has no such version.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    parts = RUN_OR_MODEL.fullmatch(uri)
    client = MlflowClient(tracking_uri=store)
    with contextlib.suppress(MlflowException):  # the download will fail with a better message
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
