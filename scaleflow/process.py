"""Worker processes: started, told what to do, watched, and ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scaleflow.cluster import TF_CONFIG
from scaleflow.errors import WorkerDied
from scaleflow.events import Reader
from scaleflow.worker import Job


class WorkerProcess:
    """One worker: a process that ends when the launcher does, its output in a log of its own.

    Args:
        job: what it is told.
        environment: added to the launcher's, in which TF_CONFIG does not count.
    """

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        self.job = job
        self.was_ended = False
        self._environment = environment
        if not job.goes_on:
            job.log.unlink(missing_ok=True)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._first_event = self.job.events.stat().st_size if self.job.events.exists() else 0
        with self.job.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "scaleflow.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited(), **self._environment},
                process_group=0,  # Ctrl-C reaches the launcher alone
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; its exit says why
            process.stdin.write(self.job.to_json().encode() + b"\n")
            process.stdin.flush()
        return process

    def start_again(self) -> str:
        """Starts one that is lost again, at the same address and with the same log; gives how it was lost."""
        how = how_it_ended(self._process.returncode)
        self._close_pipe()
        self._process = self._start()
        return how

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_lost(self) -> bool:
        """Whether it has ended otherwise than well."""
        return self._process.poll() not in (None, 0)

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def stop(self) -> None:
        """Asks it to end after the call that it is in."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        if self.is_alive:
            self.was_ended = True
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._close_pipe()

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def reason(self) -> tuple[str, bool]:
        """Why it ended, and whether that is its own word: a refusal, or a fault that it reported."""
        for event in reversed(list(Reader(self.job.events, self._first_event).read())):
            if event["event"] in ("refused", "fault"):
                return event.get("message") or event["error"], True
        died = WorkerDied(how_it_ended(self._process.returncode), last_lines(self.job.log), self.job.name)
        return str(died), False


@contextlib.contextmanager
def started(jobs: Sequence[Job], environments: Sequence[Mapping[str, str]]) -> Iterator[list[WorkerProcess]]:
    """The workers of a run on this machine, the chief first; none outlives the block."""
    workers: list[WorkerProcess] = []
    try:
        for job, environment in zip(jobs, environments, strict=True):
            workers.append(WorkerProcess(job, environment))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()


def inherited() -> dict[str, str]:
    """The launcher's environment: Keras on TensorFlow whatever keras.json says, the log written as it comes.

    Without TF_CONFIG, which would make a strategy of one process wait for others.
    """
    kept = {key: value for key, value in os.environ.items() if key != TF_CONFIG}
    return {**kept, "KERAS_BACKEND": "tensorflow", "PYTHONUNBUFFERED": "1"}


def how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def last_lines(log: Path, count: int = 3) -> str:
    """The end of a log, without what TensorFlow's runtime says of itself."""
    with log.open(errors="replace") as lines:
        own = (
            line.strip()
            for line in lines
            if line.strip() and not re.match(r"[IWE]\d{4} |WARNING: All log|To enable the following", line)
        )
        return " | ".join(deque(own, count))
