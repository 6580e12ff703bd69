"""Splits of a run that is to be looked into, not to learn something (`debug=overfit`, `debug=fast`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaleflow.dataset.splits import Splits, limited
from scaleflow.interfaces import Arrays, Batching, Examples


def first_batch(splits: Splits, batching: Batching) -> Splits:
    """The first global batch in place of each of an epoch's batches; validated on the same, and not tested."""
    batch = limited(splits.train, batching.global_size)
    train = repeated(batch, batching.steps(len(splits.train)))
    return replace(splits, train=train, validation=None if splits.validation is None else batch, test=None)


def repeated(batch: Examples, times: int) -> Examples:
    """The same examples again and again."""
    if isinstance(batch, Arrays):
        return Arrays(*(np.concatenate([array] * times) for array in (batch.inputs, batch.targets)))
    return replace(batch, dataset=batch.dataset.cache().repeat(times), length=times * len(batch))


def one_evaluation(splits: Splits, size: int) -> Splits:
    """Validation and test of one batch."""

    def few(examples: Examples | None) -> Examples | None:
        return None if examples is None else limited(examples, size)

    return replace(splits, validation=few(splits.validation), test=few(splits.test))
