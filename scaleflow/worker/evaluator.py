"""TF_CONFIG's evaluator: a process beside those that train, which evaluates each new checkpoint into the same run.

It sees of the others only the checkpoints' folder. There it appends what it finds to `evaluations.jsonl`, and the
chief, whose events are the run's, hands that on; the chief's `end.json` there says that nothing more will come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.events import EventReader, EventWriter
from scaleflow.interfaces import Emit

if TYPE_CHECKING:
    from scaleflow.worker.build import TrainingSetup

EVALUATIONS = "evaluations.jsonl"
END = "end.json"
SECONDS_BETWEEN_LOOKS = 0.5


def run_evaluator(
    setup: TrainingSetup, folder: Path, emit: Emit, should_stop: Callable[[], bool], is_alone: Callable[[], bool]
) -> str:
    """Evaluates each checkpoint that comes into a folder, until it is said that no more will come.

    Args:
        setup: with a validation split.
        folder: the checkpoints'.
        emit: takes the same metrics for this process's own record.
        should_stop: whether it was.
        is_alone: whether those that train are gone; asked now and then.

    Returns:
        The run's status, as far as this process knows.
    """
    from scaleflow import checkpoint

    shelf = checkpoint.CheckpointStore(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    tell = EventWriter(folder / EVALUATIONS)
    seen = {event["checkpoint"] for event in EventReader(folder / EVALUATIONS).read()} & set(shelf.steps())
    while True:
        is_over = (folder / END).is_file()  # before the look, so that the last one is seen
        new = [step for step in shelf.steps() if step not in seen]
        for step in new:
            seen.add(step)
            try:
                snapshot = shelf.read(step)
            except checkpoint.DamagedCheckpoint:  # or dropped meanwhile: a newer one is there
                continue
            setup.engine.restore_model(snapshot.tensors)
            assert setup.validation is not None
            values = {f"val/{name}": value for name, value in setup.engine.evaluate(setup.validation).items()}
            found = {"step": snapshot.host["updates"], "values": values}
            tell("metrics", checkpoint=step, **found)
            emit("metrics", **found)
            emit("note", text=f"checkpoint at step {step}: " + ", ".join(f"{k} {v:.4f}" for k, v in values.items()))
        if should_stop():
            return "KILLED"
        if not new:
            if is_over or is_alone():
                return "FINISHED"
            time.sleep(SECONDS_BETWEEN_LOOKS)


class EvaluationRelay:
    """The chief's reports, and among them what the evaluator has found.

    Args:
        folder: the checkpoints'.
        emit: takes both.
        is_resumed: whether what is found there already is of this run.
    """

    def __init__(self, folder: Path, emit: Emit, is_resumed: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / END).unlink(missing_ok=True)  # of the run's life before
        found = folder / EVALUATIONS
        self._folder = folder
        self._reader = EventReader(found, 0 if is_resumed or not found.exists() else found.stat().st_size)
        self._emit = emit
        self._lock = threading.Lock()
        self._last = -1

    def __call__(self, event: str, /, **fields: Any) -> None:
        with self._lock:
            self._forward()
            self._emit(event, **fields)

    def _forward(self) -> None:
        for found in self._reader.read():
            self._last = max(self._last, found["checkpoint"])
            self._emit("metrics", step=found["step"], values=found["values"])

    def wait_for(self, step: int, seconds: float) -> bool:
        """Until the checkpoint at a step was evaluated, but not longer than that; gives whether it was."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._forward()
                if self._last >= step:
                    return True
            time.sleep(SECONDS_BETWEEN_LOOKS / 5)
        return False

    def end(self) -> None:
        """Says that no more checkpoints will come."""
        (self._folder / END).write_text("{}\n")
