"""TF_CONFIG's evaluator: a process that evaluates each new checkpoint while other processes train.

The processes share only the folder of the checkpoints. The evaluator appends its metrics to `evaluations.jsonl` there.
The chief adds them to the events of the run, and writes `end.json` when no more checkpoints will come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.cluster.network import is_listening
from scaleflow.interfaces import Plan, Status
from scaleflow.interfaces.events import Emit, Event, MetricsLogged, Note
from scaleflow.interfaces.formatting import format_number
from scaleflow.runs import EventReader, EventWriter

if TYPE_CHECKING:
    from scaleflow.worker.build import TrainingSetup

EVALUATIONS = "evaluations.jsonl"
END = "end.json"
SECONDS_BETWEEN_LOOKS = 0.5


def is_chief_gone(plan: Plan) -> Callable[[], bool]:
    """Returns a function that says whether an evaluator's chief has not answered for `cluster.start_seconds`."""
    answered_at = time.monotonic()

    def is_gone() -> bool:
        nonlocal answered_at
        if plan.chief is None or is_listening(plan.chief):
            answered_at = time.monotonic()
        return time.monotonic() - answered_at > plan.cluster.start_seconds

    return is_gone


def run_evaluator(setup: TrainingSetup, folder: Path, emit: Emit, should_stop: Callable[[], bool]) -> Status:
    """Evaluates each checkpoint that appears in a folder, until `end.json` says that no more come or the chief is gone.

    Args:
        setup: everything that was built, with a validation split.
        emit: receives the same metrics, for the events of this process.
        should_stop: returns whether the user asked for the end.
    """
    from scaleflow import checkpoint

    store = checkpoint.CheckpointStore(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / EVALUATIONS
    write = EventWriter(file)
    is_alone = is_chief_gone(setup.plan)
    evaluated = {event.checkpoint for event in EventReader(file).read() if isinstance(event, MetricsLogged)}
    seen = {step for step in store.steps() if step in evaluated}
    while True:
        is_over = (folder / END).is_file()  # read before the steps are listed, so that the last one is not missed
        new = [step for step in store.steps() if step not in seen]
        for step in new:
            seen.add(step)
            try:
                snapshot = store.read(step)
            except checkpoint.DamagedCheckpoint:  # or it was deleted because there are newer ones
                continue
            setup.engine.restore_model(snapshot.tensors)
            assert setup.feeds.validation is not None
            values = {f"val/{name}": value for name, value in setup.engine.evaluate(setup.feeds.validation).items()}
            metrics = MetricsLogged(snapshot.host["updates"], values)
            write(replace(metrics, checkpoint=step))
            emit(metrics)
            emit(Note(f"checkpoint at step {step}: " + ", ".join(f"{k} {format_number(v)}" for k, v in values.items())))
        if should_stop():
            return "KILLED"
        if not new:
            if is_over or is_alone():
                return "FINISHED"
            time.sleep(SECONDS_BETWEEN_LOOKS)


class EvaluationRelay:
    """Adds the metrics of the evaluator, in the folder of the checkpoints, to the events of the chief.

    If it `is_resumed`, metrics that are already in the folder belong to this run.
    """

    def __init__(self, folder: Path, emit: Emit, is_resumed: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / END).unlink(missing_ok=True)  # of an earlier attempt
        file = folder / EVALUATIONS
        self._folder = folder
        self._reader = EventReader(file, 0 if is_resumed or not file.exists() else file.stat().st_size)
        self._emit = emit
        self._lock = threading.Lock()
        self._last = -1

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._forward()
            self._emit(event)

    def _forward(self) -> None:
        for event in self._reader.read():
            if isinstance(event, MetricsLogged) and event.checkpoint is not None:
                self._last = max(self._last, event.checkpoint)
                self._emit(MetricsLogged(event.step, event.values))

    def wait_for(self, step: int, seconds: float) -> bool:
        """Waits at most `seconds` until the checkpoint at `step` is evaluated; returns whether it is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._forward()
                if self._last >= step:
                    return True
            time.sleep(SECONDS_BETWEEN_LOOKS / 5)
        return False

    def end(self) -> None:
        """Tells the evaluator that there will be no more checkpoints."""
        (self._folder / END).write_text("{}\n")
