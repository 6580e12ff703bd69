"""The worker's part of fitting baselines: starts the process that does it, and waits for its end.

The process reads the rows in the run's folder, and writes the metrics there, so that a resumed run has them, too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from scaleflow.interfaces.events import Emit, Note
from scaleflow.interfaces.extras import guard_extra
from scaleflow.runs import RunFolder, RunSpec

#: The baselines, as notes name them.
FITTED_BASELINES = "boosting and the linear model, to compare with"

#: Seconds between two looks at whether the run has to stop.
STOP_SECONDS = 0.1


class BaselineProcess:
    """The process that fits the baselines of a run; None if its folder has no rows for them."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, should_stop: Callable[[], bool]) -> bool:
        """Waits for the end of the process; returns False if the run has to stop before."""
        while self._process is not None:
            try:
                self._process.wait(STOP_SECONDS)
                return True
            except subprocess.TimeoutExpired:
                if should_stop():
                    return False
        return True

    @property
    def failure(self) -> str | None:
        """How a process ended that died, such as by a signal; None if there was none, or it has written a result."""
        if self._process is None or not self._process.returncode:
            return None
        return f"their process ended with exit code {self._process.returncode}"


@contextlib.contextmanager
def fit_meanwhile(spec: RunSpec, emit: Emit) -> Iterator[BaselineProcess]:
    """Fits the baselines to the rows that the chief has written, if there are some, while the block lasts.

    If the process is ended before it is done, the rows stay, and a resumed run fits them.
    """
    process = None
    if spec.records and spec.files.baseline_data.exists():
        with guard_extra(FITTED_BASELINES, lambda text: emit(Note(text))):
            process = start_process(spec.files)
    try:
        yield BaselineProcess(process)
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def start_process(files: RunFolder) -> subprocess.Popen[bytes]:
    paths = [str(path) for path in (files.baseline_data, files.baselines, files.baseline_outputs)]
    return subprocess.Popen(
        [sys.executable, "-m", "scaleflow.features.baselines.fit", *paths],
        stdin=subprocess.PIPE,  # nothing is written: the process ends when this one does
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        process_group=0,  # keeps Ctrl-C from the child
    )
