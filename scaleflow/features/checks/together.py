"""Finds rows that belong together: groups, such as the visits of a customer, and drift along dates.

A random split puts such rows on both sides, which makes test metrics too optimistic.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from scaleflow.dataset.column_kinds import DATE, NUMBER, ColumnKind
from scaleflow.dataset.schema import GROUPS, SplitSample, make_schema
from scaleflow.features.checks.drift import DRIFT, FAULT, MAX_NAMED, DataFinding, compare_sample
from scaleflow.features.checks.rules import MIN_ROWS
from scaleflow.interfaces import DivisionKeys, Split
from scaleflow.interfaces.formatting import join_first

#: A column may number groups if at least MIN_GROUPS of its values repeat and no value has more than MAX_GROUP_SHARE of
#: the rows.
MIN_GROUPS = 20
MAX_GROUP_SHARE = 0.1

#: A column is alike within groups if its differences there are smaller than usual: by at least MIN_DIFFERENCE of the
#: usual difference, and by more than meaningless groups would show with probability CHANCE in any column of a table.
CHANCE = 1e-4
MIN_DIFFERENCE = 0.1

#: A group gives away a target if similar rows of other groups predict it worse: by at least MIN_GAIN of the error of a
#: guess, and by ERRORS standard errors over the groups.
MIN_GAIN = 0.15
ERRORS = 3

#: An input, or the original of an input, is usually a useful category. It numbers groups only if its values are codes
#: and the other columns are alike within groups by at least WHOLE on average (0 to 1).
WHOLE = 0.5

#: Maximum number of rows to find similar rows for, of columns that define similarity, and of similar rows per row.
MAX_ROWS = 300
MAX_COMPARED = 8
MAX_SIMILAR = 5

#: The latest share of rows that is compared. A number that correlates this much with a date counts as a date.
LATEST = 0.2
IS_DATE_OR_EMPTY = re.compile(r"$|\d{4}-\d{2}-\d{2}([ T]|$)")
IS_DATE = 0.9

Array = np.ndarray[Any, Any]


def find_together(
    splits: Mapping[str, SplitSample], rows: int, rule: Split, keys: Mapping[str, DivisionKeys] = {}
) -> Iterator[DataFinding]:
    """Finds rows that belong together although `dataset.split` divides them.

    Args:
        splits: samples by split, the training split first.
        rows: number of rows in all splits.
        rule: `dataset.split`.
        keys: group and time of all rows by split, the training split first.
    """
    train = next(iter(splits.values()))
    yield from find_undivided(rule, keys)
    if len(train) < MIN_ROWS:
        return
    if rule.by in ("group", "hash"):
        yield from find_groups(splits, rows, {GROUPS, rule.column})
    elif rule.by != "time":
        yield from find_groups(splits, rows)
    if rule.by in ("auto", "random", "stratum"):
        yield from find_time_drift(train)


def find_undivided(rule: Split, keys: Mapping[str, DivisionKeys]) -> Iterator[DataFinding]:
    """Finds groups that occur in several splits, and test rows no later than training.

    Both happen if the files are named after splits: these are not divided again.
    """
    for split, other in list(keys.items())[1:]:
        train = keys["train"]
        name = rule.column or "what dataset.split names"
        where = f"the files of {split}"
        advice = "put all rows into files without names of splits"
        if rule.by in ("group", "hash") and train.groups is not None and other.groups is not None:
            shared = np.isin(np.unique(other.groups), train.groups)
            if shared.any():
                text = f"{shared.sum():,} of {len(shared):,} groups of {name} in {where} are in train, too: {advice}"
                because = "test figures are too good for new groups"
                yield DataFinding("groups", FAULT, text, because=because, columns=[name])
        if rule.by == "time" and train.times is not None and other.times is not None:
            is_early = other.times <= train.times.max()
            if is_early.any():
                text = f"{is_early.sum():,} of {len(is_early):,} rows in {where} are no later than train: {advice}"
                because = "test figures are too good for later rows"
                yield DataFinding("time drift", FAULT, text, because=because, columns=[name])


def find_groups(
    splits: Mapping[str, SplitSample], rows: int, known: Collection[str | None] = ()
) -> Iterator[DataFinding]:
    """Finds the column that numbers groups of similar rows, if groups are on both sides of a split.

    A random split gives a group away if the rows most similar to a row by other inputs are in its group, and predict
    its target much better than similar rows of other groups. This gain is measured. A category that merely predicts the
    target does not count, because similar rows then come from any category.
    """
    sample = next(iter(splits.values()))
    inputs = {name: values for name, values in sample.columns.items() if values.ndim == 1}
    numbers = {}
    for name, column in {**inputs, **sample.others}.items():
        if are_discrete(column):
            numbers[name] = number_values(column)
    excluded = {*sample.list_kind(DATE), *known}
    candidates = {}
    for name, codes in numbers.items():
        is_allowed = (sample.is_table or name in sample.others) and name not in excluded
        if is_allowed and has_groups(codes):
            candidates[name] = codes
    if not candidates or not inputs or not sample.targets:
        return
    values = encode_columns(inputs, sample.kinds)
    targets = encode_columns(sample.targets, {})
    limit = NormalDist().inv_cdf(1 - CHANCE / (len(candidates) * len(inputs)))
    gains = {}
    for name, codes in candidates.items():
        a, b = pair_rows(codes)
        alike = measure_alike(values, a, b, limit=limit)
        is_copy = np.array([column in numbers and are_copies(numbers[column], codes) for column in inputs])
        if is_copy.any():  # an input, which is usually a category
            others_alike = alike[~is_copy]
            are_others_alike = len(others_alike) > 0 and others_alike.sum() >= WHOLE * len(others_alike)
            if not is_code(sample.find(name)) or not are_others_alike:
                continue
        weights = np.where([column == name for column in inputs], 0, alike)
        gains[name] = measure_gain(codes, np.append(a, b), values, weights=weights, targets=targets)
    name = max(gains, key=lambda column: gains[column], default="")
    if gains.get(name, 0.0) >= MIN_GAIN and is_on_both_sides(name, splits):
        counts = np.bincount(candidates[name] + 1)[1:].astype(float)
        size = 1 + (counts * (counts - 1)).sum() / (counts.sum() * (counts.sum() - 1)) * (rows - 1)
        rule = "{by: group}" if name == GROUPS else f"{{by: group, column: {name}}}"
        text = (
            f"rows of one {name} are alike ({size:,.0f} each); test figures are too good for new "
            f"{name.removesuffix('s')}s: dataset.split='{rule}'"
        )
        because = f"without them, similar rows tell the target worse, by {gains[name]:.0%} of the error of a guess"
        yield DataFinding("groups", FAULT, text, because=because, columns=[name])


def has_groups(codes: Array) -> bool:
    """Returns whether many values repeat, and none too often."""
    counts = np.bincount(codes + 1)[1:]
    return bool((counts > 1).sum() >= MIN_GROUPS and counts.max() <= MAX_GROUP_SHARE * len(codes))


def are_discrete(values: Array) -> bool:
    """Returns whether values are words or whole numbers."""
    return values.dtype == object or bool((np.isnan(values) | (values == np.floor(values))).all())


def is_code(values: Array) -> bool:
    """Returns whether values are codes: numbers, or texts with digits.

    Customer ids have digits, names of towns do not.
    """
    if values.dtype != object:
        return True
    with_digits = sum(any(map(str.isdigit, text)) for text in values)
    return with_digits / len(values) > 0.9


def are_copies(own: Array, codes: Array) -> bool:
    """Returns whether two columns divide rows into the same groups."""
    count = codes.max() + 2
    return bool(own.max() == codes.max()) and len(np.unique(own * count + codes)) <= count


def is_on_both_sides(name: str, splits: Mapping[str, SplitSample]) -> bool:
    """Returns whether the other splits share values with the training split about as often as after a random split."""
    train, *others = [sample.find(name).astype(str) for sample in splits.values()]
    _, places, counts = np.unique(train, return_inverse=True, return_counts=True)
    share_of_repeated = (counts[places] > 1).mean()
    return all(np.isin(values, train).mean() > share_of_repeated / 2 for values in others if len(values))


def encode_columns(columns: Mapping[str, Array], kinds: Mapping[str, ColumnKind]) -> Array:
    """Encodes words as numbers, and numbers and dates as ranks from 0 to 1: [n, columns] float32."""
    encoded = []
    for name, values in columns.items():
        are_words = values.dtype == object and kinds.get(name) != DATE
        encoded.append(number_values(values) if are_words else rank_numbers(values))
    return np.stack(encoded, axis=1).astype(np.float32)


def number_values(values: Array) -> Array:
    """Returns a number from 0 for each value, the same for equal values, and -1 for missing ones: [n] int64."""
    import pyarrow

    column = pyarrow.array(values, mask=(values == "") if values.dtype == object else None, from_pandas=True)
    return np.asarray(column.dictionary_encode().indices.fill_null(-1), np.int64)


def rank_numbers(values: Array) -> Array:
    """Returns ranks from 0 to 1 of numbers or dates: [n].

    Equal values get their mean rank. Missing numbers come last.
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray(((np.cumsum(counts) - counts / 2) / len(values))[places.reshape(len(values))])


def compare_values(values: Array, others: Array) -> Array:
    """Returns how much encoded values differ, from 0 to 1."""
    return np.asarray(np.minimum(np.abs(values - others), 1))


def pair_rows(codes: Array) -> tuple[Array, Array]:
    """Returns pairs of rows within a group. No row is in two pairs, so pairs are independent if groups mean nothing."""
    order = np.random.default_rng(0).permutation(np.flatnonzero(codes >= 0))
    order = order[np.argsort(codes[order], kind="stable")]
    place = np.arange(len(order)) - np.searchsorted(codes[order], codes[order])
    first = np.flatnonzero((place[:-1] % 2 == 0) & (place[1:] > 0))
    return order[first], order[first + 1]


def measure_alike(values: Array, a: Array, b: Array, limit: float) -> Array:
    """Returns how much smaller differences are within pairs than within permuted pairs: [columns], from 0 to 1.

    A column gets 0 if they are hardly smaller, or by less than `limit` standard errors. The error of each column allows
    one more pair: if few pairs are equal by chance, their number is not normally distributed.
    """
    permuted = np.stack([np.random.default_rng(n).permutation(b) for n in range(3)])
    usual = compare_values(values[a], values[permuted])
    mean = usual.mean(axis=(0, 1))
    own = compare_values(values[a], values[b]).mean(axis=0)
    error = usual.std(axis=(0, 1)) * np.sqrt(4 / 3 / len(a)) + 1 / len(a)
    return np.where(mean - own > np.maximum(limit * error, MIN_DIFFERENCE * mean), 1 - own / np.maximum(mean, 1e-9), 0)


def measure_gain(codes: Array, paired: Array, values: Array, weights: Array, targets: Array) -> float:
    """Returns how much worse similar rows predict a target without the row's own group.

    The result is a share of the error of a guess; 0 if it may be chance.

    Args:
        paired: rows that are not alone in their group.
        weights: weights of the columns of `values` in the distance between rows.
    """
    chosen = np.argsort(-weights)[: min(MAX_COMPARED, np.count_nonzero(weights))]
    if not len(chosen):
        return 0.0
    rows = np.random.default_rng(0).permutation(paired)[:MAX_ROWS]
    is_own = codes[rows][:, None] == codes
    similar = int(np.clip(np.median(is_own.sum(axis=1)) - 1, 1, MAX_SIMILAR))
    apart = np.random.default_rng(0).random(is_own.shape, np.float32) * 1e-3  # chance orders equal rows
    for column in chosen:
        apart += weights[column] * compare_values(values[rows, column][:, None], values[:, column])
    apart[np.arange(len(rows)), rows] = np.inf
    errors = []
    for distances in (apart, np.where(is_own, np.inf, apart)):
        nearest = np.argpartition(distances, similar, axis=1)[:, :similar]
        errors.append(compare_values(targets[rows][:, None], targets[nearest]).mean(axis=1))
    groups = np.unique(codes[rows], return_inverse=True)[1]
    loss_sums = [np.bincount(groups, losses) for losses in (errors[1] - errors[0]).T]
    lost = np.stack(loss_sums) / np.bincount(groups)  # per target and group
    guess = compare_values(targets[paired], targets[np.random.default_rng(1).permutation(paired)]).mean(axis=0)
    is_certain = lost.mean(axis=1) > ERRORS * lost.std(axis=1) / np.sqrt(lost.shape[1])
    return float(np.where(is_certain, lost.mean(axis=1) / np.maximum(guess, 1e-9), 0).max())


def find_time_drift(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds a date along which a target or input drifts.

    The latest rows are then distributed differently from earlier ones.
    """
    drifting_along: dict[str, list[str]] = {}  # columns that drift, by the column of dates
    candidates = {**sample.list_kind(DATE), **sample.others}
    looks = len(candidates) * (len(sample.columns) + len(sample.targets))
    for name, dates in candidates.items():
        if not all(IS_DATE_OR_EMPTY.match(str(date)) for date in dates[:100]):
            continue
        known = sample.select(dates != "")
        ranks = rank_numbers(known.find(name))
        is_late = ranks > 1 - LATEST
        if len(np.unique(ranks)) < MIN_GROUPS or not is_late.any():
            continue
        differences = compare_sample(make_schema(known.select(~is_late)), known.select(is_late), looks=looks)
        drifting = {difference.columns[0] for difference in differences if difference.rule == "drift"}
        for column, values in known.list_kind(NUMBER).items():
            if column in drifting and abs(np.corrcoef(ranks, rank_numbers(values))[0, 1]) > IS_DATE:
                drifting.remove(column)
        drifting_along[name] = sorted(drifting)
    name = max(drifting_along, key=lambda dates: len(drifting_along[dates]), default="")
    columns = drifting_along.get(name)
    if columns:
        text = (
            f"along {name}, there is a drift of {join_first(columns, MAX_NAMED)}; a random split is too kind to "
            f"later rows: dataset.split='{{by: time, column: {name}}}'"
        )
        because = "the latest fifth has a population stability index above 0.2, and above chance"
        yield DataFinding("time drift", DRIFT, text, because=because, columns=[name, *columns])
