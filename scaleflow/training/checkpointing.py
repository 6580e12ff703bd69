"""Decides when a session saves its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scaleflow.interfaces import Best, Checkpoints, Snapshot
from scaleflow.training.monitor import BestValue
from scaleflow.training.worker_sync import WorkerSync


class Checkpointing:
    """Saves the snapshots of one run when they are due.

    Args:
        checkpoints: stores the snapshots; None for no checkpoints.
        best: the value that selects the best checkpoint; None for no best checkpoint.
        ends_as_best: whether the model of the best checkpoint is tested and exported at the end.
        modes: `Objective.modes`, for `best`; None: those of the loss alone.

    Attributes:
        best: the best value so far.
        saved_position: (epoch, step) of the last checkpoint, or of the one that the session continues from.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None = None,
        best: Best | None = None,
        ends_as_best: bool = False,
        modes: Mapping[str, str] | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self.best = BestValue(best, modes or {"loss": "min"})
        self.ends_as_best = ends_as_best and checkpoints is not None
        self.saved_position: tuple[int, int] | None = None
        self._unsaved_seconds = 0.0

    def steps_left(self, step: int) -> int | None:
        """Returns the number of steps until the next checkpoint is due; None if that is not known beforehand."""
        return None if self.checkpoints is None else self.checkpoints.steps_left(step)

    def count_call(self, step: int, seconds: float) -> bool:
        """Records the duration of a call that ended at `step`; returns whether a checkpoint is due."""
        self._unsaved_seconds += seconds
        return self.checkpoints is not None and self.checkpoints.is_due(step, self._unsaved_seconds)

    def is_due_after(self, epoch: int) -> bool:
        """Returns whether a checkpoint is due at the end of an epoch, counted from 1."""
        return self.checkpoints is not None and self.checkpoints.is_due_after(epoch)

    def save(
        self,
        position: tuple[int, int],
        make_snapshot: Callable[[], Snapshot],
        is_best: bool = False,
        is_due: bool = True,
    ) -> None:
        """Saves a checkpoint of a position (epoch, step), unless there is one already.

        A position that is the best is saved again: a checkpoint from before its evaluation does not contain that. If it
        `is_due` for no other reason, it may be kept in memory until the next one.
        """
        if self.checkpoints is None or (self.saved_position == position and not is_best):
            return
        snapshot = make_snapshot()
        if not is_due:
            self.checkpoints.hold(snapshot)
            return
        self.saved_position = position
        self._unsaved_seconds = 0.0
        self.checkpoints.save(snapshot, is_best)

    def wait(self) -> None:
        """Waits until everything is written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def finish(self) -> None:
        """Waits until the checkpoints are where they are kept; for the end of the run. It raises nothing."""
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def load_best(self, sync: WorkerSync) -> Snapshot | None:
        """Loads the best checkpoint, if all workers can read it. All workers must call it."""
        assert self.checkpoints is not None
        self.checkpoints.publish()
        sync(0.0)  # no worker reads before the writing worker is done
        has_best = self.best.step is not None  # the stored one may be of a metric that the run no longer monitors
        best = self.checkpoints.load_best() if has_best else None
        return None if sync.any(best is None) else best
