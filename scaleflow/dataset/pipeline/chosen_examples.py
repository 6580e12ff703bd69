"""Says where examples of a split come from, and reads their raw inputs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.blocks import Blocks, concatenate
from scaleflow.dataset.pipeline.cache import Transforms, preprocess_arrays, refuse_unreadable
from scaleflow.dataset.pipeline.records import Records, decode_records
from scaleflow.dataset.pipeline.unreadable import number_records
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Examples, Stream, map_leaves, name_leaves

#: A name that a source gives an example: a file, and the number of a row in it.
NUMBERED = re.compile(r"(.*), (?:row|record|example) (\d+)", re.DOTALL)

#: Records of a stream that are not in memory are read again for their names, for at most so many seconds.
NAMING_SECONDS = 5.0

BATCH = 1024

#: The blocks of a table from which few examples are read.
MOST_BLOCKS = 16

Array = np.ndarray[Any, Any]


def locate_examples(examples: Examples, places: Array) -> tuple[list[str | None] | None, Array | None]:
    """Returns the file of each example, and its row there, as messages count rows: from 1 in a table, otherwise from 0.

    Args:
        examples: a split, before its preprocessing.
        places: ascending indices, [n] int64.

    Returns:
        Files [n], None if there are none; rows [n], masked where there is none. None if the source names no examples,
        or if it takes too long to read their names.
    """
    if isinstance(examples, Arrays):
        return None, places if examples.rows is None else examples.rows[places]
    if isinstance(examples, Blocks):
        rows = places if examples.keep is None else np.flatnonzero(examples.keep)[places]
        return locate_rows(examples, rows)
    specs = tf.nest.flatten(examples.dataset.element_spec)
    if examples.name is None or not all(spec.shape.is_fully_defined() for spec in specs):
        return None, None
    matches = [(name, NUMBERED.fullmatch(name)) for name in read_names(examples, places)]
    if len(matches) < len(places):
        return None, None
    files = [match[1] if match else name for name, match in matches]
    numbers = np.ma.array(
        [int(match[2]) if match else 0 for _, match in matches], mask=[not match for _, match in matches]
    )
    return files, None if numbers.mask.all() else numbers


def sample_rows(examples: Examples, count: int, transforms: Transforms) -> Arrays | None:
    """Returns up to `count` examples that are spread over a split, after the preprocessing, without their weights.

    None, if they are neither in memory nor rows of a table.
    """
    if isinstance(examples, Arrays):
        places = np.unique(np.linspace(0, len(examples) - 1, min(count, len(examples))).astype(int))
        return Arrays(examples.inputs, examples.targets).map(lambda array: array[places])
    if isinstance(examples, Blocks):
        with refuse_unreadable("train", examples):
            return preprocess_arrays(spread_rows(examples, min(count, len(examples))), transforms)
    return None


def locate_rows(blocks: Blocks, rows: Array) -> tuple[list[str | None], Array]:
    """Returns the file of each row of a table, and its number there, counted from 1."""
    paths, ends = blocks.rows.paths, np.cumsum(blocks.rows.lengths)
    is_first = np.array([not n or path != paths[n - 1] for n, path in enumerate(paths)])
    firsts = np.maximum.accumulate(np.where(is_first, ends - blocks.rows.lengths, 0))  # the first row of a block's file
    chosen = np.searchsorted(ends, rows, side="right")
    return [paths[n] for n in chosen], rows - firsts[chosen] + 1


def open_columns(examples: Examples, names: Sequence[str], key: str) -> Callable[[Array], Mapping[str, Any]]:
    """Returns a function that reads columns of examples, whose indices it gets: [n] int64, ascending.

    Of a table these are any columns of its files, of another dataset inputs with a value each.

    Args:
        examples: a split, before its preprocessing.
        names: of the columns.
        key: the key of the config that names them.

    Returns:
        A function from indices to columns [n], pyarrow's or numpy's.

    Raises:
        ConfigError: if there is no such column.
    """
    if isinstance(examples, Blocks) and isinstance(examples.rows, HasColumns):
        read, keep = examples.rows.open_columns(names, key), examples.keep
        return lambda places: read(places if keep is None else np.flatnonzero(keep)[places])
    parts = examples.parts if isinstance(examples, Arrays) else decode_records(examples).element_spec
    inputs = name_leaves(parts[0])
    single = [name for name, each in inputs.items() if name and len(each.shape) == int(isinstance(examples, Arrays))]
    for name in names:
        if name not in single:
            there_are = f"; there are {', '.join(single)}" if single else ", because its inputs have no names"
            raise ConfigError(f"{key}={name}: the dataset has no input of that name with one value{there_are}")
    return lambda places: {name: name_leaves(read_inputs(examples, places))[name] for name in names}


@runtime_checkable
class HasColumns(Protocol):
    """A `RowReader` that can read columns which are no inputs."""

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[Array], Mapping[str, Any]]:
        """Returns a function from rows to columns. Raises ConfigError if a file lacks one."""


def read_names(stream: Stream, places: Array) -> list[str]:
    """Returns the names that a stream gives records; fewer if it takes too long to read them."""
    names: list[str] = []
    deadline = time.monotonic() + NAMING_SECONDS
    for batch in take_records(stream, places).batch(BATCH).as_numpy_iterator():
        components = batch if isinstance(batch, tuple) else (batch,)
        assert stream.name is not None
        names += [stream.name(*values) for values in zip(*components, strict=True)]
        if time.monotonic() > deadline and not isinstance(stream, Records):
            break
    return names


def read_inputs(examples: Examples, places: Array) -> Any:
    """Returns the raw inputs of examples, as `read_parts` does."""
    return read_parts(examples, places)[0]


def read_parts(examples: Examples, places: Array) -> tuple[Any, ...]:
    """Returns inputs and targets of examples, and weights if there are some: arrays [n, ...], or dicts of them.

    Text is `bytes` or `str`. `places` are ascending indices, [n] int64.
    """
    if isinstance(examples, Arrays):
        return tuple(map_leaves(lambda array: np.asarray(array[places]), part) for part in examples.parts)
    if isinstance(examples, Blocks):
        batches = examples.select(to_mask(places, len(examples))).slabs()
    else:
        batches = decode_records(examples, take_records(examples, places)).batch(BATCH)
    parts = list(batches.as_numpy_iterator())
    return tuple(map_leaves(lambda *arrays: np.concatenate(arrays), *each) for each in zip(*parts, strict=True))


def read_spread(examples: Examples, count: int, reads_all: bool = False) -> tuple[Any, ...]:
    """Returns up to `count` examples that are spread evenly over a split, as `read_parts` does.

    Of a table that is not in memory they are the first rows of blocks all over its files. Of a stream whose records are
    not in memory (`is_spread` says so) they are the first ones, unless the command `reads_all` of it.
    """
    places = np.unique(np.linspace(0, len(examples) - 1, min(count, len(examples))).astype(np.int64))
    if isinstance(examples, Arrays | Records) or (reads_all and not isinstance(examples, Blocks)):
        return read_parts(examples, places)
    if not isinstance(examples, Blocks):
        return read_parts(replace(examples, dataset=examples.dataset.take(len(places)), length=len(places)), places)
    return spread_rows(examples, len(places)).parts


def spread_rows(blocks: Blocks, count: int) -> Arrays:
    """Returns up to `count` rows of a table, the first ones of blocks all over its files."""
    lengths = blocks.lengths()
    used = np.flatnonzero(lengths)
    chosen = used[np.unique(np.linspace(0, len(used) - 1, max(MOST_BLOCKS, count // BATCH)).astype(int))]
    parts, left = [], count
    for n, block in enumerate(sorted(map(int, chosen), key=lengths.__getitem__)):  # long ones make up for short ones
        share = min(lengths[block], -(-left // (len(chosen) - n)))
        is_read = len(blocks.rows.sampled) == sum(blocks.rows.lengths)  # all rows are in memory
        spread = blocks.rows.lengths[block] / lengths[block]  # of the rows, if only some are in the split
        loaded = blocks.load(block, None if is_read else int(2 * share * spread) + 64)
        rows = np.unique(np.linspace(0, max(0, len(loaded) - 1), share).astype(int))[: len(loaded)]
        parts.append((block, loaded.map(lambda array, rows=rows: array[rows])))  # type: ignore[misc]
        left -= share
    return concatenate([part for _, part in sorted(parts, key=lambda each: each[0])])


def is_spread(examples: Examples) -> bool:
    """Returns whether `read_spread` returns examples from all over a split."""
    return isinstance(examples, Arrays | Records | Blocks)


def read_input_batches(examples: Examples) -> Iterator[Any]:
    """Yields the raw inputs of all examples in their order, in batches: arrays [b, ...], or dicts of them."""
    if isinstance(examples, Arrays):
        for first in range(0, len(examples), BATCH):
            yield map_leaves(lambda array, first=first: np.asarray(array[first : first + BATCH]), examples.inputs)
        return
    if isinstance(examples, Blocks):
        batches = examples.slabs()
    else:
        batches = decode_records(examples, examples.dataset.take(len(examples))).batch(BATCH)
    for inputs, *_ in batches.as_numpy_iterator():
        yield inputs


def take_records(stream: Stream, places: Array) -> tf.data.Dataset:
    if len(places) == len(stream):
        return stream.dataset.take(len(stream))
    if isinstance(stream, Records):
        return stream.select(places).dataset
    return number_records(stream, to_mask(places, len(stream))).map(
        lambda _, *record: record if len(record) > 1 else record[0]
    )


def to_mask(places: Sequence[int] | Array, length: int) -> Array:
    mask = np.zeros(length, bool)
    mask[places] = True
    return mask
