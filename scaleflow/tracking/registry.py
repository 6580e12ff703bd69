"""The logged model as a new version of a registered model: once, whatever is asked how often."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scaleflow.tracking.initial_weights import use_store

if TYPE_CHECKING:
    from mlflow import MlflowClient


def register_model(client: MlflowClient, name: str, alias: str | None, run_id: str, model_id: str) -> str:
    """Makes the version, unless it is there, and moves the alias to it, unless that is at a newer one.

    Args:
        client: of the store, which is the registry, too, unless MLFLOW_REGISTRY_URI says otherwise.
        name: the registered model's; made where there is none.
        alias: of that model, or None.
        run_id, model_id: whose model it is.

    Returns:
        The version.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
    source = f"models:/{model_id}"
    known = client.search_model_versions(f"name = '{name}' AND run_id = '{run_id}'")
    own = next((found for found in known if found.model_id == model_id or found.source == source), None)
    if own is None:
        with use_store(client.tracking_uri):  # where the registry is a database, it looks for the model there
            own = client.create_model_version(name, source, run_id, model_id=model_id, await_creation_for=0)
    if alias is not None:
        present = client.get_registered_model(name).aliases.get(alias)
        if present is None or int(present) < int(own.version):
            client.set_registered_model_alias(name, alias, own.version)
    return str(own.version)
