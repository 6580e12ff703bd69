"""The process that fits the baselines while the worker trains: `python -m scaleflow.worker.baseline_process FOLDER`.

It reads the rows in the run's folder, and writes the metrics there, so that a run that is resumed has them, too. Its
end tells the worker that they are there. It imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scaleflow.errors import read_reason
from scaleflow.interfaces import FAILED_FIT
from scaleflow.interfaces.events import Emit, Note
from scaleflow.interfaces.extras import guard_extra
from scaleflow.runs import RunFolder, RunSpec

#: The baselines, as notes name them.
FITTED_BASELINES = "boosting and the linear model, to compare with"

#: Seconds between two looks at whether the run has to stop.
STOP_SECONDS = 0.1

#: The priority of the process: those that train go first.
NICE = 5


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
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(files.path)],
        stdin=subprocess.PIPE,  # nothing is written: the process ends when this one does
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        process_group=0,  # keeps Ctrl-C from the child
    )


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    threading.Thread(target=end_with_worker, daemon=True).start()
    fit_and_write(RunFolder(Path(sys.argv[1])))


def end_with_worker() -> None:
    """Ends this process when the worker has closed standard input, or is gone."""
    os.read(0, 1)
    os._exit(1)


def fit_and_write(files: RunFolder) -> None:
    """Fits the baselines, writes their metrics, and deletes the rows. A failure leaves the run without baselines.

    Then the file of their metrics has the reason.
    """
    try:
        import numpy as np

        from scaleflow.evaluation.baseline_models import BaselineData, fit_baselines

        data = BaselineData.load(files.baseline_data)
        outputs: dict[str, Any] = {}
        values = fit_baselines(data, outputs)
        if data.keeps_outputs:
            if data.test_weights is not None:
                outputs["weights"] = data.test_weights
            np.savez(files.baseline_outputs, targets=data.test_targets, **outputs)
        part = files.baselines.with_suffix(".part")
        part.write_text(json.dumps(values), encoding="utf-8")
        part.replace(files.baselines)
    except Exception as error:  # such as a full disk, little memory, or a table that scikit-learn cannot fit
        with contextlib.suppress(OSError):
            reason = f"{type(error).__name__}: {read_reason(error)}"
            files.baselines.write_text(json.dumps({FAILED_FIT: reason}), encoding="utf-8")
    finally:
        files.baseline_data.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
