"""The task of most runs: train a model. Its work needs TensorFlow, so it is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scaleflow.runs import Task, WorkerProcess


@dataclass(frozen=True)
class TrainModel(Task):
    """Trains a model, and exports it."""

    trains: ClassVar[bool] = True

    def run(self, process: WorkerProcess) -> None:
        from scaleflow.worker.train import train_model

        train_model(process)
