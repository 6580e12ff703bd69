"""What can go wrong, as a tree.

    ScaleflowError
    ├── ConfigError        the user asked for something that cannot work: exit 2, no run
    │   └── Unreachable    a store that does not answer now, and may later
    └── RunError           a run began and could not be finished: exit 1, run FAILED
        ├── NotFinite      the loss became NaN or Inf
        ├── RunFailed      the same, told by scaleflow.run: with the run's id, folder and metrics
        ├── ExportError    the saved model does not do what the live one does
        ├── CheckpointError  the run's state could not be saved
        └── WorkerDied     a worker process ended without a word

An error raised by a user's own model or dataset is left as it is while a run is on, and becomes a
`ConfigError` that quotes it before there is one.
"""

from __future__ import annotations

from typing import Literal


class ScaleflowError(Exception):
    """Base of every error that scaleflow raises on purpose."""


class ConfigError(ScaleflowError):
    """What was asked for cannot work.

    The message is what the user reads on stderr: a line or two that name the key, the value found
    and what would work.
    """


class StoreUnreachable(ConfigError):
    """A tracking store does not answer; it may later, without anything being changed."""


class RunError(ScaleflowError):
    """A run that had begun could not be finished; the message is the reason that is recorded."""


class NotFinite(RunError):
    """The loss became NaN or Inf, or the weights did.

    Args:
        step: the optimizer update, counted from 1, whose loss was not finite, or that made the weights so.
        what: which of them.

    Attributes:
        fact: the message without its advice.
        last_cause: the last update that can have made it so; a state from behind it is as bad.
    """

    def __init__(self, step: int, what: Literal["the loss is", "the weights are"] = "the loss is") -> None:
        advice = "try a lower optimizer.learning_rate, training.clip_norm=1.0, or training.on_nan=rollback"
        if step == 1 and what == "the loss is":
            advice = "nothing was updated before it: look for NaN in the dataset's inputs, or in the model"
        self.fact = f"{what} not finite at step {step}"
        super().__init__(f"{self.fact}; {advice}")
        self.step = step
        self.last_cause = step - 1 if what == "the loss is" else step


class ExportError(RunError):
    """The SavedModel, loaded again, does not give the live model's outputs."""


class CheckpointError(RunError):
    """A checkpoint could not be written; those that were are as they were."""


class WorkerDied(RunError):
    """A worker process ended without saying how.

    Args:
        how: the signal or exit status, in words.
        last_lines: the end of its log.
        name: which one it was.
    """

    def __init__(self, how: str, last_lines: str, name: str = "worker 0") -> None:
        super().__init__(f"{name} {how}" + (f"; its last words: {last_lines}" if last_lines else ""))
