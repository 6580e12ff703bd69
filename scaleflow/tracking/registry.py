"""Registers a logged model as a version of a registered model, and moves the aliases `champion` and `challenger`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from scaleflow.errors import ConfigError
from scaleflow.tracking.connection import name_lock, use_store

if TYPE_CHECKING:
    from mlflow import MlflowClient


def register_model(client: MlflowClient, name: str, alias: str | None, run_id: str, model_id: str) -> str:
    """Registers a logged model, and moves the alias to its version unless the alias points to a newer version.

    Creates the registered model and the version if they are missing. Repeated calls have no further effect. The
    registry is the client's store, unless MLFLOW_REGISTRY_URI is set. Returns the version.
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


#: Aliases of the version in use, and of the last candidate that did not replace it.
CHAMPION = "champion"
CHALLENGER = "challenger"

#: Tags of a version: the decision about it, and the champion before it.
DECISION = "scaleflow.promotion"
BEFORE = "scaleflow.promotion.before"

#: Seconds to wait for another command of this machine that moves the alias of the same model.
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class ChampionRegistry:
    """The versions of a registered model, and its alias `champion`.

    A promotion moves the alias with a single request at its end. If a command stops earlier, the old champion stays.
    """

    client: MlflowClient
    name: str

    def find_aliases(self) -> Mapping[str, str]:
        """Returns the version of each alias; {} if there is no such registered model."""
        from mlflow.exceptions import MlflowException

        try:
            aliases = self.client.get_registered_model(self.name).aliases
            return {alias: str(version) for alias, version in aliases.items()}
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return {}

    def find_champion(self) -> str | None:
        """Returns the version in use; None if the model has no champion."""
        return self.find_aliases().get(CHAMPION)

    def find_model(self, version: str) -> str:
        """Returns the ID of a version's logged model."""
        registered = self.client.get_model_version(self.name, version)
        return str(registered.model_id or str(registered.source).removeprefix("models:/"))

    def add_version(self, run_id: str, model_id: str) -> str:
        """Registers a logged model as a version, if it is not one yet, and returns the version. Moves no alias."""
        with self._exclude_others():
            return register_model(self.client, self.name, None, run_id=run_id, model_id=model_id)

    def keep_challenger(self, version: str, decision: Mapping[str, Any]) -> None:
        """Records that a version did not become the champion, and gives it the alias `challenger`."""
        self._tag(version, DECISION, json.dumps(decision))
        self.client.set_registered_model_alias(self.name, CHALLENGER, version)

    def move_champion(self, version: str, before: str | None, decision: Mapping[str, Any]) -> bool:
        """Makes a version the champion if `before` still is. Returns whether it did."""
        with self._exclude_others():
            if self.find_champion() != before:
                return False
            self._tag(version, DECISION, json.dumps(decision))
            self._tag(version, BEFORE, before or "")
            self.client.set_registered_model_alias(self.name, CHAMPION, version)
        self.remove_challenger(version)
        return True

    def remove_challenger(self, version: str) -> None:
        """Removes the alias `challenger` from a version, if it has it."""
        if self.find_aliases().get(CHALLENGER) == version:
            self.client.delete_registered_model_alias(self.name, CHALLENGER)

    def roll_back(self) -> tuple[str, str]:
        """Moves the alias `champion` back to the previous champion. Returns (from, to).

        Raises ConfigError if there is no champion, or no champion before it.
        """
        with self._exclude_others():
            now = self.find_champion()
            if now is None:
                raise ConfigError(f"--rollback: the model {self.name} has no alias {CHAMPION}")
            before = self.client.get_model_version(self.name, now).tags.get(BEFORE)
            versions = self.client.search_model_versions(f"name = '{self.name}'")
            known = {str(version.version) for version in versions}
            if not before or before not in known:
                reason = "was the first one" if before == "" else "says nothing of a version before it"
                raise ConfigError(f"--rollback: version {now} of {self.name} {reason}; set the alias with MLflow")
            self.client.set_registered_model_alias(self.name, CHAMPION, before)
        return now, before

    def _tag(self, version: str, key: str, value: str) -> None:
        self.client.set_model_version_tag(self.name, version, key, value)

    @contextlib.contextmanager
    def _exclude_others(self) -> Iterator[None]:
        """Locks the registered model against other commands on this machine inside the `with` block."""
        path = name_lock(f"{self.client.tracking_uri}#{self.name}")
        try:
            lock = FileLock(path, timeout=LOCK_SECONDS, mode=0o600).acquire()
        except Timeout as error:
            raise ConfigError(f"--model {self.name}: another command is promoting it; try again later") from error
        with lock:
            yield
