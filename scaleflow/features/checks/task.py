"""The task of the worker of `scaleflow check`. Its work is imported when it runs, as it needs TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleflow.interfaces.events import RunEnded
from scaleflow.runs import Task, WorkerProcess


@dataclass(frozen=True)
class CheckData(Task):
    """Looks at a dataset."""

    report: str  # the path of the page to write
    examples: int  # the most that are looked at, of each split
    schema: Mapping[str, Any] | None = None  # of the run with which the data are compared

    def run(self, process: WorkerProcess) -> None:
        from scaleflow.features.checks.look import look_at_dataset

        look_at_dataset(process.spec.plan, self.report, self.examples, schema=self.schema, emit=process.emit)
        process.emit(RunEnded("FINISHED"))
