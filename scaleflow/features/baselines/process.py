"""Starts the process that fits the baselines, and waits for its end.

The process reads rows from the run's folder and writes the metrics there, so that a resumed run finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

#: Seconds between two checks whether the run has to stop.
STOP_SECONDS = 0.1


class BaselineProcess:
    """The process that fits a run's baselines. Without a child there is nothing to wait for."""

    def __init__(self, child: subprocess.Popen[bytes] | None = None) -> None:
        self._child = child

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def wait(self, should_stop: Callable[[], bool]) -> bool:
        """Waits for the end of the process. Returns False if the run has to stop first."""
        while self._child is not None:
            try:
                self._child.wait(STOP_SECONDS)
                return True
            except subprocess.TimeoutExpired:
                if should_stop():
                    return False
        return True

    @property
    def failure(self) -> str | None:
        """How the process died, such as by a signal; None if it did not."""
        if self._child is None or not self._child.returncode:
            return None
        return f"their process ended with exit code {self._child.returncode}"

    def end(self) -> None:
        """Kills the process if it is alive. The rows stay, and a resumed run fits the baselines."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()


def start_process(folder: Path) -> BaselineProcess:
    """Starts fitting the baselines to the rows in a run's folder. Raises OSError if the process cannot be started."""
    child = subprocess.Popen(
        [sys.executable, "-m", "scaleflow.features.baselines.fit", str(folder)],
        stdin=subprocess.PIPE,  # nothing is written: the process ends when this one ends
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        process_group=0,  # keeps Ctrl-C from the child
    )
    return BaselineProcess(child)
