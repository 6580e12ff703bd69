"""A source as one split with all of its examples, for an evaluation of all of them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.rows import to_rows
from scaleflow.dataset.pipeline.source_view import SourceView
from scaleflow.interfaces import Arrays, Examples, Stream


class WholeSource(SourceView):
    """A source whose split `train` has the examples of all splits of another source, each once.

    Args:
        source: the other source.
    """

    splits = ("train",)

    def load(self, split: str) -> Examples:
        return join_examples([self.source.load(each) for each in self.source.splits])


def join_examples(parts: list[Examples]) -> Examples:
    """Returns the examples of several splits as one; their weights are 1 where only others have weights."""
    if len(parts) == 1:
        return parts[0]
    rows = [to_rows(each) for each in parts]
    is_weighted = any(each.is_weighted for each in rows)
    arrays = [add_weights(each) if is_weighted else each for each in rows if isinstance(each, Arrays)]
    if len(arrays) == len(rows):
        joined = Arrays(*tf.nest.map_structure(lambda *parts: np.concatenate(parts), *(each.parts for each in arrays)))
        places = [each.rows for each in arrays if each.rows is not None]  # of a file from which splits are drawn
        return replace(joined, rows=np.concatenate(places)) if len(places) == len(arrays) else joined
    streams = [each.stream().map(weigh) if is_weighted else each.stream() for each in rows]
    whole = functools.reduce(tf.data.Dataset.concatenate, streams)
    return Stream(whole, sum(map(len, rows)), faults=[fault for each in rows for fault in each.faults])


def add_weights(arrays: Arrays) -> Arrays:
    return arrays if arrays.weights is not None else replace(arrays, weights=np.ones(len(arrays), np.float32))


def weigh(*example: Any) -> tuple[Any, ...]:
    return example if len(example) == 3 else (*example, tf.constant(1.0))
