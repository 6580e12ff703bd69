"""Rows of text as numbers: what a table's columns become before a model sees them.

A row is what a line of a CSV file holds, as strings. Numbers are standardised, and where the training split lacks
some, a further column says so; words become one-hot codes. All of it is made of Keras's own layers and operations,
reading a number included, so that a saved model takes rows as they are and loads without scaleflow.
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

#: A number as it may be written, for TensorFlow (RE2) and Python alike; in at most so many characters.
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
LONGEST = 31

#: The characters of a number; a digit's place here is its value.
CHARACTERS = "0123456789.-+eE"
PADDING = 0
FIRST = 2  # a lookup's index of the first character: 0 is padding, 1 whatever it does not know


@dataclass
class Moments:
    """Mean and deviation of columns, from batches (Chan, Golub and LeVeque 1979).

    Attributes:
        count: numbers seen, [columns].
        mean, squares: of them, and the sum of their squared distances from it.
        missing: whether some row had none.
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
        """Takes in [b, columns] numbers, of which those that are `there` count."""
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
        """[columns]; 1 for a column that does not vary."""
        found = np.sqrt(self.squares / np.maximum(self.count, 1))
        return np.where(found > 0, found, 1.0)


@dataclass
class ColumnValues:
    """The different values of one column; whether some row had none."""

    seen: set[bytes] = field(default_factory=set)
    missing: bool = False


class Columns:
    """The preprocessing of rows.

    A number becomes (number - mean) / deviation, a missing one 0 (the mean). Behind the numbers come, for the columns
    where the training split lacks some, 1 where it is missing and 0 elsewhere; then for each column of words a 1 in
    the place of its value: the first place is for values that the training split does not have, the last for missing
    ones, where that has some. What is no number where one is expected is an error, in the saved model, too.

    Args:
        names: of all columns of a row.
        numeric: the places of those that are numbers; the others are words.
        missing: what stands for a missing value.
        most_values: how many different words a column may have.
    """

    def __init__(self, names: Sequence[str], numeric: Sequence[int], missing: Sequence[str], most_values: int) -> None:
        self._names = list(names)
        self._numeric = list(numeric)
        self._words = [n for n in range(len(names)) if n not in set(numeric)]
        self._missing = list(missing)
        self._most = most_values

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> Any:
        """Means and deviations of the numbers, and the words of the others.

        Args:
            batches: rows [b, columns] of strings.
        """
        moments = Moments.from_columns(len(self._numeric))
        values = [ColumnValues() for _ in self._words]
        for rows in batches:
            tensor = tf.constant(rows, tf.string)
            there = np.logical_not(is_missing(tensor, self._missing).numpy())
            if self._numeric:
                numbers = tf.gather(tensor, self._numeric, axis=1)
                present = there[:, self._numeric]
                moments.add(as_numbers(tf.where(present, numbers, "0")).numpy(), present)
            for found, n in zip(values, self._words, strict=True):
                found.seen.update(tf.unique(tf.boolean_mask(tensor[:, n], there[:, n])).y.numpy().tolist())
                found.missing |= not there[:, n].all()
                self._check(n, found)
        for n, is_finite in zip(self._numeric, np.isfinite(moments.squares), strict=True):
            if not is_finite:
                raise ConfigError(
                    f"dataset.columns: the column {self._names[n]} has numbers too large to have a mean; "
                    "leave it out with dataset.drop"
                )
        return {
            "mean": moments.mean.tolist(),
            "deviation": moments.deviation().tolist(),
            "missing": moments.missing.tolist(),
            "words": [sorted(word.decode() for word in found.seen) for found in values],
            "words_missing": [bool(found.missing) for found in values],
        }

    def _check(self, column: int, found: ColumnValues) -> None:
        if len(found.seen) > self._most:
            raise ConfigError(too_many_values_error(self._names[column], self._most))

    def features(self, learned: Any) -> Inputs:
        """[features] float32."""
        words = sum(1 + len(w) + m for w, m in zip(learned["words"], learned["words_missing"], strict=True))
        return Inputs((len(self._numeric) + sum(learned["missing"]) + words,), "float32")

    def layer(self, learned: Any) -> keras.Model:
        """Rows [b, columns] of strings -> [b, features] float32."""
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
        """Standardised numbers, and which of them are missing."""
        absent = ops.take(missing, self._numeric, axis=1)
        given = ops.reshape(ops.where(absent, "0", ops.take(rows, self._numeric, axis=1)), (-1,))
        numbers = ops.reshape(refuse_unparsable(given, parse_numbers(given)), (-1, len(self._numeric)))
        mean, deviation = np.array(learned["mean"]), np.array(learned["deviation"])
        standard = ops.divide(ops.subtract(numbers, mean), deviation)  # Keras's own layers for it round to float32
        standard = ops.where(absent, ops.zeros_like(numbers), standard)
        parts = [ops.cast(standard, "float32")]
        told = [n for n, has in zip(self._numeric, learned["missing"], strict=True) if has]
        if told:
            parts.append(ops.cast(ops.take(missing, told, axis=1), "float32"))
        return parts

    def _one_hot(
        self, n: int, rows: keras.KerasTensor, missing: keras.KerasTensor, words: list[str], has_missing: bool
    ) -> keras.KerasTensor:
        """[b, 1 + words (+ 1)]."""
        index = ops.zeros_like(ops.cast(missing[:, n], "int32"))
        if words:
            lookup = keras.layers.StringLookup(vocabulary=words, num_oov_indices=1, name=f"words_{n}")
            index = ops.cast(lookup(rows[:, n]), "int32")
        place = (1 + len(words)) if has_missing else 0
        index = ops.where(missing[:, n], place, index)
        return ops.one_hot(index, 1 + len(words) + has_missing, dtype="float32")


def too_many_values_error(name: str, most: int) -> str:
    return (
        f"dataset.columns: the column {name} has more than {most} different words; leave it out with dataset.drop, or "
        "raise dataset.most_values"
    )


def is_number(text: str) -> bool:
    return len(text) <= LONGEST and re.fullmatch(NUMBER, text) is not None


def is_missing(strings: tf.Tensor, missing: Sequence[str]) -> tf.Tensor:
    """Traced: which of the strings stand for a missing value."""
    if not missing:
        return tf.zeros(tf.shape(strings), tf.bool)
    return tf.reduce_any(tf.equal(strings[..., None], tf.constant(list(missing))), axis=-1)


def are_numbers(strings: tf.Tensor) -> tf.Tensor:
    """Traced: which of the strings are numbers."""
    return tf.strings.regex_full_match(strings, NUMBER) & (tf.strings.length(strings) <= LONGEST)


def as_numbers(strings: tf.Tensor) -> tf.Tensor:
    """Traced: numbers as float64, in the input pipeline, where TensorFlow's own way is at hand."""
    return tf.strings.to_number(strings, tf.float64)


# ---------------------------------------------------------------------------------------------
# Reading a number with Keras's operations
# ---------------------------------------------------------------------------------------------


def parse_numbers(strings: keras.KerasTensor) -> keras.KerasTensor:
    """[n] strings -> [n] float64; NaN for what is no number. To about 1e-15 of it.

    Keras has no operation for it, and a layer of our own, or a Lambda, would not load elsewhere. So each string is
    divided into characters; digits are multiplied by their powers of ten and summed, the exponent likewise.
    """
    characters = keras.layers.TextVectorization(
        standardize=None,
        split="character",
        output_mode="int",
        output_sequence_length=LONGEST + 1,
        vocabulary=list(CHARACTERS),
        name="characters",
    )(strings)
    x = ops.cast(characters, "int32") - FIRST  # [n, LONGEST + 1]
    is_there = x > PADDING - FIRST
    is_digit = ops.logical_and(x >= 0, x <= 9)
    is_point = ops.equal(x, CHARACTERS.index("."))
    is_minus = ops.equal(x, CHARACTERS.index("-"))
    is_sign = ops.logical_or(is_minus, ops.equal(x, CHARACTERS.index("+")))
    is_e = x >= CHARACTERS.index("e")
    in_exponent = ops.cumsum(ops.cast(is_e, "int32"), axis=1) > 0
    behind_point = ops.cumsum(ops.cast(is_point, "int32"), axis=1) > 0

    in_mantissa = ops.logical_and(is_digit, ops.logical_not(in_exponent))
    exponent_digits = ops.logical_and(is_digit, in_exponent)
    mantissa = to_whole_number(x, in_mantissa) * to_sign(is_minus, ops.logical_not(in_exponent))
    exponent = to_whole_number(x, exponent_digits) * to_sign(is_minus, in_exponent)
    decimals = ops.cast(count_per_column(ops.logical_and(in_mantissa, behind_point)), "float64")
    value = scale_by_power(mantissa, exponent - decimals)

    before = ops.pad(x[:, :-1], [[0, 0], [1, 0]], constant_values=CHARACTERS.index("e"))  # at the start as behind an e
    misplaced = ops.logical_and(is_sign, before < CHARACTERS.index("e"))
    late_point = ops.logical_and(is_point, in_exponent)
    unknown = ops.equal(x, 1 - FIRST)
    wrong = ops.any(ops.logical_or(ops.logical_or(misplaced, late_point), unknown), axis=1)
    wrong = ops.logical_or(wrong, ops.equal(count_per_column(in_mantissa), 0))
    wrong = ops.logical_or(wrong, count_per_column(is_point) > 1)
    wrong = ops.logical_or(wrong, ops.logical_or(count_per_column(is_e) > 1, count_per_column(exponent_digits) > 3))
    wrong = ops.logical_or(wrong, ops.not_equal(count_per_column(is_e) > 0, count_per_column(exponent_digits) > 0))
    wrong = ops.logical_or(wrong, is_there[:, LONGEST])
    return ops.where(wrong, ops.full_like(value, float("nan")), value)


def refuse_unparsable(strings: keras.KerasTensor, numbers: keras.KerasTensor) -> keras.KerasTensor:
    """The same numbers; whatever was parsed as NaN raises an error that shows it.

    NaN alone would not do: compiled for a CPU, ReLU makes 0 of it. A lookup that has no place for what it does not
    know is the one of Keras's layers that raises.
    """
    wrong = ops.where(ops.isnan(numbers), strings, "0")
    zero = keras.layers.StringLookup(vocabulary=["0"], num_oov_indices=0, name="only_numbers")(wrong)
    return numbers + ops.cast(zero, "float64")


def count_per_column(chosen: keras.KerasTensor) -> keras.KerasTensor:
    """[n, k] bool -> [n] int32."""
    return ops.sum(ops.cast(chosen, "int32"), axis=1)


def to_sign(is_minus: keras.KerasTensor, where: keras.KerasTensor) -> keras.KerasTensor:
    """[n] float64: -1 where there is a minus, else 1."""
    return 1.0 - 2.0 * ops.cast(ops.any(ops.logical_and(is_minus, where), axis=1), "float64")


def to_whole_number(x: keras.KerasTensor, digits: keras.KerasTensor) -> keras.KerasTensor:
    """The whole number [n] float64 that the chosen digits make, from left to right."""
    chosen = ops.cast(digits, "int32")
    place = ops.flip(ops.cumsum(ops.flip(chosen, axis=1), axis=1), axis=1) - 1  # digits to the right of it
    power = ops.take(POWERS, ops.maximum(place, 0), axis=0)
    return ops.sum(ops.cast(x * chosen, "float64") * power, axis=1)


def scale_by_power(mantissa: keras.KerasTensor, exponent: keras.KerasTensor) -> keras.KerasTensor:
    """mantissa x 10^exponent, [n] float64; in two steps, since 10^-330 is 0 where 1e20 x 10^-330 is not."""
    half = ops.floor(exponent / 2)
    ten = ops.full_like(exponent, 10.0)
    return mantissa * ops.power(ten, half) * ops.power(ten, exponent - half)


#: Powers of ten that are exact in float64, or the nearest to them.
POWERS = np.array([float(f"1e{n}") for n in range(LONGEST + 1)])
