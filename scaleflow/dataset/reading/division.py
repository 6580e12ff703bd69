"""Divides rows as `dataset.split` says: a test or validation split, or folds. The launcher uses it: no TensorFlow.

Validation needs no held-out rows if each member of an ensemble leaves out one fold, and is evaluated on that.
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
from typing import Any

import numpy as np

from scaleflow.dataset.reading.files import DRAWN_TOGETHER, SPLITS, TEST_FRACTION, draw_rows, read_metadata
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import AUTO, FOLD, OUT_OF_FOLD, Dataset, DivisionKeys, InputStructure, Outputs, Rows, Split
from scaleflow.interfaces.formatting import SECONDS, join_first

Array = np.ndarray[Any, Any]

#: The splits that the values of a column can name, by their codes.
NAMED = ("train", "validation", "test")

#: Numbers are drawn from so many ranges with equally many rows; whole numbers, of more different ones than this.
RANGES, MOST_CLASSES = 10, 20

#: The value of `stratum` that means the targets.
TARGET = "target"

#: Groups are drawn so often, or until so many numbers are counted; the most numbers of groups and their classes.
MOST_DRAWS, MOST_DRAWN, MOST_CELLS = 200, 1_000_000, 50_000_000


@dataclass(frozen=True)
class Division:
    """How rows are held out, such as a source's test split if its files name none."""

    rule: Split  # `dataset.split`
    test: float = TEST_FRACTION  # the fraction of the rows that is held out
    seed: int = 0  # draws them

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, unless a column names them."""
        return ("train", "test") if self.test else ("train",)

    def draw(self, keys: DivisionKeys, count: int, together: int = DRAWN_TOGETHER) -> dict[str, Array]:
        """Returns the rows of each split, [count] bool. A row that is in none lies in the gap."""
        if self.rule.by == "column":
            assert keys.groups is not None
            masks = {name: keys.groups == code for code, name in enumerate(NAMED)}
            found = {name: mask for name, mask in masks.items() if mask.any()}
            if "train" not in found:
                raise ConfigError(f"dataset.split: no row has the value train in the column {self.rule.column}")
            return found
        if not self.test:
            return {"train": np.ones(count, bool)}
        rest, held_out = self.hold_out(keys, count, draw=0x7E57, together=together, least=1)
        return {"train": rest, "test": held_out}

    def hold_out(
        self, keys: DivisionKeys, count: int, draw: int, together: int = DRAWN_TOGETHER, least: int = 0
    ) -> tuple[Array, Array]:
        """Draws the fraction of rows. A rule that names the splits by a column draws at random; so does `auto` without
        strata.

        Args:
            keys: of the rows.
            count: of the rows.
            draw: the number of the draw, of those with one seed.
            together: the same share of each so many rows is drawn at random.
            least: rows of each class with more that are held out at least.

        Returns:
            Which rows are left, and which are held out, [count] bool. Rows in the gap before the latest are in none.

        Raises:
            ConfigError: if one of the two would be empty.
        """
        rule, fraction, seeds = self.rule, self.test, (self.seed, draw)
        rest: Array | None = None
        if rule.by == "group":
            held_out = draw_groups(require_keys(rule, keys.groups), keys.strata, fraction, seeds=seeds)
        elif rule.by == "hash":
            held_out = spread_hashes(require_keys(rule, keys.groups), seeds) < fraction
        elif rule.by == "time":
            times = require_keys(rule, keys.times)
            start = find_first_time(times, fraction)
            rest, held_out = times < start - parse_gap(rule.gap), times >= start
        elif rule.by in ("auto", "stratum") and keys.strata is not None:
            held_out = draw_strata(keys.strata, fraction, seeds, least=least)
        else:
            held_out = draw_rows(count, fraction, seeds, together=together)
        rest = ~held_out if rest is None else rest
        if rule.by in ("stratum", "group", "hash", "time"):
            refuse_empty(rule, rest, held_out, part=f"a fraction of {fraction:g}")
        return rest, held_out


def find_keys(rule: Split, weights: str | None = None) -> dict[str, str]:
    """Returns the columns that a rule names, and that of the weights, by the keys that name them."""
    named = {"dataset.split.column": rule.column, "dataset.split.stratum": rule.stratum, "dataset.weights": weights}
    return {key: name for key, name in named.items() if name is not None and name != TARGET}


def is_by_target(rule: Split) -> bool:
    """Returns whether each split gets its share of the targets."""
    is_named = rule.pattern is not None or rule.column not in (None, TARGET)
    return rule.stratum == TARGET or (rule.by == "stratum" and not is_named)


def read_keys(rule: Split, read: Callable[[str], Any], name_row: Callable[[int], str]) -> DivisionKeys:
    """Reads what rows are divided by, without the targets.

    Args:
        rule: `dataset.split`.
        read: returns a column by its name: pyarrow's, or numpy's [n].
        name_row: names a row in messages.

    Raises:
        ConfigError: if a column has missing values, or values of which the rule can make nothing.
    """
    keys = DivisionKeys()
    if rule.by in READERS and rule.column is not None:
        name, _, encode = READERS[rule.by]
        keys = replace(keys, **{name: encode(read_column(rule.column, read, name_row), rule)})
    stratum = rule.column if rule.by == "stratum" else rule.stratum
    if stratum is None or is_by_target(rule):
        return keys
    return replace(keys, strata=to_strata(read_column(stratum, read, name_row)))


def find_strata(targets: Array, outputs: Outputs) -> Array:
    """Returns the number of each target's class, or of its range: [n] int64, from 0.

    Targets that do not count (`Outputs.ignore`) are a class, or a range, of their own.
    """
    if outputs.ignore is not None and (is_ignored := targets == outputs.ignore).any():
        strata = np.zeros(len(targets), np.int64)
        if not is_ignored.all():
            strata[~is_ignored] = 1 + find_strata(targets[~is_ignored], outputs)
        return strata
    if outputs.kind == "regression":
        return rank_values(targets)
    return np.asarray(targets - min(0, targets.min()), np.int64)


def encode_keys(rule: Split, keys: DivisionKeys, count: int) -> DivisionKeys:
    """Returns keys that an own dataset gives, of any dtype, in the form of `DivisionKeys`; others are so already.

    Raises ConfigError if they are not one for each of `count` examples, or some are missing.
    """
    name, dtype, encode = READERS.get(rule.by, ("strata", np.int64, lambda column, _: to_strata(column)))
    given = getattr(keys, name)
    if given is not None and len(given) != count:
        raise ConfigError(f"dataset: there are {len(given)} {name} for {count} examples; give one for each")
    if given is None or given.dtype == dtype:
        return keys
    return replace(keys, **{name: encode(read_column(name, lambda _: given, lambda row: f"example {row}"), rule)})


def read_path_keys(rule: Split, base: Path, paths: Sequence[str]) -> DivisionKeys:
    """Reads what files are divided by: a part of their path below a folder, or a column of `metadata.csv` in it."""
    places = [Path(path).relative_to(base).as_posix() for path in paths]

    def read(name: str) -> Any:
        if rule.pattern is not None and name == rule.column:
            matches = [re.search(rule.pattern, place) for place in places]
            return np.array([None if match is None else match[match.re.groups and 1] for match in matches], object)
        table = read_metadata(base, name)
        return np.array([table.get(place) for place in places], object)

    if rule.pattern is not None:
        rule = replace(rule, column=f"of the pattern {rule.pattern}")
    return read_keys(rule, read, lambda row: paths[row])


def read_column(name: str, read: Callable[[str], Any], name_row: Callable[[int], str]) -> Any:
    """Returns a column, which must have no missing values, as pyarrow's."""
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
    if missing := compute.sum(is_missing).as_py():
        first = name_row(compute.index(is_missing, True).as_py())
        raise ConfigError(
            f"dataset.split: the column {name} has {missing:,} missing values, the first in {first}; fill them, or "
            "leave these rows out of the file"
        )
    return column


def cast_numbers(column: Any) -> Any:
    """Returns texts that are all numbers as float64; other columns as they are."""
    import pyarrow
    from pyarrow import types

    if types.is_binary(column.type):
        column = column.cast(pyarrow.string())
    if types.is_string(column.type) or types.is_large_string(column.type):
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return column.cast(pyarrow.float64())
    return column


def to_strata(column: Any) -> Array:
    """Returns the number of each class, or of the range of many different numbers: [n] int64, from 0."""
    from pyarrow import types

    encoded, numbers = column.dictionary_encode(), cast_numbers(column)
    is_number = types.is_integer(numbers.type) or types.is_floating(numbers.type)
    if types.is_floating(column.type) or (is_number and len(encoded.dictionary) > MOST_CLASSES):
        return rank_values(numbers.to_numpy(zero_copy_only=False))
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)


def rank_values(values: Array) -> Array:
    """Returns the number of each value's range, of `RANGES` with about equally many values: [n] int64."""
    inner = np.quantile(values, np.linspace(0, 1, RANGES + 1)[1:-1])
    return np.asarray(np.searchsorted(np.unique(inner), values, side="right"))


def encode_words(column: Any, encode: Callable[[Array], Any]) -> Array:
    """Returns what a function makes of the text of each value, [n]; it takes the different texts."""
    import pyarrow

    encoded = column.dictionary_encode()
    try:
        words = encoded.dictionary.cast(pyarrow.string()).to_numpy(zero_copy_only=False)
    except pyarrow.ArrowInvalid as error:  # bytes
        raise ConfigError(f"dataset.split: the column has values that are no texts: {read_reason(error)}") from error
    return np.asarray(encode(words)[encoded.indices.to_numpy(zero_copy_only=False)])


def read_groups(column: Any, rule: Split) -> Array:
    """Hashes the text of each value: the same one in every file and version, whatever the order of the rows."""
    from pandas.util import hash_array

    return encode_words(column, lambda words: hash_array(words, categorize=False))


def read_split_names(column: Any, rule: Split) -> Array:
    """Returns the split that each value names, as its index in `NAMED`."""

    def encode(words: Array) -> Array:
        if unknown := [word for word in words if word.strip().lower() not in SPLITS]:
            raise ConfigError(
                f"dataset.split: the column that names the splits has {join_first(list(map(repr, unknown)), 3)}; its "
                f"values are {', '.join(NAMED)}"
            )
        return np.array([NAMED.index(SPLITS[word.strip().lower()]) for word in words])

    return encode_words(column, encode)


def read_times(column: Any, rule: Split) -> Array:
    """Returns numbers as they are, dates in seconds since 1970: [n] float64."""
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
    """Parses dates as texts, as in ISO 8601."""
    import pyarrow

    texts = [text.replace(" ", "T", 1).removesuffix("Z") for text in column.to_pylist()]
    odd = next((text for text in texts if not re.match(r"\d{4}-\d{2}(-\d{2})?(T|$)", text)), None)
    try:
        if odd is None:
            with warnings.catch_warnings(action="ignore"):  # of time zones, which NumPy converts to UTC
                return pyarrow.array(np.array(texts, "M8[us]"))
    except ValueError as error:  # such as a month 13
        odd = read_reason(error)
    raise ConfigError(
        f"dataset.split: {{by: time}} cannot read the time {odd!r}; write dates as 2024-01-31 or 2024-01-31T23:59:59, "
        "or numbers"
    )


#: By `by`, the attribute of `DivisionKeys` that a rule uses, its dtype, and what reads it from a column.
READERS: Mapping[str, tuple[str, Any, Callable[[Any, Split], Array]]] = {
    "group": ("groups", np.uint64, read_groups),
    "hash": ("groups", np.uint64, read_groups),
    "time": ("times", np.float64, read_times),
    "column": ("groups", np.int64, read_split_names),
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
    """Raises ConfigError if it is no regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(f"dataset.split.pattern={pattern}: is no regular expression ({error})") from error


def refuse_empty(rule: Split, rest: Array, held_out: Array, part: str) -> None:
    """Raises ConfigError if there is nothing to train on, or nothing to hold out; `part` is what is held out."""
    if not (rest.any() and held_out.any()):
        raise ConfigError(
            f"dataset.split: {{by: {rule.by}}} with {part} leaves "
            f"{'nothing to train on' if held_out.any() else 'nothing to hold out'} of {len(rest):,} rows; use another "
            f"one{', a smaller gap' if parse_gap(rule.gap) else ''}, or another column"
        )


def require_keys(rule: Split, keys: Array | None) -> Array:
    """Returns the keys of rows. Raises ConfigError if there are none, or only one."""
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
    """Returns the time from which on rows are the latest ones; rows of one time stay together."""
    place = min(len(times) - round(len(times) * fraction), len(times) - 1)
    start = float(np.partition(times, place)[place])
    return start if start > times.min() else float(times[times > start].min())


def spread_hashes(hashes: Array, seeds: Sequence[int]) -> Array:
    """Returns a number from 0 to less than 1 for each value, another one for other seeds: [n] float64."""
    mixed = hashes.astype(np.uint64) ^ np.random.SeedSequence(list(seeds)).generate_state(1, np.uint64)[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((mixed >> np.uint64(11)).astype(np.float64) / 2.0**53)


def draw_strata(strata: Array, fraction: float, seeds: Sequence[int], least: int = 0) -> Array:
    """Draws a fraction of each class, [n] bool; of one with a single row, none."""
    sizes = np.bincount(strata)
    quotas = np.floor(fraction * sizes).astype(np.int64)
    left = round(fraction * len(strata)) - quotas.sum()
    random = np.random.default_rng(list(seeds))
    rests = fraction * sizes - quotas + 1e-9 * random.random(len(sizes))
    quotas[np.argsort(-rests)[: max(left, 0)]] += 1
    most = np.maximum(sizes - 1, 0)
    quotas = np.clip(quotas, np.minimum(least, most), most)
    order, classes, places = order_by_class(strata, random)
    drawn = np.zeros(len(strata), bool)
    drawn[order] = places < quotas[classes]
    return drawn


def order_by_class(strata: Array, random: np.random.Generator) -> tuple[Array, Array, Array]:
    """Returns rows in random order by their classes, the class of each, and its place among those of its class."""
    sizes = np.bincount(strata)
    order = random.permutation(len(strata))
    classes = strata[order].astype(np.min_scalar_type(max(len(sizes) - 1, 0)))  # small numbers are sorted much faster
    by_class = np.argsort(classes, kind="stable")
    order, classes = order[by_class], classes[by_class].astype(np.int64)
    return order, classes, np.arange(len(order)) - (np.cumsum(sizes) - sizes)[classes]


def count_by_group(groups: Array, strata: Array | None) -> tuple[Array, Array]:
    """Returns the rows of each class in each group, [groups, classes], and the number of each row's group, from 0.

    Groups are in the order of their values, whatever the order of the rows.
    """
    from pandas import factorize

    numbers, values = factorize(groups, sort=True)
    kinds = 1 if strata is None else int(strata.max()) + 1
    if kinds * len(values) > MOST_CELLS:
        raise ConfigError(
            f"dataset.split.stratum: {kinds:,} values for {len(values):,} groups are too many; use a column with fewer "
            "values"
        )
    cells = numbers if strata is None else numbers * kinds + strata
    return np.bincount(cells, minlength=kinds * len(values)).reshape(-1, kinds), numbers


def draw_groups(groups: Array, strata: Array | None, fraction: float, seeds: Sequence[int]) -> Array:
    """Draws whole groups that have about a fraction of the rows: [n] bool; of many draws, the best of each class."""
    counts, numbers = count_by_group(groups, strata)
    sizes, random = counts.sum(axis=1), np.random.default_rng(list(seeds))
    wanted, rows, nearest = fraction * counts.sum(axis=0), fraction * len(groups), math.inf
    chosen = np.zeros(len(sizes), bool)
    for _ in range(max(1, min(MOST_DRAWS, MOST_DRAWN // counts.size))):
        order = random.permutation(len(sizes))
        order = order[np.argsort(sizes[order] > rows, kind="stable")]  # those that are too large come last
        order = order[: 1 + np.argmin(np.abs(np.cumsum(sizes[order])[:-1] - rows))]
        away = counts[order].sum(axis=0) - wanted
        distance = (np.square(away) / np.maximum(wanted, 1)).sum() + away.sum() ** 2 / rows
        if distance < nearest:
            nearest, chosen = distance, np.isin(np.arange(len(sizes)), order)
    return np.asarray(chosen[numbers])


#: Draws folds. It is no setting: the same rows are in the same folds in every run, whatever the seed of the run.
FOLD_SEEDS = (0, 2)


def assign_folds(rule: Split, keys: DivisionKeys, count: int, folds: int) -> Array:
    """Returns the number of the fold that each row is in, [count] int32, from 0.

    The same rows always get the same folds: the jobs of a sweep are compared on the same rows, and a run that begins
    with the weights of another one (`model.init_from`) has members that have not seen their folds there either.

    Folds have nearly equally many rows, whole groups, and the same share of each class of `keys.strata`. By time they
    are ordered; -1: the rows before the first one.

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
    if (found := np.count_nonzero(np.bincount(numbers + 1)[1:])) < folds:
        raise ConfigError(
            f"dataset.split: {{by: {rule.by}}} has rows for {found} of {folds} folds; use fewer ones, or another column"
        )
    return numbers


def hold_out_fold(rule: Split, keys: DivisionKeys, count: int, fold: tuple[int, int]) -> tuple[Array, Array]:
    """Returns which rows are left to train on, and which are in a fold, [count] bool. By time, only earlier ones are
    left, without the gap. `fold` is its number, from 0, and that of the folds.
    """
    number, folds = fold
    held_out = assign_folds(rule, keys, count, folds) == number
    rest = ~held_out
    if rule.by == "time" and keys.times is not None:
        rest = keys.times < keys.times[held_out].min() - parse_gap(rule.gap)
    refuse_empty(rule, rest, held_out, part=f"the fold {number + 1}/{folds}")
    return rest, held_out


def deal_groups(groups: Array, strata: Array | None, folds: int, random: np.random.Generator) -> Array:
    """Deals groups to folds, the largest first, each to the fold that has the fewest rows of groups like it.

    Groups are alike if they have most of the same class, compared with all rows.
    """
    counts, numbers = count_by_group(groups, strata)
    order = random.permutation(len(counts))
    order = order[np.argsort(-counts[order].sum(axis=1), kind="stable")]
    kinds = (counts[order] / np.maximum(1, counts.sum(axis=0))).argmax(axis=1)
    loads, dealt = [0] * folds, np.zeros(len(counts), np.int32)
    for kind in np.unique(kinds):
        alike, found = order[kinds == kind], []
        heap = [(0, load, fold) for fold, load in enumerate(loads)]
        heapq.heapify(heap)
        for size in counts[alike].sum(axis=1).tolist():
            like, load, fold = heap[0]
            heapq.heapreplace(heap, (like + size, load + size, fold))
            found.append(fold)
        dealt[alike] = found
        for _, load, fold in heap:
            loads[fold] = load
    return np.asarray(dealt[numbers])


#: The fraction that `auto` holds out, if there are no folds.
HELD_OUT = 0.1

#: `auto` uses folds up to this many training examples. Of more, a tenth is enough to choose an epoch by.
MOST_EXAMPLES = 10_000


def choose_validation(
    options: Dataset, inputs: InputStructure, examples: int, folds: int
) -> tuple[str | float | None, int]:
    """Returns the fraction or the split to validate on, and the number of folds, 0 for none.

    Args:
        options: the config group `dataset`.
        inputs: of the dataset.
        examples: of the training split.
        folds: into how many the model can divide them; 0: it has no members that could leave out one.

    Raises:
        ConfigError: for `out_of_fold`, if that is not possible.
    """
    if options.validation not in (AUTO, OUT_OF_FOLD):
        return options.validation, 0
    obstacles = {
        "the model has no members without common weights; use model=tabular with model.shared=by_size": not folds,
        "the dataset has a single input": not isinstance(inputs, Mapping),
        "dataset.augment mixes examples of several folds": options.augment is not None,
        f"dataset.cache={options.cache} keeps no examples in memory": options.cache in ("none", "file"),
        "dataset.shards reads while training": options.shards > 1,
        "dataset.split by time has no folds of which each is later than what a member trains on": (
            options.split.by == "time"
        ),
    }
    obstacle = next((why for why, applies in obstacles.items() if applies), None)
    if options.validation == OUT_OF_FOLD and obstacle is not None:
        raise ConfigError(f"dataset.validation={OUT_OF_FOLD}: {obstacle}; or use dataset.validation={HELD_OUT}")
    if obstacle is None and 2 * folds <= examples and (options.validation == OUT_OF_FOLD or examples <= MOST_EXAMPLES):
        return None, folds
    return HELD_OUT, 0


def add_folds(examples: Rows, numbers: Array) -> Rows:
    """Returns examples with the number of a fold as a further input, from `numbers` [n] int32."""
    arrays: Any = examples  # training in folds keeps them in memory
    return replace(arrays, inputs={**arrays.inputs, FOLD: numbers})  # type: ignore[no-any-return]
