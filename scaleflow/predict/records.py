"""Reads the input of TFRecord files. It imports TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.tfrecord import read_feature
from scaleflow.errors import read_reason


def read_records(
    path: str, name: str, spec: Mapping[str, Any], compression: str, at_once: int
) -> Iterator[tuple[np.ndarray[Any, Any], str]]:
    """Yields values [b, ...] of a feature in order, and at the end why the rest cannot be read; empty if it can.

    Args:
        path: of the file.
        name: of the feature.
        spec: of the feature; a picture stays encoded.
        compression: of the file, as TensorFlow names it.
        at_once: the most values of one array.
    """
    feature = read_feature(f"dataset.features.{name}", spec)

    def parse(record: tf.Tensor) -> tf.Tensor:
        stored = tf.io.parse_single_example(record, {name: feature.stored})[name]
        return stored if spec.get("kind") == "image" else feature.finish(stored)

    records = tf.data.TFRecordDataset(path, compression).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    batches = records.batch(at_once).prefetch(1).as_numpy_iterator()
    while True:
        try:
            yield next(batches), ""
        except StopIteration:
            return
        except tf.errors.OpError as error:
            yield np.zeros(0), explain_fault(path, compression, read_reason(error))
            return


def explain_fault(path: str, compression: str, reason: str) -> str:
    """Returns at which record a file is damaged; if it is whole, why a record is not what the run describes."""
    intact = 0
    try:
        for _ in tf.data.TFRecordDataset(path, compression):
            intact += 1
    except tf.errors.OpError:
        return f"record {intact + 1} is damaged, or the file is cut off there"
    return f"a record is not as dataset.features says: {reason.rpartition('}} ')[2][:300]}"
