"""Learns from a sample of a table the kinds of its columns, and the way their values are written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scaleflow.dataset.reading.division import Division
from scaleflow.dataset.reading.files import ALL
from scaleflow.dataset.tables.file_rows import FileRows
from scaleflow.dataset.tables.kinds import (
    ColumnOptions,
    SampleColumns,
    check_column_types,
    check_weights_column,
    choose_kind,
    count_words,
    describe_known_target,
    describe_left_out,
    find_limits,
    find_useless,
    is_like_values,
)
from scaleflow.dataset.tables.values import Form, are_codes, describe_bare_numbers, find_forms
from scaleflow.interfaces import DivisionKeys, EarlierState, Outputs
from scaleflow.serving.cells import CATEGORY, EXPECTED, NUMBER, Array


@dataclass(frozen=True)
class EarlierTable:
    """How an earlier run read its table. All fields are empty if there is no such run."""

    state: EarlierState | None
    reading: Mapping[str, Any]

    @classmethod
    def from_state(cls, state: EarlierState | None, source: object) -> EarlierTable:
        return cls(state, {} if state is None else state.find_reading(source))

    @property
    def is_evaluated(self) -> bool:
        """Whether the earlier run is evaluated or resumed, so that nothing changes, rather than extended."""
        return self.state is not None and not self.state.extends

    @property
    def kinds(self) -> Mapping[str, str]:
        """The kinds of its inputs, by column."""
        kinds: Mapping[str, str] = self.reading.get("columns", {})
        return kinds

    @property
    def forms(self) -> Mapping[str, Form]:
        """By column, how its numbers or dates are written."""
        forms: Mapping[str, Form] = self.reading.get("forms", {})
        return forms

    @property
    def weights(self) -> str | None:
        """The column of the weights."""
        weights: str | None = self.reading.get("weights")
        return weights


class TableDivision:
    """Divides the rows of a table into splits. Rows are divided once, whatever is learned of them later."""

    def __init__(self, division: Division) -> None:
        self.division = division
        self._divided: dict[str, tuple[Mapping[str, Array], DivisionKeys]] = {}

    def divide(
        self, rows: FileRows, forms: Mapping[str, Form], outputs: Outputs
    ) -> tuple[Mapping[str, Array], DivisionKeys]:
        """Returns the rows of each split, [n] bool, and the values that divide all rows."""
        group = rows.group
        if group not in self._divided:
            keys = rows.read_keys(self.division.rule, forms, outputs)
            masks = {group: np.ones(len(rows), bool)}
            if group == ALL:
                masks = self.division.draw(keys, len(rows))
            self._divided[group] = (masks, keys)
        return self._divided[group]


@dataclass(frozen=True)
class TableTypes:
    """The facts that a table learns from the values of its columns."""

    examined: Sequence[str]  # the columns whose values were examined
    decisions: Mapping[str, str]  # for each input its kind, or the reason to leave it out
    outputs: Mapping[str, Any]  # the fields of `Outputs`
    forms: dict[str, Form]  # by column, how its numbers or dates are written
    codes: Sequence[str]  # columns that look like numbers, but are words
    missing_words: dict[str, int]  # how often the target has each word of `dataset.missing`
    unrecognised: Sequence[str]  # categories that look like numbers or dates
    word_counts: Mapping[str, int]  # the number of words of categories that have too many
    bare_numbers: Sequence[str]  # notes about columns whose numbers have a unit in some rows only

    def describe(self, unused: Mapping[str, str], max_words: int) -> Iterator[str]:
        """Yields lines about surprises.

        Args:
            unused: the columns that are left out, with the reasons.
            max_words: how many words of a category are used.
        """
        if self.codes:
            yield (
                f"dataset: codes, not numbers: {', '.join(self.codes)}; dataset.numeric takes such a column for numbers"
            )
        unrecognised = [name for name in self.unrecognised if name not in self.codes]
        if unrecognised:
            yield (
                f"dataset: words, though they look like numbers or dates: {', '.join(unrecognised)}; write numbers and "
                "dates in a usual form, such as 377.2 and 2024-01-31, or use dataset.drop"
            )
        if unused:
            yield f"dataset: not used: {describe_left_out(unused)}; name a column in dataset.columns to use it"
        for name, count in self.word_counts.items():
            yield (
                f"dataset.rare=other: the {max_words:,} most frequent of {count:,} words of {name} are used; the "
                "others are one word, as unknown ones are"
            )


class TypeLearner:
    """Learns the types of a table's columns from the sample.

    Args:
        rows: the rows with the sample.
        names: the columns that can be inputs.
        users_kinds: the kinds that options name for columns.
        options: of the table.
        division: divides the rows. The range of the targets is learned without the test split.
        earlier: how an earlier run read its table.
    """

    def __init__(
        self,
        rows: FileRows,
        names: Sequence[str],
        users_kinds: Mapping[str, str],
        options: ColumnOptions,
        division: TableDivision,
        earlier: EarlierTable,
    ) -> None:
        self._rows = rows
        self._names = names
        self._users_kinds = users_kinds
        self._options = options
        self._division = division
        self._earlier = earlier

    def learn(self) -> TableTypes:
        """Returns the types, from the cache if an earlier run has learned the same."""
        examined = self._choose_examined()
        earlier = self._earlier.state
        facts = {
            "kinds": self._users_kinds,
            "forms": self._earlier.forms,
            "examined": examined,
            "options": asdict(self._options),
            "known": self._earlier.kinds,
            "earlier": earlier and (earlier.find_outputs(), earlier.extends),
            "division": asdict(self._division.division),
        }
        types = self._rows.recall("types", facts, lambda: self._learn_from_sample(examined))
        return TableTypes(examined, **types)

    def _choose_examined(self) -> list[str]:
        """Returns the columns whose type is not known from an option or an earlier run."""
        options = self._options
        earlier = self._earlier
        examined: list[str] = []
        for name in self._names:
            if name not in earlier.kinds and self._users_kinds.get(name) in (None, NUMBER):
                examined.append(name)
        is_target_known = earlier.state is not None and earlier.state.find_outputs() is not None
        if options.kind in ("auto", "regression") and not is_target_known:
            examined.append(options.target)
        if options.weights is not None and options.weights != earlier.weights:
            examined.append(options.weights)
        return examined

    def _learn_from_sample(self, examined: Sequence[str]) -> dict[str, Any]:
        """Returns the fields of `TableTypes`, except the examined columns."""
        options = self._options
        raw_columns = self._read_examined(examined)
        new_forms = find_forms(
            raw_columns,
            options.decimal,
            thousands=options.thousands,
            dates=options.dates,
            known=self._earlier.forms,
            numeric=options.numeric or (),
            inputs=self._names,
        )
        forms = {**self._earlier.forms, **new_forms}
        sample = self._rows.parse_sample(forms)
        known = self._earlier.kinds
        check_column_types(sample, {name: kind for name, kind in self._users_kinds.items() if name not in known})
        outputs = self._learn_outputs(sample)
        check_weights_column(sample, options.weights)
        decisions = self._choose_kinds(sample)
        inferred = self._find_inferred(sample, examined, decisions)
        categories = [name for name in self._names if decisions[name] == CATEGORY]
        inferred_categories = [name for name in inferred if name in categories]
        return {
            "decisions": decisions,
            "outputs": asdict(outputs),
            "forms": forms,
            "codes": [name for name in inferred if are_codes(sample.columns[name])],
            "missing_words": sample.missing_words,
            "unrecognised": [name for name in inferred_categories if is_like_values(sample.columns[name])],
            "word_counts": count_words(sample, [name for name in categories if name not in known], options),
            "bare_numbers": list(describe_bare_numbers(raw_columns, new_forms)),
        }

    def _read_examined(self, examined: Sequence[str]) -> dict[str, Any]:
        """Returns the sample of the examined columns, and of the column of times that divides the rows."""
        columns = {name: self._rows.raw_columns[name] for name in examined}
        rule = self._division.division.rule
        if rule.by == "time" and rule.column is not None and rule.column not in self._earlier.forms:
            columns |= self._rows.open_columns([rule.column], "dataset.split.column")(self._rows.sampled)
        return columns

    def _learn_outputs(self, sample: SampleColumns) -> Outputs:
        """Describes the target. The range of a regression is learned without the test split."""
        outputs = describe_known_target(sample, self._options, self._earlier.state)
        masks, _ = self._division.divide(self._rows, sample.forms, outputs)
        is_trained = masks["train"][self._rows.sampled]
        return find_limits(outputs, sample.columns[self._options.target], is_trained, earlier=self._earlier.state)

    def _choose_kinds(self, sample: SampleColumns) -> dict[str, str]:
        """Returns the kind of each column, or the reason to leave it out."""
        fixed = {**self._earlier.kinds, **self._users_kinds}
        optional: list[str] = []
        if self._options.columns is None:
            optional = [name for name in self._names if name not in fixed]
        first = self._rows.files.names[0]
        fixed |= find_useless(sample, optional, first, rows=self._rows.sampled)

        def choose(name: str) -> str:
            return fixed.get(name) or choose_kind(sample, name, self._options, is_optional=name in optional)

        with ThreadPoolExecutor() as pool:  # pyarrow computes without the interpreter's lock
            return dict(zip(self._names, pool.map(choose, self._names), strict=True))

    def _find_inferred(
        self, sample: SampleColumns, examined: Collection[str], decisions: Mapping[str, str]
    ) -> list[str]:
        """Returns the inputs of strings whose kind follows from their values, not from an option."""
        from pyarrow import types

        inferred: list[str] = []
        for name in examined:
            is_text = types.is_string(sample.columns[name].type)
            if is_text and name not in self._users_kinds and decisions.get(name) in EXPECTED:
                inferred.append(name)
        return inferred
