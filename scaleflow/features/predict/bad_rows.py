"""Counts differences from training, by column: bad rows, unknown categories, missing values, drift. No TensorFlow."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from pyarrow import compute

from scaleflow.dataset.schema import expand_input, to_texts_array
from scaleflow.errors import RunError
from scaleflow.features.checks.drift import HINT, DataFinding, DriftCounter
from scaleflow.interfaces import LearnedState, name_leaves
from scaleflow.interfaces.extras import guard_extra
from scaleflow.launcher.command_exit import to_printable
from scaleflow.serving.cells import describe_units

#: Maximum number of rows of a chunk that are compared with training.
MAX_ROWS = 2048

Array = np.ndarray[Any, Any]

#: Maximum number of distinct values, and of columns, in the summary.
MAX_VALUES = 5
MAX_COLUMNS = 20


def print_note(text: str) -> None:
    print(to_printable(text), file=sys.stderr)


class Problem(NamedTuple):
    """A reason why some rows are bad.

    Attributes:
        column: the column with the bad values.
        is_bad: which rows are bad: [rows] bool.
        explain: returns the reason for a row.
    """

    column: str
    is_bad: Array
    explain: Callable[[int], str]


class RowReport:
    """Counts how rows differ from the training data.

    Args:
        on_bad: what to do with a bad row: `raise`, `skip` or `empty`.
        name: returns the name of a row, from its index among all rows.
        state: the run's learned state. Good rows are compared with its schema.
        counted: columns whose unknown categories are all counted.

    Attributes:
        compared: number of rows compared with the schema.
    """

    def __init__(
        self, on_bad: str, name: Callable[[int], str], state: LearnedState, counted: Collection[str] = ()
    ) -> None:
        self.on_bad = on_bad
        self.compared = 0
        self._name = name
        self._counted = counted
        self._drift = DriftCounter(state.schema)
        self._inputs = name_leaves(state.inputs) if state.schema else {}
        self._bad: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._missing: Counter[str] = Counter()
        self._has_missing: dict[str, bool | None] = {}
        self._unknown: dict[str, Counter[str]] = {}
        self._units: dict[str, Counter[str]] = {}
        self._others: Counter[str] = Counter()
        self._has_rare: set[str] = set()

    def add_problems(self, problems: Sequence[Problem], place: int) -> None:
        """Counts bad rows. `place` is the index of the first row among all rows.

        Raises:
            RunError: with `on_bad=raise`, with the first bad row.
        """
        occurring = [problem for problem in problems if problem.is_bad.any()]
        if occurring and self.on_bad == "raise":
            first = min(occurring, key=lambda problem: int(problem.is_bad.argmax()))
            raise RunError(self._describe_first(first, place))
        for problem in occurring:
            self._bad[problem.column] += int(problem.is_bad.sum())
            self._first.setdefault(problem.column, self._describe_first(problem, place))

    def add_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Compares good rows with the training data.

        `inputs` has values [n, ...] by input name: numbers, or texts ("" is missing).
        """
        rows = len(next(iter(inputs.values()), ()))
        if not self._inputs or not rows:
            return
        every = -(-rows // MAX_ROWS)  # one row in so many is compared
        with guard_extra("note: the comparison of these rows with those of the training", print_note):
            for name, values in inputs.items():
                if name not in self._inputs:
                    continue
                columns = expand_input(name, self._inputs[name], values[::every])
                for column, sample in columns.items():
                    self._drift.add(column, to_texts_array(sample) if sample.dtype.kind in "OSU" else sample)
        self.compared += len(range(0, rows, every))

    def find_drift(self) -> list[DataFinding]:
        """Returns drift, and unseen categories of columns that are not `counted`."""
        findings: list[DataFinding] = []
        with guard_extra("note: the drift of these rows", print_note):
            findings = list(self._drift.find())
        shown = []
        for finding in findings:
            if finding.rule == "unseen":
                is_shown = not set(finding.columns) & set(self._counted)
            else:
                is_shown = finding.level != HINT
            if is_shown:
                shown.append(finding)
        return shown

    def add_missing(self, column: str, count: int, had_missing: bool | None) -> None:
        """Counts values that the model imputes. `had_missing`: whether training had missing values; None: unknown."""
        if count:
            self._missing[column] += count
            self._has_missing[column] = had_missing

    def add_categories(self, column: str, values: Array, known: Collection[str], has_rare: bool = False) -> None:
        """Counts unknown categories in `values`, [n] `str` objects.

        `has_rare`: rare categories of training are unknown.
        """
        texts = pyarrow.array(values, pyarrow.string())
        is_known = compute.is_in(texts, value_set=pyarrow.array(list(known), pyarrow.string()))
        if compute.all(is_known).as_py() is not False:
            return
        shown = self._unknown.setdefault(column, Counter())
        if has_rare:
            self._has_rare.add(column)
        for entry in texts.filter(compute.invert(is_known)).value_counts().to_pylist():
            if entry["values"] in shown or len(shown) < MAX_VALUES:
                shown[entry["values"]] += entry["counts"]
            else:
                self._others[column] += entry["counts"]

    def add_units(self, column: str, counts: Counter[str]) -> None:
        """Counts numbers by unit, for units that training did not have.

        The model gets missing values instead of them.
        """
        if counts:
            self._units.setdefault(column, Counter()).update(counts)

    def describe(self, bad: int, is_resumed: bool) -> Iterator[tuple[str, str]]:
        """Yields the lines of the summary, as (label, text).

        Args:
            bad: number of bad rows.
            is_resumed: whether an earlier command predicted other rows, which are not counted here.
        """
        if is_resumed and (bad or self._missing or self._unknown or self._units):
            yield "counted", "in the rows of this command only"
        if bad:
            effect = "left out" if self.on_bad == "skip" else "with empty predictions"
            yield "bad rows", f"{bad:,} {effect}"
        reasons = []
        for name, count in sorted(self._bad.items()):
            reasons.append(f"{name}: {count:,}, first {self._first[name]}")
        yield from list_columns("", reasons)
        unknown = [self._describe_unknown(name) for name in sorted(self._unknown)]
        for name, counts in sorted(self._units.items()):
            text = f"{name}: {counts.total():,} with units that training did not have: {describe_units(counts)}"
            unknown.append(f"{text}; they count as missing")
        yield from list_columns("unknown", unknown)
        yield from list_columns("imputed", [self._describe_missing(name) for name in sorted(self._missing)])
        drift = [f"{finding.text} ({finding.because})" for finding in self.find_drift()]
        yield from list_columns("drift", drift)

    def to_counts(self, bad: int) -> dict[str, Any]:
        """Returns the number of bad rows, and the counts of `describe` by column."""
        unknown = {name: shown.total() + self._others[name] for name, shown in self._unknown.items()}
        for name, counts in self._units.items():
            unknown[name] = counts.total()
        drift = []
        for finding in self.find_drift():
            drift.append({"rule": finding.rule, "columns": finding.columns, "text": finding.text})
        return {
            "bad rows": bad,
            "bad": dict(self._bad),
            "unknown": unknown,
            "imputed": dict(self._missing),
            "drift": drift,
            "compared rows": self.compared,
        }

    def _describe_first(self, problem: Problem, place: int) -> str:
        row = int(problem.is_bad.argmax())
        return f"{self._name(place + row)}: {problem.explain(row)}"

    def _describe_missing(self, column: str) -> str:
        text = f"{column}: {self._missing[column]:,} missing"
        if self._has_missing[column] is False:
            text += ", which training never had"
        return text

    def _describe_unknown(self, column: str) -> str:
        shown = self._unknown[column]
        words = []
        for category, count in shown.items():
            word = f'"{category}"' if category else "missing"
            words.append(f"{word} ({count:,})" if count > 1 else word)
        others = f" and {self._others[column]:,} with others" if self._others[column] else ""
        total = shown.total() + self._others[column]
        which = "are rare in training, or not in it" if column in self._has_rare else "training did not have"
        return f"{column}: {total:,} of categories that {which}: {', '.join(words)}{others}"


def list_columns(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields a line for each text, the first one with the label. Stops after MAX_COLUMNS lines."""
    for n, text in enumerate(texts):
        if n == MAX_COLUMNS:
            yield "", "and further columns"
            return
        yield "" if n else label, to_printable(text.replace("\n", "\\n"))
