"""Hydra's callbacks of the jobs of a sweep. Hydra calls those of single runs and of the sweep itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext

from scaleflow.errors import RunError
from scaleflow.sweep.composer import JobComposer, JobRequest, drop_hydra
from scaleflow.sweep.ledger import JobHistory


class JobCallbacks:
    """Calls `on_job_start` and `on_job_end` around each run of a job, one at a time.

    Args:
        context: Hydra's context, with the callbacks.
        composer: composes the configs that they get.
        task: the task function that they get.
    """

    def __init__(self, context: HydraContext, composer: JobComposer, task: Any) -> None:
        self._callbacks, self._composer, self._task = context.callbacks, composer, task
        self._begun: dict[Path, Any] = {}

    def begin(self, request: JobRequest, folder: Path) -> None:
        """Says that a job begins in its folder, which exists."""
        if self._callbacks.callbacks:
            with self._composer.compose_job(request, folder) as config:
                self._begun[folder] = config
                self._callbacks.on_job_start(config=self._begun[folder], task_function=self._task)

    def end(self, request: JobRequest, folder: Path, status: str, reason: str) -> None:
        """Says how a job has ended; nothing if it has not begun."""
        if (config := self._begun.pop(folder, None)) is None:
            return
        error, metrics = RunError(f"{status}: {reason}"), JobHistory.read(folder).metrics
        value = metrics.get(request.metric) if status == "FINISHED" else error
        returned = make_return(request.overrides, status == "FINISHED", value)
        returned.cfg, returned.hydra_cfg = drop_hydra(config), config
        with self._composer.compose_job(request, folder):
            self._callbacks.on_job_end(config=config, job_return=returned)


def make_return(overrides: Sequence[str], is_completed: bool, value: object) -> JobReturn:
    """Returns what Hydra's launchers return for a job: its result, or the error with which it failed."""
    returned = JobReturn(overrides, working_dir=str(Path.cwd()), task_name="scaleflow")
    returned.return_value = value
    returned.status = JobStatus.COMPLETED if is_completed else JobStatus.FAILED
    return returned
