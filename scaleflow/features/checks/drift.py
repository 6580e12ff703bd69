"""How data differ from the schema of other data: columns, types, categories, ranges, drift."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from scaleflow.dataset.column_kinds import CATEGORY, DATE, KINDS, MAX_LETTERS, NUMBER, TEXT, ColumnKind
from scaleflow.dataset.schema import SplitSample
from scaleflow.interfaces.formatting import format_number, join_first

Array = np.ndarray[Any, Any]

#: The levels of findings, the least first.
HINT = "hint"
DRIFT = "drift"
FAULT = "fault"
LEVELS = (HINT, DRIFT, FAULT)

#: Above this population stability index the distribution has changed (Siddiqi 2006, Credit Risk Scorecards; deepchecks
#: uses it, too). Few rows alone give a large index: it also has to be above what chance gives in 999 of 1000 columns.
STABILITY = 0.2
CHANCE = 0.999

#: Is added to each count, since the index of an empty range has no limit (Jeffreys).
HALF = 0.5

#: The share of values that may be outside of the range, or missing where none were, and the least number of them.
SHARE = 0.01
FEWEST = 5

#: A larger share of missing values than before is drift, if the difference is so many standard errors.
MORE_MISSING = 0.1
ERRORS = 4

#: Categories, or ranges, that occur less often in both data together are joined: of rare ones, each sample has others.
FEW = 5

#: Permutations from which the limit of an index follows, and by how much the index has to exceed what chance gives.
PERMUTATIONS = 200
MARGIN = 1.5

#: So many values that a schema does not list are counted one by one; the rarest of more than that are forgotten.
MAX_UNLISTED = 10_000
KEPT_UNLISTED = 1000

#: The most values that NumPy can permute.
MAX_PERMUTED = 10**9 - 1

#: The most values, or columns, that a message names.
MAX_NAMED = 5


@dataclass(frozen=True)
class DataFinding:
    """Something that is wrong with data, or differs."""

    rule: str
    level: str  # `fault`, `drift` or `hint`
    text: str  # what was found, with its figure
    because: str  # the rule in words, with its threshold
    columns: Sequence[str] = ()


class DriftCounter:
    """Counts the values of data by the histograms of a schema, in portions.

    Args:
        schema: of the training split, as `make_schema` returns it: its `columns`, and its `rows`.
        looks: how many columns are looked at together. Of very many, chance alone gives some a large index.
    """

    def __init__(self, schema: Mapping[str, Any], looks: int = 1) -> None:
        self._looks = looks
        self._known: dict[str, Mapping[str, Any]] = dict(schema.get("columns", {}))
        self._rows = float(schema.get("rows", math.inf))
        self._counts: dict[str, Array] = {}
        self._unseen: dict[str, Counter[str]] = {}
        self._unlisted: dict[str, Counter[str]] = {}
        self._missing: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._outside: Counter[str] = Counter()
        self._ends: dict[str, tuple[float, float]] = {}

    def add(self, name: str, values: Array) -> None:
        """Adds values of a column [n, ...], which may be unknown: numbers, or `str` objects ("" is missing)."""
        known = self._known.get(name)
        if known is None or not len(values):
            return
        kind = KINDS[known["kind"]]
        self._total[name] += len(values)
        is_text = values.dtype == object
        if kind is CATEGORY:
            self._add_categories(name, known, values)
        elif kind.reduce is not None and "edges" in known:
            if is_text != (kind is TEXT):
                return  # another type, which the comparison of the columns says
            numbers = kind.reduce(values)
            is_known = values != "" if is_text else np.isfinite(numbers)
            counted = numbers if is_text and known["min"] == 0 else numbers[is_known]  # of an early version
            self._missing[name] += int((~is_known).sum())
            self._add_numbers(name, known, counted)
        elif is_text:
            self._missing[name] += int((values == "").sum())

    def _add_numbers(self, name: str, known: Mapping[str, Any], numbers: Array) -> None:
        if not len(numbers):
            return
        edges = np.array(known["edges"])
        counts = np.bincount(np.searchsorted(edges, numbers, side="right"), minlength=len(edges) + 1)
        self._counts[name] = self._counts.get(name, 0) + counts
        self._outside[name] += int(((numbers < known["min"]) | (numbers > known["max"])).sum())
        low, high = self._ends.get(name, (math.inf, -math.inf))
        self._ends[name] = min(low, float(numbers.min())), max(high, float(numbers.max()))

    def _add_categories(self, name: str, known: Mapping[str, Any], values: Array) -> None:
        found = Counter(str(value)[:MAX_LETTERS] for value in values.tolist())
        self._missing[name] += found.pop("", 0)
        places = {value: n for n, value in enumerate(known["values"])}
        counts = self._counts.setdefault(name, np.zeros(len(places) + 1, np.int64))
        for value, count in found.items():
            counts[places.get(value, len(places))] += count
            if value not in places:
                rest = self._unlisted if known["others"] else self._unseen
                rest.setdefault(name, Counter())[value] += count
        unlisted = self._unlisted.get(name, Counter())
        if len(unlisted) > MAX_UNLISTED:
            self._unlisted[name] = Counter(dict(unlisted.most_common(KEPT_UNLISTED)))

    def find(self) -> Iterator[DataFinding]:
        """Yields what differs."""
        for name, known in self._known.items():
            total = self._total[name]
            if not total:
                continue
            if name in self._unseen:
                yield describe_unseen(name, self._unseen[name], total, known=known)
            missing = self._missing[name] / total
            is_more = missing > known["missing"] + MORE_MISSING or (
                not known["missing"] and missing > SHARE and self._missing[name] >= FEWEST
            )
            if is_more and exceeds_chance(known["missing"], self._rows, now=missing, total=total):
                text = f"{name}: {missing:.1%} of the values are missing, {known['missing']:.1%} in training"
                because = "10 % more than in training, or above 1 % of none"
                yield DataFinding("missing", DRIFT, text, because=because, columns=[name])
            yield from self._find_shift(name, known)

    def _compare_histograms(self, name: str, known: Mapping[str, Any], counts: Array) -> tuple[float, float]:
        """Returns the population stability index of a column, and the limit above which it has changed."""
        if "counts" in known:
            before = np.array(known["counts"])
            has_few = before < FEW  # the ends of the ranges follow from so few numbers that chance decides
            rest = (int(before[has_few].sum()), int(counts[has_few].sum()))
            return compute_stability(before[~has_few], counts[~has_few], looks=self._looks, rest=rest)
        before = np.array([*known["values"].values()], np.int64)
        now = counts[:-1]
        if not known["others"]:  # each value is known, so that a new one is a value as others are
            unseen = [*self._unseen.get(name, Counter()).values()]
            before = np.append(before, np.zeros(len(unseen), np.int64))
            now = np.append(now, unseen)
            return compute_stability(before, now, looks=self._looks)
        most_before = int(before.min()) if len(before) else 0  # of a value that is not listed
        least = FEW + 2 * most_before  # if the data are alike, chance gives no value that is not listed so many
        rest_before = int(known["others"])
        rest_now = int(counts[-1])
        for _, count in self._unlisted.get(name, Counter()).most_common(MAX_NAMED):
            count_before = min(most_before, rest_before)
            share_before = (before.sum() + rest_before) / (before.sum() + rest_before + now.sum() + rest_now)
            if (count_before + count) * share_before < least:
                break
            before = np.append(before, count_before)
            now = np.append(now, count)
            rest_before = rest_before - count_before
            rest_now = rest_now - count
        return compute_stability(before, now, looks=self._looks, rest=(rest_before, rest_now), least_before=least)

    def _find_shift(self, name: str, known: Mapping[str, Any]) -> Iterator[DataFinding]:
        counts = self._counts.get(name)
        if counts is None:
            return
        index, limit = self._compare_histograms(name, known, counts)
        if index > limit:
            text = f"{name}: its distribution has changed (population stability index {index:.2f})"
            because = f"an index above {limit:.2f}{', since there are few rows' if limit > STABILITY else ''}"
            yield DataFinding("drift", DRIFT, text, because=because, columns=[name])
        outside = self._outside[name]
        total = self._total[name]
        if "counts" in known and outside > max(FEWEST, SHARE * total, limit_by_chance(sum(known["counts"]), total)):
            low, high = self._ends[name]
            seen = f"{format_number(known['min'])} to {format_number(known['max'])}"
            text = (
                f"{name}: {outside:,} values are outside of {seen}: from {format_number(low)} to {format_number(high)}"
            )
            because = "more than 1 % of the values, and more than chance gives"
            yield DataFinding("range", DRIFT, text, because=because, columns=[name])


def exceeds_chance(before: float, rows: float, now: float, total: int) -> bool:
    """Returns whether a share of `total` values is larger than one of `rows` values, beyond chance."""
    share = (before + now * total / rows) / (1 + total / rows)
    return now - before > ERRORS * math.sqrt(share * (1 - share) * (1 / rows + 1 / total))


def limit_by_chance(before: int, now: int) -> float:
    """Returns how many of `now` values are hardly outside of the range of `before` values of the same distribution.

    The chance that `k` values are above the largest one before is the share of the new values, to the power of `k`.
    """
    return math.log(1e-6) / math.log(now / (before + now)) if before else math.inf


def describe_unseen(name: str, unseen: Counter[str], total: int, known: Mapping[str, Any]) -> DataFinding:
    """Returns a finding about categories that training did not have.

    Where some occurred once only, others are to be expected: their share is about that of these (Good 1953).
    """
    shown = join_first([f"{value!r} ({count:,})" for value, count in unseen.most_common()], MAX_NAMED)
    text = f"{name}: {unseen.total():,} of {total:,} values are not in training: {shown}"
    counts = list(known["values"].values())
    rows = max(1, sum(counts))
    expected = total * counts.count(1) / rows
    is_much = unseen.total() > max(SHARE * total, FEWEST + 2 * expected + ERRORS * math.sqrt(expected))
    level = DRIFT if is_much and exceeds_chance(0.0, rows, now=unseen.total() / total, total=total) else HINT
    because = "a category that training did not have; drift above 1 %"
    return DataFinding("unseen", level, text, because=because, columns=[name])


def compute_stability(
    before: Array, now: Array, looks: int = 1, rest: tuple[int, int] = (0, 0), least_before: int = 0
) -> tuple[float, float]:
    """Returns the population stability index of two histograms, one of `looks`, and the limit above which they differ.

    The limit follows from permutations: the counts that both histograms would have if their rows were exchanged at
    random. Rare values are joined. Values are rare by the sum of both counts, which a permutation does not change. If
    the counts of one histogram decided, values that are frequent there by chance would seem to become rarer.

    Args:
        before, now: how often each value, or range, occurs: [values] int.
        looks: the number of columns that are looked at together.
        rest: the counts of all other values, which are rare.
        least_before: values of which the first histogram would have fewer, if both were alike, are rare.
    """
    totals = before + now
    share_before = (before.sum() + rest[0]) / max(1, totals.sum() + sum(rest))
    is_rare = (totals < FEW) | (totals * share_before < least_before)
    joined = (rest[0] + int(before[is_rare].sum()), rest[1] + int(now[is_rare].sum()))
    before = before[~is_rare]
    now = now[~is_rare]
    if sum(joined):
        before = np.append(before, joined[0])
        now = np.append(now, joined[1])
    before = before.astype(np.int64)
    now = now.astype(np.int64)
    if not before.sum() or not now.sum() or len(before) < 2:
        return 0.0, STABILITY
    index = float(measure_stability(before, now))
    if index <= STABILITY:
        return index, STABILITY
    totals = before + now
    if totals.sum() > MAX_PERMUTED:  # chance does not give such an index
        return index, STABILITY
    permuted = np.random.default_rng(0).multivariate_hypergeometric(totals, now.sum(), size=PERMUTATIONS)
    indices = measure_stability(totals - permuted, permuted)
    # Scaled chi-square with the mean and the variance of the permutations: few of them tell no extreme quantile.
    mean = float(indices.mean())
    variance = max(float(indices.var()), 1e-12)
    free = 2 * mean**2 / variance
    wide = 2 / (9 * free)
    errors = NormalDist().inv_cdf(1 - (1 - CHANCE) / looks)
    quantile = mean * (1 - wide + errors * math.sqrt(wide)) ** 3  # Wilson and Hilferty 1931
    return index, max(STABILITY, MARGIN * quantile)


def measure_stability(before: Array, now: Array) -> Array:
    """Returns the population stability index of histograms [..., values]."""
    values = before.shape[-1]
    p = (before + HALF) / (before.sum(axis=-1, keepdims=True) + HALF * values)
    q = (now + HALF) / (now.sum(axis=-1, keepdims=True) + HALF * values)
    return np.asarray(((q - p) * np.log(q / p)).sum(axis=-1))


def compare_columns(schema: Mapping[str, Any], kinds: Mapping[str, ColumnKind]) -> Iterator[DataFinding]:
    """Yields missing and new columns, and those of another type.

    Args:
        kinds: of the new columns, by name.
    """
    known = schema.get("columns", {})
    for name in sorted(known.keys() - kinds.keys()):
        yield DataFinding("column", FAULT, f"{name}: the column is missing", because="training had it", columns=[name])
    for name in sorted(kinds.keys() - known.keys()):
        yield DataFinding("column", HINT, f"{name}: a new column", because="training did not have it", columns=[name])
    for name in sorted(known.keys() & kinds.keys()):
        before = KINDS[known[name]["kind"]]
        now = kinds[name]
        if any((before is kind) != (now is kind) for kind in (NUMBER, DATE)):
            text = f"{name}: is {now.name}, and was {before.name} in training"
            yield DataFinding("type", FAULT, text, because="another type", columns=[name])


def compare_sample(
    schema: Mapping[str, Any], sample: SplitSample, label: str = "", looks: int = 1
) -> list[DataFinding]:
    """Returns how examples differ from a schema: inputs, and targets. `label` begins the texts; `looks` is as above."""
    targets = {f"target {name}".strip(): values for name, values in sample.targets.items()}
    counter = DriftCounter({**schema, "columns": {**schema.get("columns", {}), **schema.get("targets", {})}}, looks)
    for name, values in {**sample.columns, **targets}.items():
        counter.add(name, values)
    found = [*compare_columns(schema, sample.kinds), *counter.find()]
    return [DataFinding(f.rule, f.level, f"{label}{f.text}", because=f.because, columns=f.columns) for f in found]


def select_level(findings: Collection[DataFinding], level: str) -> list[DataFinding]:
    """Returns the findings of at least a level."""
    return [each for each in findings if LEVELS.index(each.level) >= LEVELS.index(level)]
