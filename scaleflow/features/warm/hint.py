"""Suggests the warm server after a slow start, at most once a day."""

import os
import time
from pathlib import Path

from scaleflow.files.cache import find_cache_folder
from scaleflow.interfaces.events import Event, RunReady
from scaleflow.interfaces.hooks import LauncherHook
from scaleflow.launcher.processes.handover import FORKED_BY, WARM_ENV

#: A start is slow from this many seconds on.
SLOW_SECONDS = 3.0

DAY_SECONDS = 86_400.0


class WarmHint(LauncherHook):
    """Suggests the warm server to a user at a terminal who has neither enabled nor disabled it."""

    def on_event(self, event: Event) -> None:
        """Prints the hint after a slow start."""
        if not isinstance(event, RunReady) or not self.run.is_on_terminal:
            return
        is_decided = bool(FORKED_BY) or WARM_ENV in os.environ
        seconds = (event.time - event.began) / 1000
        if is_decided or seconds < SLOW_SECONDS or not is_due(find_cache_folder(None, "hints") / "warm"):
            return
        self.run.print_note(
            f"with {WARM_ENV}=1 in the environment, the next commands start in an instant (scaleflow warm --help)"
        )


def is_due(mark: Path) -> bool:
    """Returns whether the last hint is more than a day old. If so, marks the file as a new hint."""
    try:
        if mark.exists() and time.time() - mark.stat().st_mtime < DAY_SECONDS:
            return False
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:  # without the mark, the hint would appear at every start
        return False
    return True
