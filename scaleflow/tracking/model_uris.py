"""Finds the run, and the logged model, that a run's ID or a model's URI names. It imports no TensorFlow."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import name_command
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.tracking.store import RESULT_TAG, STEP_TAG, refuse_missing

if TYPE_CHECKING:
    from mlflow import MlflowClient

#: A run's ID or a model's URI.
RUN_OR_MODEL = re.compile(
    r"(?P<prefix>runs:/)?(?P<run>[0-9a-f]{32})(?(prefix)(/model)?/?)"
    r"|models:/(?P<model>m-[0-9a-f]{32})/?"
    r"|models:/(?P<name>[^/]+?)(/(?P<version>[^/]+)|@(?P<alias>[^/@]+))?/?"
)

#: The forms of a reference, for messages.
FORMS = (
    "the id of a run in MLflow (32 hexadecimal digits), the folder of a run, models:/NAME/VERSION, models:/NAME@ALIAS "
    "or models:/m-..."
)

#: The most names that a message lists.
MOST_LISTED = 10


@dataclass(frozen=True)
class ModelReference:
    """A run, and one of its logged models.

    Attributes:
        run_id: of the run.
        model_id: of the model; None: the run's result.
        step: the update after which the model was exported; 0 without a model.
    """

    run_id: str
    model_id: str | None = None
    step: int = 0


def resolve_reference(named: str, store: str) -> ModelReference:
    """Returns the run and the model that a run's ID or a model's URI names in a store.

    Raises:
        ConfigError: if it has another form, the store has no such model, or scaleflow did not log it.
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
    """Returns the version of a registered model that a URI such as models:/NAME@ALIAS names.

    Raises ConfigError, with the names that exist, if there is none.
    """
    from mlflow.exceptions import MlflowException

    parts = RUN_OR_MODEL.fullmatch(uri)
    assert parts is not None
    name, wanted, alias = parts["name"], parts["version"], parts["alias"]
    try:
        aliases = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        known = [model.name for model in client.search_registered_models()]
        raise ConfigError(f"{uri}: there is no registered model {name}{list_known(name, known)}") from error
    versions = sorted((str(each.version) for each in client.search_model_versions(f"name='{name}'")), key=int)
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
    """Returns `; there are X, Y; did you mean X?` for what exists in place of a word."""
    similar = difflib.get_close_matches(word, names, n=1)
    shown = ", ".join(names[-MOST_LISTED:]) + (f" and {len(names) - MOST_LISTED} more" * (len(names) > MOST_LISTED))
    exist = f"; there is {shown}" if names else "; there is none"
    return exist + (f"; did you mean {similar[0]}?" if similar else "")


def choose_result(run: Any) -> ModelReference:
    """Returns the logged model that is the result of a run: the tagged one, else the one of the largest step."""
    outputs = sorted(run.outputs.model_outputs if run.outputs else [], key=lambda output: output.step)
    tagged = [output for output in outputs if output.model_id == run.data.tags.get(RESULT_TAG)]
    for output in (tagged or outputs)[-1:]:
        return ModelReference(run.info.run_id, output.model_id, output.step)
    return ModelReference(run.info.run_id)
