"""Datasets: sources of examples, and the one pipeline that is behind every source."""

from scaleflow.dataset.augment import augmented
from scaleflow.dataset.bad import Bad, explained, first_bad
from scaleflow.dataset.feed import feed
from scaleflow.dataset.few import first_batch, one_evaluation
from scaleflow.dataset.looks import targets_at_hand
from scaleflow.dataset.records import decoded
from scaleflow.dataset.splits import Splits, prepare

__all__ = [
    "Bad",
    "Splits",
    "augmented",
    "decoded",
    "explained",
    "feed",
    "first_bad",
    "first_batch",
    "one_evaluation",
    "prepare",
    "targets_at_hand",
]
