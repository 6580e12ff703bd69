"""`training.epochs=by_size` and `training.batch_size=by_size`: how many steps suit a number of training examples."""

from __future__ import annotations

import math
from dataclasses import replace

from scaleflow.interfaces import BY_SIZE, Training

#: The least and the largest global batch.
BATCHES = 32, 256

#: An epoch has about so many steps, as far as the batch is within its limits.
STEPS_PER_EPOCH = 16

EPOCHS = 64


def choose_length_by_size(options: Training, examples: int, parts: int) -> Training:
    """Returns options with numbers in place of `by_size`.

    Args:
        options: the config group `training`.
        examples: of the training split.
        parts: the number of equal parts that a global batch is divided into.
    """
    if options.epochs == BY_SIZE:
        options = replace(options, epochs=EPOCHS)
    if options.batch_size == BY_SIZE and options.global_batch_size is None:
        size = min(max(2 ** round(math.log2(max(examples / STEPS_PER_EPOCH, 1))), BATCHES[0]), BATCHES[1])
        options = replace(options, global_batch_size=-(-size // parts) * parts)
    return options
