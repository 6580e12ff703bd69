"""Says once a day how to start faster."""

from __future__ import annotations

import os
import time

from scaleflow.files.cache import find_cache_folder
from scaleflow.launcher.processes.handover import WARM_ENV, Client

#: No advice is given if the start took less than this.
SLOW_SECONDS = 3.0

DAY_SECONDS = 86_400.0


def suggest_warm(seconds: float) -> str | None:
    """Returns a line about the warm server after a cold start, if none was returned within a day.

    Args:
        seconds: from the start of the command to the first step.
    """
    if Client.files is not None or WARM_ENV in os.environ or seconds < SLOW_SECONDS:
        return None
    said = find_cache_folder(None, "hints") / "warm"
    try:
        if said.exists() and time.time() - said.stat().st_mtime < DAY_SECONDS:
            return None
        said.parent.mkdir(parents=True, exist_ok=True)
        said.touch()
    except OSError:  # it could not be remembered, and would be said at every start
        return None
    return f"note: with {WARM_ENV}=1 in the environment, the next commands start in an instant (scaleflow warm --help)"
