"""Runs the worker of a command that is not a run itself, and shows what it reports."""

from __future__ import annotations

from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces.events import Event, FaultReported, Note, RunEnded, RunRefused, StageBegan
from scaleflow.launcher.display import IMPORTING, Display
from scaleflow.launcher.processes.server_start import start_fork_server
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.processes.worker_process import start_workers
from scaleflow.launcher.recording.monitor import POLL_SECONDS
from scaleflow.runs import EventReader, EventWriter, RunSpec
from scaleflow.worker.train import run_worker


def supervise_worker(spec: RunSpec, stop: StopRequest, display: Display) -> list[Event]:
    """Runs one worker to its end, and shows its stages and notes as they arrive.

    Returns all events of the worker. The last ones are missing if `stop` was set. Raises ConfigError if the worker
    refused its work, and RunError if it failed.
    """
    display.begin_stage(IMPORTING)
    reader = EventReader(spec.events)
    events: list[Event] = []

    def look() -> None:
        for event in reader.read():
            events.append(event)
            if isinstance(event, Note | RunEnded | RunRefused | StageBegan):
                display.show_event(event)

    if spec.plan.debug.inline:
        display.close()  # a debugger needs the terminal
        run_worker(spec, EventWriter(spec.events), stop.is_set)
        look()
    else:
        with start_fork_server() as server, start_workers([spec], [{}], server) as (process,):
            while process.is_alive and not stop.is_set():
                process.wait(POLL_SECONDS)
                look()
            look()
            if stop.is_set():
                return events
            if not events or not isinstance(events[-1], RunEnded | RunRefused):
                raise RunError(process.find_reason().why)
    last = events[-1]
    if isinstance(last, FaultReported):
        raise RunError(last.error)
    if isinstance(last, RunRefused):
        message = last.message.replace(f"; the traceback is in {spec.log}", "")  # the log is deleted
        raise (RunError if last.keep else ConfigError)(message)
    return events
