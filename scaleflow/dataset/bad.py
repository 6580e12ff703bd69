"""Finds the examples that cannot be read, and names them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.records import Records, as_yielded, called, decode
from scaleflow.errors import RunError
from scaleflow.interfaces import Examples, Stream

DECODED_AT_ONCE = 16

#: What TensorFlow writes around an operation's own words.
AROUND_WORDS = re.compile(r"^(\{\{.*?\}\}\s*)?(Error in user-defined function passed to .*?Iterator::\S+:\s*)?")
ASSERTED = re.compile(r"assertion failed: \[(.*)\]$")


#: What TensorFlow raises; the last, where its own message quotes bytes that are no text.
FAILURES = (tf.errors.OpError, UnicodeDecodeError)

#: What `assert_cardinality` raises for a stream that ends too early.
SHORT = re.compile(r"expected to contain (\d+) elements? but contained only (\d+)")


@dataclass(frozen=True)
class Bad:
    """One example that cannot be read.

    Attributes:
        place: in its split, from 0.
        name: what a user knows it by.
        reason: what TensorFlow says of it.
    """

    place: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def bad_places(stream: Stream) -> list[int]:
    """The places of the records that cannot be decoded: one pass over the stream, in parallel."""
    good = np.zeros(len(stream), bool)
    for places, _ in () if stream.at_once is None else readable_at_once(stream).as_numpy_iterator():
        good[places] = True
    if not good.all():
        for places, _ in readable(stream, ~good if good.any() else None).batch(1024).as_numpy_iterator():
            good[places] = True
    return [int(place) for place in np.flatnonzero(~good)]


def first_bad(stream: Stream) -> Bad | None:
    """The first record that cannot be decoded, if there is one."""
    if stream.at_once is not None:
        return next(iter(described(stream, bad_places(stream)[:1])), None)
    place = -1
    for place, (found, _) in enumerate(readable(stream).as_numpy_iterator()):
        if found != place:
            break
    else:
        place += 1
    return None if place == len(stream) else next(iter(described(stream, [place])), None)


def readable_at_once(stream: Stream) -> tf.data.Dataset:
    """(places [b], witness) of the portions of records that can be decoded as a whole."""

    def places_if_read(places: tf.Tensor, records: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return places, witness(called(stream, records))

    portions = stream.dataset.take(len(stream)).enumerate().batch(stream.at_once)
    return portions.map(places_if_read, num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()


def readable(stream: Stream, doubtful: np.ndarray[Any, Any] | None = None) -> tf.data.Dataset:
    """(place, witness) of the records that can be decoded, in order.

    What fails before the decoding fails here, too.

    Args:
        stream: what is read.
        doubtful: look only at these places, [length] bool.
    """

    def place_if_read(place: tf.Tensor, record: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return place, witness(decode(stream, record))

    def alone(place: tf.Tensor, record: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((place, record)).map(place_if_read).ignore_errors()

    numbered = stream.dataset.take(len(stream)).enumerate() if doubtful is None else numbered_at(stream, doubtful)
    parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
    if isinstance(stream, Records):  # to read them cannot fail
        return numbered.map(place_if_read, **parallel).ignore_errors()
    return numbered.interleave(alone, cycle_length=DECODED_AT_ONCE, **parallel)


def witness(example: Any) -> tf.Tensor:
    """A little of an example, as text: what nobody asks for, TensorFlow would not decode."""
    first = [tf.reshape(tensor, [-1])[:1] for tensor in tf.nest.flatten(example)]
    words = [value if value.dtype == tf.string else tf.strings.as_string(value) for value in first]
    return tf.strings.reduce_join(tf.concat(words, axis=0))


def explained(error: Exception, splits: Mapping[str, Examples]) -> Exception:
    """The error, or one that names the example it came from: the splits that are read as they go are read again.

    Args:
        error: what ended the training.
        splits: by their names.
    """
    is_from_input = isinstance(error, FAILURES) and ("terator" in str(error) or isinstance(error, UnicodeDecodeError))
    if not is_from_input:
        return error
    short = SHORT.search(str(error))
    if short:
        return RunError(f"the dataset gave {short[2]} examples where its source had promised {short[1]}")
    for split, examples in splits.items():
        with contextlib.suppress(*FAILURES):  # it is not an example's decoding that fails
            bad = first_bad(examples) if isinstance(examples, Stream) else None
            if bad is not None:
                return RunError(unreadable(split, bad))
    return error


def unreadable(split: str, bad: Bad) -> str:
    """The message that names an example."""
    words = f"dataset: {bad.name} of {split!r} cannot be read: {bad.reason}"
    return f"{words}; dataset.on_bad_example=skip leaves such out"


def described(stream: Stream, places: Sequence[int]) -> list[Bad]:
    """Some bad records with their names and reasons."""
    return [describe(stream, place, record) for place, record in zip(places, at_places(stream, places), strict=False)]


def at_places(stream: Stream, places: Sequence[int]) -> Iterable[Any]:
    if isinstance(stream, Records):
        return [stream.at(tf.constant(place)) for place in places]
    wanted = tf.constant(sorted(places), tf.int64)
    chosen = stream.dataset.enumerate().filter(lambda place, *_: tf.reduce_any(tf.equal(place, wanted)))
    return [record for _, record in chosen.take(len(places))]


def describe(stream: Stream, place: int, record: Any) -> Bad:
    values = tf.nest.map_structure(lambda tensor: tensor.numpy(), record)
    arguments = values if isinstance(values, tuple) else (values,)
    name = f"example {place}" if stream.name is None else stream.name(*arguments)
    alone = tf.data.Dataset.from_tensors(record).map(lambda *parts: decode(stream, as_yielded(parts)))
    try:
        for _ in alone:
            pass
    except FAILURES as error:
        return Bad(place, name, words_of(error))
    return Bad(place, name, "it cannot be read")


def words_of(error: Exception) -> str:
    """What an operation says, without what TensorFlow writes around it."""
    if not isinstance(error, tf.errors.OpError):
        return "it cannot be read"
    line = AROUND_WORDS.sub("", str(error.message).strip()).partition("\n")[0].strip()
    asserted = ASSERTED.match(line)
    if asserted:
        line = asserted[1].replace("] [", " ")
    return line if len(line) <= 200 else line[:197] + "..."


def without(stream: Stream, places: Sequence[int]) -> Stream:
    """The same stream without the records at some places."""
    good = np.setdiff1d(np.arange(len(stream)), np.asarray(places, np.int64))
    if isinstance(stream, Records):
        return stream.only(good)
    keep = np.zeros(len(stream), bool)
    keep[good] = True
    numbered = numbered_at(stream, keep)
    return replace(stream, dataset=numbered.map(lambda _, *record: as_yielded(record)), length=len(good))


def numbered_at(stream: Stream, wanted: np.ndarray[Any, Any]) -> tf.data.Dataset:
    """(place, record) of the records at the places that are wanted, [length] bool."""
    keep = tf.constant(wanted)
    numbered = stream.dataset.take(len(stream)).enumerate()
    if stream.at_once is None:
        return numbered.filter(lambda place, *_: tf.gather(keep, place))

    def kept(places: tf.Tensor, records: Any) -> Any:
        is_kept = tf.gather(keep, places)
        return tf.nest.map_structure(lambda tensor: tf.boolean_mask(tensor, is_kept), (places, records))

    return numbered.batch(stream.at_once).map(kept).unbatch()  # a call to each small record would take longer
