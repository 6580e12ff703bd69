"""Runs a worker or a parameter server of `strategy=parameter_server`, which executes what the coordinator schedules."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from scaleflow.cluster.engines import find_engine
from scaleflow.cluster.gpus import drop_assigned_devices
from scaleflow.cluster.network import is_listening, wait_until_closed
from scaleflow.cluster.tf_config import TF_CONFIG, parse_tf_config
from scaleflow.interfaces.events import Emit, Note, PeersMet, RunEnded, Waiting
from scaleflow.runs import RunSpec, RunState

#: Seconds between two checks for the coordinator, or for the end of the run.
SECONDS_BETWEEN_LOOKS = 1.0

#: Seconds to wait for the event `end`, which the coordinator's launcher may write after the coordinator is gone.
SECONDS_FOR_LAST_WORD = 10.0


def serve_task(spec: RunSpec, emit: Emit) -> NoReturn:
    """Serves the coordinator until it is gone, or until the launcher ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # this process has nothing to save
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # so that the log ends with the error
    task = parse_tf_config(os.environ.get(TF_CONFIG))
    chief = task.peers[0]
    from scaleflow import strategy

    emit(Waiting(spec.plan.cluster.start_seconds, task.peers))
    strategy.serve(drop_assigned_devices(spec.plan.hardware, os.environ))
    while not is_listening(chief):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    emit(PeersMet())
    emit(Note(f"{spec.name} serves the coordinator at {chief}"))
    patience = spec.plan.cluster.stall_seconds or spec.plan.cluster.start_seconds
    has_ended = wait_until_closed(chief, patience)
    why = "the coordinator has ended" if has_ended else f"no answer from the coordinator ({chief}) for {patience:g} s"
    if find_engine(spec.plan.cluster).restarts_failed_only and not is_run_finished(spec.folder):
        emit(RunEnded("KILLED", f"{why}, and the run is not finished"))
    elif has_ended:
        emit(Note(f"{why}; how the run ended is in its record"))
        emit(RunEnded("FINISHED"))
    else:
        emit(RunEnded("FAILED", why))
        os._exit(1)
    os._exit(0)


def is_run_finished(folder: Path) -> bool:
    """Returns whether the run in a folder ended as FINISHED. Waits `SECONDS_FOR_LAST_WORD` for its end."""
    deadline = time.monotonic() + SECONDS_FOR_LAST_WORD
    while (status := RunState.read(folder).status) is None and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return status == "FINISHED"
