"""Runs the task of a worker process, and reports a failure: before the event `ready` as a refusal."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from scaleflow.errors import ConfigError
from scaleflow.interfaces.clock import CLOCK
from scaleflow.interfaces.events import Emit, FaultReported, RunRefused
from scaleflow.runs import RunSpec, WorkerProcess
from scaleflow.runs.provenance.tags import mark_process
from scaleflow.runs.user_metrics import user_metrics
from scaleflow.worker.failures import format_failure, is_loss_of_peer, report_failure


def run_worker(spec: RunSpec, emit: Emit, should_stop: Callable[[], bool]) -> bool:
    """Runs the task of a process. The last event always reports how it ended.

    Returns False if the run was refused or failed.
    """
    CLOCK.begin(at_least=spec.started)
    process = WorkerProcess(spec, emit, should_stop)
    with mark_process(spec.folder), user_metrics():
        try:
            spec.task.run(process)
        except Exception as error:
            if process.is_ready:
                report_failure(process, process.explain(error))
                process.after_failure(error)
            else:
                report_refusal(process, error)
            return False
        finally:
            process.unlock_folder()
    return True


def report_refusal(process: WorkerProcess, error: Exception) -> None:
    """Reports that there is no run. An error that does not explain itself leaves a traceback in the log."""
    if isinstance(error, ConfigError):
        process.emit(RunRefused(str(error)))
        return
    traceback.print_exc()
    message = f"{format_failure(error, process.spec.plan)}; the traceback is in {process.spec.log}"
    # A process that lost a peer does not know why the peer ended. If the peer refused the run, the launcher knows.
    if is_loss_of_peer(error):
        process.emit(FaultReported(message, lost_peer=True))
    else:
        process.emit(RunRefused(message, keep=True))
