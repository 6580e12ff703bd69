"""Records that are decoded many at once give what those that are decoded one by one give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.interfaces import Batching, Stream
from tests.dataset.files import prepared
from tests.dataset.reading import reader, spread_over
from tests.dataset.test_records import EXAMPLES, Files, options


class Portions(Files):
    """The same examples, up to 8 of them decoded in a call; no record is kept in memory by its place."""

    def load(self, split: str) -> Stream:
        import tensorflow as tf

        def decode(names: tf.Tensor, numbers: tf.Tensor) -> Any:
            is_bad = tf.reduce_any(tf.equal(numbers[:, None], [-1, *self.bad]), axis=1)
            tf.debugging.assert_less_equal(tf.shape(numbers)[0], 8)
            with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(is_bad), ["not a number", names])]):
                return tf.cast(tf.stack([numbers, -numbers], axis=1), tf.float32), numbers

        return dataclasses.replace(super().load(split), decode=decode, at_once=8)


def epochs(held: bool) -> Any:
    """Two epochs of both, the second from step 2 on; what is left without bad ones."""
    from scaleflow import dataset
    from scaleflow.dataset.batches import records

    if not held:
        records.RECORD_BYTES = 1000
    strategy = spread_over(2)
    found = []
    for source in (Files(), Portions()):
        train = dataset.prepare_splits(source, options(cache="none"), 0).train
        read = reader(strategy, dataset.make_feed(train, Batching(6, 1, 2), strategy, 3))
        found.append((isinstance(train, records.Records), read(0), read(1, 2)))
    bad = (0, 8, 9, EXAMPLES - 1)
    skipped = [prepared(lambda kind=kind: kind(bad=bad), on_bad_example="skip") for kind in (Files, Portions)]
    refused = prepared(lambda: Portions(bad=(9,)), cache="memory")
    return found, skipped, refused


@pytest.mark.slow
@pytest.mark.parametrize("held", [True, False])
def test_many_at_once_are_the_same_examples_in_the_same_order(isolated: Callable[..., Any], held: bool) -> None:
    (single, several), (left, same), refused = isolated(epochs, held)
    assert single[0] is several[0] is held
    assert several == single
    assert sorted(number for numbers, _ in several[1] for number in numbers) == list(range(EXAMPLES))
    counts, (note, about_test) = same
    assert "test/0 (" in about_test
    assert counts == left[0] == {"train": EXAMPLES - 4, "test": 4}
    assert f"4 of the {EXAMPLES}" in note
    for number in (0, 8, 9, EXAMPLES - 1):
        assert f"train/{number} (" in note
    assert "train/9" in refused
    assert "not a number" in refused
