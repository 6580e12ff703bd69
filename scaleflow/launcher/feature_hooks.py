"""Calls the hooks that features have in the launcher."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.interfaces.events import Event
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.features import import_named, list_features
from scaleflow.interfaces.hooks import FollowedRun, KeptPredictions, LauncherHook


class FeatureHooks:
    """The hooks of all features for one run or sweep. An error in one of them becomes a note with its name."""

    def __init__(self, run: FollowedRun) -> None:
        self._run = run
        self._hooks: dict[str, LauncherHook] = {}
        for feature in list_features().values():
            if not feature.launcher or not feature.is_used_by(run.plan):
                continue
            with guard_extra(f"the feature {feature.name}", run.print_note):
                hook = import_named(feature.launcher)(run)
                if not isinstance(hook, LauncherHook):
                    raise TypeError(f"{feature.launcher} is no LauncherHook")
                self._hooks[feature.name] = hook

    def on_event(self, event: Event) -> None:
        """Passes an event to all hooks. A hook that fails gets no more events: one note is enough."""
        for name, hook in list(self._hooks.items()):
            is_failed = True
            with guard_extra(f"the feature {name}", self._run.print_note):
                hook.on_event(event)
                is_failed = False
            if is_failed:
                del self._hooks[name]

    def after_folds(self, kept: KeptPredictions) -> list[Path]:
        """Passes the predictions of all folds of a job to all hooks. Returns the files that they wrote."""
        files: list[Path] = []
        for name, hook in self._hooks.items():
            with guard_extra(f"the feature {name}", self._run.print_note):
                files += [Path(file).resolve(strict=True) for file in hook.after_folds(kept)]
        return files

    def describe_end(self) -> list[tuple[str, str]]:
        """Returns all hooks' rows for the last lines of a run."""
        rows: list[tuple[str, str]] = []
        for name, hook in self._hooks.items():
            with guard_extra(f"the feature {name}", self._run.print_note):
                rows += [(str(label), str(text)) for label, text in hook.describe_end()]
        return rows

    def after_run(self, answer: Mapping[str, Any]) -> None:
        """Passes the object of `--json` to all hooks."""
        for name, hook in self._hooks.items():
            with guard_extra(f"the feature {name}", self._run.print_note):
                hook.after_run(answer)
