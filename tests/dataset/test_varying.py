"""Data that differ at each reading are read again in each epoch, and are not frozen by a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Batching, Outputs
from tests.dataset.files import options
from tests.dataset.reading import spread_over

COUNT, BATCH = 40, 16
NUMBERS = np.arange(COUNT, dtype=np.float32)


class Noisy:
    """A map-style dataset with an augmentation, as in torch."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return NUMBERS[index] + np.random.random(1).astype(np.float32) / 2, index % 2


def noisy() -> Iterator[Any]:
    return (Noisy()[index] for index in range(COUNT))


def make_kinds() -> dict[str, Any]:
    """Each example is its number and a random part below a half; its target is whether the number is odd."""
    import keras
    import tensorflow as tf

    layer = keras.layers.RandomBrightness(0.4, value_range=(0, 100))
    plain = tf.data.Dataset.from_tensor_slices((NUMBERS[:, None], np.arange(COUNT) % 2))
    seeded = plain.map(lambda x, y: (x + tf.random.uniform([1], maxval=0.5), y))  # begins anew in each iterator
    layered = plain.map(lambda x, y: (x + layer(tf.zeros([2, 2, 3]), training=True)[0, 0, :1] / 200, y))
    return {
        "seeded": seeded,
        "layer": layered,
        "map": Noisy(),
        "function": noisy,
        "plain": plain,
        "shuffled": plain.shuffle(COUNT),
        "shuffled and seeded": seeded.shuffle(COUNT),
    }


def read_epochs(kind: str, validation: float | None, replicas: int = 1, **changes: Any) -> dict[str, Any]:
    """The inputs of three epochs in the order of the examples, what is noted, and the digest of the split."""
    import keras

    from scaleflow import dataset
    from scaleflow.errors import ConfigError
    from scaleflow.interfaces.events import Note

    strategy = spread_over(replicas)
    keras.utils.set_random_seed(3)  # as a run does
    kinds, notes = make_kinds(), []
    source = dataset.make_source({"train": kinds[kind], "test": kinds["plain"]}, Outputs("classification", (2,)))

    def emit(event: Any) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    try:
        splits = dataset.prepare_splits(source, options(validation=validation, **changes), 0, emit=emit)
    except ConfigError as error:
        return {"refused": str(error)}
    feed = dataset.make_feed(splits.train, Batching(BATCH // replicas, 1, replicas), strategy, 0)
    epochs, opened = [], None
    for epoch in range(3):
        if opened is None or not feed.continues:
            opened = feed.open(epoch, 0)
        values: list[float] = []
        steps = feed.batching.steps(feed.examples)
        read = list(feed.batches(epoch + 1, steps))[-steps:] if feed.is_indexed else None
        for step in range(steps):
            batch = feed.fetch(opened) if read is None else read[step]
            inputs, _, mask = (
                np.concatenate([part.numpy() for part in strategy.experimental_local_results(each)]) for each in batch
            )
            values += inputs[mask > 0][:, 0].tolist()
        epochs.append(sorted(values))
    return {"epochs": epochs, "notes": notes, "digest": splits.fingerprints["train"].digest}


@pytest.mark.parametrize("kind", ["seeded", "layer", "map", "function"])
def test_random_changes_are_new_in_each_epoch(isolated: Callable[..., Any], kind: str) -> None:
    found, again = isolated(read_epochs, kind, None), isolated(read_epochs, kind, None)
    first, second, third = found["epochs"]
    for epoch in (first, second, third):
        assert np.floor(epoch).tolist() == NUMBERS.tolist()  # each example once
    assert first != second != third != first
    (note,) = found["notes"]
    assert note.startswith("dataset: examples of 'train' differ at each reading")
    assert note.endswith("a resumed run does not repeat them")
    assert found["digest"] == again["digest"]  # a resumed run accepts its data


@pytest.mark.slow
def test_random_changes_are_new_on_two_replicas_and_with_a_held_out_part(isolated: Callable[..., Any]) -> None:
    first, second, _ = isolated(read_epochs, "seeded", 0.25, 2)["epochs"]
    assert np.floor(first).tolist() == np.floor(second).tolist()
    assert first != second
    assert len(first) == 30


@pytest.mark.slow
def test_a_shuffled_dataset_has_one_order_and_keeps_its_held_out_part(isolated: Callable[..., Any]) -> None:
    found, again = isolated(read_epochs, "shuffled", 0.25), isolated(read_epochs, "shuffled", 0.25)
    assert found == again
    assert found["notes"] == []
    assert len(found["epochs"][0]) == 30
    refused = isolated(read_epochs, "shuffled and seeded", 0.25)["refused"]
    assert "dataset.validation=0.25 needs the same example at the same place" in refused
    assert "refused" not in isolated(read_epochs, "shuffled and seeded", None)


@pytest.mark.slow
def test_data_that_do_not_differ_are_cached(isolated: Callable[..., Any]) -> None:
    found = isolated(read_epochs, "plain", None)
    assert found["epochs"][0] == found["epochs"][1]
    assert found["notes"] == []
    frozen = isolated(read_epochs, "seeded", None, cache="memory")
    assert frozen["epochs"][0] == frozen["epochs"][1]
    assert frozen["notes"][1].startswith("dataset.cache=memory: keeps the first reading of the examples")
