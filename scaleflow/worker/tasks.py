"""The tasks of runs: train a model, find a setting. Their work is imported when they run, as it needs TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scaleflow.interfaces.trials import Trial
from scaleflow.runs import Task, WorkerProcess


@dataclass(frozen=True)
class TrainModel(Task):
    """Trains a model, and exports it."""

    trains: ClassVar[bool] = True

    def run(self, process: WorkerProcess) -> None:
        from scaleflow.worker.train import train_model

        train_model(process)


@dataclass(frozen=True)
class FindSetting(Task):
    """Trains for a short time to find a setting."""

    trial: Trial  # which setting, and how

    def run(self, process: WorkerProcess) -> None:
        from scaleflow.worker.trials import find_setting

        find_setting(process, self.trial)
