"""Reads all targets of a split, without its inputs as far as that is possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from scaleflow.dataset.pipeline.blocks import Blocks
from scaleflow.dataset.pipeline.cache import refuse_unreadable
from scaleflow.dataset.pipeline.records import call_decode, to_record
from scaleflow.interfaces import Arrays, Examples

BATCH = 1024


def read_targets(split: str, examples: Examples) -> Iterator[Any]:
    """Yields the targets of a split in batches, in their order: arrays [b, ...], or dicts of them.

    Of a stream, tf.data prunes `decode` to what the target needs: a file that only the input comes from is not read.

    Raises:
        ConfigError: if an example cannot be read.
    """
    if isinstance(examples, Arrays):
        yield examples.targets
        return
    if isinstance(examples, Blocks):
        with refuse_unreadable(split, examples):
            yield from (targets for _, targets in examples.slabs().as_numpy_iterator())
        return
    records = examples.dataset.take(len(examples))
    size = examples.at_once if examples.decode is not None else None
    targets = (records if size is None else records.batch(size)).map(
        lambda *record: call_decode(examples, to_record(record))[1], num_parallel_calls=tf.data.AUTOTUNE
    )
    with refuse_unreadable(split, examples):
        yield from (targets.batch(BATCH) if size is None else targets).as_numpy_iterator()
