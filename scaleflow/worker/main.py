"""The worker process.

It reads a `RunSpec` from one line of standard input and runs its task (`process.py`). A further empty line allows it to
emit `ready`. The launcher keeps standard input open; when it closes, the worker saves and ends. The fork server calls
`main` in a fork; without it the worker runs as `python -m scaleflow.worker.main`. The worker reports through events and
never connects to the tracking store.
"""

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import BinaryIO, NoReturn

from scaleflow.cluster.engines import find_engine
from scaleflow.cluster.gpus import drop_assigned_devices
from scaleflow.cluster.network import NO_PROXY, is_listening, no_proxy_for, wait_until_closed
from scaleflow.cluster.tasks import process_names
from scaleflow.cluster.tf_config import TF_CONFIG, parse_tf_config
from scaleflow.interfaces.events import Emit, Event, Note, PeersMet, ProcessStarted, RunEnded, RunReady, Waiting
from scaleflow.interfaces.secret_masking import MaskedStream, find_environment_secrets, remember_secrets
from scaleflow.runs import EventWriter, RunSpec, RunState
from scaleflow.worker import keras_import
from scaleflow.worker.process import run_worker

#: Seconds that a worker may take to save and end after its launcher is gone.
SECONDS_TO_SAVE = 30.0


def end_with_launcher(pipe: BinaryIO, released: threading.Event, stop: threading.Event, patience: float) -> None:
    """Releases this process at the launcher's first byte, and asks it to save and end when the launcher is gone.

    If the process hangs in a collective operation, it is ended after `patience` seconds. `pipe` reaches its end when
    the launcher is gone. `stop` is set to request the end.
    """
    while pipe.read(1):
        released.set()
    print("the launcher has ended, so this worker ends, too", file=sys.stderr, flush=True)
    if patience and released.is_set():
        stop.set()
        time.sleep(patience)
    os._exit(1)


#: Seconds between two checks for the coordinator, or for the end of the run.
SECONDS_BETWEEN_LOOKS = 1.0

#: Seconds to wait for the event `end`. The coordinator's launcher may write it after the coordinator is gone.
SECONDS_FOR_LAST_WORD = 10.0


def serve_task(spec: RunSpec, emit: Emit) -> NoReturn:
    """Serves the coordinator until it is gone, or until the launcher ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # this process has nothing to save
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # so that the error is the last line of the log
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
    """Returns whether the run in a folder ended as FINISHED. Waits up to `SECONDS_FOR_LAST_WORD` for its end."""
    deadline = time.monotonic() + SECONDS_FOR_LAST_WORD
    status = RunState.read(folder).status
    while status is None and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        status = RunState.read(folder).status
    return status == "FINISHED"


def main() -> None:
    """Runs the process. It ends without waiting for TensorFlow's threads."""
    stop = threading.Event()
    released = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides how to react to Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    remember_secrets(find_environment_secrets())
    pipe = os.fdopen(os.dup(0), "rb")
    spec = RunSpec.from_line(pipe.readline())
    sys.stdout = MaskedStream(sys.stdout)
    sys.stderr = MaskedStream(sys.stderr)
    set_cluster_variables(spec)
    # A remote launcher may continue the run on other machines: events of both processes must not mix.
    patience = 0.0 if find_engine(spec.plan.cluster).is_remote else SECONDS_TO_SAVE
    threading.Thread(target=end_with_launcher, args=(pipe, released, stop, patience), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    keras_import.import_keras()
    finished = False
    try:
        emit = EventWriter(spec.events)
        emit(ProcessStarted(spec.name, os.getpid()))
        if spec.serves:
            serve_task(spec, emit)
        finished = run_worker(spec, hold_ready(emit, released), stop.is_set)
    except OSError:  # the events cannot be written; the launcher also notices it and reports it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if finished else 1)


def set_cluster_variables(spec: RunSpec) -> None:
    """Sets the environment variables that describe the cluster to TensorFlow."""
    if len(process_names(spec.plan)) == 1:
        os.environ.pop(TF_CONFIG, None)  # with TF_CONFIG, a strategy of one process would wait for others
    if TF_CONFIG in os.environ:
        os.environ[NO_PROXY] = no_proxy_for(os.environ, parse_tf_config(os.environ[TF_CONFIG]).peers)


def hold_ready(emit: Emit, released: threading.Event) -> Emit:
    """Returns an `emit` that delays `ready` until the launcher knows that the store can be used."""

    def emit_released(event: Event) -> None:
        if isinstance(event, RunReady):
            released.wait()
        emit(event)

    return emit_released


if __name__ == "__main__":
    main()
