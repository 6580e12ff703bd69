"""Jobs that do not train, to test without TensorFlow what a sweep does with its jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf

from scaleflow.config.parse import flatten_config
from scaleflow.interfaces import Plan, Status
from scaleflow.interfaces.events import Event, MetricsLogged, RunEnded, RunReady
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.prepare import PreparedRun
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.runs import EventWriter
from scaleflow.runs.provenance.collect import read_code
from scaleflow.runs.provenance.record import Provenance, write_data_state, write_launch_state
from scaleflow.worker.metadata import identify_files

Ended = Status | Literal["REFUSED"]

CODES: Mapping[Ended, int] = {"FINISHED": 0, "FAILED": 1, "KILLED": 143, "REFUSED": 2}


class FakeLaunch:
    """Replaces `launch_run`: writes and reports the events of a run that ends with a given status.

    Args:
        statuses: how each job ends, in the order in which they are launched; all others are FINISHED.
        measured: gives the metrics of a plan.

    Attributes:
        runs: the prepared runs, in the order in which they were launched.
    """

    def __init__(
        self, statuses: Sequence[Ended] = (), measured: Callable[[Plan], Mapping[str, float]] | None = None
    ) -> None:
        self._statuses = list(statuses)
        self._measured = measured or (lambda plan: {"val/loss": 1.0 / plan.training.epochs})
        self.runs: list[PreparedRun] = []

    @property
    def plans(self) -> list[Plan]:
        return [run.spec.plan for run in self.runs]

    @property
    def folders(self) -> list[Path]:
        return [run.spec.folder for run in self.runs]

    @property
    def resume_numbers(self) -> list[int]:
        return [run.resume_number for run in self.runs]

    def __call__(
        self,
        run: PreparedRun,
        *,
        stop: StopRequest,
        on_event: Callable[[Event], None],
        **others: object,
    ) -> Outcome:
        self.runs.append(run)
        status = self._statuses.pop(0) if self._statuses else "FINISHED"
        if status == "REFUSED":
            return Outcome(CODES[status], error="the test refuses it")
        plan, files = run.spec.plan, run.spec.files
        write = EventWriter(files.events)

        def emit(event: Event) -> None:
            write(event)
            on_event(event)

        params = {key: str(value) for key, value in flatten_config(plan.config).items()} | dict(plan.choices)
        replicas = plan.hardware.logical_devices if plan.strategy.name == "mirrored" else 1
        resolved = {"replicas": replicas, "global_batch_size": 32, "cache": "none", "steps_per_epoch": 1}
        params |= {f"resolved.{key}": str(value) for key, value in resolved.items()}
        resumed = 0 if run.resume_number else None
        emit(RunReady("fake", params=params, steps=1, epochs=1, parent=run.spec.parent, resumed=resumed))
        write_launch_state(files, Provenance(run.resume_number, read_code(plan.config, plan.search)))
        write_data_state(files, run.resume_number, {"files": identify_files(plan)})
        emit(MetricsLogged(1, dict(self._measured(plan))))
        status = "KILLED" if stop.is_set() else status
        write(RunEnded(status, "the test lets it fail" if status == "FAILED" else ""))
        write.close()
        if run.resume_number:
            files.resume_overrides(run.resume_number).write_text("[]\n")
        else:
            files.config.write_text(OmegaConf.to_yaml(OmegaConf.create(run.composed.raw)))
        return Outcome(CODES[status])
