"""Finds examples that cannot be read, and explains TensorFlow's errors about them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import tensorflow as tf

from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.interfaces import Rows


class UnusableRowError(ValueError):
    """A row that cannot be used was read."""


#: Errors of reading: TensorFlow's, UnicodeDecodeError if their message quotes bytes that are not UTF-8, and of tables.
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


@contextlib.contextmanager
def refuse_unreadable(split: str, rows: Rows) -> Iterator[None]:
    """Wraps code that reads a split: if reading fails, raises ConfigError, which names the first unreadable example.

    If all examples can be read, the original error passes through.
    """
    try:
        yield
    except FAILURES as error:
        try:
            bad = find_first_unreadable(rows)
        except FAILURES as failure:  # before an example is decoded, such as of a generator
            raise ConfigError(f"dataset: {split!r} cannot be read: {operation_message(failure)}") from error
        if bad is None:
            raise
        raise ConfigError(unreadable_message(split, bad)) from error


def explain_read_error(error: Exception, splits: Mapping[str, Rows]) -> Exception:
    """Finds the unreadable example that ended training, and returns an error that names it, or else the first error.

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
            example = find_first_unreadable(examples)
            if example is not None:
                return RunError(unreadable_message(split, example))
    return error


def find_first_unreadable(rows: Rows) -> UnreadableExample | None:
    return next(iter(rows.describe_unreadable([*islice(rows.find_unreadable(), 1)])), None)


def unreadable_message(split: str, example: UnreadableExample) -> str:
    message = f"dataset: {example.name} of {split!r} cannot be read: {example.reason}"
    return f"{message}; use dataset.on_bad_example=skip to leave it out"


def operation_message(error: Exception) -> str:
    """Returns an operation's own message, without what TensorFlow adds."""
    if not isinstance(error, tf.errors.OpError):
        return "it cannot be read"
    line = read_reason(error).replace("\\'", "'")
    return line if len(line) <= 300 else line[:297] + "..."
