"""A process that computes an exported model in its own runtime. It loads TensorFlow only for TensorFlow's formats.

Start: `python -m scaleflow.features.formats.runtime FORMAT FILE DESCRIPTOR`. The descriptor belongs to a socket.
`multiprocessing.connection` pickles requests and answers. Both processes belong to one command.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ExportError
from scaleflow.features.formats.formats import ExportFormat, list_formats

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray[Any, Any]]

#: Examples to compute before time is measured.
WARM_UP = 10

#: Maximum seconds to wait for the end of the process.
END_SECONDS = 10.0


class RuntimeProcess:
    """A model in its own runtime, in another process."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()

    def compute(self, arrays: Arrays) -> Arrays:
        """Returns outputs by name for inputs by name, [b, ...] each. Raises ExportError if computing fails."""
        outputs: Arrays = self.ask("compute", arrays)
        return outputs

    def measure_ms(self, arrays: Arrays) -> float:
        """Returns the median time per example in ms. Raises ExportError if computing fails."""
        return float(self.ask("measure", arrays))

    def ask(self, what: str, arrays: Arrays) -> Any:
        with self._lock:
            try:
                self._connection.send((what, dict(arrays)))
                is_good, answer = self._connection.recv()
            except (EOFError, OSError) as error:
                code = self._process.wait(END_SECONDS)
                raise ExportError(f"its process ended with exit code {code}") from error
        if not is_good:
            raise ExportError(answer)
        return answer


@contextlib.contextmanager
def start_runtime(form: ExportFormat, path: Path, environment: Mapping[str, str]) -> Iterator[RuntimeProcess]:
    """Runs a model in its own runtime during the block. Raises ExportError if it cannot be loaded.

    Args:
        environment: variables of the process, in addition to this process's variables.
    """
    here, there = socket.socketpair()
    command = [sys.executable, "-m", __name__, form.name, str(path), str(there.fileno())]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=variables)
    there.close()
    connection = Connection(here.detach())
    try:
        runtime = RuntimeProcess(connection, process)
        runtime.ask("load", {})
        yield runtime
    finally:
        connection.close()  # ends the process
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve_requests(name: str, path: Path, connection: Connection) -> None:
    """Answers requests until the connection is closed. An answer is (True, result) or (False, error)."""
    compute: Any = None
    while True:
        try:
            what, arrays = connection.recv()
        except EOFError:
            return
        try:
            if what == "load":
                compute = list_formats()[name].open(path)
                answer = None
            else:
                answer = compute(arrays) if what == "compute" else measure_median(compute, arrays)
        except Exception as error:  # a runtime may raise anything
            connection.send((False, f"{type(error).__name__}: {error}"))
        else:
            connection.send((True, answer))


def measure_median(compute: Any, arrays: Arrays) -> float:
    """Returns the median time in ms, computing one example at a time after WARM_UP examples."""
    count = len(next(iter(arrays.values())))
    examples = []
    for n in range(count):
        examples.append({name: values[n : n + 1] for name, values in arrays.items()})
    times = []
    for example in [*examples[:WARM_UP], *examples]:
        began = time.perf_counter()
        compute(example)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[min(WARM_UP, count) :])


if __name__ == "__main__":
    serve_requests(sys.argv[1], Path(sys.argv[2]), Connection(int(sys.argv[3])))
