"""The worker's task of `scaleflow check`. Its work needs TensorFlow and is imported when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleflow.interfaces.events import RunEnded
from scaleflow.runs import Task, WorkerProcess


@dataclass(frozen=True)
class CheckData(Task):
    """Checks a dataset."""

    report: str  # path of the page to write
    examples: int  # maximum per split
    schema: Mapping[str, Any] | None = None  # schema of the run to compare with

    def run(self, process: WorkerProcess) -> None:
        from scaleflow.features.checks.look import look_at_dataset

        look_at_dataset(process.spec.plan, self.report, self.examples, schema=self.schema, emit=process.emit)
        process.emit(RunEnded("FINISHED"))
