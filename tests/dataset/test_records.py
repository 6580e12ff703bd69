"""Streams that are decoded late: their order, where they are kept, and the examples that cannot be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Batching, Dataset, Inputs, Outputs, Stream, Target
from tests.conftest import Command
from tests.dataset.reading import reader, spread_over

EXAMPLES = 53
CACHES = ("auto", "memory", "file", "none")


@dataclasses.dataclass
class Files:
    """Numbered examples behind records (a file's name, a number); some of them cannot be read."""

    bad: tuple[int, ...] = ()
    classes: int = EXAMPLES
    count: int = EXAMPLES
    read: list[int] = dataclasses.field(default_factory=list)

    splits = ("train", "test")
    inputs = Inputs((2,))

    @property
    def outputs(self) -> Outputs:
        return Outputs("classification", (self.classes,))

    def load(self, split: str) -> Stream:
        import tensorflow as tf

        count = self.count if split == "train" else 5
        names = np.array([f"{split}/{number}" for number in range(count)])
        records = tf.data.Dataset.from_tensor_slices((names, np.arange(count, dtype=np.int32)))

        def decode(name: tf.Tensor, number: tf.Tensor) -> Any:
            is_good = tf.reduce_all(tf.constant([-1, *self.bad]) != number)
            tf.py_function(lambda n: self.read.append(int(n)), [number], [])
            with tf.control_dependencies([tf.debugging.Assert(is_good, ["not a number", name])]):
                return tf.cast(tf.stack([number, -number]), tf.float32), number

        return Stream(records, self.count if split == "train" else 5, decode, lambda name, _: name.decode())


def options(**changes: Any) -> Dataset:
    return Dataset(Target("dataset", "nowhere"), **{"validation": None, **changes})


def orders(replicas: int) -> dict[str, Any]:
    """By how a stream is kept: the feed, two epochs, the second from step 2 on, and both for fit."""
    from scaleflow import dataset

    strategy = spread_over(replicas)
    found = {}
    for cache in CACHES:
        train = dataset.prepare_splits(Files(), options(cache=cache), 0).train
        feed = dataset.make_feed(train, Batching(12 // replicas, 1, replicas), strategy, 3)
        read = reader(strategy, feed)
        fitted = [targets.numpy()[mask.numpy() == 1].tolist() for _, targets, mask in feed.batches(2, 5)]
        found[cache] = (type(feed).__name__, read(0), read(1), read(1, 2), fitted)
    return found


@pytest.mark.slow
def test_a_stream_has_one_order_however_it_is_kept(isolated: Callable[..., Any]) -> None:
    found = isolated(orders, 1)
    assert [found[cache][0] for cache in CACHES] == ["ArrayFeed", "ArrayFeed", "FileFeed", "StreamFeed"]
    for cache in CACHES:
        _, first, second, rest, fitted = found[cache]
        assert (first, second) == found["memory"][1:3], cache
        assert rest == second[2:], cache
        assert fitted == [numbers for numbers, _ in [*first, *second]], cache
        for epoch in (first, second):
            assert sorted(number for numbers, _ in epoch for number in numbers) == list(range(EXAMPLES))
    assert first != second
    assert isolated(orders, 2) == found


def decoded_by_workers() -> list[tuple[list[int], list[list[int]]]]:
    """Of two workers with two replicas each: what each decodes for the shares of an epoch, and those shares."""
    import tensorflow as tf

    from scaleflow.dataset.batches.feeds import StreamFeed, worker_positions
    from scaleflow.dataset.batches.records import cache_records
    from scaleflow.dataset.batches.rows import to_rows

    found = []
    for worker in range(2):
        source = Files(count=30)
        stream = cache_records("train", to_rows(source.load("train")))
        for held in (stream, dataclasses.replace(source.load("train"))):
            source.read.clear()
            feed = StreamFeed(held, Batching(4, 1, 4), tf.distribute.get_strategy(), 7, buffer=30)
            context = tf.distribute.InputContext(2, worker, 4)
            mine = feed._order.examples(1, 0, 32, worker_positions(4, context))
            shares = feed._shares(mine, tf.data.Dataset.range(8).filter(worker_positions(1, context)), 4)
            numbers = [targets.numpy()[mask.numpy() == 1].tolist() for _, targets, mask in shares]
            found.append((sorted(source.read), numbers))
    return found


def test_a_worker_decodes_what_its_replicas_train_on_and_no_more(isolated: Callable[..., Any]) -> None:
    found = isolated(decoded_by_workers)
    for first, second in (found[0::2], found[1::2]):
        every = [number for _, shares in (first, second) for share in shares for number in share]
        assert sorted(every) == list(range(30))
        assert [len(share) for share in first[1]] == [4, 4, 4, 4]
        assert [len(share) for share in second[1]] == [4, 4, 4, 2]
    (read, shares), (read_second, shares_second) = found[0::2]  # from memory
    assert read == sorted(number for share in shares for number in share)
    padding = shares[0][:2]  # the first ones of the epoch
    assert read_second == sorted([number for share in shares_second for number in share] + padding)


def bad_examples() -> dict[str, Any]:
    from scaleflow import dataset
    from scaleflow.dataset.batches.rows import to_rows
    from scaleflow.dataset.batches.unreadable import find_first_unreadable

    notes: list[str] = []

    def emit(event: Any) -> None:
        notes.append(event.text)

    def refusal(source: Files, **changes: Any) -> str:
        try:
            dataset.prepare_splits(source, options(**changes), 0, emit=emit)
        except ConfigError as refused:
            return str(refused)
        return ""

    skip = {"on_bad_example": "skip"}
    sets = {}
    for cache in ("memory", "none"):
        splits = dataset.prepare_splits(Files((1, 40)), options(**skip, cache=cache, validation=0.2), 0, emit=emit)
        examples = (splits.train, splits.validation, splits.test)
        sets[cache] = [
            sorted(int(y) for y in e.targets)
            if hasattr(e, "targets")
            else sorted(int(y) for _, y in dataset.decode_records(e).as_numpy_iterator())  # type: ignore[arg-type]
            for e in examples
        ]
    broken = to_rows(Files((40,)).load("train"))
    streamed = dataclasses.replace(broken, dataset=broken.dataset.filter(lambda *_: True))
    long = Files(tuple(range(3, 12)))
    return {
        "sets": sets,
        "notes": list(dict.fromkeys(notes)),
        "kept": refusal(Files((40,))),
        "first": refusal(Files((2,)), cache="none"),
        "late": refusal(Files((40,)), cache="none"),
        "label": refusal(Files(classes=50)),
        "all": refusal(Files(tuple(range(EXAMPLES))), **skip),
        "many": refusal(long, **skip, cache="none") or notes[-2],
        "streamed": str(find_first_unreadable(streamed)),
        "streamed, late": refusal(Streamed(streamed), **skip, cache="none") or notes[-1],
        "short": refusal(ShortOf(Files())),  # type: ignore[arg-type]
    }


class Streamed:
    """A source of one stream, the records of which are not in memory."""

    inputs, outputs, splits = Files.inputs, Outputs("classification", (EXAMPLES,)), ("train",)

    def __init__(self, stream: Stream) -> None:
        import tensorflow as tf

        records = stream.dataset.map(lambda name, number: (name, tf.ensure_shape(number, [])))
        self._stream = dataclasses.replace(stream, dataset=records)

    def load(self, split: str) -> Stream:
        return self._stream


class ShortOf:
    """A source that promises an example too many."""

    def __init__(self, source: Files) -> None:
        self.inputs, self.outputs, self.splits = source.inputs, source.outputs, ("train",)
        self._source = source

    def load(self, split: str) -> Stream:
        stream = self._source.load(split)
        return dataclasses.replace(stream, dataset=stream.dataset.filter(lambda *_: True), length=EXAMPLES + 1)


def test_bad_examples_are_refused_by_name_or_left_out_and_counted(isolated: Callable[..., Any]) -> None:
    found = isolated(bad_examples)
    left = [number for number in range(EXAMPLES) if number not in (1, 40)]
    for train, validation, test in found["sets"].values():
        assert sorted(train + validation) == left
        assert len(validation) == 10
        assert test == [0, 2, 3, 4]
    assert found["sets"]["memory"] == found["sets"]["none"]
    assert found["notes"][:2] == [
        "dataset.on_bad_example=skip: left out 2 of the 53 examples of 'train' that cannot be read: "
        "train/1 (not a number train/1), train/40 (not a number train/40)",
        "dataset.on_bad_example=skip: left out 1 of the 5 examples of 'test' that cannot be read: "
        "test/1 (not a number test/1)",
    ]
    ending = "; use dataset.on_bad_example=skip to leave it out"
    assert found["kept"] == "dataset: train/40 of 'train' cannot be read: not a number train/40" + ending
    assert found["first"] == "dataset: train/2 of 'train' cannot be read: not a number train/2" + ending
    assert found["late"] == ""
    target = "its classification target is not between 0 and 49 50"
    assert found["label"] == f"dataset: train/50 of 'train' cannot be read: {target}{ending}"
    assert found["all"].startswith(
        "dataset.on_bad_example=skip: none of the 53 examples of 'train' can be read: train/0"
    )
    assert found["many"].endswith("train/7 (not a number train/7) and 4 more")
    assert found["streamed"] == "train/40 (not a number train/40)"
    assert found["streamed, late"].endswith("'train' that cannot be read: train/40 (not a number train/40)")
    assert found["short"] == "dataset: the stream of 'train' holds 53 examples, but the source says 54"


def buffers() -> list[Any]:
    """How many examples of some size are shuffled through a buffer, and whether records of a size are held."""
    import tensorflow as tf

    from scaleflow.dataset.batches.feeds import buffer_size
    from scaleflow.dataset.batches.records import cache_records
    from scaleflow.dataset.batches.rows import to_rows

    def stream(size: int, count: int) -> Stream:
        one = tf.zeros([size], tf.uint8)
        return Stream(tf.data.Dataset.range(count).map(lambda n: (one, n)), count, lambda x, n: (x, n))

    cases = [(stream(1 << 20, 1000), None), (stream(1 << 20, 100), None), (stream(1 << 20, 1000), 30)]
    return [buffer_size(*case) for case in cases] + [
        type(cache_records("train", to_rows(stream(size, 300)))).__name__ for size in (1 << 10, 1 << 20)
    ]


def test_held_and_shuffled_rows_are_bounded_in_bytes(isolated: Callable[..., Any]) -> None:
    assert isolated(buffers) == [255, 100, 30, "Records", "StreamRows"]


FAILING = """
import numpy as np
import tensorflow as tf

from scaleflow.interfaces import Inputs, Outputs, Stream


class Photos:
    inputs, outputs, splits = Inputs((2, 2, 3), "uint8", scale=1 / 255), Outputs("classification", (2,)), ("train",)

    def load(self, split):
        good = tf.io.encode_png(np.zeros((2, 2, 3), np.uint8)).numpy()
        contents = [good] * 30 + [b"no image"] + [good] * 9
        records = tf.data.Dataset.from_tensor_slices(([f"photo{n}.png" for n in range(40)], contents, [0, 1] * 20))
        return Stream(records, 40, self.decode, lambda name, *_: name.decode())

    def decode(self, name, content, label):
        return tf.ensure_shape(tf.io.decode_png(content, 3), (2, 2, 3)), label
"""


@pytest.mark.slow
def test_a_failure_while_training_names_the_example_that_can_be_skipped(command: Command) -> None:
    (command.folder / "mine.py").write_text(FAILING)
    words = (
        "dataset._target_=mine.Photos", "dataset.cache=none", "dataset.validation=null", "strategy=multi_worker",
        "hardware=cpu", "tracking=none", "training.batch_size=4", "training.epochs=1", "model.units=[4]",
        "checkpoint=none",
    )  # fmt: skip
    ended = command(*words)
    assert ended.returncode == 1, ended.stderr
    assert "photo30.png of 'train' cannot be read: " in ended.stderr
    assert "use dataset.on_bad_example=skip to leave it out" in ended.stderr
    ended = command(*words, "dataset.on_bad_example=skip")
    assert ended.returncode == 0, ended.stderr
    assert "left out 1 of the 40 examples of 'train' that cannot be read: photo30.png" in ended.stdout + ended.stderr
