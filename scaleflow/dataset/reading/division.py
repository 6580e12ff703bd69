"""Divides rows by the rule `dataset.split` into a test or validation split, or into folds.

Validation needs no held-out rows if each member of an ensemble leaves out one fold and is evaluated on it. The launcher
imports this module, so it imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scaleflow.dataset.reading.files import DRAWN_TOGETHER, SPLITS, TEST_FRACTION, draw_rows, read_metadata
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import AUTO, FOLD, OUT_OF_FOLD, Dataset, DivisionKeys, InputStructure, Outputs, Rows, Split
from scaleflow.interfaces.formatting import SECONDS, join_first

Array = np.ndarray[Any, Any]

#: The splits that the values of a column can name. Their places are their codes.
NAMED_SPLITS = ("train", "validation", "test")

#: A stratum of numbers has this many ranges with equally many rows.
RANGES = 10

#: Whole numbers with more different values than this are divided into ranges. The others are classes.
MAX_CLASSES = 20

#: The value of `stratum` that means the targets.
TARGET = "target"

#: Groups are drawn this many times at most.
MAX_DRAWS = 200

#: All draws of groups together add at most this many numbers.
MAX_DRAWN = 1_000_000

#: Maximum number of pairs of a group and a class.
MAX_CELLS = 50_000_000


@dataclass(frozen=True)
class Division:
    """How rows are held out, for example for the test split of a source whose files name none."""

    rule: Split  # `dataset.split`
    test: float = TEST_FRACTION  # the fraction of rows to hold out
    seed: int = 0  # of the draw

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, unless a column names them."""
        return ("train", "test") if self.test else ("train",)

    def draw(self, keys: DivisionKeys, count: int, together: int = DRAWN_TOGETHER) -> dict[str, Array]:
        """Returns the rows of each split, [count] bool. Rows in the gap are in no split."""
        if self.rule.by == "column":
            return self._read_named_splits(keys)
        if not self.test:
            return {"train": np.ones(count, bool)}
        rest, held_out = self.hold_out(keys, count, draw=0x7E57, together=together, least=1)
        return {"train": rest, "test": held_out}

    def _read_named_splits(self, keys: DivisionKeys) -> dict[str, Array]:
        """Returns the rows of each split that the values of a column name."""
        assert keys.groups is not None
        masks: dict[str, Array] = {}
        for code, name in enumerate(NAMED_SPLITS):
            mask = keys.groups == code
            if mask.any():
                masks[name] = mask
        if "train" not in masks:
            raise ConfigError(f"dataset.split: no row has the value train in the column {self.rule.column}")
        return masks

    def hold_out(
        self, keys: DivisionKeys, count: int, draw: int, together: int = DRAWN_TOGETHER, least: int = 0
    ) -> tuple[Array, Array]:
        """Holds out the fraction of rows.

        The rows are drawn at random if a column names the splits, and for `auto` without strata.

        Args:
            keys: the values that divide the rows.
            count: the number of rows.
            draw: the number of the draw. Draws with one seed and different numbers are independent.
            together: the rows are drawn in pieces of this size, with the same fraction of each piece.
            least: minimum number of rows that are held out of each class. One row of the class is always left.

        Returns:
            The rows that are left, and those that are held out, [count] bool. Rows in the gap before the latest rows
            are in neither.

        Raises:
            ConfigError: if one of the two is empty.
        """
        rule = self.rule
        fraction = self.test
        seeds = (self.seed, draw)
        if rule.by == "time":
            times = require_keys(rule, keys.times)
            start = find_first_time(times, fraction)
            rest = times < start - parse_gap(rule.gap)
            held_out = times >= start
            refuse_empty(rule, rest, held_out, part=f"a fraction of {fraction:g}")
            return rest, held_out
        if rule.by == "group":
            held_out = draw_groups(require_keys(rule, keys.groups), keys.strata, fraction, seeds=seeds)
        elif rule.by == "hash":
            held_out = spread_hashes(require_keys(rule, keys.groups), seeds) < fraction
        elif rule.by in ("auto", "stratum") and keys.strata is not None:
            held_out = draw_strata(keys.strata, fraction, seeds, least=least)
        else:
            held_out = draw_rows(count, fraction, seeds, together=together)
        rest = ~held_out
        if rule.by in ("stratum", "group", "hash"):
            refuse_empty(rule, rest, held_out, part=f"a fraction of {fraction:g}")
        return rest, held_out


def find_keys(rule: Split, weights: str | None = None) -> dict[str, str]:
    """Returns the columns of a rule and of the weights, by the config keys that name them."""
    columns = {"dataset.split.column": rule.column, "dataset.split.stratum": rule.stratum, "dataset.weights": weights}
    return {key: name for key, name in columns.items() if name is not None and name != TARGET}


def is_by_target(rule: Split) -> bool:
    """Returns whether all splits get the same share of each class of the targets."""
    has_column = rule.pattern is not None or rule.column not in (None, TARGET)
    return rule.stratum == TARGET or (rule.by == "stratum" and not has_column)


def read_keys(rule: Split, read: Callable[[str], Any], name_row: Callable[[int], str]) -> DivisionKeys:
    """Reads the values that divide rows, without the targets.

    Args:
        rule: `dataset.split`.
        read: returns a column by its name: pyarrow's, or numpy's [n].
        name_row: names a row in messages.

    Raises:
        ConfigError: if a column has missing values, or values that the rule cannot use.
    """
    keys = DivisionKeys()
    if rule.by in READERS and rule.column is not None:
        reader = READERS[rule.by]
        column = read_column(rule.column, read, name_row)
        keys = replace(keys, **{reader.name: reader.encode(column, rule)})
    stratum = rule.column if rule.by == "stratum" else rule.stratum
    if stratum is None or is_by_target(rule):
        return keys
    return replace(keys, strata=to_strata(read_column(stratum, read, name_row)))


def find_strata(targets: Array, outputs: Outputs) -> Array:
    """Returns the number of each target's class, or of its range: [n] int64, from 0.

    Targets that do not count (`Outputs.ignore`) are the class 0.
    """
    if outputs.ignore is not None:
        is_ignored = targets == outputs.ignore
        if is_ignored.any():
            strata = np.zeros(len(targets), np.int64)
            if not is_ignored.all():
                strata[~is_ignored] = 1 + find_strata(targets[~is_ignored], outputs)
            return strata
    if outputs.kind == "regression":
        return rank_values(targets)
    return np.asarray(targets - min(0, targets.min()), np.int64)


def encode_keys(rule: Split, keys: DivisionKeys, count: int) -> DivisionKeys:
    """Returns the keys of an own dataset, which may have any dtype, in the dtypes of `DivisionKeys`.

    Raises ConfigError if there is not one key for each of `count` examples, or some are missing.
    """
    reader = READERS.get(rule.by, KeyReader("strata", np.int64, lambda column, _: to_strata(column)))
    values = getattr(keys, reader.name)
    if values is not None and len(values) != count:
        raise ConfigError(f"dataset: there are {len(values)} {reader.name} for {count} examples; give one for each")
    if values is None or values.dtype == reader.dtype:
        return keys
    column = read_column(reader.name, lambda _: values, lambda row: f"example {row}")
    return replace(keys, **{reader.name: reader.encode(column, rule)})


def read_path_keys(rule: Split, base: Path, paths: Sequence[str]) -> DivisionKeys:
    """Reads the values that divide files: a part of their paths below a folder, or a column of its `metadata.csv`."""
    relative_paths = [Path(path).relative_to(base).as_posix() for path in paths]

    def read(name: str) -> Any:
        if rule.pattern is not None and name == rule.column:
            return np.array([match_path(rule.pattern, path) for path in relative_paths], object)
        table = read_metadata(base, name)
        return np.array([table.get(path) for path in relative_paths], object)

    if rule.pattern is not None:
        rule = replace(rule, column=f"of the pattern {rule.pattern}")
    return read_keys(rule, read, lambda row: paths[row])


def match_path(pattern: str, path: str) -> str | None:
    """Returns the first group of a pattern in a path, or the whole match if it has no groups; None without a match."""
    match = re.search(pattern, path)
    if match is None:
        return None
    group: str | None = match[1] if match.re.groups else match[0]
    return group


def read_column(name: str, read: Callable[[str], Any], name_row: Callable[[int], str]) -> Any:
    """Returns a column of pyarrow. Raises ConfigError if it has missing values, several types, or lists."""
    import pyarrow
    from pyarrow import compute

    column = read(name)
    try:
        column = pyarrow.array(column) if isinstance(column, np.ndarray) else column
    except pyarrow.ArrowException as error:  # such as numbers and texts
        raise ConfigError(f"dataset.split: the column {name} has several types: {read_reason(error)}") from error
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_nested(column.type):
        raise ConfigError(f"dataset.split: the column {name} has {column.type}; rows are divided by single values")
    is_missing = compute.is_null(column, nan_is_null=True)
    missing = compute.sum(is_missing).as_py()
    if missing:
        first = name_row(compute.index(is_missing, True).as_py())
        raise ConfigError(
            f"dataset.split: the column {name} has {missing:,} missing values, the first in {first}; fill them, or "
            "leave these rows out of the file"
        )
    return column


def cast_numbers(column: Any) -> Any:
    """Converts texts to float64 if all of them are numbers. Other columns stay as they are."""
    import pyarrow
    from pyarrow import types

    if types.is_binary(column.type):
        column = column.cast(pyarrow.string())
    if types.is_string(column.type) or types.is_large_string(column.type):
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return column.cast(pyarrow.float64())
    return column


def to_strata(column: Any) -> Array:
    """Returns the number of each value's class, or of its range if there are many different numbers: [n] int64."""
    from pyarrow import types

    encoded = column.dictionary_encode()
    numbers = cast_numbers(column)
    is_number = types.is_integer(numbers.type) or types.is_floating(numbers.type)
    if types.is_floating(column.type) or (is_number and len(encoded.dictionary) > MAX_CLASSES):
        return rank_values(numbers.to_numpy(zero_copy_only=False))
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)


def rank_values(values: Array) -> Array:
    """Divides values into `RANGES` ranges with about equally many values. Returns the range of each: [n] int64."""
    inner = np.quantile(values, np.linspace(0, 1, RANGES + 1)[1:-1])
    return np.asarray(np.searchsorted(np.unique(inner), values, side="right"))


def encode_words(column: Any, encode: Callable[[Array], Any]) -> Array:
    """Encodes the text of each value: [n]. `encode` is called once, with the different texts."""
    import pyarrow

    encoded = column.dictionary_encode()
    try:
        words = encoded.dictionary.cast(pyarrow.string()).to_numpy(zero_copy_only=False)
    except pyarrow.ArrowInvalid as error:  # bytes
        raise ConfigError(f"dataset.split: the column has values that are no texts: {read_reason(error)}") from error
    return np.asarray(encode(words)[encoded.indices.to_numpy(zero_copy_only=False)])


def read_groups(column: Any, rule: Split) -> Array:
    """Hashes the text of each value. The hash does not depend on the file, the version or the order of the rows."""
    from pandas.util import hash_array

    return encode_words(column, lambda words: hash_array(words, categorize=False))


def read_split_names(column: Any, rule: Split) -> Array:
    """Returns the split that each value names, as its place in `NAMED_SPLITS`."""

    def encode(words: Array) -> Array:
        names = [word.strip().lower() for word in words]
        unknown = [repr(word) for word, name in zip(words, names, strict=True) if name not in SPLITS]
        if unknown:
            raise ConfigError(
                f"dataset.split: the column that names the splits has {join_first(unknown, 3)}; its values are "
                f"{', '.join(NAMED_SPLITS)}"
            )
        return np.array([NAMED_SPLITS.index(SPLITS[name]) for name in names])

    return encode_words(column, encode)


def read_times(column: Any, rule: Split) -> Array:
    """Converts dates to seconds since 1970, [n] float64. Numbers stay as they are."""
    from pyarrow import types

    column = cast_numbers(column)
    if types.is_string(column.type) or types.is_large_string(column.type):
        column = parse_times(column)
    values = column.to_numpy(zero_copy_only=False)
    if types.is_timestamp(column.type) or types.is_date(column.type) or types.is_duration(column.type):
        kind = "m8[us]" if types.is_duration(column.type) else "M8[us]"
        return np.asarray(values.astype(kind).astype(np.float64) / 1e6)
    if not (types.is_integer(column.type) or types.is_floating(column.type)):
        raise ConfigError(f"dataset.split: {{by: time}} needs dates or numbers, and the column has {column.type}")
    if isinstance(rule.gap, str):
        raise ConfigError(
            f"dataset.split.gap={rule.gap}: the times are numbers, such as {values[0]}, and their unit is not known; "
            "give the gap as a number in their unit"
        )
    return np.asarray(values, np.float64)


def parse_times(column: Any) -> Any:
    """Parses texts in the form of ISO 8601."""
    import pyarrow

    texts = [text.replace(" ", "T", 1).removesuffix("Z") for text in column.to_pylist()]
    for text in texts:
        if not re.match(r"\d{4}-\d{2}(-\d{2})?(T|$)", text):
            raise ConfigError(explain_unreadable_time(text))
    try:
        with warnings.catch_warnings(action="ignore"):  # of time zones, which NumPy converts to UTC
            return pyarrow.array(np.array(texts, "M8[us]"))
    except ValueError as error:  # such as a month 13
        reason = read_reason(error)
    raise ConfigError(explain_unreadable_time(reason))


def explain_unreadable_time(text: str) -> str:
    return (
        f"dataset.split: {{by: time}} cannot read the time {text!r}; write dates as 2024-01-31 or 2024-01-31T23:59:59, "
        "or numbers"
    )


class KeyReader(NamedTuple):
    """Reads the keys of a rule from a column."""

    name: str  # the attribute of `DivisionKeys`
    dtype: Any
    encode: Callable[[Any, Split], Array]


#: The readers of rules, by `Split.by`.
READERS: Mapping[str, KeyReader] = {
    "group": KeyReader("groups", np.uint64, read_groups),
    "hash": KeyReader("groups", np.uint64, read_groups),
    "time": KeyReader("times", np.float64, read_times),
    "column": KeyReader("groups", np.int64, read_split_names),
}


def parse_gap(gap: str | float | None) -> float:
    """Returns a gap such as `7d` in seconds, or a number as it is. Raises ConfigError."""
    if isinstance(gap, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", gap.strip())
        if match is None:
            raise ConfigError(f"dataset.split.gap={gap}: expected a time such as 7d or 12h, or a number, at least 0")
        return float(match[1]) * SECONDS[match[2]]
    if gap is not None and not gap >= 0:
        raise ConfigError(f"dataset.split.gap={gap}: expected a time such as 7d or 12h, or a number, at least 0")
    return gap or 0.0


def check_pattern(pattern: str | None) -> None:
    """Raises ConfigError if a pattern is no regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"dataset.split.pattern={pattern}: is no regular expression ({error})") from error


def refuse_empty(rule: Split, rest: Array, held_out: Array, part: str) -> None:
    """Raises ConfigError if no rows are left to train on, or none are held out. `part` describes the latter."""
    if rest.any() and held_out.any():
        return
    purpose = "to train on" if held_out.any() else "to hold out"
    gap = ", a smaller gap" if parse_gap(rule.gap) else ""
    raise ConfigError(
        f"dataset.split: {{by: {rule.by}}} with {part} leaves nothing {purpose} of {len(rest):,} rows; use another "
        f"one{gap}, or another column"
    )


def require_keys(rule: Split, keys: Array | None) -> Array:
    """Returns the keys of rows. Raises ConfigError if there are no keys, or all are equal."""
    name = f"the column {rule.column}" if rule.column else "what the rows are divided by"
    if keys is None:
        raise ConfigError(
            f"dataset.split: {{by: {rule.by}}} needs {name}, which this dataset does not have; an own dataset gives "
            f"{'times' if rule.by == 'time' else 'groups'} in its Arrays or Stream"
        )
    if len(keys) and (keys == keys[0]).all():
        raise ConfigError(
            f"dataset.split: {{by: {rule.by}}}: all rows have the same value in {name}; use another column, or "
            "dataset.split=random"
        )
    return keys


def find_first_time(times: Array, fraction: float) -> float:
    """Returns the start time of the latest fraction of the rows. Rows with the same time stay together."""
    place = min(len(times) - round(len(times) * fraction), len(times) - 1)
    start = float(np.partition(times, place)[place])
    return start if start > times.min() else float(times[times > start].min())


def spread_hashes(hashes: Array, seeds: Sequence[int]) -> Array:
    """Mixes hashes with seeds. Returns a number from 0 to less than 1 for each: [n] float64."""
    mixed = hashes.astype(np.uint64) ^ np.random.SeedSequence(list(seeds)).generate_state(1, np.uint64)[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((mixed >> np.uint64(11)).astype(np.float64) / 2.0**53)


def draw_strata(strata: Array, fraction: float, seeds: Sequence[int], least: int = 0) -> Array:
    """Draws a fraction of each class, [n] bool. At least one row of a class is not drawn.

    Args:
        strata: the number of each row's class.
        fraction: of the rows.
        seeds: of the draw.
        least: minimum number of rows that are drawn of each class.
    """
    sizes = np.bincount(strata)
    quotas = np.floor(fraction * sizes).astype(np.int64)
    undistributed = round(fraction * len(strata)) - quotas.sum()
    random = np.random.default_rng(list(seeds))
    rests = fraction * sizes - quotas + 1e-9 * random.random(len(sizes))
    quotas[np.argsort(-rests)[: max(undistributed, 0)]] += 1
    limits = np.maximum(sizes - 1, 0)
    quotas = np.clip(quotas, np.minimum(least, limits), limits)
    order, classes, places = order_by_class(strata, random)
    drawn = np.zeros(len(strata), bool)
    drawn[order] = places < quotas[classes]
    return drawn


def order_by_class(strata: Array, random: np.random.Generator) -> tuple[Array, Array, Array]:
    """Orders rows by class, and randomly within a class.

    Returns:
        The rows in this order, the class of each, and its place among the rows of its class.
    """
    sizes = np.bincount(strata)
    order = random.permutation(len(strata))
    classes = strata[order].astype(np.min_scalar_type(max(len(sizes) - 1, 0)))  # small numbers are sorted much faster
    by_class = np.argsort(classes, kind="stable")
    order = order[by_class]
    classes = classes[by_class].astype(np.int64)
    first_places = np.cumsum(sizes) - sizes
    return order, classes, np.arange(len(order)) - first_places[classes]


def count_by_group(groups: Array, strata: Array | None) -> tuple[Array, Array]:
    """Counts the rows of each class in each group.

    Returns:
        The counts, [groups, classes], and the number of each row's group, [n]. Groups are in the order of their values,
        so they do not depend on the order of the rows.
    """
    from pandas import factorize

    numbers, values = factorize(groups, sort=True)
    kinds = 1 if strata is None else int(strata.max()) + 1
    if kinds * len(values) > MAX_CELLS:
        raise ConfigError(
            f"dataset.split.stratum: {kinds:,} values for {len(values):,} groups are too many; use a column with fewer "
            "values"
        )
    cells = numbers if strata is None else numbers * kinds + strata
    return np.bincount(cells, minlength=kinds * len(values)).reshape(-1, kinds), numbers


def draw_groups(groups: Array, strata: Array | None, fraction: float, seeds: Sequence[int]) -> Array:
    """Draws whole groups that have about a fraction of the rows: [n] bool.

    It draws many times, and chooses the draw whose fractions of the classes differ least.
    """
    counts, group_of_row = count_by_group(groups, strata)
    sizes = counts.sum(axis=1)
    wanted_by_class = fraction * counts.sum(axis=0)
    wanted = fraction * len(groups)
    random = np.random.default_rng(list(seeds))
    nearest = math.inf
    chosen = np.zeros(len(sizes), bool)
    draws = min(MAX_DRAWS, MAX_DRAWN // counts.size)
    for _ in range(max(1, draws)):
        order = random.permutation(len(sizes))
        order = order[np.argsort(sizes[order] > wanted, kind="stable")]  # groups that are too large come last
        rows_with_next = np.cumsum(sizes[order])[:-1]  # at least one group is left
        drawn = order[: 1 + np.argmin(np.abs(rows_with_next - wanted))]
        excess = counts[drawn].sum(axis=0) - wanted_by_class
        distance = (np.square(excess) / np.maximum(wanted_by_class, 1)).sum() + excess.sum() ** 2 / wanted
        if distance < nearest:
            nearest = distance
            chosen = np.isin(np.arange(len(sizes)), drawn)
    return np.asarray(chosen[group_of_row])


#: The seeds of folds. They are constant, so that the same rows are in the same folds in every run.
FOLD_SEEDS = (0, 2)


def assign_folds(rule: Split, keys: DivisionKeys, count: int, folds: int) -> Array:
    """Returns the number of each row's fold, [count] int32, from 0.

    Folds have nearly the same size, whole groups, and the same share of each class of `keys.strata`. Folds by time are
    ordered. Rows before the first one have the number -1.

    The same rows always get the same folds. So the jobs of a sweep are compared on the same rows. And if a run begins
    with the weights of another one (`model.init_from`), its members have not seen their folds there either.

    Raises:
        ConfigError: if there are too few different values.
    """
    random = np.random.default_rng(FOLD_SEEDS)
    if rule.by == "hash":
        numbers = (spread_hashes(require_keys(rule, keys.groups), FOLD_SEEDS) * folds).astype(np.int32)
    elif rule.by == "time":
        times = require_keys(rule, keys.times)
        firsts = np.quantile(times, np.arange(1, folds + 1) / (folds + 1))
        numbers = (np.searchsorted(firsts, times, side="right") - 1).astype(np.int32)
    elif rule.by == "group":
        numbers = deal_groups(require_keys(rule, keys.groups), keys.strata, folds, random=random)
    else:
        strata = np.zeros(count, np.int64)
        if keys.strata is not None and rule.by in ("auto", "stratum"):
            strata = keys.strata
        order, _, _ = order_by_class(strata, random)
        drawn = random.permuted(np.tile(np.arange(folds, dtype=np.int32), (-(-count // folds), 1)), axis=1)
        numbers = np.empty(count, np.int32)
        numbers[order] = np.ravel(drawn)[:count]
    filled = np.count_nonzero(np.bincount(numbers + 1)[1:])
    if filled < folds:
        raise ConfigError(
            f"dataset.split: {{by: {rule.by}}} has rows for {filled} of {folds} folds; use fewer ones, or another "
            "column"
        )
    return numbers


def hold_out_fold(rule: Split, keys: DivisionKeys, count: int, fold: tuple[int, int]) -> tuple[Array, Array]:
    """Holds out a fold.

    Args:
        rule: `dataset.split`.
        keys: the values that divide the rows.
        count: the number of rows.
        fold: the number of the fold, from 0, and the number of folds.

    Returns:
        The rows that are left to train on, and the rows of the fold, [count] bool. If the rule divides by time, only
        earlier rows are left, without the gap.
    """
    number, folds = fold
    held_out = assign_folds(rule, keys, count, folds) == number
    rest = ~held_out
    if rule.by == "time" and keys.times is not None:
        rest = keys.times < keys.times[held_out].min() - parse_gap(rule.gap)
    refuse_empty(rule, rest, held_out, part=f"the fold {number + 1}/{folds}")
    return rest, held_out


def deal_groups(groups: Array, strata: Array | None, folds: int, random: np.random.Generator) -> Array:
    """Deals groups to folds, beginning with the largest.

    A group is dealt to the fold with the smallest number of rows in groups like it. Groups are alike if the same class
    is over-represented in them.

    Returns:
        The fold of each row, [n] int32.
    """
    counts, group_of_row = count_by_group(groups, strata)
    order = random.permutation(len(counts))
    order = order[np.argsort(-counts[order].sum(axis=1), kind="stable")]
    kinds = (counts[order] / np.maximum(1, counts.sum(axis=0))).argmax(axis=1)
    rows_of_fold = [0] * folds
    fold_of_group = np.zeros(len(counts), np.int32)
    for kind in np.unique(kinds):
        alike = order[kinds == kind]
        heap = [(0, rows, fold) for fold, rows in enumerate(rows_of_fold)]  # rows of this kind, rows in all, fold
        heapq.heapify(heap)
        dealt: list[int] = []
        for size in counts[alike].sum(axis=1).tolist():
            rows_of_kind, rows, fold = heap[0]
            heapq.heapreplace(heap, (rows_of_kind + size, rows + size, fold))
            dealt.append(fold)
        fold_of_group[alike] = dealt
        for _, rows, fold in heap:
            rows_of_fold[fold] = rows
    return np.asarray(fold_of_group[group_of_row])


#: The fraction that `auto` holds out, if there are no folds.
HELD_OUT = 0.1

#: `auto` uses folds for at most this many training examples. A tenth of more examples is enough to choose an epoch.
MAX_FOLDED_EXAMPLES = 10_000


def choose_validation(
    options: Dataset, inputs: InputStructure, examples: int, folds: int, no_folds: str = ""
) -> tuple[str | float | None, int]:
    """Returns the fraction or the split to validate on, and the number of folds, 0 for none.

    Args:
        options: the config group `dataset`.
        inputs: of the dataset.
        examples: the number of examples in the training split.
        folds: the number of folds that the model can use. 0: it has no members that can leave one out.
        no_folds: why no member can leave out a fold, whatever the model. "": nothing prevents it.

    Raises:
        ConfigError: for `out_of_fold`, if that is not possible.
    """
    if options.validation not in (AUTO, OUT_OF_FOLD):
        return options.validation, 0
    obstacle = find_fold_obstacle(options, inputs, folds, no_folds)
    is_requested = options.validation == OUT_OF_FOLD
    if is_requested and obstacle is not None:
        raise ConfigError(f"dataset.validation={OUT_OF_FOLD}: {obstacle}; or use dataset.validation={HELD_OUT}")
    if obstacle is None and examples >= 2 * folds and (is_requested or examples <= MAX_FOLDED_EXAMPLES):
        return None, folds
    return HELD_OUT, 0


def find_fold_obstacle(options: Dataset, inputs: InputStructure, folds: int, no_folds: str) -> str | None:
    """Returns the reason why training cannot use folds; None if it can. The arguments are as in `choose_validation`."""
    if not folds:
        return "the model has no members without common weights; use model=tabular with model.shared=by_size"
    if not isinstance(inputs, Mapping):
        return "the dataset has a single input"
    if no_folds:
        return no_folds
    if options.cache in ("none", "file"):
        return f"dataset.cache={options.cache} keeps no examples in memory"
    if options.shards > 1:
        return "dataset.shards reads while training"
    if options.split.by == "time":
        return "dataset.split by time has no folds of which each is later than what a member trains on"
    return None


def add_folds(examples: Rows, numbers: Array) -> Rows:
    """Adds an input to examples: the number of each example's fold, [n] int32."""
    arrays: Any = examples  # training in folds keeps them in memory
    return replace(arrays, inputs={**arrays.inputs, FOLD: numbers})  # type: ignore[no-any-return]
