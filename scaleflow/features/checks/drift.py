"""Compares data with the schema of other data: columns, types, categories, ranges, distributions."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from scaleflow.dataset.column_kinds import CATEGORY, DATE, KINDS, MAX_LETTERS, NUMBER, TEXT, ColumnKind
from scaleflow.dataset.schema import SplitSample
from scaleflow.interfaces.formatting import format_number, join_first

Array = np.ndarray[Any, Any]

#: Levels of findings, from mild to serious.
HINT = "hint"
DRIFT = "drift"
FAULT = "fault"
LEVELS = (HINT, DRIFT, FAULT)

#: A distribution has changed if its population stability index is above STABILITY (Siddiqi 2006, Credit Risk
#: Scorecards; also in deepchecks). With few rows, chance alone gives a large index. So the index must also exceed the
#: value that chance stays below in 999 of 1000 columns (CHANCE).
STABILITY = 0.2
CHANCE = 0.999

#: Added to each count, because the index of an empty bin is infinite (Jeffreys).
HALF = 0.5

#: Values outside the range, or missing if none were missing before, are drift above SHARE of all and about MIN_VALUES.
SHARE = 0.01
MIN_VALUES = 5

#: More missing values are drift if their share grew by MORE_MISSING and by ERRORS standard errors.
MORE_MISSING = 0.1
ERRORS = 4

#: Categories or bins with fewer values than this, in both datasets together, are joined: rare ones differ by sample.
FEW = 5

#: The limit of an index comes from PERMUTATIONS permutations, times MARGIN.
PERMUTATIONS = 200
MARGIN = 1.5

#: Above MAX_UNLISTED values that the schema does not list, only the KEPT_UNLISTED most frequent are counted on.
MAX_UNLISTED = 10_000
KEPT_UNLISTED = 1000

#: Maximum number of values that NumPy can permute.
MAX_PERMUTED = 10**9 - 1

#: Maximum number of values or columns that a message names.
MAX_NAMED = 5


@dataclass(frozen=True)
class DataFinding:
    """A fault of data, or a difference from other data."""

    rule: str
    level: str  # `fault`, `drift` or `hint`
    text: str  # the finding, with its number
    because: str  # the rule in words, with its threshold
    columns: Sequence[str] = ()


class DriftCounter:
    """Counts values by the histograms of a schema. Call `add` for each portion of data, then `find`.

    Args:
        schema: of the training split, from `make_schema`: its `columns` and `rows`.
        looks: number of columns compared together. The more columns, the larger an index may be by chance.
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
        """Adds values of a column [n, ...]: numbers, or `str` objects ("" is missing).

        Ignores columns not in the schema.
        """
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
                return  # `compare_columns` reports the other type
            numbers = kind.reduce(values)
            is_known = values != "" if is_text else np.isfinite(numbers)
            # Schemas of early versions count empty texts, with length 0.
            counted = numbers if is_text and known["min"] == 0 else numbers[is_known]
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
        occurring = Counter(str(value)[:MAX_LETTERS] for value in values.tolist())
        self._missing[name] += occurring.pop("", 0)
        places = {value: n for n, value in enumerate(known["values"])}
        counts = self._counts.setdefault(name, np.zeros(len(places) + 1, np.int64))
        for value, count in occurring.items():
            counts[places.get(value, len(places))] += count
            if value not in places:
                rest = self._unlisted if known["others"] else self._unseen
                rest.setdefault(name, Counter())[value] += count
        unlisted = self._unlisted.get(name, Counter())
        if len(unlisted) > MAX_UNLISTED:
            self._unlisted[name] = Counter(dict(unlisted.most_common(KEPT_UNLISTED)))

    def find(self) -> Iterator[DataFinding]:
        """Yields unseen categories, more missing values, changed distributions and values outside the range."""
        for name, known in self._known.items():
            total = self._total[name]
            if not total:
                continue
            if name in self._unseen:
                yield describe_unseen(name, self._unseen[name], total, known=known)
            missing = self._missing[name] / total
            if known["missing"]:
                is_more = missing > known["missing"] + MORE_MISSING
            else:
                is_more = missing > MORE_MISSING or (missing > SHARE and self._missing[name] >= MIN_VALUES)
            if is_more and exceeds_chance(known["missing"], self._rows, now=missing, total=total):
                text = f"{name}: {missing:.1%} of the values are missing, {known['missing']:.1%} in training"
                because = "10 % more than in training, or above 1 % of none"
                yield DataFinding("missing", DRIFT, text, because=because, columns=[name])
            yield from self._find_shift(name, known)

    def _compare_histograms(self, name: str, known: Mapping[str, Any], counts: Array) -> tuple[float, float]:
        """Returns a column's population stability index and the limit above which the distribution has changed."""
        if "counts" in known:
            before = np.array(known["counts"])
            has_few = before < FEW  # chance decides: the outer bins come from few values
            rest = (int(before[has_few].sum()), int(counts[has_few].sum()))
            return compute_stability(before[~has_few], counts[~has_few], looks=self._looks, rest=rest)
        before = np.array([*known["values"].values()], np.int64)
        now = counts[:-1]
        if not known["others"]:  # all values are listed: count an unseen value like any other
            unseen = [*self._unseen.get(name, Counter()).values()]
            before = np.append(before, np.zeros(len(unseen), np.int64))
            now = np.append(now, unseen)
            return compute_stability(before, now, looks=self._looks)
        most_before = int(before.min()) if len(before) else 0  # largest count of an unlisted value
        least = FEW + 2 * most_before  # by chance, an unlisted value hardly occurs this often
        rest_before = int(known["others"])
        rest_now = int(counts[-1])
        for _, count in self._unlisted.get(name, Counter()).most_common(MAX_NAMED):
            count_before = min(most_before, rest_before)
            share_before = (before.sum() + rest_before) / (before.sum() + rest_before + now.sum() + rest_now)
            if (count_before + count) * share_before < least:
                break
            before = np.append(before, count_before)
            now = np.append(now, count)
            rest_before -= count_before
            rest_now -= count
        return compute_stability(before, now, looks=self._looks, rest=(rest_before, rest_now), least_before=least)

    def _find_shift(self, name: str, known: Mapping[str, Any]) -> Iterator[DataFinding]:
        counts = self._counts.get(name)
        if counts is None:
            return
        index, limit = self._compare_histograms(name, known, counts)
        if index > limit:
            text = f"{name}: its distribution has changed (population stability index {index:.2f})"
            because = f"an index above {limit:.2f}"
            if limit > STABILITY:
                because += ", since there are few rows"
            yield DataFinding("drift", DRIFT, text, because=because, columns=[name])
        outside = self._outside[name]
        total = self._total[name]
        if "counts" in known and outside > max(MIN_VALUES, SHARE * total, limit_by_chance(sum(known["counts"]), total)):
            low, high = self._ends[name]
            seen = f"{format_number(known['min'])} to {format_number(known['max'])}"
            text = (
                f"{name}: {outside:,} values are outside of {seen}: from {format_number(low)} to {format_number(high)}"
            )
            because = "more than 1 % of the values, and more than chance gives"
            yield DataFinding("range", DRIFT, text, because=because, columns=[name])


def exceeds_chance(before: float, rows: float, now: float, total: int) -> bool:
    """Returns whether share `now` of `total` values exceeds share `before` of `rows` values by more than chance."""
    share = (before + now * total / rows) / (1 + total / rows)
    return now - before > ERRORS * math.sqrt(share * (1 - share) * (1 / rows + 1 / total))


def limit_by_chance(before: int, now: int) -> float:
    """Returns how many of `now` values may lie outside the range of `before` values of the same distribution.

    The chance that `k` new values exceed the largest old one is the share of new values to the power of `k`. The limit
    is at a chance of 1e-6.
    """
    return math.log(1e-6) / math.log(now / (before + now)) if before else math.inf


def describe_unseen(name: str, unseen: Counter[str], total: int, known: Mapping[str, Any]) -> DataFinding:
    """Returns a finding about categories that training did not have.

    If some categories occurred only once in training, new ones are expected: their share is about the share of the
    single ones (Good 1953).
    """
    shown = join_first([f"{value!r} ({count:,})" for value, count in unseen.most_common()], MAX_NAMED)
    text = f"{name}: {unseen.total():,} of {total:,} values are not in training: {shown}"
    counts = list(known["values"].values())
    rows = max(1, sum(counts))
    expected = total * counts.count(1) / rows
    is_much = unseen.total() > max(SHARE * total, MIN_VALUES + 2 * expected + ERRORS * math.sqrt(expected))
    level = DRIFT if is_much and exceeds_chance(0.0, rows, now=unseen.total() / total, total=total) else HINT
    because = "a category that training did not have; drift above 1 %"
    return DataFinding("unseen", level, text, because=because, columns=[name])


def compute_stability(
    before: Array, now: Array, looks: int = 1, rest: tuple[int, int] = (0, 0), least_before: int = 0
) -> tuple[float, float]:
    """Returns the population stability index of two histograms, and the limit above which they differ.

    The limit comes from permutations: the counts of both histograms if their rows were exchanged at random. Rare values
    are joined. A value is rare by the sum of both counts, because a permutation does not change it. If the counts of
    one histogram decided, values frequent there by chance would seem to become rarer.

    Args:
        before, now: how often each value or bin occurs: [values] int.
        looks: number of columns compared together.
        rest: counts of all other values, which are rare.
        least_before: a value is also rare if equal distributions would give it fewer than this in `before`.
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
    if totals.sum() > MAX_PERMUTED:  # chance does not give an index this large
        return index, STABILITY
    permuted = np.random.default_rng(0).multivariate_hypergeometric(totals, now.sum(), size=PERMUTATIONS)
    indices = measure_stability(totals - permuted, permuted)
    # Scaled chi-square with the mean and variance of the permutations: these are too few to give an extreme quantile.
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
    """Yields missing columns, new columns and columns of another type.

    Args:
        kinds: kinds of the new columns, by name.
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
    """Returns how inputs and targets of examples differ from a schema.

    `label` begins the texts. `looks` is the argument of `DriftCounter`.
    """
    known = {**schema.get("columns", {}), **schema.get("targets", {})}
    counter = DriftCounter({**schema, "columns": known}, looks)
    added = dict(sample.columns)
    for name, values in sample.targets.items():
        added[f"target {name}".strip()] = values
    for name, values in added.items():
        counter.add(name, values)
    findings = [*compare_columns(schema, sample.kinds), *counter.find()]
    return [replace(finding, text=f"{label}{finding.text}") for finding in findings]


def select_level(findings: Collection[DataFinding], level: str) -> list[DataFinding]:
    """Returns the findings of at least this level."""
    least = LEVELS.index(level)
    return [finding for finding in findings if LEVELS.index(finding.level) >= least]
