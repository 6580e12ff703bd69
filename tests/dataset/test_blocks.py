"""Rows in blocks: each comes once in an epoch, in an order of (seed, epoch), from any step on and on any replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Arrays, Batching
from tests.dataset.files import options
from tests.dataset.reading import numbered, reader, spread_over

LENGTHS = (40, 0, 25, 60, 10, 33)
FILES = ("a", "a", "a", "b", "b", "c")


class Rows:
    """Numbered rows in blocks, some of which cannot be used."""

    lengths = LENGTHS
    paths = FILES
    malformed: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    sampled = np.arange(0, sum(LENGTHS), 2)

    def __init__(self, faults: Mapping[int, str] = {}) -> None:
        import tensorflow as tf

        self._faults = faults
        self.spec = tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.int32)
        self.blocks_read: list[int] = []

    def read(self, block: int, rows: int | None = None) -> tuple[Arrays, Mapping[int, str]]:
        self.blocks_read.append(block)
        first = sum(LENGTHS[:block])
        end = first + min(LENGTHS[block], rows or LENGTHS[block])
        found = {row - first: reason for row, reason in self._faults.items() if first <= row < end}
        return numbered(sum(LENGTHS)).map(lambda array: array[first:end]), found

    def sample(self) -> tuple[Any, Any]:
        return numbered(sum(LENGTHS)).inputs[self.sampled], self.sampled

    def recall(self, what: str, options: Any, learn: Callable[[], Any]) -> Any:
        return learn()

    def name(self, row: int) -> str:
        return f"row {row}"


#: In how many shards the blocks are read.
SHARDS = (1, 4)


def read_epochs(replicas: int) -> list[Any]:
    """What is read in each number of shards."""
    from scaleflow.dataset.batches.blocks import make_blocks
    from scaleflow.dataset.batches.feeds import BlockFeed

    strategy = spread_over(replicas)
    batching = Batching(8 // replicas, 1, replicas)
    found = []
    for shards in SHARDS:
        rows = Rows()
        feed = BlockFeed(make_blocks(rows), batching, strategy, 3, buffer=20, shards=shards)
        read = reader(strategy, feed)
        epochs = [read(0), read(1), read(0)]
        resumed = read(1, 9)
        rows.blocks_read.clear()
        read(1, feed.batching.steps(feed.examples) - 1)
        last = list(rows.blocks_read)
        other = reader(strategy, feed.reorder(4))(0)
        in_order = reader(strategy, BlockFeed(make_blocks(rows), batching, strategy, None, shards=shards))(0)
        fit = [targets.numpy()[mask.numpy() > 0].tolist() for _, targets, mask in feed.batches(2, 22)]
        found.append((epochs, resumed, last, other, in_order, fit))
    return found


def flat(batches: Any) -> list[int]:
    return [number for batch, _ in batches for number in batch]


def test_each_row_comes_once_in_an_order_of_the_seed_and_the_epoch(isolated: Callable[..., Any]) -> None:
    """And the same rows make a batch on one device and on two."""
    every = list(range(sum(LENGTHS)))
    alone, divided = isolated(read_epochs, 1), isolated(read_epochs, 2)
    for shards, (epochs, resumed, last, other, in_order, fit), on_two in zip(SHARDS, alone, divided, strict=True):
        assert on_two[0] == epochs
        orders = [flat(epoch) for epoch in epochs]
        assert all(sorted(order) == every for order in [*orders, flat(other), flat(in_order)])
        assert orders[0] == orders[2]
        assert len({tuple(order) for order in [*orders, flat(other)]}) == 3
        assert resumed == epochs[1][9:]
        assert 0 < len(last) < 5 * shards  # not all blocks
        assert 0 < len(on_two[2]) < 5 * shards
        assert (flat(in_order) == every) == (shards == 1)
        assert {length for _, length in epochs[0]} == {8}
        assert [list(chain(*batches)) for batches in (fit[:21], fit[21:])] == orders[:2]


def read_worker_shares(cases: list[tuple[int, int]]) -> list[Any]:
    """For so many workers and shards: what all workers read together, and the whole batches."""
    import tensorflow as tf

    from scaleflow.dataset.batches.blocks import make_blocks
    from scaleflow.dataset.batches.feeds import BlockFeed

    found = []
    for workers, shards in cases:
        batching = Batching(12 // workers, 1, workers)
        feed = BlockFeed(make_blocks(Rows()), batching, tf.distribute.get_strategy(), 3, buffer=12, shards=shards)
        contexts = [tf.distribute.InputContext(workers, worker, workers) for worker in range(workers)]
        shares = [
            list(feed._read_shares(0, 2, tf.data.Dataset.range(0), each).as_numpy_iterator()) for each in contexts
        ]
        whole = [(targets.tolist(), mask.tolist()) for _, targets, mask in feed.batches(1, 14).as_numpy_iterator()]
        together = [
            [np.concatenate(parts).tolist() for parts in zip(*step, strict=True)] for step in zip(*shares, strict=True)
        ]
        found.append(([(targets, mask) for _, targets, mask in together], whole[2:]))
    return found


def test_each_worker_reads_its_share_of_a_batch(isolated: Callable[..., Any]) -> None:
    cases = [(2, 1), (2, 2), (2, 4), (3, 4)]
    for case, (together, whole) in zip(cases, isolated(read_worker_shares, cases), strict=True):
        assert together == whole, case


def order_files(
    shards: int, lengths: list[int], seed: int | None, epochs: int = 3, blocks: int = 1
) -> list[list[list[str]]]:
    """For each epoch and shard the file of each block that is read, of files with so many `blocks` each."""
    from scaleflow.dataset.batches.blocks import BlockOrder, make_blocks

    class Files(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.lengths = tuple(lengths)
            self.paths = tuple(str(n // blocks) for n in range(len(lengths)))

    orders = [BlockOrder(make_blocks(Files()), seed, 1, shard, shards) for shard in range(shards)]
    paths = Files().paths
    return [[[paths[each.block] for each in order._arrange(epoch)] for order in orders] for epoch in range(epochs)]


def read_selected_shards() -> Any:
    from scaleflow.dataset.batches.blocks import BlockOrder, make_blocks

    blocks = make_blocks(Rows()).select(np.arange(sum(LENGTHS)) % 3 > 0)
    orders = [BlockOrder(blocks, 3, 20, shard, 4) for shard in range(4)]
    return [order.take(1, np.arange(len(order))).targets.tolist() for order in orders]


def test_shards_have_the_rows_that_were_selected(isolated: Callable[..., Any]) -> None:
    shards = isolated(read_selected_shards)
    assert sorted(chain(*shards)) == [row for row in range(sum(LENGTHS)) if row % 3 > 0]
    assert [len(rows) for rows in shards] == [28] * 4


def test_shards_are_made_of_different_files_in_each_epoch(isolated: Callable[..., Any]) -> None:
    epochs = isolated(order_files, 4, [10] * 12, 3)
    for shards in epochs:
        assert [len(files) for files in shards] == [3] * 4
        assert sorted(chain(*shards)) == sorted(map(str, range(12)))
    assert len({frozenset(shards[0]) for shards in epochs}) == 3


def test_the_blocks_of_a_file_stay_in_one_shard(isolated: Callable[..., Any]) -> None:
    for shards in isolated(order_files, 4, [10] * 12, 3, 3, 3):
        assert sorted(map(sorted, shards)) == [[str(n)] * 3 for n in range(4)]


def test_shards_of_uneven_files_share_at_most_the_files_at_their_ends(isolated: Callable[..., Any]) -> None:
    for shards in isolated(order_files, 3, [1, 50, 7, 22, 3, 90, 14, 8, 31], 3):
        assert len(list(chain(*shards))) <= 9 + 2
        assert len(set(chain(*shards))) == 9


def refuse_shards() -> list[str]:
    from scaleflow.dataset.batches.blocks import check_shards, describe_shards, make_blocks
    from scaleflow.dataset.batches.rows import to_rows
    from scaleflow.errors import ConfigError
    from scaleflow.interfaces import Dataset, Target, Training

    def check(shards: int, examples: Any, size: int, **training: Any) -> None:
        options = Dataset(Target("dataset", "a.Table"), shards=shards, limit=90)
        check_shards(options, Training(**training), examples, size)

    messages = []
    for wanted, examples, size in (
        (2, to_rows(numbered(9)), 8),
        (3, make_blocks(Rows()), 8),
        (8, make_blocks(Rows()), 16),
    ):
        with pytest.raises(ConfigError) as refusal:
            check(wanted, examples, size, global_batch_size=size)
        messages.append(str(refusal.value))
    check(5, make_blocks(Rows()), 10)
    notes = [describe_shards(shards, make_blocks(Rows()), 2) for shards in (1, 3, 4)]
    notes.append(describe_shards(1, make_blocks(Rows()), 8))  # there are fewer blocks than workers
    return [*messages, *map(str, notes)]


def test_shards_that_cannot_be_are_refused_in_words(isolated: Callable[..., Any]) -> None:
    memory, batch, blocks, one, odd, even, many = isolated(refuse_shards)
    assert memory.startswith("dataset.shards=2: only tables that are read while training")
    assert batch.startswith("dataset.shards=3: a global batch of 8 examples has no equal part of each shard")
    assert batch.endswith("or another training.global_batch_size")
    assert blocks.startswith("dataset.shards=8: the training split has 5 blocks with rows within dataset.limit=90")
    assert one == (
        "dataset.shards=1: every worker reads all files in each epoch; with 2, or a multiple of it, each of the 2 "
        "workers reads only its own part"
    )
    assert odd.startswith("dataset.shards=3: several workers read the same files")
    assert (even, many) == ("None", "None")


def divide() -> Any:
    from scaleflow.dataset.batches.blocks import make_blocks
    from scaleflow.dataset.batches.records import to_mask
    from scaleflow.dataset.batches.splits import hold_out_examples
    from scaleflow.dataset.batches.unreadable import find_first_unreadable
    from scaleflow.dataset.reading.files import draw_rows
    from scaleflow.interfaces import DivisionKeys, Split

    blocks = make_blocks(Rows({5: "is wrong", 70: "is worse", 166: "is bad"}))
    drawn = Split("random"), DivisionKeys(), 1, lambda event: None
    train, validation = hold_out_examples(blocks, 0.25, *drawn)
    unreadable = [*blocks.find_unreadable()], str(find_first_unreadable(blocks))
    good = blocks.select(~to_mask(unreadable[0], len(blocks)))
    limited = good.limit(45)
    rows = good.head(10_000).targets.tolist()
    slow = [int(y) for _, y in good.stream().as_numpy_iterator()]
    held_out = hold_out_examples(good, 0.25, *drawn)
    parts = [sorted(each.head(10_000).targets.tolist()) for each in held_out[:2]]
    large = [draw_rows(1_000_003, 0.1, [seed]) for seed in (1, 1, 2)]
    return (len(train), len(validation)), unreadable, rows, slow, limited.head(99).targets.tolist(), parts, large


def test_rows_are_selected_without_reading_them(isolated: Callable[..., Any]) -> None:
    counts, (indices, first), rows, slow, limited, parts, large = isolated(divide)
    assert counts == (126, 42)
    assert indices == [5, 70, 166]
    assert first == "row 5 (is wrong)"
    good = [row for row in range(sum(LENGTHS)) if row not in indices]
    assert rows == slow == good
    assert limited == good[:45]
    assert sorted(parts[0] + parts[1]) == good
    assert len(parts[1]) == 41
    assert max(parts[1]) > 150  # not the first ones
    assert large[0].sum() == 100_000
    assert (large[0] == large[1]).all()
    assert (large[0] != large[2]).any()
    assert abs(large[0][:65_536].mean() - 0.1) < 1e-4


class Source:
    splits = ("train",)

    def __init__(self, **changes: Any) -> None:
        from scaleflow.interfaces import Inputs, Outputs

        self.inputs, self.outputs = Inputs((2,)), Outputs("classification", (sum(LENGTHS),))
        self._changes = changes

    def load(self, split: str) -> Any:
        from scaleflow.dataset.batches.blocks import make_blocks

        return make_blocks(Rows(**self._changes))


def prepare() -> Any:
    from scaleflow import dataset
    from scaleflow.errors import ConfigError

    cached = dataset.prepare_splits(Source(), options(validation=0.25), 0)
    streamed = dataset.prepare_splits(Source(), options(validation=0.25, cache="none"), 0)
    messages = []
    for changes in ({}, {"cache": "none"}):
        try:
            splits = dataset.prepare_splits(Source(faults={50: "is wrong"}), options(**changes), 0)
            list(splits.train.slabs())
        except ConfigError as error:
            messages.append(str(error))
        except Exception as error:
            messages.append(str(dataset.explain_read_error(error, {"train": splits.train})))
    targets = [
        [split.targets.tolist(), stream.head(999).targets.tolist()]
        for split, stream in ((cached.train, streamed.train), (cached.validation, streamed.validation))
    ]
    return targets, messages, type(streamed.train).__name__


def test_a_split_is_the_same_in_memory_and_streamed(isolated: Callable[..., Any]) -> None:
    targets, messages, name = isolated(prepare)
    assert name == "Blocks"
    for cached, streamed in targets:
        assert cached == streamed
    for message in messages:
        assert message.startswith(
            "dataset: row 50 of 'train' cannot be read: is wrong; use dataset.on_bad_example=skip"
        )
