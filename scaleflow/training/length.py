"""The length of a run, and its position: epoch and step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import BY_SIZE, Feed, Snapshot, Training

#: The inputs of a position that follow from the data.
INPUTS_FROM_DATA = ("steps_per_epoch", "training_examples")

#: The limits of the global batch that `by_size` chooses. Larger batches take fewer steps, which learn less from the
#: same examples.
MIN_BATCH = 32
MAX_BATCH = 256

#: The approximate number of steps of an epoch with `by_size`, if the batch is within its limits.
STEPS_PER_EPOCH = 16

#: The epochs with `by_size`: `MAX_EPOCHS` for up to `MANY_EXAMPLES` examples, and fewer for more. Ten times as many
#: examples are seen 1.8 times as often in all.
MIN_EPOCHS = 3
MAX_EPOCHS = 64
MANY_EXAMPLES = 10_000


@dataclass(frozen=True)
class Length:
    """The length of a run; `total` is in steps."""

    epochs: int
    steps_per_epoch: int
    total: int
    surplus: int = 0  # how many steps longer the epochs before a change of the data were than the epochs after it


def compute_length(options: Training, feed: Feed, surplus: int = 0) -> Length:
    """Computes the steps of an epoch and of the run.

    Raises ConfigError if `training.steps_per_epoch` is more than the training split has.
    """
    available = feed.batching.steps(feed.examples)
    per_epoch = options.steps_per_epoch or available
    if per_epoch > available:
        raise ConfigError(
            f"training.steps_per_epoch={per_epoch}: the training split's {feed.examples} examples make {available} "
            f"steps of {feed.batching.global_size}; use at most {available}"
        )
    assert options.epochs != BY_SIZE, "the worker fills it in"
    total = options.epochs * per_epoch + surplus
    if options.max_steps:
        total = min(total, options.max_steps)
    epochs = math.ceil((total - surplus) / per_epoch)
    return Length(epochs, per_epoch, total, surplus=surplus)


def choose_length_by_size(options: Training, examples: int, parts: int) -> Training:
    """Replaces `by_size` in options with numbers that suit the size of the training split.

    Args:
        parts: the number of equal parts that a global batch is divided into.
    """
    if options.epochs == BY_SIZE:
        share = min(1.0, (MANY_EXAMPLES / max(examples, 1)) ** 0.75)
        options = replace(options, epochs=max(round(MAX_EPOCHS * share), MIN_EPOCHS))
    if options.batch_size == BY_SIZE and options.global_batch_size is None:
        size = 2 ** round(math.log2(max(examples / STEPS_PER_EPOCH, 1)))
        size = min(max(size, MIN_BATCH), MAX_BATCH)
        options = replace(options, global_batch_size=math.ceil(size / parts) * parts)
    return options


class RunPosition:
    """The position of a run in its length.

    Args:
        feed: of the training split.
        has_new_data: whether the data may differ from the data of the checkpoint that the run continues from.

    Attributes:
        epoch: the epoch of the next step, counted from 0.
        step: the steps of the whole run so far.
        length: the length of the run.
    """

    def __init__(self, options: Training, feed: Feed, has_new_data: bool = False) -> None:
        self.epoch = 0
        self.step = 0
        self.length = compute_length(options, feed)
        self._options = options
        self._feed = feed
        self._has_new_data = has_new_data

    @property
    def first(self) -> int:
        """The index of the next step in its epoch, from 0."""
        return self.step - self.length.surplus - self.epoch * self.length.steps_per_epoch

    @property
    def steps_left(self) -> int:
        """The steps that the run still takes in this epoch."""
        return min(self.length.steps_per_epoch - self.first, self.length.total - self.step)

    @property
    def is_at_end(self) -> bool:
        """Whether all steps of the run are taken."""
        return self.step == self.length.total

    def end_here(self) -> None:
        """Makes this step the last one of the run."""
        self.length = replace(self.length, epochs=self.epoch + 1, total=self.step)

    def read_state(self) -> dict[str, int]:
        """Returns the values for `Snapshot.host`."""
        return {
            **self._list_inputs(),
            "epoch": self.epoch,
            "total": self.length.total,
            "surplus": self.length.surplus,
        }

    def _list_inputs(self) -> dict[str, int]:
        """Returns the inputs that must match for a saved position to be valid."""
        return {
            "steps_per_epoch": self.length.steps_per_epoch,
            "training_examples": self._feed.examples,
            "examples_a_step": self._feed.batching.global_size,
        }

    def check(self, host: Mapping[str, Any]) -> None:
        """Raises ConfigError if the saved state `host` is from other data."""
        for name, value in self._list_inputs().items():
            is_from_data = name in INPUTS_FROM_DATA
            if host[name] == value or (is_from_data and self._has_new_data):
                continue
            advice = ", or add resume_data=changed to continue with other data" if is_from_data else ""
            raise ConfigError(
                f"resume: the run had {host[name]} {name.replace('_', ' ')}, and now has {value}; resume "
                f"it with the same data and global batch{advice}"
            )

    def restore(self, snapshot: Snapshot) -> None:
        """Continues at the position of a snapshot. If the data changed, earlier epochs may have had another length."""
        self.epoch = snapshot.host["epoch"]
        self.step = snapshot.step
        per_epoch = self.length.steps_per_epoch
        saved_per_epoch = snapshot.host["steps_per_epoch"]
        steps_in_epoch = snapshot.step - snapshot.host["surplus"] - self.epoch * saved_per_epoch
        if steps_in_epoch == saved_per_epoch:
            steps_in_epoch = per_epoch
        steps_in_epoch = min(steps_in_epoch, per_epoch)
        surplus = self.step - steps_in_epoch - self.epoch * per_epoch
        self.length = compute_length(self._options, self._feed, surplus)
