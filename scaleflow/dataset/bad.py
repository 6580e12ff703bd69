"""Finds the examples that cannot be read, and names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.records import Records, as_yielded, decode
from scaleflow.interfaces import Stream

#: What TensorFlow writes around an operation's own words.
AROUND_WORDS = re.compile(r"^(\{\{.*?\}\}\s*)?(Error in user-defined function passed to .*?Iterator::\S+:\s*)?")
ASSERTED = re.compile(r"assertion failed: \[(.*)\]$")


#: What TensorFlow raises; the last, where its own message quotes bytes that are no text.
UNREADABLE = (tf.errors.OpError, UnicodeDecodeError)


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
    for places in readable(stream).batch(1024).as_numpy_iterator():
        good[places] = True
    return [int(place) for place in np.flatnonzero(~good)]


def readable(stream: Stream) -> tf.data.Dataset:
    """The places of the records that can be decoded."""

    def place_if_read(place: tf.Tensor, record: Any) -> tf.Tensor:
        with tf.control_dependencies(tf.nest.flatten(decode(stream, record))):  # an example that nobody asks for
            return tf.identity(place)  # would not be decoded

    numbered = stream.dataset.take(len(stream)).enumerate()
    places = numbered.map(place_if_read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return places.ignore_errors()


def first_bad(stream: Stream) -> Bad | None:
    """The first record that cannot be decoded, if there is one."""
    places = bad_places(stream)
    return next(iter(described(stream, places[:1])), None)


def described(stream: Stream, places: Sequence[int]) -> list[Bad]:
    """Some bad records with their names and reasons."""
    return [describe(stream, place, record) for place, record in zip(places, at_places(stream, places), strict=True)]


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
    except UNREADABLE as error:
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
    kept = tf.constant(keep)
    numbered = stream.dataset.take(len(stream)).enumerate().filter(lambda place, *_: tf.gather(kept, place))
    return replace(stream, dataset=numbered.map(lambda _, *record: as_yielded(record)), length=len(good))
