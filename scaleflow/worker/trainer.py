"""The state of a process that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import Emit
from scaleflow.interfaces.hooks import TrainedRun
from scaleflow.runs import RunSpec, WorkerProcess

if TYPE_CHECKING:
    from scaleflow.training import Session, WorkerSync
    from scaleflow.worker.build import TrainingSetup
    from scaleflow.worker.runtime import StartupTimer


@dataclass
class Trainer:
    """The state of a process that trains. `train_model` sets the fields one after another; before that they are
    missing.

    Attributes:
        process: the process, with the spec, the events and the request to stop. When the setup is built, the spec gets
            its plan, in which numbers have replaced the words that depend on the data.
        timer: measures the parts of the start.
        setup: the data, the model and the engine, checked and traced. After training it gets the learned answers.
        worker_sync: makes all workers decide the same and stop together.
        session: the training, at its first step or at its newest checkpoint.
    """

    process: WorkerProcess
    timer: StartupTimer | None = None
    setup: TrainingSetup = field(init=False)
    worker_sync: WorkerSync = field(init=False)
    session: Session = field(init=False)

    @property
    def spec(self) -> RunSpec:
        return self.process.spec

    @property
    def plan(self) -> Plan:
        return self.process.spec.plan

    @property
    def emit(self) -> Emit:
        return self.process.emit

    @property
    def should_stop(self) -> Callable[[], bool]:
        return self.process.should_stop

    @property
    def run(self) -> TrainedRun:
        """The run as hooks see it, after the setup is built."""
        spec = self.spec
        return TrainedRun(
            plan=spec.plan,
            folder=spec.folder,
            log=spec.log,
            is_chief=spec.records,
            is_resumed=spec.is_resumed,
            is_job=spec.parent is not None,
            splits=self.setup.splits,
            objective=self.setup.engine.objective,
            emit=self.emit,
            should_stop=self.should_stop,
        )
