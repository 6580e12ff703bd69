"""Finds and names examples that cannot be read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, starmap
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.blocks import Blocks, UnusableRowError
from scaleflow.dataset.pipeline.records import Records, call_decode, decode, to_record
from scaleflow.errors import RunError
from scaleflow.interfaces import Examples, Stream

DECODE_BATCH_SIZE = 16

#: Text that TensorFlow adds around an operation's own message.
ERROR_PREFIX = re.compile(
    r"^(\{\{.*?\}\}\s*)?(Error in user-defined function passed to .*?Iterator::\S+:\s*)?(ConfigError: )?"
)
ASSERTED = re.compile(r"assertion failed: \[(.*)\]$")

#: Errors of reading: TensorFlow's, UnicodeDecodeError if their message quotes bytes that are not UTF-8, and of blocks.
FAILURES = (tf.errors.OpError, UnicodeDecodeError, UnusableRowError)

#: Message of `assert_cardinality` for a stream that ends too early.
ENDED_EARLY = re.compile(r"expected to contain (\d+) elements? but contained only (\d+)")


@dataclass(frozen=True)
class UnreadableExample:
    """One example that cannot be read."""

    place: int  # its index in the split
    name: str  # for the user, such as a file and a row
    reason: str  # TensorFlow's error message

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def find_unreadable(stream: Stream) -> list[int]:
    """Returns the indices of the records that cannot be decoded, in one parallel pass over the stream."""
    if isinstance(stream, Blocks):
        return [place for place, *_ in stream.find_unusable()]
    good = np.zeros(len(stream), bool)
    for indices, _ in () if stream.at_once is None else readable_batches(stream).as_numpy_iterator():
        good[indices] = True
    if not good.all():
        for indices, _ in readable_records(stream, ~good if good.any() else None).batch(1024).as_numpy_iterator():
            good[indices] = True
    return [int(index) for index in np.flatnonzero(~good)]


def find_first_unreadable(stream: Stream) -> UnreadableExample | None:
    """Returns the first record that cannot be decoded, or None."""
    if isinstance(stream, Blocks):
        return next(starmap(UnreadableExample, stream.find_unusable()), None)
    if stream.at_once is not None:
        return next(iter(describe_examples(stream, find_unreadable(stream)[:1])), None)
    index = -1
    for index, (readable_index, _) in enumerate(readable_records(stream).as_numpy_iterator()):
        if readable_index != index:
            break
    else:
        index += 1
    return None if index == len(stream) else next(iter(describe_examples(stream, [index])), None)


def readable_batches(stream: Stream) -> tf.data.Dataset:
    """Returns (indices [b], witness) of the batches of records that can be decoded as a whole."""

    def places_if_read(places: tf.Tensor, records: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return places, witness(call_decode(stream, records))

    batches = stream.dataset.take(len(stream)).enumerate().batch(stream.at_once)
    return batches.map(places_if_read, num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()


def readable_records(stream: Stream, doubtful: np.ndarray[Any, Any] | None = None) -> tf.data.Dataset:
    """Returns (index, witness) of the records that can be decoded, in order; only those that are `doubtful`, [length]
    bool.

    Errors that are raised before the decoding are raised here, too.
    """

    def place_if_read(place: tf.Tensor, record: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return place, witness(decode(stream, record))

    def alone(place: tf.Tensor, record: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((place, record)).map(place_if_read).ignore_errors()

    numbered = stream.dataset.take(len(stream)).enumerate() if doubtful is None else number_records(stream, doubtful)
    parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
    if isinstance(stream, Records):  # only their decoding can fail
        return numbered.map(place_if_read, **parallel).ignore_errors()
    return numbered.interleave(alone, cycle_length=DECODE_BATCH_SIZE, **parallel)


def witness(example: Any) -> tf.Tensor:
    """Returns a little of an example, as text: tf.data would prune a decoding whose result is not used."""
    first = [tf.reshape(tensor, [-1])[:1] for tensor in tf.nest.flatten(example)]
    texts = [value if value.dtype == tf.string else tf.strings.as_string(value) for value in first]
    return tf.strings.reduce_join(tf.concat(texts, axis=0))


def explain_read_error(error: Exception, splits: Mapping[str, Examples]) -> Exception:
    """Returns an error that names the cause in the data of the error that ended the training, or else that error.

    Reads the streams again to find it.
    """
    is_from_input = isinstance(error, FAILURES) and ("terator" in str(error) or isinstance(error, UnicodeDecodeError))
    if not is_from_input:
        return error
    short = ENDED_EARLY.search(str(error))
    if short:
        return RunError(f"the dataset yielded {short[2]} examples, but its source promised {short[1]}")
    for split, examples in splits.items():
        with contextlib.suppress(*FAILURES):  # reading fails before the decoding
            example = find_first_unreadable(examples) if isinstance(examples, Stream) else None
            if example is not None:
                return RunError(unreadable_message(split, example))
    return error


def unreadable_message(split: str, example: UnreadableExample) -> str:
    message = f"dataset: {example.name} of {split!r} cannot be read: {example.reason}"
    return f"{message}; use dataset.on_bad_example=skip to leave it out"


def describe_examples(stream: Stream, places: Sequence[int]) -> list[UnreadableExample]:
    if isinstance(stream, Blocks):
        found = (each for each in starmap(UnreadableExample, stream.find_unusable()) if each.place in set(places))
        return list(islice(found, len(places)))
    return [
        describe_record(stream, place, record)
        for place, record in zip(places, select_records(stream, places), strict=False)
    ]


def select_records(stream: Stream, places: Sequence[int]) -> Iterable[Any]:
    if isinstance(stream, Records):
        return [stream.at(tf.constant(place)) for place in places]
    wanted = tf.constant(sorted(places), tf.int64)
    matches = stream.dataset.enumerate().filter(lambda place, *_: tf.reduce_any(tf.equal(place, wanted)))
    return [record for _, record in matches.take(len(places))]


def name_examples(examples: Examples, places: Sequence[int]) -> list[str]:
    """Returns the names of examples, given by their ascending indices: those of the stream, or else the indices."""
    if not isinstance(examples, Stream) or examples.name is None:
        return [f"example {place}" for place in places]
    records = select_records(examples, places)
    return [name_record(examples, place, record) for place, record in zip(places, records, strict=True)]


def name_record(stream: Stream, place: int, record: Any) -> str:
    values = tf.nest.map_structure(lambda tensor: tensor.numpy(), record)
    arguments = values if isinstance(values, tuple) else (values,)
    return f"example {place}" if stream.name is None else stream.name(*arguments)


def describe_record(stream: Stream, place: int, record: Any) -> UnreadableExample:
    name = name_record(stream, place, record)
    alone = tf.data.Dataset.from_tensors(record).map(lambda *parts: decode(stream, to_record(parts)))
    try:
        for _ in alone:
            pass
    except FAILURES as error:
        return UnreadableExample(place, name, operation_message(error))
    return UnreadableExample(place, name, "it cannot be read")


def operation_message(error: Exception) -> str:
    """Returns an operation's own message, without what TensorFlow adds."""
    if not isinstance(error, tf.errors.OpError):
        return "it cannot be read"
    line = ERROR_PREFIX.sub("", str(error.message).strip()).partition("\n")[0].strip()
    asserted = ASSERTED.match(line)
    if asserted:
        line = asserted[1].replace("] [", " ").replace("\\'", "'")
    return line if len(line) <= 200 else line[:197] + "..."


def drop_records(stream: Stream, places: Sequence[int]) -> Stream:
    good = np.setdiff1d(np.arange(len(stream)), np.asarray(places, np.int64))
    if isinstance(stream, Records):
        return stream.select(good)
    keep = np.zeros(len(stream), bool)
    keep[good] = True
    if isinstance(stream, Blocks):
        return stream.select(keep)
    numbered = number_records(stream, keep)
    return replace(stream, dataset=numbered.map(lambda _, *record: to_record(record)), length=len(good))


def number_records(stream: Stream, wanted: np.ndarray[Any, Any]) -> tf.data.Dataset:
    """Returns (index, record) of the records for which `wanted` [length] is True."""
    keep = tf.constant(wanted)
    numbered = stream.dataset.take(len(stream)).enumerate()
    if stream.at_once is None:
        return numbered.filter(lambda place, *_: tf.gather(keep, place))

    def is_kept(places: tf.Tensor, records: Any) -> Any:
        is_kept = tf.gather(keep, places)
        return tf.nest.map_structure(lambda tensor: tf.boolean_mask(tensor, is_kept), (places, records))

    return numbered.batch(stream.at_once).map(is_kept).unbatch()  # a call per small record would take longer
