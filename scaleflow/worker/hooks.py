"""Calls the hooks of features in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import Emit, Note
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.features import import_named, list_features
from scaleflow.interfaces.hooks import ReadData, WorkerHook
from scaleflow.worker.failures import guard, is_loss_of_peer


def load_hooks(plan: Plan, emit: Emit) -> dict[str, WorkerHook]:
    """Returns the hooks of the features that a plan uses, by the names of the features.

    A hook that cannot be imported is told in a note.
    """
    hooks: dict[str, WorkerHook] = {}
    for feature in list_features().values():
        with guard(f"the feature {feature.name}", emit):
            if feature.worker and feature.is_used(plan):
                hooks[feature.name] = import_named(feature.worker)()
    return hooks


def call_after_data(hooks: Mapping[str, WorkerHook], data: ReadData) -> dict[str, Any]:
    """Returns what all hooks keep in the schema of the data. Raises ConfigError if one refuses the run."""

    def must_end(error: Exception) -> bool:
        return isinstance(error, ConfigError) or is_loss_of_peer(error)

    kept: dict[str, Any] = {}
    for name, hook in hooks.items():
        with guard_extra(f"the feature {name}", lambda text: data.emit(Note(text)), must_end):
            kept |= hook.after_data(data)
    return kept
