"""Registers a logged model as a new version of a registered model. Repeated calls have no further effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scaleflow.tracking.connection import use_store

if TYPE_CHECKING:
    from mlflow import MlflowClient


def register_model(client: MlflowClient, name: str, alias: str | None, run_id: str, model_id: str) -> str:
    """Creates the version if it is missing, and moves the alias to it unless the alias points to a newer version.

    Also creates the registered model if it is missing. The client's store is the registry, unless MLFLOW_REGISTRY_URI
    names another. Returns the version.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
    source = f"models:/{model_id}"
    versions = client.search_model_versions(f"name = '{name}' AND run_id = '{run_id}'")
    version = next((known for known in versions if known.model_id == model_id or known.source == source), None)
    if version is None:
        with use_store(client.tracking_uri):  # a database registry looks up the model with the global tracking URI
            version = client.create_model_version(name, source, run_id, model_id=model_id, await_creation_for=0)
    if alias is not None:
        current = client.get_registered_model(name).aliases.get(alias)
        if current is None or int(current) < int(version.version):
            client.set_registered_model_alias(name, alias, version.version)
    return str(version.version)
