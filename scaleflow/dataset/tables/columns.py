"""Preprocessing of the columns of a table: numbers, categories, texts and dates. Each column is an input.

Everything is built from Keras's layers and operations, so a saved model takes raw values and loads without scaleflow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from scaleflow.dataset.column_kinds import TABLE_KINDS
from scaleflow.dataset.reading.targets import find_mean_and_deviation
from scaleflow.dataset.reading.text import (
    LOWER,
    SPECIAL,
    Text,
    add_variants,
    add_words,
    choose_standardization,
    find_split,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Preprocessing, Standardize
from scaleflow.serving.cells import CATEGORY, NUMBER, TEXT

#: The characters of a date. The place of a character is its code, so the code of a digit is its value.
CHARACTERS = "0123456789-:T ."
BLANK = CHARACTERS.index(" ")
T = CHARACTERS.index("T")
POINT = CHARACTERS.index(".")

#: The code after the end of a date.
END = -2

#: The codes of a date with a time, with 0 for every digit. Digits of a fraction can follow.
FORM = [CHARACTERS.index(character) for character in "0000-00-00T00:00:00"]

#: Maximum number of characters of a date with a fraction.
MAX_LENGTH = 29

#: How many quantiles of a column of numbers are learned, with the smallest and the largest value.
QUANTILES = 49

#: If the interquartile range is smaller than this, in deviations, float32 numbers around the mean are nearly all equal.
LONG_TAIL = 1e-3

#: The Julian day number of 1970-01-01.
EPOCH_DAY = 2440588

#: Seconds of a day.
DAY = 86400

#: Words of a text for embeddings, if `tokens` is null.
TOKENS = 50


class Number:
    """Standardises a number: (x - mean) / deviation of the training split.

    A missing number, NaN, becomes 0. If the training split has missing numbers, a second feature is 1 for those.
    """

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Returns the mean, the deviation, the quantiles, and whether some are missing, of batches [b]."""
        return describe_numbers(batches)

    def extend(self, learned: Any, new: Any) -> dict[str, Any]:
        """Returns the learned values, with an indicator if numbers are missing in the new data."""
        return {**learned, "missing": learned["missing"] or new["missing"]}

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [1] float32, or [2] with an indicator."""
        return Inputs((2 if learned["missing"] else 1,), quantiles=standardise_quantiles(learned))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model numbers [b] float64 -> [b, 1] or [b, 2] float32."""
        return self.layer_of_all([learned])

    def layer_of_all(self, learned: Sequence[Any]) -> keras.Model:
        """Builds one model for several columns, from a list of numbers [b] float64 to a list of features.

        Layers for single columns would take longer to build, trace and save. The numbers are float64, because float32
        would round numbers such as seconds since 1970 before their mean is subtracted.
        """
        raw = [keras.Input((), dtype="float64", name=f"number_{n}") for n in range(len(learned))]
        x = ops.stack(raw, axis=1)
        absent = ops.isnan(x)
        means = np.array([column["mean"] for column in learned])
        deviations = np.array([column["deviation"] for column in learned])
        standardised = (ops.where(absent, 0.0, x) - means) / deviations
        features = ops.cast(ops.where(absent, 0.0, standardised), "float32")
        widths = [2 if column["missing"] else 1 for column in learned]
        if max(widths) > 1:
            features = join([features, ops.cast(absent, "float32")])  # all numbers, then all indicators
            places: list[int] = []
            for number, width in enumerate(widths):
                places.append(number)
                if width == 2:
                    places.append(number + len(learned))
            features = ops.take(features, np.array(places), axis=1)
        if len(learned) > 1:
            features = list(ops.split(features, np.cumsum(widths)[:-1].tolist(), axis=1))
        return keras.Model(raw if len(raw) > 1 else raw[0], features, name="numbers_preprocessing")


class Category:
    """Encodes words: as a one-hot code, or as a number for an embedding.

    The first place is for words that are rare or absent in the training split. A missing word, "", counts as a word.

    Args:
        embeds: give a number, instead of a one-hot code.
        most: maximum number of words, without the missing one. The most frequent words are used, and the others are
            encoded as unknown words. None: no limit.
    """

    def __init__(self, embeds: bool, most: int | None = None) -> None:
        self._embeds = embeds
        self._most = most

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> list[str]:
        """Returns the sorted words of batches [b]."""
        counts: Counter[str] = Counter()
        for batch in batches:
            counts.update(to_text(batch))
        if self._most is None:
            return sorted(counts)
        words = sorted(counts, key=lambda word: (word != "", -counts[word], word))
        limit = self._most + (1 if "" in counts else 0)
        return sorted(words[:limit])

    def extend(self, learned: Any, new: Any) -> list[str]:
        """Returns the known words, then the new ones."""
        return add_words(learned, new)

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [1 + words] float32, or a number below 1 + words."""
        count = 1 + len(learned)
        return Inputs((), "int32", vocabulary=count) if self._embeds else Inputs((count,))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model words [b] -> codes [b, 1 + words] float32, or numbers [b] int32."""
        raw = keras.Input((), dtype="string", name="word")
        number = keras.layers.StringLookup(vocabulary=learned, num_oov_indices=1, name="words")(raw)
        code = ops.cast(number, "int32")
        if not self._embeds:
            code = ops.one_hot(code, 1 + len(learned), dtype="float32")
        return keras.Model(raw, code, name="category")


class WordBag:
    """Encodes a text by the words that it contains: 1 for a word that occurs, else 0.

    The first place is for words that are not among the most frequent words of the training split.

    Args:
        name: of the column, for messages.
        vocabulary: the number of places.
        standardize: as for `Text`.
    """

    def __init__(self, name: str, vocabulary: int, standardize: Standardize = LOWER) -> None:
        self._name = name
        self._vocabulary = vocabulary
        self._standardize = standardize

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> list[str]:
        """Returns the most frequent words of batches [b], as many as there are places."""
        text = Text(self._vocabulary + 1, standardize=self._standardize)  # it has one more special place
        words = text.learn(batches)
        if not words:
            raise ConfigError(f"dataset.text: the column {self._name} has no words; leave it out with dataset.drop")
        return words

    def extend(self, learned: Any, new: Any) -> list[str]:
        """Returns the known words, then the most frequent new words, as many as there are places."""
        return add_words(learned, new, self._vocabulary - SPECIAL + 1)

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [1 + words] float32."""
        return Inputs((SPECIAL - 1 + len(learned),))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model texts [b] -> [b, 1 + words] float32."""
        raw = keras.Input((), dtype="string", name="text")
        is_unicode = self._standardize == "unicode"
        words, places = add_variants(learned) if is_unicode else (learned, [])
        vectorize = keras.layers.TextVectorization(
            standardize=choose_standardization(self._standardize),
            split=find_split(learned, is_unicode),
            output_mode="multi_hot",
            vocabulary=words,
        )
        bag = ops.cast(vectorize(raw), "float32")
        if len(words) > len(learned):  # a word occurs if a variant does
            columns = list_variant_columns(places, len(learned))
            bag = ops.max(ops.take(bag, columns, axis=1), axis=2)
        return keras.Model(raw, bag, name="word_bag")


def list_variant_columns(places: Sequence[int], words: int) -> np.ndarray[Any, Any]:
    """Returns the columns of a bag of variants that each word has: [1 + words, variants] int32.

    The first row is for unknown words. Words with few variants repeat their first one.

    Args:
        places: for each variant the place of its word.
        words: the number of words.
    """
    columns: list[list[int]] = [[] for _ in range(1 + words)]
    columns[0].append(0)
    for column, place in enumerate(places, 1):
        columns[1 + place].append(column)
    width = max(len(variants) for variants in columns)
    for variants in columns:
        variants += variants[:1] * (width - len(variants))
    return np.array(columns, "int32")


class Date:
    """Turns a date into numbers: the standardised time, and the positions in the year, the week and the day.

    The form is `2024-01-31`, `2024-01-31 23:59:59` or `2024-01-31T23:59:59`. Fractions of a second may follow. A
    position is the sine and the cosine of an angle, so that December is next to January. A missing date, "", becomes
    zeros. If the training split has missing dates, a last feature is 1 for those. Any other text is an error. This is
    also true of the saved model.
    """

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Returns the mean, the deviation and the quantiles of the seconds since 1970, and whether some are missing."""
        seconds: list[np.ndarray[Any, Any]] = []
        for batch in batches:
            dates = np.array(to_text(batch), "datetime64[s]")
            seconds.append(np.where(np.isnat(dates), np.nan, dates.astype(np.float64)))
        return describe_numbers(seconds)

    def extend(self, learned: Any, new: Any) -> dict[str, Any]:
        """Returns the learned values, with an indicator if dates are missing in the new data."""
        return {**learned, "missing": learned["missing"] or new["missing"]}

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [7] float32, or [8] with an indicator."""
        return Inputs((8 if learned["missing"] else 7,), quantiles=standardise_quantiles(learned))

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
        for position in (ops.expand_dims(year, -1), week, day):
            angle = 2 * math.pi * position
            parts += [ops.sin(angle), ops.cos(angle)]
        absent = ops.expand_dims(absent, -1)
        features = ops.where(absent, 0.0, ops.cast(join(parts), "float32"))
        parts = [features, ops.cast(absent, "float32")] if learned["missing"] else [features]
        return keras.Model(raw, join(parts), name="date")


def describe_numbers(batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Returns the mean, the deviation (1 for a constant) and the quantiles of numbers [b], and whether some are NaN.

    A few extreme numbers can press the middle half of the numbers into `LONG_TAIL` deviations. The "mean" is then the
    median, because float32 has more digits near 0.
    """
    numbers = np.concatenate(list(batches))
    present = numbers[~np.isnan(numbers)]
    has_missing = len(present) < len(numbers)
    if not len(present):
        return {"mean": 0.0, "deviation": 1.0, "missing": has_missing, "quantiles": [0.0] * QUANTILES}
    quantiles = np.quantile(present, np.linspace(0, 1, QUANTILES)).tolist()
    mean, deviation = find_mean_and_deviation(present)
    middle = QUANTILES // 2
    quarter = middle // 2
    interquartile_range = quantiles[-1 - quarter] - quantiles[quarter]
    if interquartile_range < LONG_TAIL * deviation:
        mean = quantiles[middle]
    return {"mean": mean, "deviation": deviation or 1.0, "missing": has_missing, "quantiles": quantiles}


def standardise_quantiles(learned: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns the quantiles of standardised numbers."""
    return tuple((value - learned["mean"]) / learned["deviation"] for value in learned["quantiles"])


def to_text(batch: np.ndarray[Any, Any]) -> list[str]:
    """Returns a batch as strings. The texts of a stream are `bytes`."""
    return [value.decode() if isinstance(value, bytes) else str(value) for value in batch]


def join(parts: list[keras.KerasTensor]) -> keras.KerasTensor:
    # A layer, not keras.ops, whose names older versions of Keras do not keep in a file.
    return keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]


def parse_dates(strings: keras.KerasTensor) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Parses dates [n] as strings. Keras has no such operation, and an own layer would not load without scaleflow.

    Returns:
        The seconds since 1970, [n] float64, NaN if a string is no date; and the position in the year, [n] float64,
        from 0 to less than 1, as if all months had 31 days.
    """
    lookup = keras.layers.TextVectorization(
        standardize=None,
        split="character",
        output_mode="int",
        output_sequence_length=MAX_LENGTH + 1,
        vocabulary=list(CHARACTERS),
        name="characters",
    )
    x = ops.cast(lookup(strings), "int32") + END  # 0 is padding, 1 an unknown character
    digits = ops.where(x <= 9, ops.maximum(x, 0), 0)
    form = ops.where(ops.equal(x, BLANK), T, ops.where(ops.logical_and(x >= 0, x <= 9), 0, x))

    def number(first: int, end: int) -> keras.KerasTensor:
        powers = np.array([10**n for n in reversed(range(end - first))], "int32")
        return ops.sum(digits[:, first:end] * powers, axis=1)

    year = number(0, 4)
    month = number(5, 7)
    day = number(8, 10)
    hour = number(11, 13)
    minute = number(14, 16)
    second = number(17, 19)

    is_end = ops.equal(x, END)
    fraction = form[:, 19:20]
    rest = form[:, 20:MAX_LENGTH]
    has_time = are_all(
        ops.equal(form[:, 10:19], FORM[10:]),
        ops.logical_or(ops.equal(fraction, POINT), is_end[:, 19:20]),
        ops.logical_or(ops.equal(rest, 0), is_end[:, 20:MAX_LENGTH]),
        is_end[:, MAX_LENGTH:],
    )
    has_day_form = ops.equal(form[:, :10], FORM[:10])
    has_no_blank = ops.logical_not(ops.equal(x[:, :10], BLANK))
    limits = ((month, 1, 12), (day, 1, 31), (hour, 0, 23), (minute, 0, 59), (second, 0, 59))
    is_in_limits: list[keras.KerasTensor] = []
    for part, low, high in limits:
        is_in_limits += [part >= low, part <= high]
    is_day = are_all(has_day_form, has_no_blank, ops.stack(is_in_limits, axis=1))
    is_date = ops.logical_and(is_day, ops.logical_or(is_end[:, 10], has_time))

    seconds = count_days(year, month, day) * float(DAY) + ops.cast(hour * 3600 + minute * 60 + second, "float64")
    position = (ops.cast(month - 1, "float64") + ops.cast(day - 1, "float64") / 31) / 12
    return ops.where(is_date, seconds, ops.full_like(seconds, float("nan"))), position


def are_all(*conditions: keras.KerasTensor) -> keras.KerasTensor:
    """Returns for each row whether all conditions [n, ...] hold: [n] bool."""
    return ops.all(keras.layers.Concatenate(axis=1)(list(conditions)), axis=1)


def refuse_unparsable(strings: keras.KerasTensor, numbers: keras.KerasTensor) -> keras.KerasTensor:
    """Returns the numbers unchanged, or raises an error that shows a string that was parsed as NaN.

    Returning NaN is not enough: ReLU compiled for a CPU turns it into 0. A lookup without an index for unknown
    strings is the only Keras layer that raises an error.
    """
    invalid = ops.where(ops.isnan(numbers), strings, "0")
    zero = keras.layers.StringLookup(vocabulary=["0"], num_oov_indices=0, name="only_dates")(invalid)
    return numbers + ops.cast(zero, "float64")


def count_days(year: keras.KerasTensor, month: keras.KerasTensor, day: keras.KerasTensor) -> keras.KerasTensor:
    """Returns the days since 1970-01-01 [n] float64, in the Gregorian calendar."""
    before_march = ops.cast(month < 3, "int32")
    years = year + 4800 - before_march
    months = month + 12 * before_march - 3
    leap_days = years // 4 - years // 100 + years // 400
    days = day + (153 * months + 2) // 5 + 365 * years + leap_days - 32045 - EPOCH_DAY
    return ops.cast(days, "float64")


@dataclass(frozen=True)
class FeatureOptions:
    """The options of a table that concern the features of its columns. conf/dataset/table.yaml describes them.

    Raises ConfigError if they do not fit together.
    """

    most_values: int
    vocabulary: int
    standardize: Standardize
    embed: bool
    tokens: int | None

    def __post_init__(self) -> None:
        if self.tokens is not None and not self.embed:
            raise ConfigError(
                f"dataset.tokens={self.tokens}: is for dataset.embed=true; without it all words of a text count"
            )


def describe_input_column(kind: str) -> Inputs:
    return Inputs((), "float64" if kind == NUMBER else "string", kind=TABLE_KINDS[kind].name)


def make_preprocessing(name: str, kind: str, options: FeatureOptions) -> Preprocessing:
    """Makes the preprocessing of a column."""
    if kind == TEXT and options.embed:
        return Text(options.vocabulary, options.tokens or TOKENS, options.standardize)
    if kind == TEXT:
        return WordBag(name, options.vocabulary, options.standardize)
    if kind == CATEGORY:
        return Category(options.embed, options.most_values)
    return Number() if kind == NUMBER else Date()
