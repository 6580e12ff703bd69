"""Preprocessing of the columns of a table: numbers, categories, texts and dates, each an input of its own.

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
from scaleflow.dataset.reading.text import LOWER, SPECIAL, Text, add_variants, add_words, find_split
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Preprocessing, Standardize
from scaleflow.serving.cells import CATEGORY, NUMBER, TEXT

#: Characters of a date, and their codes; the code of a digit is its value.
CHARACTERS = "0123456789-:T ."
END, BLANK, T, POINT = -2, CHARACTERS.index(" "), CHARACTERS.index("T"), CHARACTERS.index(".")

#: The form of a date with a time as codes, 0 for every digit. Digits of a fraction follow, up to `LONGEST` characters.
FORM = [CHARACTERS.index(character) for character in "0000-00-00T00:00:00"]
LONGEST = 29

#: How many quantiles of a column of numbers are learned, the least and the greatest value among them.
QUANTILES = 49

#: The interquartile range, in deviations, of a column of which float32 could not tell most numbers apart.
LONG_TAIL = 1e-3

#: Days from the day that Julian day numbers count from to 1970-01-01.
EPOCH_DAY = 2440588
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
        """Returns what was learned, with an indicator if numbers are missing in the new data."""
        return {**learned, "missing": learned["missing"] or new["missing"]}

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [1] float32, or [2] with an indicator."""
        return Inputs((2 if learned["missing"] else 1,), quantiles=standardise_quantiles(learned))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model numbers [b] float64 -> [b, 1] or [b, 2] float32."""
        return self.layer_of_all([learned])

    def layer_of_all(self, learned: Sequence[Any]) -> keras.Model:
        """Builds the model of several columns at once, lists of numbers and features: each layer of a column takes time
        to build, to trace and to save.

        float32 would round numbers such as seconds since 1970 before their mean is subtracted.
        """
        raw = [keras.Input((), dtype="float64", name=f"number_{n}") for n in range(len(learned))]
        x = ops.stack(raw, axis=1)
        absent = ops.isnan(x)
        means, deviations = (np.array([each[key] for each in learned]) for key in ("mean", "deviation"))
        standardised = (ops.where(absent, 0.0, x) - means) / deviations
        features = ops.cast(ops.where(absent, 0.0, standardised), "float32")
        widths = [2 if each["missing"] else 1 for each in learned]
        if max(widths) > 1:
            features = join([features, ops.cast(absent, "float32")])
            places = [n + place * len(learned) for n, width in enumerate(widths) for place in range(width)]
            features = ops.take(features, np.array(places), axis=1)
        if len(learned) > 1:
            features = list(ops.split(features, np.cumsum(widths)[:-1].tolist(), axis=1))
        return keras.Model(raw if len(raw) > 1 else raw[0], features, name="numbers_preprocessing")


class Category:
    """Encodes words: as a one-hot code, or as a number for an embedding.

    The first place is for words that are rare in the training split, or not in it. A missing word, "", is a word like
    others.

    Args:
        embeds: give a number, instead of a one-hot code.
        most: the most words besides a missing one, the most frequent ones; None: all. The others are as unknown ones.
    """

    def __init__(self, embeds: bool, most: int | None = None) -> None:
        self._embeds = embeds
        self._most = most

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> list[str]:
        """Returns the sorted words of batches [b]."""
        counts = Counter(word for batch in batches for word in to_text(batch))
        words = sorted(counts, key=lambda word: (word != "", -counts[word], word))
        return sorted(words[: None if self._most is None else self._most + ("" in counts)])

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
        return keras.Model(
            raw, code if self._embeds else ops.one_hot(code, 1 + len(learned), dtype="float32"), name="category"
        )


class WordBag:
    """Encodes a text by the words that it contains: 1 for each that occurs, else 0.

    The first place is for words that are not among the most frequent ones of the training split.

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
        """Returns the most frequent words of batches [b], without those that there is no place for."""
        words = Text(self._vocabulary + 1, standardize=self._standardize).learn(
            batches
        )  # it has two special places, this one
        if not words:
            raise ConfigError(f"dataset.text: the column {self._name} has no words; leave it out with dataset.drop")
        return words

    def extend(self, learned: Any, new: Any) -> list[str]:
        """Returns the known words, then the most frequent new ones that there is a place for."""
        return add_words(learned, new, self._vocabulary - SPECIAL + 1)

    def features(self, learned: Any) -> Inputs:
        """Describes the features: [1 + words] float32."""
        return Inputs((SPECIAL - 1 + len(learned),))

    def layer(self, learned: Any) -> keras.Model:
        """Builds the model texts [b] -> [b, 1 + words] float32."""
        raw = keras.Input((), dtype="string", name="text")
        is_unicode = self._standardize == "unicode"
        words, places = add_variants(learned) if is_unicode else (learned, [])
        split = find_split(learned, is_unicode)
        standardize = LOWER if is_unicode else None if self._standardize == "none" else self._standardize
        bag = ops.cast(
            keras.layers.TextVectorization(
                standardize=standardize, split=split, output_mode="multi_hot", vocabulary=words
            )(raw),
            "float32",
        )
        if len(words) > len(learned):  # a word occurs if a variant does
            columns: list[list[int]] = [[0], *([] for _ in learned)]
            for column, place in enumerate(places, 1):
                columns[1 + place].append(column)
            most = max(map(len, columns))
            padded = np.array([[*each, *each[:1] * (most - len(each))] for each in columns], "int32")
            bag = ops.max(ops.take(bag, padded, axis=1), axis=2)
        return keras.Model(raw, bag, name="word_bag")


class Date:
    """Turns a date into numbers: the standardised time, and the positions in the year, the week and the day.

    The form is `2024-01-31`, `2024-01-31 23:59:59` or `2024-01-31T23:59:59`; fractions of a second may follow. A
    position is the sine and the cosine of an angle, so that December is next to January. A missing date, "", becomes
    zeros. If the training split has missing dates, a last feature is 1 for those. Any other text is an error, in the
    saved model too.
    """

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Returns the mean, the deviation and the quantiles of the seconds since 1970, and whether some are missing."""
        dates = (np.array(to_text(batch), "datetime64[s]") for batch in batches)
        return describe_numbers(np.where(np.isnat(each), np.nan, each.astype(np.float64)) for each in dates)

    def extend(self, learned: Any, new: Any) -> dict[str, Any]:
        """Returns what was learned, with an indicator if dates are missing in the new data."""
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
        for share in (ops.expand_dims(year, -1), week, day):
            angle = 2 * math.pi * share
            parts += [ops.sin(angle), ops.cos(angle)]
        absent = ops.expand_dims(absent, -1)
        features = ops.where(absent, 0.0, ops.cast(join(parts), "float32"))
        parts = [features, ops.cast(absent, "float32")] if learned["missing"] else [features]
        return keras.Model(raw, join(parts), name="date")


def describe_numbers(batches: Iterable[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Returns the mean, the deviation (1 for a constant) and the quantiles of numbers [b], and whether some are NaN.

    If a few numbers are so large that all others are within `LONG_TAIL` deviations, the median takes the place of the
    mean: float32 has more digits near 0.
    """
    numbers = np.concatenate(list(batches))
    present = numbers[~np.isnan(numbers)]
    found = {"mean": 0.0, "deviation": 1.0, "missing": len(present) < len(numbers), "quantiles": [0.0] * QUANTILES}
    if not len(present):
        return found
    quantiles = np.quantile(present, np.linspace(0, 1, QUANTILES)).tolist()
    mean, deviation = find_mean_and_deviation(present)
    middle = QUANTILES // 2
    if quantiles[-1 - middle // 2] - quantiles[middle // 2] < LONG_TAIL * deviation:
        mean = quantiles[middle]
    return {**found, "mean": mean, "deviation": deviation or 1.0, "quantiles": quantiles}


def standardise_quantiles(learned: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns the quantiles of standardised numbers."""
    return tuple((value - learned["mean"]) / learned["deviation"] for value in learned["quantiles"])


def to_text(batch: np.ndarray[Any, Any]) -> list[str]:
    """Returns strings; those of a stream are `bytes`."""
    return [value.decode() if isinstance(value, bytes) else str(value) for value in batch]


def join(parts: list[keras.KerasTensor]) -> keras.KerasTensor:
    # A layer, not keras.ops, whose names older versions of Keras do not keep in a file.
    return keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]


def parse_dates(strings: keras.KerasTensor) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Parses dates [n] to seconds since 1970 [n] float64, NaN if a string is no date, and the share of the year.

    Keras has no such operation, and a custom layer or a Lambda would not load without scaleflow. The share is by
    months of 31 days: [n] float64, from 0 to less than 1.
    """
    lookup = keras.layers.TextVectorization(
        standardize=None,
        split="character",
        output_mode="int",
        output_sequence_length=LONGEST + 1,
        vocabulary=list(CHARACTERS),
        name="characters",
    )
    x = ops.cast(lookup(strings), "int32") + END  # 0 is padding, 1 an unknown character
    digits = ops.where(x <= 9, ops.maximum(x, 0), 0)
    form = ops.where(ops.equal(x, BLANK), T, ops.where(ops.logical_and(x >= 0, x <= 9), 0, x))

    def number(first: int, end: int) -> keras.KerasTensor:
        return ops.sum(digits[:, first:end] * np.array([10**n for n in reversed(range(end - first))], "int32"), axis=1)

    def is_all(parts: Iterable[keras.KerasTensor]) -> keras.KerasTensor:
        return ops.all(keras.layers.Concatenate(axis=1)(list(parts)), axis=1)

    year, month, day = number(0, 4), number(5, 7), number(8, 10)
    hour, minute, second = number(11, 13), number(14, 16), number(17, 19)
    limits = ((month, 1, 12), (day, 1, 31), (hour, 0, 23), (minute, 0, 59), (second, 0, 59))
    is_end = ops.equal(x, END)
    fraction, rest = form[:, 19:20], form[:, 20:LONGEST]
    ends = [ops.logical_or(ops.equal(fraction, POINT), is_end[:, 19:20])]
    ends += [ops.logical_or(ops.equal(rest, 0), is_end[:, 20:LONGEST]), is_end[:, LONGEST:]]
    has_time = is_all([ops.equal(form[:, 10:19], FORM[10:]), *ends])
    is_day = ops.equal(form[:, :10], FORM[:10]), ops.logical_not(ops.equal(x[:, :10], BLANK))
    in_limits = ops.stack([op for each, least, most in limits for op in (each >= least, each <= most)], axis=1)
    is_date = ops.logical_and(is_all([*is_day, in_limits]), ops.logical_or(is_end[:, 10], has_time))

    whole = count_days(year, month, day) * float(DAY) + ops.cast(hour * 3600 + minute * 60 + second, "float64")
    share = (ops.cast(month - 1, "float64") + ops.cast(day - 1, "float64") / 31) / 12
    return ops.where(is_date, whole, ops.full_like(whole, float("nan"))), share


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
    years, months = year + 4800 - before_march, month + 12 * before_march - 3
    leap_days = years // 4 - years // 100 + years // 400
    days = day + (153 * months + 2) // 5 + 365 * years + leap_days - 32045 - EPOCH_DAY
    return ops.cast(days, "float64")


@dataclass(frozen=True)
class FeatureOptions:
    """What the options of a table say about the features that its columns become; conf/dataset/table.yaml has them.

    Raises ConfigError if they do not fit.
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
    """Makes what converts the column of a name and a kind."""
    if kind == TEXT and options.embed:
        return Text(options.vocabulary, options.tokens or TOKENS, options.standardize)
    if kind == TEXT:
        return WordBag(name, options.vocabulary, options.standardize)
    if kind == CATEGORY:
        return Category(options.embed, options.most_values)
    return Number() if kind == NUMBER else Date()
