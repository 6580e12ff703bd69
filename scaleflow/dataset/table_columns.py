"""Preprocessing of the columns of a table: numbers, categories, texts and dates, each an input of its own.

Everything is built from Keras's layers and operations, so a saved model takes raw values and loads without scaleflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from scaleflow.dataset.columns import FIRST, PADDING, Moments, look_up_characters, refuse_unparsable
from scaleflow.dataset.text import SPECIAL, Text
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs

#: Characters of a date, its full length, and the length with fractions of a second.
CHARACTERS, SECONDS_END, LONGEST = "0123456789-:T .", 19, 29

#: The separators of a date by position; `T` or a blank is before the time.
SEPARATORS = {4: "-", 7: "-", 10: "T ", 13: ":", 16: ":"}

#: Days from the day that Julian day numbers count from to 1970-01-01.
EPOCH_DAY = 2440588
DAY = 86400


class Number:
    """Standardises a number: (x - mean) / deviation of the training split.

    A missing number, NaN, becomes 0. If the training split has missing numbers, a second feature is 1 for those.
    """

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Returns the mean, the deviation, and whether some numbers are missing, from batches [b]."""
        moments = Moments.from_columns(1)
        for batch in batches:
            moments.add(batch.astype(np.float64)[:, None], ~np.isnan(batch)[:, None])
        return describe_moments(moments)

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [1] float32, or [2] with an indicator."""
        return Inputs((2 if learned["missing"] else 1,))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model numbers [b] float32 -> [b, 1] or [b, 2] float32."""
        raw = keras.Input((), dtype="float32", name="number")
        x = ops.expand_dims(raw, -1)
        absent = ops.isnan(x)
        standardised = (ops.where(absent, 0.0, x) - learned["mean"]) / learned["deviation"]
        parts = [ops.where(absent, 0.0, standardised)]
        if learned["missing"]:
            parts.append(ops.cast(absent, "float32"))
        return keras.Model(raw, join(parts), name="number")


class Category:
    """Encodes words: as a one-hot code, or as a number for an embedding.

    The first place is for words that the training split does not have. A missing word, "", is a word like others.

    Args:
        embeds: give a number, instead of a one-hot code.
    """

    def __init__(self, embeds: bool) -> None:
        self._embeds = embeds

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> list[str]:
        """Returns the sorted words of batches [b]."""
        words: set[str] = set()
        for batch in batches:
            words.update(to_text(batch))
        return sorted(words)

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [1 + words] float32, or a number below 1 + words."""
        count = 1 + len(learned)
        return Inputs((), "int32", vocabulary=count) if self._embeds else Inputs((count,))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model words [b] -> codes [b, 1 + words] float32, or numbers [b] int32."""
        raw = keras.Input((), dtype="string", name="word")
        number = keras.layers.StringLookup(vocabulary=learned, num_oov_indices=1, name="words")(raw)
        code = ops.cast(number, "int32")
        return keras.Model(
            raw, code if self._embeds else ops.one_hot(code, 1 + len(learned), dtype="float32"), name="category"
        )


class WordBag:
    """Encodes a text by the words that it contains: 1 for each that occurs, else 0.

    The first place is for words that are not among the most frequent ones of the training split.

    Args:
        name: of the column, for messages.
        vocabulary: the number of places.
    """

    def __init__(self, name: str, vocabulary: int) -> None:
        self._name = name
        self._vocabulary = vocabulary

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> list[str]:
        """Returns the most frequent words of batches [b], without those that there is no place for."""
        words = Text(self._vocabulary + 1).learn(batches)  # it has two special places, this one
        if not words:
            raise ConfigError(f"dataset.text: the column {self._name} has no words; leave it out with dataset.drop")
        return words

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [1 + words] float32."""
        return Inputs((SPECIAL - 1 + len(learned),))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model texts [b] -> [b, 1 + words] float32."""
        raw = keras.Input((), dtype="string", name="text")
        bag = keras.layers.TextVectorization(output_mode="multi_hot", vocabulary=learned)(raw)
        return keras.Model(raw, ops.cast(bag, "float32"), name="word_bag")


class Date:
    """Turns a date into numbers: the standardised time, and the positions in the year, the week and the day.

    The form is `2024-01-31`, `2024-01-31 23:59:59` or `2024-01-31T23:59:59`; fractions of a second may follow. A
    position is the sine and the cosine of an angle, so that December is next to January. A missing date, "", becomes
    zeros. If the training split has missing dates, a last feature is 1 for those. Any other text is an error, in the
    saved model too.
    """

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Returns the mean and the deviation of the seconds since 1970, and whether some dates are missing."""
        moments = Moments.from_columns(1)
        for batch in batches:
            dates = np.array(to_text(batch), "datetime64[s]")
            moments.add(dates.astype(np.int64).astype(np.float64)[:, None], ~np.isnat(dates)[:, None])
        return describe_moments(moments)

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [7] float32, or [8] with an indicator."""
        return Inputs((8 if learned["missing"] else 7,))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model dates [b] as strings -> [b, 7] or [b, 8] float32."""
        raw = keras.Input((), dtype="string", name="date")
        absent = ops.equal(raw, "")
        date = ops.where(absent, "1970-01-01", raw)
        seconds, year = parse_dates(date)
        seconds = ops.expand_dims(refuse_unparsable(date, seconds), -1)
        day = ops.mod(seconds, DAY) / DAY
        week = ops.mod(seconds / DAY + 3, 7) / 7  # 1970-01-01 was a Thursday
        parts = [(seconds - learned["mean"]) / learned["deviation"]]
        for share in (ops.expand_dims(year, -1), week, day):
            angle = 2 * math.pi * share
            parts += [ops.sin(angle), ops.cos(angle)]
        absent = ops.expand_dims(absent, -1)
        features = ops.where(absent, 0.0, ops.cast(join(parts), "float32"))
        parts = [features, ops.cast(absent, "float32")] if learned["missing"] else [features]
        return keras.Model(raw, join(parts), name="date")


def describe_moments(moments: Moments) -> dict[str, Any]:
    return {
        "mean": float(moments.mean[0]),
        "deviation": float(moments.deviation()[0]),
        "missing": bool(moments.missing[0]),
    }


def to_text(batch: np.ndarray[Any, Any]) -> list[str]:
    """Returns strings; those of a stream are `bytes`."""
    return [value.decode() if isinstance(value, bytes) else str(value) for value in batch]


def join(parts: list[keras.KerasTensor]) -> keras.KerasTensor:
    return ops.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]


def parse_dates(strings: keras.KerasTensor) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Parses dates [n] to seconds since 1970 [n] float64, NaN if a string is no date, and the share of the year.

    Keras has no such operation, and a custom layer or a Lambda would not load without scaleflow. The share is by
    months of 31 days: [n] float64, from 0 to less than 1.
    """
    x = look_up_characters(strings, CHARACTERS, LONGEST)
    is_end = ops.equal(x, PADDING - FIRST)
    is_digit = ops.logical_and(x >= 0, x <= 9)
    digits = ops.where(is_digit, x, 0)

    def number(first: int, end: int) -> keras.KerasTensor:
        return ops.sum(digits[:, first:end] * np.array([10**n for n in reversed(range(end - first))], "int32"), axis=1)

    year, month, day = number(0, 4), number(5, 7), number(8, 10)
    hour, minute, second = number(11, 13), number(14, 16), number(17, 19)
    invalid = ops.logical_or(ops.logical_or(month < 1, month > 12), ops.logical_or(day < 1, day > 31))
    invalid = ops.logical_or(invalid, ops.logical_or(hour > 23, ops.logical_or(minute > 59, second > 59)))
    fits = [
        ops.any(ops.stack([ops.equal(x[:, n], CHARACTERS.index(each)) for each in SEPARATORS[n]]), axis=0)
        if n in SEPARATORS
        else is_digit[:, n]
        for n in range(SECONDS_END)
    ]
    has_date = ops.all(ops.stack(fits[:10]), axis=0)
    has_time = ops.all(ops.stack(fits[10:]), axis=0)
    has_time = ops.logical_and(
        has_time,
        ops.logical_or(is_end[:, SECONDS_END], ops.equal(x[:, SECONDS_END], CHARACTERS.index("."))),
    )
    rest = ops.logical_or(is_digit, is_end)[:, SECONDS_END + 1 :]
    has_time = ops.logical_and(has_time, ops.logical_and(ops.all(rest, axis=1), is_end[:, LONGEST]))
    invalid = ops.logical_or(
        invalid, ops.logical_not(ops.logical_and(has_date, ops.logical_or(is_end[:, 10], has_time)))
    )

    days = count_days(year, month, day)
    whole = days * float(DAY) + ops.cast(hour * 3600 + minute * 60 + second, "float64")
    share = (ops.cast(month - 1, "float64") + ops.cast(day - 1, "float64") / 31) / 12
    return ops.where(invalid, ops.full_like(whole, float("nan")), whole), share


def count_days(year: keras.KerasTensor, month: keras.KerasTensor, day: keras.KerasTensor) -> keras.KerasTensor:
    """Returns the days since 1970-01-01 [n] float64, in the Gregorian calendar."""
    before_march = ops.cast(month < 3, "int32")
    years, months = year + 4800 - before_march, month + 12 * before_march - 3
    leap_days = years // 4 - years // 100 + years // 400
    days = day + (153 * months + 2) // 5 + 365 * years + leap_days - 32045 - EPOCH_DAY
    return ops.cast(days, "float64")
