"""Streams of rows in blocks that can be read in any order, such as the row groups of a Parquet file.

Rows are read, converted and shuffled by the block, never one by one. The order of an epoch is a function of the seed
and the epoch: the blocks in random order, divided into pools that fit in memory, and the rows of each pool shuffled.
So a run can resume at any step, after one pool was read.

The rows can be divided into shards, so that workers read different files. Each shard has its own order.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.records import DIGESTED, StreamRows, draw_places, reading_options, to_mask
from scaleflow.dataset.batches.rows import ALL_VALUES
from scaleflow.dataset.batches.unreadable import UnreadableExample, UnusableRowError
from scaleflow.dataset.reading.files import DRAWN_TOGETHER
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Dataset, DivisionKeys, OutputStructure, Rows, Training, name_leaves

Array = np.ndarray[Any, Any]

#: Rows that one call of TensorFlow takes. More need much memory, fewer need many calls.
SLAB = 16_384

#: A spread sample is read from max(MIN_SPREAD_BLOCKS, rows // SPREAD_ROWS) blocks.
MIN_SPREAD_BLOCKS = 16
SPREAD_ROWS = 1024

#: Size of the pools in which rows are shuffled, without `dataset.shuffle`.
POOL_BYTES = 64 << 20

#: Memory that a string takes in addition to its characters.
STRING_BYTES = 64

#: `dataset.cache=auto` keeps the rows of a split in memory up to this size after their preprocessing.
MEMORY_BYTES = 256 << 20


class RowReader(Protocol):
    """Reads the rows of a split.

    Attributes:
        lengths: the number of rows of each block.
        paths: the file of each block.
        spec: the specs (inputs, targets) of one row, or with a weight.
        malformed: messages about rows that are in no block, because they cannot be divided into fields.
        faults: the malformed rows, and messages about the first other rows that cannot be used.
        sampled: the indices of the rows to learn a preprocessing from: [n] int64.
    """

    lengths: Sequence[int]
    paths: Sequence[str]
    spec: tuple[Any, ...]
    malformed: Sequence[str]
    faults: Sequence[str]
    sampled: Array

    def read(self, block: int, rows: int | None = None) -> tuple[Arrays, Mapping[int, str]]:
        """Returns the first `rows` of a block, or all of them, and why some of them cannot be used, by their index."""

    def sample(self) -> tuple[Any, Array]:
        """Returns the inputs of rows to learn a preprocessing from, and the indices of these rows: [n] int64."""

    def recall(self, what: str, options: Any, learn: Callable[[], Any]) -> Any:
        """Returns a fact about the sample from the cache, or learns it, like `Rows.recall`."""

    def name(self, row: int) -> str:
        """Names a row by its file."""

    def locate(self, rows: Array) -> tuple[Sequence[str], Array]:
        """Returns the file of each row, and its number there, counted from 1."""

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[Array], Mapping[str, Any]]:
        """Returns a function from ascending rows to columns of the files. Raises ConfigError if a file lacks one."""


@dataclass(frozen=True)
class Blocks(StreamRows):
    """A stream of the rows of a `RowReader`, or of the rows that `keep` [rows] bool selects.

    `dataset` yields the indices of the rows, and `decode` reads them, for code that takes any stream, but slowly.
    """

    is_random_access: ClassVar[bool] = True
    auto_bytes: ClassVar[int] = MEMORY_BYTES
    reader: RowReader | None = None
    keep: Array | None = None

    @property
    def spec(self) -> tuple[Any, ...]:
        return self.rows.spec

    @property
    def drawn_together(self) -> int:
        return DRAWN_TOGETHER

    @property
    def blocks(self) -> int:
        return int(np.count_nonzero(self.lengths()))

    @property
    def kept_together(self) -> int:
        return sum(self.rows.lengths)  # all splits of the same files

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.rows.paths))

    @property
    def rows(self) -> RowReader:
        assert self.reader is not None
        return self.reader

    def select(self, chosen: Array) -> Self:
        keep = to_mask(chosen, len(self))
        if self.keep is not None:
            wanted = keep
            keep = self.keep.copy()
            keep[self.keep] = wanted
        blocks = make_blocks(self.rows, keep)
        parts = {"dataset": blocks.dataset, "length": blocks.length, "decode": blocks.decode, "keep": blocks.keep}
        return replace(self, **parts, **self.cut_keys(chosen))

    def limit(self, count: int) -> Self:
        return self.select(np.arange(len(self)) < count)

    def batch(self, size: int, pick: Callable[..., Any] | None = None) -> tf.data.Dataset:
        return self.slabs() if pick is None else self.slabs().map(pick)

    def iterate(self, pick: Callable[..., Any]) -> Iterator[Any]:
        return (pick(*slab.parts) for slab in self.read_slabs())

    def read(self, places: Array) -> tuple[Any, ...]:
        return concatenate([*self.select(places).read_slabs()]).parts

    def read_first(self, count: int) -> Any:
        return self.head(count).inputs

    def read_to_learn(self, name: str) -> Iterator[Array]:
        columns, numbers = self._sample
        yield columns[name] if self.keep is None else columns[name][self.keep[numbers]]

    @cached_property
    def _sample(self) -> tuple[dict[str, Array], Array]:
        inputs, numbers = self.rows.sample()
        return name_leaves(inputs), numbers

    def read_to_digest(self) -> tuple[str, Iterator[tuple[Any, ...]]]:
        if self.has_read_all:
            blocks = (block for block, length in enumerate(self.lengths()) if length)
            return ALL_VALUES, (self.load(block).parts for block in blocks)
        sample = self.head(DIGESTED)
        return f"a sample of {len(sample)} examples", iter([sample.parts])

    def read_spread(self, count: int, reads_all: bool = False) -> tuple[Array, tuple[Any, ...]]:
        # The first rows of blocks all over the files
        lengths = self.lengths()
        used = np.flatnonzero(lengths)
        chosen = used[
            np.unique(np.linspace(0, len(used) - 1, max(MIN_SPREAD_BLOCKS, count // SPREAD_ROWS)).astype(int))
        ]
        firsts = np.cumsum([0, *lengths])
        places: list[Array] = []
        parts: list[Any] = []
        for block, share in share_rows(lengths, chosen, min(count, len(self))).items():
            spread = self.rows.lengths[block] / lengths[block]  # of the rows, if only some are in the split
            loaded = self.load(block, None if self.has_read_all else int(2 * share * spread) + 64)
            rows = draw_places(len(loaded), share)
            places.append(firsts[block] + rows)
            parts.append(loaded.map(partial(gather, rows=rows)))
        return np.concatenate(places), concatenate(parts).parts

    def locate(self, places: Array) -> tuple[list[str | None], Array]:
        paths, numbers = self.rows.locate(places if self.keep is None else np.flatnonzero(self.keep)[places])
        return list(paths), numbers

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[Array], Mapping[str, Any]]:
        read = self.rows.open_columns(names, key)
        if self.keep is None:
            return read
        kept = np.flatnonzero(self.keep)
        return lambda places: read(kept[places])

    def map_targets(self, convert: Callable[[Any], Any]) -> Blocks:
        raise ConfigError(
            "dataset: its classes are not those of the earlier run; give it the argument `earlier` of dataset=table"
        )

    def find_unreadable(self) -> Iterator[int]:
        return (place for place, *_ in self.find_unusable())

    def describe_unreadable(self, places: Sequence[int]) -> list[UnreadableExample]:
        wanted = set(places)
        examples: list[UnreadableExample] = []
        if not wanted:
            return examples
        for place, name, reason in self.find_unusable():
            if place in wanted:
                examples.append(UnreadableExample(place, name, reason))
                if len(examples) == len(places):
                    break
        return examples

    def check_targets(self, outputs: OutputStructure, split: str = "") -> Blocks:
        return self  # its source has done so

    @property
    def malformed(self) -> Sequence[str]:  # type: ignore[override]
        """Messages about rows that cannot be divided into fields."""
        return self.rows.malformed

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        """Whether all rows of the files are in the stream."""
        return self.keep is None

    @property
    def has_read_all(self) -> bool:
        """Whether all rows are kept in memory, because all are learned from."""
        return len(self.rows.sampled) == sum(self.rows.lengths)

    def lengths(self) -> list[int]:
        """Returns the number of rows of each block that are in the stream."""
        if self.keep is None:
            return list(self.rows.lengths)
        return [int(np.count_nonzero(self.keep[first:end])) for first, end in self._bounds()]

    def load(self, block: int, rows: int | None = None) -> Arrays:
        """Reads a block, or its first rows. Raises UnusableRowError if one cannot be used."""
        arrays, faults = self.rows.read(block, rows)
        keep = self._keep_mask(block, len(arrays))
        for row in faults:
            if keep is None or keep[row]:
                raise UnusableRowError(f"{self.rows.name(self._bounds()[block][0] + row)}: {faults[row]}")
        if keep is None:
            return arrays
        places = np.flatnonzero(keep)  # faster than a mask for each column
        return arrays.map(partial(gather, rows=places))

    def find_unusable(self) -> Iterator[tuple[int, str, str]]:
        """Yields the index in the stream, the name and the reason of each row that cannot be used."""
        done = 0
        for block, (first, _) in enumerate(self._bounds()):
            arrays, faults = self.rows.read(block)
            keep = self._keep_mask(block, len(arrays))
            places = np.arange(len(arrays)) if keep is None else np.cumsum(keep) - 1
            for row, reason in sorted(faults.items()):
                if keep is None or keep[row]:
                    yield done + int(places[row]), self.rows.name(first + row), reason
            done += len(arrays) if keep is None else int(np.count_nonzero(keep))

    def head(self, count: int) -> Arrays:
        """Returns the first rows, up to `count`."""
        parts: list[Arrays] = []
        for block, length in enumerate(self.lengths()):
            if length:
                part = self.load(block, 16 * count)
                whole = part if len(part) >= min(count, length) else self.load(block)
                parts.append(whole.map(lambda array: array[:count]))
            if sum(map(len, parts)) >= count:
                break
        return concatenate(parts).map(lambda array: array[:count])

    @cached_property
    def pool_rows(self) -> int:
        """The number of rows that fit in `POOL_BYTES`, estimated from the first ones."""
        first = self.head(256)
        size = 0
        for array in tf.nest.flatten(first.parts):
            if array.dtype == object:
                size += sum(map(len, array)) + STRING_BYTES * len(array)
            else:
                size += array.nbytes
        return max(1, int(POOL_BYTES / max(size, 1) * len(first)))

    def recall(self, what: str, options: Any, learn: Callable[[], Any]) -> Any:
        is_used = None if self.keep is None else self.keep[self.rows.sampled].tobytes()
        return self.rows.recall(what, [options, is_used and hashlib.blake2b(is_used).hexdigest()], learn)

    def read_slabs(self) -> Iterator[Arrays]:
        """Yields all rows in their order, `SLAB` at once."""
        order = BlockOrder(self, None)
        return (order.take(0, places) for places in np.split(np.arange(len(self)), range(SLAB, len(self), SLAB)))

    def slabs(self) -> tf.data.Dataset:
        """Returns (inputs [b, ...], targets [b, ...]), or with weights [b], of all rows in their order."""
        return self.dataset.batch(SLAB).map(self.decode).prefetch(2).with_options(reading_options())

    def _bounds(self) -> list[tuple[int, int]]:
        return list(pairwise([0, *np.cumsum(self.rows.lengths).tolist()]))

    def _keep_mask(self, block: int, rows: int) -> Array | None:
        first = self._bounds()[block][0]
        return None if self.keep is None else self.keep[first : first + rows]


def make_blocks(reader: RowReader, keep: Array | None = None, keys: DivisionKeys | None = None) -> Blocks:
    """Makes the stream of all rows, or of the rows that `keep` selects. `keys` divide the rows of the stream."""
    length = sum(reader.lengths) if keep is None else int(np.count_nonzero(keep))
    options = {"reader": reader, "keep": keep, **vars(keys or DivisionKeys())}
    blocks = Blocks(
        tf.data.Dataset.range(length), length, None, name=None, faults=reader.faults, at_once=SLAB, **options
    )

    def decode(places: tf.Tensor) -> Any:
        order = BlockOrder(blocks, None)
        return call_reader(lambda chosen: order.take(0, chosen).parts, [places], reader.spec)

    return replace(blocks, decode=decode)


def share_rows(lengths: Sequence[int], blocks: Iterable[Any], count: int) -> dict[int, int]:
    """Divides a number of rows among blocks. Blocks get about the same number, and long ones replace short ones."""
    shares: dict[int, int] = {}
    ascending = sorted(map(int, blocks), key=lengths.__getitem__)
    for n, block in enumerate(ascending):
        shares[block] = min(lengths[block], -(-count // (len(ascending) - n)))
        count -= shares[block]
    return dict(sorted(shares.items()))


def concatenate(parts: Sequence[Arrays]) -> Arrays:
    """Joins splits."""
    if len(parts) == 1:
        return parts[0]
    joined = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *(part.parts for part in parts))
    return Arrays(*joined)


def store_by_rows(arrays: Arrays) -> Arrays:
    """Copies columns of float64 into one array by rows, because rows are gathered much faster from it."""
    flat: list[Array] = tf.nest.flatten(arrays.parts)
    numbers = [n for n, array in enumerate(flat) if array.dtype == np.float64 and array.ndim == 1]
    matrix = np.empty([len(arrays), len(numbers)])
    for first in range(0, len(arrays), SLAB):  # a part that fits in the cache of a core
        for column, n in enumerate(numbers):
            matrix[first : first + SLAB, column] = flat[n][first : first + SLAB]
    for column, n in enumerate(numbers):
        flat[n] = matrix[:, column]
    return Arrays(*tf.nest.pack_sequence_as(arrays.parts, flat))


def gather(array: Array, rows: Array) -> Array:
    """Returns rows of an array. `numpy.take` would first copy a column that is stored by rows."""
    return array[rows]


def read_slabs(numbers: tf.data.Dataset, read: Callable[..., Any], spec: Any) -> tf.data.Dataset:
    """Calls `read` with the numbers, in order. Returns its arrays [b, ...], of the structure `spec`."""

    def read_slab(*values: Any) -> Any:
        return read(*map(int, values))

    slabs = numbers.map(lambda *values: call_reader(read_slab, values, spec))
    return slabs.prefetch(2).with_options(reading_options())


def call_reader(read: Callable[..., Any], values: Sequence[tf.Tensor], spec: Any) -> Any:
    """Calls `read` with values. Returns its arrays [b, ...], of the structure `spec`. Traced."""
    flat_spec = tf.nest.flatten(spec)
    dtypes = [leaf_spec.dtype for leaf_spec in flat_spec]
    arrays = tf.numpy_function(lambda *arguments: tf.nest.flatten(read(*arguments)), values, dtypes)
    shaped = []
    for array, leaf_spec in zip(arrays, flat_spec, strict=True):
        shaped.append(tf.ensure_shape(array, [None, *leaf_spec.shape]))
    return tf.nest.pack_sequence_as(spec, shaped)


class Piece(NamedTuple):
    """The rows [first, end) of a block, counted among those that are in the stream."""

    block: int
    first: int
    end: int


def shuffle_by_file(blocks: Sequence[int], paths: Sequence[str], random: np.random.Generator) -> list[int]:
    """Returns blocks in random order. Blocks of a file stay together."""
    by_file: dict[str, list[int]] = {}
    for block in blocks:
        by_file.setdefault(paths[block], []).append(block)
    files = list(by_file.values())
    order: list[int] = []
    for file in random.permutation(len(files)):
        blocks_of_file = files[file]
        order += [blocks_of_file[place] for place in random.permutation(len(blocks_of_file))]
    return order


def cut_rows(order: Sequence[int], lengths: Sequence[int], first: int, end: int) -> list[Piece]:
    """Returns the rows [first, end) of blocks in an order. `lengths` has the number of rows of each block."""
    pieces = []
    for block in order:
        if first < lengths[block] and end > 0:
            pieces.append(Piece(block, max(first, 0), min(end, lengths[block])))
        first -= lengths[block]
        end -= lengths[block]
    return pieces


class BlockOrder:
    """The rows of blocks, or of one shard of them, in the order of an epoch.

    A shard has an equal part of the rows. Each epoch cuts the files, in random order, into its shards. If a cut divides
    a block, two shards read it.

    While the rows of a pool are taken, the next pool is read. After the last pool, it is the first one of the next
    epoch.

    Args:
        blocks: the rows.
        seed: reshuffles every epoch. None keeps the order.
        pool: minimum number of rows in a pool, for all shards together. None: as many as fit in `POOL_BYTES`.
        shard: the number of the shard.
        shards: the number of shards. The shard 0 of 1 has all rows.

    Attributes:
        first: the index of the shard's first row in the stream, if the order is kept.
    """

    def __init__(
        self, blocks: Blocks, seed: int | None, pool: int | None = None, shard: int = 0, shards: int = 1
    ) -> None:
        self._blocks = blocks
        self._seed = seed
        self._lengths = blocks.lengths()
        self._pool = pool
        self._shard = shard
        self._shards = shards
        self.first, self._end = (n * len(blocks) // shards for n in (shard, shard + 1))
        self._lock = threading.Lock()
        self._loader = ThreadPoolExecutor(1, "scaleflow-blocks")
        self._loaded: dict[tuple[int, int], Future[tuple[Arrays, Array]]] = {}
        self._pools: dict[int, tuple[list[list[Piece]], Array]] = {}

    def __len__(self) -> int:
        return self._end - self.first

    def take(self, epoch: int, positions: Array) -> Arrays:
        """Returns the rows at ascending positions of an epoch."""
        pools, ends = self._divide(epoch)
        parts = []
        for pool in np.unique(np.searchsorted(ends, positions, side="right")):
            first = ends[pool - 1] if pool else 0
            mine = positions[(positions >= first) & (positions < ends[pool])] - first
            arrays, order = self._get(epoch, int(pool), len(pools))
            parts.append(arrays.map(partial(gather, rows=order[mine])))
        if positions[-1] == ends[-1] - 1:
            with self._lock:
                self._loaded.pop((epoch, len(pools) - 1), None)
        return concatenate(parts)

    def _divide(self, epoch: int) -> tuple[list[list[Piece]], Array]:
        """Returns the pieces in each pool of an epoch, and the position after its last row."""
        if epoch in self._pools:
            return self._pools[epoch]
        least = 1
        if self._seed is not None:
            least = -(-(self._pool or self._blocks.pool_rows) // self._shards)
        pools: list[list[Piece]] = []
        rows = least
        for piece in self._arrange(epoch):
            if rows >= least:
                pools.append([])
                rows = 0
            pools[-1].append(piece)
            rows += piece.end - piece.first
        ends = np.cumsum([sum(piece.end - piece.first for piece in pool) for pool in pools])
        self._pools = {
            **({epoch - 1: self._pools[epoch - 1]} if epoch - 1 in self._pools else {}),
            epoch: (pools, ends),
        }
        return pools, ends

    def _arrange(self, epoch: int) -> list[Piece]:
        """Returns the rows of an epoch, before the rows of pools are shuffled."""
        order = [n for n, length in enumerate(self._lengths) if length]
        if self._seed is not None and self._shards == 1:
            order = [order[n] for n in np.random.default_rng([self._seed, epoch]).permutation(len(order))]
        elif self._seed is not None:
            order = shuffle_by_file(order, self._blocks.rows.paths, np.random.default_rng([self._seed, epoch]))
        pieces = cut_rows(order, self._lengths, self.first, end=self._end)
        if self._seed is None or self._shards == 1:
            return pieces
        random = np.random.default_rng([self._seed, epoch, self._shard, 0, 1])  # so that a pool mixes the files
        return [pieces[n] for n in random.permutation(len(pieces))]

    def _get(self, epoch: int, pool: int, count: int) -> tuple[Arrays, Array]:
        following = (epoch, pool + 1) if pool + 1 < count else (epoch + 1, 0)
        wanted = [(epoch, pool), following] if following[0] == epoch or self._seed is not None else [(epoch, pool)]
        with self._lock:
            for key in set(self._loaded) - set(wanted):
                del self._loaded[key]
            for key in wanted:
                if key not in self._loaded:
                    self._loaded[key] = self._loader.submit(self._load, *key)
            future = self._loaded[wanted[0]]
        return future.result()

    def _load(self, epoch: int, pool: int) -> tuple[Arrays, Array]:
        """Returns the rows of a pool, and their order."""
        arrays = concatenate([self._load_piece(piece) for piece in self._divide(epoch)[0][pool]])
        if self._seed is None:
            return arrays, np.arange(len(arrays))
        seeds = [self._seed, epoch, pool, *([self._shard] if self._shards > 1 else [])]
        return store_by_rows(arrays), np.random.default_rng(seeds).permutation(len(arrays))

    def _load_piece(self, piece: Piece) -> Arrays:
        arrays = self._blocks.load(piece.block)
        if piece.end - piece.first == len(arrays):
            return arrays
        return arrays.map(partial(gather, rows=np.arange(piece.first, piece.end)))


def check_shards(options: Dataset, training: Training, examples: Rows, global_size: int) -> None:
    """Rejects `dataset.shards` if it cannot divide the training split or its global batches."""
    shards = options.shards
    if shards == 1:
        return
    if not examples.blocks:
        raise ConfigError(
            f"dataset.shards={shards}: only tables that are read while training can be divided by their files; leave "
            "it 1, or use dataset=table"
        )
    if global_size % shards:
        key = "batch_size" if training.global_batch_size is None else "global_batch_size"
        raise ConfigError(
            f"dataset.shards={shards}: a global batch of {global_size} examples has no equal part of each shard; use a "
            f"divisor of {global_size}, or another training.{key}"
        )
    if examples.blocks < shards:
        cause = "" if options.limit is None else f" within dataset.limit={options.limit}"
        raise ConfigError(
            f"dataset.shards={shards}: the training split has {examples.blocks} blocks with rows"
            f"{cause}, and each shard needs one; use fewer shards, or more and smaller files or row groups"
        )


def describe_shards(shards: int, examples: Rows, workers: int) -> str | None:
    """Returns a note for the user if workers needlessly read rows that others train on."""
    if shards % workers == 0 or examples.blocks < workers:
        return None
    cost = "every worker reads all files" if shards == 1 else "several workers read the same files"
    return (
        f"dataset.shards={shards}: {cost} in each epoch; with {workers}, or a multiple of it, each of the {workers} "
        "workers reads only its own part"
    )
