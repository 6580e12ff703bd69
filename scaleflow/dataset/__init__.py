"""Datasets: sources of examples, and the one pipeline that is behind every source."""

from scaleflow.dataset.feed import feed
from scaleflow.dataset.few import first_batch, one_evaluation
from scaleflow.dataset.splits import Splits, prepare

__all__ = ["Splits", "feed", "first_batch", "one_evaluation", "prepare"]
