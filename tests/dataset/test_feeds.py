"""What comes out of a feed depends on the epoch and the step alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Batching, Stream
from tests.dataset.reading import as_stream, numbered, reader, spread_over

#: 5 steps of 12, the last one of 5 examples.
EXAMPLES = 53
GLOBAL = 12
IN_ORDER = [(list(range(first, min(first + GLOBAL, EXAMPLES))), GLOBAL) for first in range(0, EXAMPLES, GLOBAL)]
FORMS = ("arrays", "stream", "no room on a device")


def batches(replicas: int, accumulate: int) -> dict[str, Any]:
    """Everything the tests below look at, by name."""
    import tensorflow as tf

    from scaleflow import dataset

    tf.random.set_seed(0)  # as `seed=0` does, the default
    strategy = spread_over(replicas)
    arrays = numbered(EXAMPLES)
    portions = Batching(GLOBAL // replicas // accumulate, accumulate, replicas)
    found = {}
    forms: list[tuple[str, Any, float | None]] = [
        ("arrays", arrays, None),
        ("stream", Stream(as_stream(arrays), EXAMPLES), None),
        ("no room on a device", arrays, 1.0),
    ]
    for form, examples, room in forms:
        plain, shuffled, other = (
            reader(strategy, dataset.make_feed(examples, portions, strategy, seed, device_bytes=room))
            for seed in (None, 3, 4)
        )
        found[form] = {
            "plain": plain(0),
            "plain, epoch 1": plain(1),
            "shuffled": shuffled(0),
            "shuffled, epoch 1": shuffled(1),
            "shuffled, from step 2": shuffled(1, 2),
            "other seed": other(0),
        }
    return found


def test_a_feed_gives_each_epoch_once_in_the_order_of_its_seed(isolated: Callable[..., Any]) -> None:
    one = isolated(batches, 1, 1)
    for form in FORMS:
        found = one[form]
        assert found["plain"] == found["plain, epoch 1"] == IN_ORDER, form
        for name in ("shuffled", "shuffled, epoch 1", "other seed"):
            assert sorted(number for numbers, _ in found[name] for number in numbers) == list(range(EXAMPLES)), (
                form,
                name,
            )
            assert [(len(numbers), places) for numbers, places in found[name]] == [(12, 12)] * 4 + [(5, 12)]
        orders = [str(found[name]) for name in ("plain", "shuffled", "shuffled, epoch 1", "other seed")]
        assert len(set(orders)) == len(orders), form
        assert found["shuffled, from step 2"] == found["shuffled, epoch 1"][2:], form
    assert isolated(batches, 2, 2) == one


def of_unknown_shape() -> list[Any]:
    """The batches of a stream whose inputs' shape is known only when they come."""
    import tensorflow as tf

    from scaleflow import dataset

    strategy = spread_over(1)
    arrays = numbered(7)
    examples = list(zip(arrays.inputs, arrays.targets, strict=True))
    signature = tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int32)
    stream = Stream(tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature), 7)
    return reader(strategy, dataset.make_feed(stream, Batching(2, 2, 1), strategy))(0)


def test_a_shape_that_is_not_known_beforehand_is_no_hindrance(isolated: Callable[..., Any]) -> None:
    assert isolated(of_unknown_shape) == [([0, 1, 2, 3], 4), ([4, 5, 6], 4)]


def padding(replicas: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The padding after the last examples, of arrays, records in memory and a stream through a buffer; the same of
    fewer examples than padding; and the first batch of the epoch.
    """
    from scaleflow import dataset
    from scaleflow.dataset.batches.records import cache_records
    from scaleflow.dataset.batches.rows import to_rows

    strategy, batching = spread_over(replicas), Batching(GLOBAL // replicas, 1, replicas)

    def read(examples: int, step: int) -> list[list[int]]:
        arrays = numbered(examples)
        stream = Stream(as_stream(arrays), examples)
        records = cache_records("train", to_rows(replace(stream, decode=lambda x, y: (x, y))))
        feeds = [dataset.make_feed(each, batching, strategy, 3) for each in (arrays, records, stream)]
        return [reader(strategy, each, padding=True)(1, step)[0][0] for each in feeds]

    first = reader(strategy, dataset.make_feed(numbered(EXAMPLES), batching, strategy, 3))(1)[0][0]
    return read(EXAMPLES, 4), read(5, 0), list(first)


@pytest.mark.slow
def test_padding_is_not_one_example_again_and_again(isolated: Callable[..., Any]) -> None:
    one = isolated(padding, 1)
    (arrays, records, stream), few, first = one
    assert arrays == records == first[: GLOBAL - EXAMPLES % GLOBAL]
    assert stream == list(range(GLOBAL - EXAMPLES % GLOBAL))
    for found in few:
        assert Counter(found).most_common()[-1][1] == 1 < Counter(found).most_common()[0][1] == 2
    assert isolated(padding, 2) == one


def few_examples(replicas: int) -> list[Any]:
    from scaleflow import dataset

    strategy = spread_over(replicas)
    portions = Batching(2, 1, replicas)
    arrays = numbered(1)
    forms = (arrays, Stream(as_stream(arrays), 1))
    return [reader(strategy, dataset.make_feed(examples, portions, strategy, 3))(0) for examples in forms]


def test_a_replica_without_an_example_gets_padding(isolated: Callable[..., Any]) -> None:
    assert isolated(few_examples, 2) == [[([0], 4)]] * 2


def tuned() -> dict[str, bool]:
    """Returns whether tf.data tunes what is iterated: batches, and the examples that are read before."""
    from scaleflow import dataset
    from scaleflow.dataset.batches.rows import to_rows

    strategy, portions = spread_over(1), Batching(GLOBAL, 1, 1)
    arrays = numbered(EXAMPLES)
    iterated = {}
    for name, examples in {"arrays": arrays, "stream": Stream(as_stream(arrays), EXAMPLES)}.items():
        feed = dataset.make_feed(examples, portions, strategy, 3)
        iterated |= {f"{name}, batches": feed.batches(1, 5), f"{name}, read before": to_rows(examples).stream()}
        if name == "stream":
            iterated["stream, picked"] = to_rows(examples).batch(4, lambda inputs, *_: inputs)
            iterated["stream, selected"] = to_rows(examples).select([0, 3]).stream()
    return {name: dataset.options().autotune.enabled is not False for name, dataset in iterated.items()}


def read_ahead() -> list[int]:
    """Returns how many batches tf.data makes before one is asked for, of small, large and unknown sizes."""
    import time

    import tensorflow as tf

    from scaleflow.dataset.batches.records import PREFETCHED, prefetch

    found = []
    for width, expected in ((1, 16), ((1 << 26) // 4, 4), (None, 2)):
        made: list[int] = []

        def make(number: Any, made: list[int] = made) -> Any:
            made.append(int(number))
            return np.zeros(1, "float32")

        def call(number: tf.Tensor, make: Any = make, width: int | None = width) -> tf.Tensor:
            value = tf.numpy_function(make, [number], tf.float32)
            return tf.ensure_shape(value, [None]) if width is None else tf.zeros([width]) * tf.ensure_shape(value, [1])

        batches = iter(prefetch(tf.data.Dataset.range(3 * PREFETCHED).map(call)))
        next(batches)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(made) <= expected:
            time.sleep(0.05)
        time.sleep(0.2)  # for more than are expected
        found.append(len(made) - 1)
    return found


def test_few_large_batches_are_read_ahead(isolated: Callable[..., Any]) -> None:
    assert isolated(read_ahead) == [16, 4, 2]


def test_no_iterator_waits_for_a_thread_that_tunes_it(isolated: Callable[..., Any]) -> None:
    assert not any(isolated(tuned).values())


def join_columns() -> Any:
    import tensorflow as tf

    from scaleflow.dataset.batches.feeds import Columns

    random = np.random.default_rng(0)
    widths = {"b": (1,), "a": (1,), "d": (), "c": (), "e": (2,), "picture": (2, 3), "f": (1,)}
    inputs = {name: random.normal(size=(5, *shape)).astype("f") for name, shape in widths.items()}
    inputs["code"], inputs["word"] = random.integers(0, 9, 5), np.array(list("abcde"), object)
    parts = inputs, random.integers(0, 9, 5), random.normal(size=5).astype("f")
    columns = Columns(parts)
    joined = [tf.gather(tf.constant(array), [3, 0]) for array in columns.join(parts)]
    return parts, len(joined), tf.nest.map_structure(lambda each: each.numpy(), columns.divide(joined))


def test_columns_are_gathered_together_and_come_back_in_their_places(isolated: Callable[..., Any]) -> None:
    (inputs, *rest), count, (found, *others) = isolated(join_columns)
    assert count == 6, "a, b, f; c, d and the weights; code and the targets; e; picture; word"
    for name, array in inputs.items():
        expected = [b"d", b"a"] if name == "word" else array[[3, 0]].tolist()
        assert found[name].tolist() == expected, name
    assert [each.tolist() for each in others] == [each[[3, 0]].tolist() for each in rest]
