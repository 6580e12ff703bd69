"""A source as one split with all of its examples, for an evaluation of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.records import decode_records
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
    is_weighted = any(to_rows(each).is_weighted for each in parts)
    if all(isinstance(each, Arrays) for each in parts):
        weighted = [add_weights(each) if is_weighted else each for each in parts if isinstance(each, Arrays)]
        joined = Arrays(
            *tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *(each.parts for each in weighted))
        )
        rows = [each.rows for each in weighted if each.rows is not None]  # those of a file from which splits are drawn
        return replace(joined, rows=np.concatenate(rows)) if len(rows) == len(weighted) else joined
    streams = [to_stream(each, is_weighted) for each in parts]
    whole = streams[0].dataset
    for each in streams[1:]:
        whole = whole.concatenate(each.dataset)
    faults = [fault for each in streams for fault in each.faults]
    return Stream(whole, sum(map(len, streams)), faults=faults)


def add_weights(arrays: Arrays) -> Arrays:
    return arrays if arrays.weights is not None else replace(arrays, weights=np.ones(len(arrays), np.float32))


def to_stream(examples: Examples, is_weighted: bool) -> Stream:
    """Returns a stream of decoded examples, with weights if it `is_weighted`."""
    if isinstance(examples, Arrays):
        arrays = add_weights(examples) if is_weighted else examples
        return Stream(tf.data.Dataset.from_tensor_slices(arrays.parts), len(arrays))
    dataset = decode_records(examples, examples.dataset.take(len(examples)))

    def weigh(*example: Any) -> tuple[Any, ...]:
        return example if len(example) == 3 else (*example, tf.constant(1.0))

    return Stream(dataset.map(weigh) if is_weighted else dataset, len(examples), faults=examples.faults)
