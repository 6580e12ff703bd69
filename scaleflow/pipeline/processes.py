"""Starts and watches the processes of stages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from scaleflow.launcher.answer import JSON
from scaleflow.launcher.display import Display
from scaleflow.tracking import RUN_ID

PROGRAM = "scaleflow.pipeline.stage_process"

#: The output of a stage's process, in its folder.
LOG = "stage.log"

#: Seconds to wait for a process of an earlier command that was killed: it saves a checkpoint first.
LEFT_SECONDS = 90.0

#: The exit code of a process that a signal ended, by what Popen returns.
SIGNAL_BASE = 128


class StageProcess:
    """The process of a stage.

    Args:
        name: of the stage, for the terminal.
        words: those after `scaleflow`.
        folder: the stage's folder, which exists.
        environment: variables to add. MLFLOW_RUN_ID is left out: it names the pipeline's own run.

    Raises OSError if it cannot be started.
    """

    def __init__(self, name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = folder / LOG
        self._position = self._log.stat().st_size if self._log.exists() else 0
        self._start = self._position
        command = [sys.executable, "-m", PROGRAM, str(os.getpid()), *words, JSON]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**{key: value for key, value in os.environ.items() if key != RUN_ID}, **environment},
                start_new_session=True,  # Ctrl-C reaches it from here, and once
            )

    @property
    def identity(self) -> tuple[int, float]:
        """The process id, and when the process began, in seconds since the epoch."""
        with contextlib.suppress(psutil.Error):
            return self._process.pid, psutil.Process(self._process.pid).create_time()
        return self._process.pid, 0.0

    def poll(self) -> int | None:
        """Returns the exit code; None while the process is alive."""
        code = self._process.poll()
        return None if code is None else code if code >= 0 else SIGNAL_BASE - code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def show_output(self, display: Display) -> None:
        """Shows the lines that the process has printed since the last call, without its answer."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._position)
            content = log.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._position += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if not line.startswith('{"exit_code":'):
                    display.print_line(f"[{self.name}] {line}")

    def read_stage_answer(self) -> dict[str, Any]:
        """Returns what the command answered; {} if it was killed before."""
        with contextlib.suppress(OSError, ValueError), self._log.open("rb") as file:
            file.seek(self._start)
            lines = [line for line in file.read().splitlines() if line.startswith(b'{"exit_code":')]
            answer: dict[str, Any] = json.loads(lines[-1]) if lines else {}
            return answer
        return {}


def end_left_process(identity: Sequence[float]) -> None:
    """Ends the process of a stage whose pipeline was killed, if it is still alive, and waits for it."""
    pid, began = int(identity[0]), float(identity[1])
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - began) > 1.0:
            return  # another process has its id now
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LEFT_SECONDS
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.1)
