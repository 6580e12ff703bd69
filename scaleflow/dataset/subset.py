"""Splits of a run that is to be looked into, not to learn something (`debug=overfit`, `debug=fast`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaleflow.dataset.splits import Splits, limit_examples
from scaleflow.interfaces import Arrays, Batching, Examples


def repeat_first_batch(splits: Splits, batching: Batching) -> Splits:
    """The first global batch in place of each of an epoch's batches; validated on the same, and not tested."""
    batch = limit_examples(splits.train, batching.global_size)
    train = repeat_examples(batch, batching.steps(len(splits.train)))
    return replace(splits, train=train, validation=None if splits.validation is None else batch, test=None)


def repeat_examples(batch: Examples, times: int) -> Examples:
    """The same examples again and again."""
    if isinstance(batch, Arrays):
        return Arrays(*(np.concatenate([array] * times) for array in (batch.inputs, batch.targets)))
    return replace(batch, dataset=batch.dataset.cache().repeat(times), length=times * len(batch))


def limit_evaluation(splits: Splits, size: int) -> Splits:
    """Validation and test of one batch."""

    def take_first(examples: Examples | None) -> Examples | None:
        return None if examples is None else limit_examples(examples, size)

    return replace(splits, validation=take_first(splits.validation), test=take_first(splits.test))
