"""`training.epochs=by_size` and `training.batch_size=by_size`: how many steps suit a number of training examples."""

from __future__ import annotations

import math
from dataclasses import replace

from scaleflow.interfaces import BY_SIZE, Training

#: The least and the largest global batch, and the largest one of more than `MANY` examples.
LEAST_BATCH, MOST_BATCH, LARGE_BATCH = 32, 256, 1024

MANY = 20_000

#: An epoch has about so many steps, as far as the batch is within its limits.
STEPS_PER_EPOCH = 16

#: The epochs of up to `ENOUGH` examples. Then they become fewer, as the square root of the number of examples grows.
EPOCHS, FEWEST_EPOCHS, ENOUGH = 64, 8, 10_000


def choose_length_by_size(options: Training, examples: int, parts: int) -> Training:
    """Returns options with numbers in place of `by_size`.

    Args:
        options: the config group `training`.
        examples: of the training split.
        parts: the number of equal parts that a global batch is divided into.
    """
    if options.epochs == BY_SIZE:
        epochs = round(EPOCHS * min(1.0, math.sqrt(ENOUGH / max(examples, 1))))
        options = replace(options, epochs=max(epochs, FEWEST_EPOCHS))
    if options.batch_size == BY_SIZE and options.global_batch_size is None:
        most = MOST_BATCH if examples <= MANY else LARGE_BATCH
        size = min(max(2 ** round(math.log2(max(examples / STEPS_PER_EPOCH, 1))), LEAST_BATCH), most)
        options = replace(options, global_batch_size=-(-size // parts) * parts)
    return options
