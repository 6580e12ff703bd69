"""The task of a process that runs a script. Its work needs TensorFlow, so it is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scaleflow.runs import Task, WorkerProcess


@dataclass(frozen=True)
class RunScript(Task):
    """Runs the user's script, and records what it trains."""

    trains: ClassVar[bool] = True

    def run(self, process: WorkerProcess) -> None:
        from scaleflow.features.script.run_script import run_script

        run_script(process)
