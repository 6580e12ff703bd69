"""Epochs of `training.steps_per_epoch` go through the whole of a stream, and sorted data are noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Batching, Inputs, Outputs, Stream
from tests.dataset.reading import as_stream, numbered, spread_over
from tests.training.interrupted import differences

#: 53 examples make 5 steps of 12; an epoch has 2 of them.
EXAMPLES, GLOBAL, STEPS, EPOCHS = 53, 12, 2, 9


class Sorted:
    """A stream that is not in memory: the first half has class 0, the second half class 1."""

    inputs = Inputs((2,), "float32")
    outputs = Outputs("classification", (2,))
    splits = ("train", "validation")

    def load(self, split: str) -> Stream:
        import tensorflow as tf

        count = EXAMPLES if split == "train" else 12
        numbers = tf.data.Dataset.range(count)
        return Stream(numbers.map(lambda n: (tf.cast(tf.stack([n, -n]), tf.float32), n * 2 // count)), count)


def read_short(replicas: int, accumulate: int) -> dict[str, Any]:
    """The numbers of the examples of each step, as each reader of a feed gets them."""
    import tensorflow as tf

    from scaleflow import dataset

    strategy = spread_over(replicas)
    batching = Batching(GLOBAL // replicas // accumulate, accumulate, replicas)
    stream = Stream(as_stream(numbered(EXAMPLES)), EXAMPLES)
    feed = dataset.make_feed(stream, batching, strategy, 3, buffer=8, steps_per_epoch=STEPS)

    def numbers(fetched: Any) -> list[int]:
        parts = strategy.experimental_local_results(fetched[1])
        assert all(np.all(mask.numpy() == 1) for mask in strategy.experimental_local_results(fetched[2]))
        return [int(number) for part in parts for number in part.numpy()]

    opened = feed.open(0, 0)
    found: dict[str, Any] = {"read on": [numbers(feed.fetch(opened)) for _ in range(EPOCHS * STEPS)]}
    found["opened anew"] = [numbers(feed.fetch(feed.open(n // STEPS, n % STEPS))) for n in range(EPOCHS * STEPS)]
    found["fit"] = [batch[1].numpy().tolist() for batch in feed.batches(EPOCHS, STEPS)]
    contexts = [tf.distribute.InputContext(2, worker, 2) for worker in range(2)]
    if replicas == 2:
        position = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
        shares = [iter(feed._trace_dataset(context)(*position)) for context in contexts]  # type: ignore[attr-defined]
        found["two workers"] = [
            [int(number) for share in shares for number in next(share)[1].numpy()] for _ in range(EPOCHS * STEPS)
        ]
    return found


def test_short_epochs_continue_where_the_last_one_ended(isolated: Callable[..., Any]) -> None:
    one, two = isolated(read_short, 1, 2), isolated(read_short, 2, 1)
    order = one["read on"]
    for found in (one, two):
        for name, read in found.items():
            assert read == order, name
    flat = [number for batch in order for number in batch]
    for first in range(0, len(flat) - EXAMPLES, EXAMPLES):  # each pass has all examples
        assert sorted(flat[first : first + EXAMPLES]) == list(range(EXAMPLES))
    assert flat[:EXAMPLES] != flat[EXAMPLES : 2 * EXAMPLES]


@pytest.mark.parametrize(
    "more",
    [
        (),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                ("training.engine=fit", "training.steps_per_loop=1"),
                ("strategy=mirrored", "hardware.logical_devices=2"),
                ("dataset.validation=0.2", "dataset.limit=40", "dataset.augment={mixup: 0.4}"),
            )
        ),
    ],
)
@pytest.mark.slow
def test_a_resumed_run_of_short_epochs_ends_as_a_whole_one(
    isolated: Callable[..., Any], plan: Callable[..., Any], more: tuple[str, ...]
) -> None:
    base = (
        *("hardware=cpu", "tracking=none", "model=linear", "dataset.cache=none", "dataset.shuffle=8"),
        *("dataset._target_=tests.dataset.test_short_epochs.Sorted", "dataset.validation=validation"),
        *("training.global_batch_size=8", "training.steps_per_loop=1", "training.steps_per_epoch=3"),
        "training.epochs=5",
    )
    changed, notes = isolated(differences, plan(*base, *more), [2, 5, 11])
    assert not changed
    assert notes == []


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("targets", "classes", "window", "found"),
    [
        (np.repeat([0, 1], 5000)[:2000], 2, 1000, "have 1 of 2 classes"),
        (np.repeat([0, 1], 600), 2, 100, "differ from window to window"),
        (np.repeat(np.arange(10), 1000)[:2000], 10, 2000, "have 2 of 10 classes"),
        (np.arange(3000.0), None, 3000, "rise"),
        (-np.arange(3000.0) + RANDOM.normal(size=3000), None, 3000, "fall"),
        (np.sin(np.arange(3000) / 300), None, 100, "differ from window to window"),
        (RANDOM.integers(0, 2, 2000), 2, 100, None),
        (RANDOM.integers(0, 1000, 2000), 1000, 100, None),
        ((RANDOM.pareto(0.3, 2000)).astype(int).clip(0, 9999), 10_000, 2000, None),  # many rare classes
        (np.tile(np.repeat(np.arange(10), 50), 20), 10, 2000, None),  # the window has all classes
        (RANDOM.normal(size=2000), None, 50, None),
        (np.zeros(30), 2, 10, None),
    ],
)
def test_sorted_targets_are_found(targets: Any, classes: int | None, window: int, found: str | None) -> None:
    from scaleflow.dataset.batches.sorted_data import describe_sorted

    text = describe_sorted(targets.astype(np.float64), classes, window)
    assert text is None if found is None else text is not None and found in text


def describe_sorted(shuffle: int | None) -> Any:
    from scaleflow import dataset
    from tests.dataset.files import options

    train = dataset.prepare_splits(Sorted(), options(cache="none"), 0).train
    return dataset.describe_stream_order(train, Sorted.outputs, shuffle)


def describe_limited(limit: int) -> Any:
    from scaleflow import dataset
    from tests.dataset.files import options

    outputs = Outputs("classification", (4,))
    train = dataset.prepare_splits(Sorted(), options(cache="memory", limit=limit), 0).train
    return dataset.describe_first_examples(f"dataset.limit={limit}", "train", train, outputs)


def test_a_note_says_that_a_window_is_small_compared_with_sorted_data(isolated: Callable[..., Any]) -> None:
    note = isolated(describe_sorted, 20)
    assert note.startswith("dataset.shuffle: the training data seem to be sorted: ")
    assert "has 20 of 53 examples" in note
    assert isolated(describe_sorted, 53) is None
    assert "the first 52 have 2 of 4 classes" in isolated(describe_limited, 52)
