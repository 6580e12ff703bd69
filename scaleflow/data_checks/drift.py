"""Compares data with a schema: columns, types, unseen categories, ranges, missing values, drift."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from scaleflow.data_checks.sample import CATEGORY, DATE, MOST_LETTERS, NUMBER, TEXT, SplitSample, reduce_values
from scaleflow.interfaces.formatting import format_number, join_first

#: The levels of findings, the least first.
HINT, DRIFT, FAULT = "hint", "drift", "fault"
LEVELS = (HINT, DRIFT, FAULT)

#: Above this population stability index the distribution has changed (Siddiqi 2006, Credit Risk Scorecards; deepchecks
#: uses it, too). Few rows alone give a large index: it also has to be above what chance gives in 999 of 1000 columns.
STABILITY, CHANCE = 0.2, 0.999

#: Is added to each count, since the index of an empty range has no limit (Jeffreys).
HALF = 0.5

#: The share of values that may be outside of the range, or missing where none were, and the least number of them.
SHARE, FEWEST = 0.01, 5

#: A larger share of missing values than before is drift, if the difference is so many standard errors.
MORE_MISSING, ERRORS = 0.1, 4

#: Ranges, or values, that fewer values were in before are joined: of rare categories, each sample has others.
FEW = 5

#: The most values, or columns, that a message names.
MOST_NAMED = 5

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DataFinding:
    """Something that is wrong with data, or differs.

    Attributes:
        level: `fault`, `drift` or `hint`.
        text: what was found, with its figure.
        because: the rule in words, with its threshold.
    """

    rule: str
    level: str
    text: str
    because: str
    columns: Sequence[str] = ()


class DriftCounter:
    """Counts the values of data by the histograms of a schema, in portions.

    Args:
        schema: of the training split, as `make_schema` returns it: its `columns`, and its `rows`.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._known: dict[str, Mapping[str, Any]] = dict(schema.get("columns", {}))
        self._rows = float(schema.get("rows", math.inf))
        self._counts: dict[str, Array] = {}
        self._unseen: dict[str, Counter[str]] = {}
        self._missing: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._outside: Counter[str] = Counter()
        self._ends: dict[str, tuple[float, float]] = {}

    def add(self, name: str, values: Array) -> None:
        """Adds values of a column [n, ...], which may be unknown: numbers, or `str` objects ("" is missing)."""
        known = self._known.get(name)
        if known is None or not len(values):
            return
        kind = known["kind"]
        self._total[name] += len(values)
        if kind == CATEGORY:
            self._add_categories(name, known, values)
        elif kind != DATE and "edges" in known:
            if (values.dtype == object) != (kind == TEXT):
                return  # another type, which the comparison of the columns says
            numbers = reduce_values(values, kind)
            is_known = np.isfinite(numbers) if kind != TEXT else values != ""
            counted = numbers if kind == TEXT and known["min"] == 0 else numbers[is_known]  # of an early version
            self._missing[name] += int((~is_known).sum())
            self._add_numbers(name, known, counted)
        elif values.dtype == object:
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
        found = Counter(str(value)[:MOST_LETTERS] for value in values.tolist())
        self._missing[name] += found.pop("", 0)
        places = {value: n for n, value in enumerate(known["values"])}
        counts = self._counts.setdefault(name, np.zeros(len(places) + 1, np.int64))
        for value, count in found.items():
            counts[places.get(value, len(places))] += count
            if value not in places and not known["others"]:
                self._unseen.setdefault(name, Counter())[value] += count

    def find(self) -> Iterator[DataFinding]:
        """Yields what differs."""
        for name, known in self._known.items():
            total = self._total[name]
            if not total:
                continue
            if name in self._unseen:
                yield describe_unseen(name, self._unseen[name], total, known)
            missing = self._missing[name] / total
            is_more = missing > known["missing"] + MORE_MISSING or (
                not known["missing"] and missing > SHARE and self._missing[name] >= FEWEST
            )
            if is_more and exceeds_chance(known["missing"], self._rows, missing, total):
                text = f"{name}: {missing:.1%} of the values are missing, {known['missing']:.1%} in training"
                yield DataFinding("missing", DRIFT, text, "10 % more than in training, or above 1 % of none", [name])
            yield from self._find_shift(name, known)

    def _find_shift(self, name: str, known: Mapping[str, Any]) -> Iterator[DataFinding]:
        counts = self._counts.get(name)
        if counts is None:
            return
        before = known["counts"] if "counts" in known else [*known["values"].values(), known["others"]]
        index, limit = compute_stability(np.array(before, np.float64), counts.astype(np.float64))
        if index > limit:
            text = f"{name}: its distribution has changed (population stability index {index:.2f})"
            because = f"an index above {limit:.2f}{', since there are few rows' if limit > STABILITY else ''}"
            yield DataFinding("drift", DRIFT, text, because, [name])
        outside, total = self._outside[name], self._total[name]
        if "counts" in known and outside > max(FEWEST, SHARE * total, limit_by_chance(sum(known["counts"]), total)):
            low, high = self._ends[name]
            seen = f"{format_number(known['min'])} to {format_number(known['max'])}"
            text = (
                f"{name}: {outside:,} values are outside of {seen}: from {format_number(low)} to {format_number(high)}"
            )
            because = "more than 1 % of the values, and more than chance gives"
            yield DataFinding("range", DRIFT, text, because, [name])


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
    shown = join_first([f"{value!r} ({count:,})" for value, count in unseen.most_common()], MOST_NAMED)
    text = f"{name}: {unseen.total():,} of {total:,} values are not in training: {shown}"
    counts = list(known["values"].values())
    rows = max(1, sum(counts))
    expected = total * counts.count(1) / rows
    is_much = unseen.total() > max(SHARE * total, FEWEST + 2 * expected + ERRORS * math.sqrt(expected))
    level = DRIFT if is_much and exceeds_chance(0.0, rows, unseen.total() / total, total) else HINT
    return DataFinding("unseen", level, text, "a category that training did not have; drift above 1 %", [name])


def compute_stability(before: Array, now: Array) -> tuple[float, float]:
    """Returns the population stability index of two histograms, and the limit above which they differ.

    The index of equal distributions is about chi-square with `ranges - 1` degrees of freedom, times 1/n + 1/m. Ranges
    with few values are joined.
    """
    order = np.argsort(-before, kind="stable")
    before, now = before[order], now[order]
    is_small = (np.cumsum(before) / max(1.0, before.sum()) > 0.98) | (before < FEW)
    is_small &= np.arange(len(before)) > 0
    if is_small.sum() > 1:
        before, now = (np.append(each[~is_small], each[is_small].sum()) for each in (before, now))
    if not before.sum() or not now.sum() or len(before) < 2:
        return 0.0, STABILITY
    p, q = ((each + HALF) / (each.sum() + HALF * len(each)) for each in (before, now))
    index = float(((q - p) * np.log(q / p)).sum())
    free = len(before) - 1
    wide = 2 / (9 * free)
    quantile = free * (1 - wide + NormalDist().inv_cdf(CHANCE) * math.sqrt(wide)) ** 3  # Wilson and Hilferty 1931
    return index, max(STABILITY, 1.5 * quantile * (1 / before.sum() + 1 / now.sum()))


def compare_columns(schema: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterator[DataFinding]:
    """Yields missing and new columns, and those of another type.

    Args:
        kinds: of the new columns, by name.
    """
    known = schema.get("columns", {})
    for name in sorted(known.keys() - kinds.keys()):
        yield DataFinding("column", FAULT, f"{name}: the column is missing", "training had it", [name])
    for name in sorted(kinds.keys() - known.keys()):
        yield DataFinding("column", HINT, f"{name}: a new column", "training did not have it", [name])
    for name in sorted(known.keys() & kinds.keys()):
        before, now = known[name]["kind"], kinds[name]
        if any((before == kind) != (now == kind) for kind in (NUMBER, DATE)):
            yield DataFinding("type", FAULT, f"{name}: is {now}, and was {before} in training", "another type", [name])


def compare_sample(schema: Mapping[str, Any], sample: SplitSample, label: str = "") -> list[DataFinding]:
    """Returns how examples differ from a schema: inputs, and targets. `label` begins the texts."""
    targets = {f"target {name}".strip(): values for name, values in sample.targets.items()}
    counter = DriftCounter({**schema, "columns": {**schema.get("columns", {}), **schema.get("targets", {})}})
    for name, values in {**sample.columns, **targets}.items():
        counter.add(name, values)
    found = [*compare_columns(schema, sample.kinds), *counter.find()]
    return [DataFinding(f.rule, f.level, f"{label}{f.text}", f.because, f.columns) for f in found]


def select_level(findings: Collection[DataFinding], level: str) -> list[DataFinding]:
    """Returns the findings of at least a level."""
    return [each for each in findings if LEVELS.index(each.level) >= LEVELS.index(level)]
