"""Values that are not finite: their check, and rollbacks to an earlier checkpoint (`training.on_nan`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from scaleflow.errors import NotFinite, RunError
from scaleflow.interfaces import Checkpoints, Snapshot, Training
from scaleflow.training.worker_sync import WorkerSync

ADVICE = "try a lower optimizer.learning_rate, or training.clip_norm=1.0"


def check_finite(model: keras.Model, tensors: Mapping[str, np.ndarray[Any, Any]], step: int) -> None:
    """Checks that the trainable weights and the optimizer's state are finite, before they are saved or exported.

    Args:
        model: its variables tell which weights are trainable.
        tensors: what `Engine.read_state` returned.
        step: the step after which it was read.

    Raises:
        NotFinite: if they are not.
    """
    trained = {f"model/{index}" for index, v in enumerate(model.variables) if v.trainable}
    for name, value in tensors.items():
        is_checked = name in trained or name.startswith("optimizer/")
        if is_checked and value.dtype.kind not in "iub" and not np.isfinite(value).all():
            raise NotFinite(step, "the weights are")


class Rollbacks:
    """The rollbacks of one run. Each lowers the learning rate.

    Attributes:
        count: rollbacks so far.
        rate_factor: the learning rate is this factor times the configured one.
        limit: the most rollbacks.
    """

    def __init__(self, options: Training) -> None:
        self.count = 0
        self.rate_factor = 1.0
        self.limit = options.nan_rollbacks
        self._options = options

    @property
    def is_enabled(self) -> bool:
        return self._options.on_nan == "rollback"

    def next_values(self) -> tuple[int, float]:
        """Returns `count` and `rate_factor` after one more rollback."""
        return self.count + 1, self.rate_factor * self._options.nan_rate_factor

    def load_snapshot(self, error: NotFinite, checkpoints: Checkpoints | None, sync: WorkerSync) -> Snapshot:
        """Loads the newest checkpoint from before an error, and deletes later ones. All workers must call it.

        Raises:
            NotFinite: `error`, if `training.on_nan` is `stop`, there are no checkpoints, or no update caused it.
            RunError: after `training.nan_rollbacks` rollbacks, or if no checkpoint is old enough.
        """
        if checkpoints is not None:
            checkpoints.wait()
        if not self.is_enabled or checkpoints is None or not error.last_cause:
            raise error
        if self.count >= self.limit:
            raise RunError(f"{error.fact}, after training.nan_rollbacks={self.limit} rollbacks; {ADVICE}") from error
        checkpoints.publish()
        sync(0.0)  # no worker reads before the writing worker is done
        snapshot = checkpoints.load_newest(before=error.last_cause)
        if not sync.is_same(str(snapshot and snapshot.step)):
            raise RunError(f"{error.fact}, and the workers do not see the same checkpoints to go back to") from error
        if snapshot is None:
            raise RunError(f"{error.fact}, and there is no checkpoint from before; {ADVICE}") from error
        sync(0.0)  # no worker deletes while others read
        checkpoints.drop_from(snapshot.step + 1)
        return snapshot
