"""Preprocessing of table rows: converts rows of strings to features for a model.

A row holds the fields of one line of a CSV file. Numbers are standardised, and a numeric column with missing values
in the training split gets an indicator column. Words become one-hot codes. Everything is built from Keras's own
layers and operations, including the parsing of numbers, so a saved model takes raw rows and loads without scaleflow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs

#: Syntax of a number, valid for TensorFlow (RE2) and Python, and its maximum length in characters.
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
LONGEST = 31

#: Characters of a number. The index of a digit is its value.
CHARACTERS = "0123456789.-+eE"
PADDING = 0
FIRST = 2  # a lookup's code of the first character: 0 is padding, 1 an unknown character


@dataclass
class Moments:
    """Mean and variance of columns, merged batch by batch (Chan, Golub and LeVeque 1979).

    Attributes:
        count: [columns], how many numbers were added.
        mean, squares: [columns], their mean, and the sum of their squared distances from it.
        missing: [columns], whether any row has no number.
    """

    count: np.ndarray[Any, Any]
    mean: np.ndarray[Any, Any]
    squares: np.ndarray[Any, Any]
    missing: np.ndarray[Any, Any]

    @classmethod
    def from_columns(cls, columns: int) -> Moments:
        zeros = np.zeros(columns)
        return cls(zeros, zeros.copy(), zeros.copy(), np.zeros(columns, bool))

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, values: np.ndarray[Any, Any], there: np.ndarray[Any, Any]) -> None:
        """Adds numbers [b, columns], except those whose `there` is False."""
        count = there.sum(axis=0)
        values = np.where(there, values, 0.0)
        mean = values.sum(axis=0) / np.maximum(count, 1)
        squares = (np.where(there, values - mean, 0.0) ** 2).sum(axis=0)
        total = self.count + count
        delta = mean - self.mean
        share = count / np.maximum(total, 1)
        self.mean = self.mean + delta * share
        self.squares = self.squares + squares + delta**2 * self.count * share
        self.count = total
        self.missing |= ~there.all(axis=0)

    def deviation(self) -> np.ndarray[Any, Any]:
        """Returns the standard deviations [columns]; 1 for a constant column."""
        deviations = np.sqrt(self.squares / np.maximum(self.count, 1))
        return np.where(deviations > 0, deviations, 1.0)


@dataclass
class ColumnValues:
    """The distinct values of one column, and whether any row has none."""

    seen: set[bytes] = field(default_factory=set)
    missing: bool = False


class Columns:
    """The preprocessing of rows.

    The features are, in this order:

    - for each numeric column (number - mean) / deviation, or 0 (the mean) if it is missing;
    - for each numeric column with missing values in the training split, 1 if it is missing, else 0;
    - for each column of words a one-hot code. Its first index is for values that the training split does not have.
      Its last index is for missing values, if the training split has some.

    A field of a numeric column that is not a number is an error, in the saved model too.

    Args:
        names: of all columns of a row.
        numeric: indices of the numeric columns; the others are words.
        missing: strings that mean a missing value.
        most_values: maximum number of distinct words in a column.
    """

    def __init__(self, names: Sequence[str], numeric: Sequence[int], missing: Sequence[str], most_values: int) -> None:
        self._names = list(names)
        self._numeric = list(numeric)
        self._words = [n for n in range(len(names)) if n not in set(numeric)]
        self._missing = list(missing)
        self._most = most_values

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> Any:
        """Learns means and deviations of the numeric columns, and the words of the others.

        Args:
            batches: rows [b, columns] of strings.

        Raises:
            ConfigError: if a column has too many words, or numbers too large for a mean.
        """
        moments = Moments.from_columns(len(self._numeric))
        values = [ColumnValues() for _ in self._words]
        for rows in batches:
            tensor = tf.constant(rows, tf.string)
            is_present = np.logical_not(is_missing(tensor, self._missing).numpy())
            if self._numeric:
                numbers = tf.gather(tensor, self._numeric, axis=1)
                is_numeric_present = is_present[:, self._numeric]
                moments.add(as_numbers(tf.where(is_numeric_present, numbers, "0")).numpy(), is_numeric_present)
            for column, n in zip(values, self._words, strict=True):
                column.seen.update(tf.unique(tf.boolean_mask(tensor[:, n], is_present[:, n])).y.numpy().tolist())
                column.missing |= not is_present[:, n].all()
                self._check(n, column)
        for n, is_finite in zip(self._numeric, np.isfinite(moments.squares), strict=True):
            if not is_finite:
                raise ConfigError(
                    f"dataset.columns: the column {self._names[n]} has numbers too large to compute a mean; remove it "
                    "with dataset.drop"
                )
        return {
            "mean": moments.mean.tolist(),
            "deviation": moments.deviation().tolist(),
            "missing": moments.missing.tolist(),
            "words": [sorted(word.decode() for word in column.seen) for column in values],
            "words_missing": [bool(column.missing) for column in values],
        }

    def _check(self, column: int, found: ColumnValues) -> None:
        if len(found.seen) > self._most:
            raise ConfigError(too_many_values_error(self._names[column], self._most))

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [features] float32."""
        words = sum(1 + len(w) + m for w, m in zip(learned["words"], learned["words_missing"], strict=True))
        return Inputs((len(self._numeric) + sum(learned["missing"]) + words,), "float32")

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model rows [b, columns] of strings -> [b, features] float32."""
        rows = keras.Input((len(self._names),), dtype="string", name="row")
        missing = ops.reshape(self._is_missing(ops.reshape(rows, (-1,))), (-1, len(self._names)))
        parts = []
        if self._numeric:
            parts += self._numbers(rows, missing, learned)
        parts += [
            self._one_hot(n, rows, missing, words, has_missing)
            for n, words, has_missing in zip(self._words, learned["words"], learned["words_missing"], strict=True)
        ]
        joined = keras.layers.Concatenate(dtype="float32", name="features")(parts) if len(parts) > 1 else parts[0]
        return keras.Model(rows, joined, name="columns")

    def _is_missing(self, flat: keras.KerasTensor) -> keras.KerasTensor:
        if not self._missing:
            return ops.zeros_like(ops.equal(flat, flat))
        lookup = keras.layers.StringLookup(vocabulary=self._missing, num_oov_indices=1, name="missing")
        return ops.greater(lookup(flat), 0)

    def _numbers(self, rows: keras.KerasTensor, missing: keras.KerasTensor, learned: Any) -> list[keras.KerasTensor]:
        """Returns the standardised numbers, and the indicators of missing ones."""
        absent = ops.take(missing, self._numeric, axis=1)
        strings = ops.reshape(ops.where(absent, "0", ops.take(rows, self._numeric, axis=1)), (-1,))
        numbers = ops.reshape(refuse_unparsable(strings, parse_numbers(strings)), (-1, len(self._numeric)))
        mean, deviation = np.array(learned["mean"]), np.array(learned["deviation"])
        standardised = ops.divide(ops.subtract(numbers, mean), deviation)  # Keras's layers for this round to float32
        standardised = ops.where(absent, ops.zeros_like(numbers), standardised)
        parts = [ops.cast(standardised, "float32")]
        with_missing = [n for n, has in zip(self._numeric, learned["missing"], strict=True) if has]
        if with_missing:
            parts.append(ops.cast(ops.take(missing, with_missing, axis=1), "float32"))
        return parts

    def _one_hot(
        self, n: int, rows: keras.KerasTensor, missing: keras.KerasTensor, words: list[str], has_missing: bool
    ) -> keras.KerasTensor:
        """Returns one-hot codes [b, 1 + words (+ 1)]."""
        index = ops.zeros_like(ops.cast(missing[:, n], "int32"))
        if words:
            lookup = keras.layers.StringLookup(vocabulary=words, num_oov_indices=1, name=f"words_{n}")
            index = ops.cast(lookup(rows[:, n]), "int32")
        missing_index = (1 + len(words)) if has_missing else 0
        index = ops.where(missing[:, n], missing_index, index)
        return ops.one_hot(index, 1 + len(words) + has_missing, dtype="float32")


def too_many_values_error(name: str, most: int) -> str:
    return (
        f"dataset.columns: the column {name} has more than {most} different words; remove it with dataset.drop, or "
        "raise dataset.most_values"
    )


def is_number(text: str) -> bool:
    return len(text) <= LONGEST and re.fullmatch(NUMBER, text) is not None


def is_missing(strings: tf.Tensor, missing: Sequence[str]) -> tf.Tensor:
    """Returns which strings mean a missing value. Traced."""
    if not missing:
        return tf.zeros(tf.shape(strings), tf.bool)
    return tf.reduce_any(tf.equal(strings[..., None], tf.constant(list(missing))), axis=-1)


def are_numbers(strings: tf.Tensor) -> tf.Tensor:
    """Returns which strings are numbers. Traced."""
    return tf.strings.regex_full_match(strings, NUMBER) & (tf.strings.length(strings) <= LONGEST)


def as_numbers(strings: tf.Tensor) -> tf.Tensor:
    """Parses strings to float64 in the input pipeline, where TensorFlow's own parser is available. Traced."""
    return tf.strings.to_number(strings, tf.float64)


# ---------------------------------------------------------------------------------------------
# Reading a number with Keras's operations
# ---------------------------------------------------------------------------------------------


def parse_numbers(strings: keras.KerasTensor) -> keras.KerasTensor:
    """Parses strings [n] to float64 [n], with a relative error of about 1e-15; NaN if a string is not a number.

    Keras has no such operation, and a custom layer or a Lambda would not load without scaleflow. So this splits each
    string into characters, and sums digits times powers of ten; the same for the exponent.
    """
    x = look_up_characters(strings, CHARACTERS, LONGEST)
    is_present = x > PADDING - FIRST
    is_digit = ops.logical_and(x >= 0, x <= 9)
    is_point = ops.equal(x, CHARACTERS.index("."))
    is_minus = ops.equal(x, CHARACTERS.index("-"))
    is_sign = ops.logical_or(is_minus, ops.equal(x, CHARACTERS.index("+")))
    is_e = x >= CHARACTERS.index("e")
    in_exponent = ops.cumsum(ops.cast(is_e, "int32"), axis=1) > 0
    after_point = ops.cumsum(ops.cast(is_point, "int32"), axis=1) > 0

    in_mantissa = ops.logical_and(is_digit, ops.logical_not(in_exponent))
    exponent_digits = ops.logical_and(is_digit, in_exponent)
    mantissa = to_whole_number(x, in_mantissa) * to_sign(is_minus, ops.logical_not(in_exponent))
    exponent = to_whole_number(x, exponent_digits) * to_sign(is_minus, in_exponent)
    decimals = ops.cast(count_per_column(ops.logical_and(in_mantissa, after_point)), "float64")
    value = scale_by_power(mantissa, exponent - decimals)

    previous = ops.pad(x[:, :-1], [[0, 0], [1, 0]], constant_values=CHARACTERS.index("e"))  # start counts as e
    is_misplaced = ops.logical_and(is_sign, previous < CHARACTERS.index("e"))
    is_late_point = ops.logical_and(is_point, in_exponent)
    is_unknown = ops.equal(x, 1 - FIRST)
    invalid = ops.any(ops.logical_or(ops.logical_or(is_misplaced, is_late_point), is_unknown), axis=1)
    invalid = ops.logical_or(invalid, ops.equal(count_per_column(in_mantissa), 0))
    invalid = ops.logical_or(invalid, count_per_column(is_point) > 1)
    invalid = ops.logical_or(invalid, ops.logical_or(count_per_column(is_e) > 1, count_per_column(exponent_digits) > 3))
    invalid = ops.logical_or(invalid, ops.not_equal(count_per_column(is_e) > 0, count_per_column(exponent_digits) > 0))
    invalid = ops.logical_or(invalid, is_present[:, LONGEST])
    return ops.where(invalid, ops.full_like(value, float("nan")), value)


def look_up_characters(strings: keras.KerasTensor, known: str, longest: int) -> keras.KerasTensor:
    """Returns the place in `known` of each character of strings [n]: [n, longest + 1] int32.

    Padding is `PADDING - FIRST`, any other character `1 - FIRST`.
    """
    lookup = keras.layers.TextVectorization(
        standardize=None,
        split="character",
        output_mode="int",
        output_sequence_length=longest + 1,
        vocabulary=list(known),
        name="characters",
    )
    return ops.cast(lookup(strings), "int32") - FIRST


def refuse_unparsable(strings: keras.KerasTensor, numbers: keras.KerasTensor) -> keras.KerasTensor:
    """Returns the numbers unchanged, or raises an error that shows a string that was parsed as NaN.

    Returning NaN is not enough: ReLU compiled for a CPU turns it into 0. A lookup without an index for unknown
    strings is the only Keras layer that raises an error.
    """
    invalid = ops.where(ops.isnan(numbers), strings, "0")
    zero = keras.layers.StringLookup(vocabulary=["0"], num_oov_indices=0, name="only_numbers")(invalid)
    return numbers + ops.cast(zero, "float64")


def count_per_column(chosen: keras.KerasTensor) -> keras.KerasTensor:
    """Counts the chosen characters of each string: [n, k] bool -> [n] int32."""
    return ops.sum(ops.cast(chosen, "int32"), axis=1)


def to_sign(is_minus: keras.KerasTensor, where: keras.KerasTensor) -> keras.KerasTensor:
    """Returns [n] float64: -1 if there is a minus at the positions `where`, else 1."""
    return 1.0 - 2.0 * ops.cast(ops.any(ops.logical_and(is_minus, where), axis=1), "float64")


def to_whole_number(x: keras.KerasTensor, digits: keras.KerasTensor) -> keras.KerasTensor:
    """Returns the whole number [n] float64 that the chosen digits form, from left to right."""
    chosen = ops.cast(digits, "int32")
    digits_to_the_right = ops.flip(ops.cumsum(ops.flip(chosen, axis=1), axis=1), axis=1) - 1
    power = ops.take(POWERS, ops.maximum(digits_to_the_right, 0), axis=0)
    return ops.sum(ops.cast(x * chosen, "float64") * power, axis=1)


def scale_by_power(mantissa: keras.KerasTensor, exponent: keras.KerasTensor) -> keras.KerasTensor:
    """Returns mantissa * 10^exponent, [n] float64, in two steps: 10^-330 is 0, but 1e20 * 10^-330 is not."""
    half = ops.floor(exponent / 2)
    ten = ops.full_like(exponent, 10.0)
    return mantissa * ops.power(ten, half) * ops.power(ten, exponent - half)


#: Powers of ten, rounded to float64.
POWERS = np.array([float(f"1e{n}") for n in range(LONGEST + 1)])
