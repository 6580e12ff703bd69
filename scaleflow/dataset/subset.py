"""Reduced splits for debugging (`debug=overfit`, `debug=fast`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaleflow.dataset.splits import Splits, limit_examples
from scaleflow.interfaces import Arrays, Batching, Examples


def repeat_first_batch(splits: Splits, batching: Batching) -> Splits:
    """Replaces every training batch of an epoch by the first one; validates on it, too, and drops the test split."""
    batch = limit_examples(splits.train, batching.global_size)
    train = repeat_examples(batch, batching.steps(len(splits.train)))
    return replace(splits, train=train, validation=None if splits.validation is None else batch, test=None)


def repeat_examples(batch: Examples, times: int) -> Examples:
    """Returns the same examples `times` times."""
    if isinstance(batch, Arrays):
        return batch.map(lambda array: np.concatenate([array] * times))
    return replace(batch, dataset=batch.dataset.cache().repeat(times), length=times * len(batch))


def limit_evaluation(splits: Splits, size: int) -> Splits:
    """Limits the validation and test splits to `size` examples."""

    def take_first(examples: Examples | None) -> Examples | None:
        return None if examples is None else limit_examples(examples, size)

    return replace(splits, validation=take_first(splits.validation), test=take_first(splits.test))
