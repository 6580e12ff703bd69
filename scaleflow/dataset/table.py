"""Dataset source: tables in CSV, Parquet, Feather or JSON lines files, with an input for each column."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from scaleflow.dataset.batches.blocks import Blocks, make_blocks
from scaleflow.dataset.reading.division import Division, find_keys
from scaleflow.dataset.reading.files import ALL, TEST_FRACTION, list_splits
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.reading.targets import OneKind, check_weights_name
from scaleflow.dataset.reading.text import LOWER
from scaleflow.dataset.tables.columns import FeatureOptions, describe_input_column, make_preprocessing
from scaleflow.dataset.tables.file_rows import FileRows
from scaleflow.dataset.tables.files import open_tables
from scaleflow.dataset.tables.kinds import (
    ColumnOptions,
    Rare,
    check_known_columns,
    choose_columns,
    describe_columns,
    describe_missing_words,
    describe_new_columns,
    divide_useless,
    find_categories,
    find_columns,
    find_name_problems,
    parse_column_kinds,
)
from scaleflow.dataset.tables.learning import EarlierTable, TableDivision, TypeLearner
from scaleflow.dataset.tables.rows import TableRows
from scaleflow.dataset.tables.values import describe_forms, describe_other_units, refuse_several_units
from scaleflow.errors import ConfigError
from scaleflow.files.table_formats import CsvForm
from scaleflow.interfaces import EarlierState, Outputs, Split, Standardize
from scaleflow.interfaces.learned_state import parse_leaves
from scaleflow.interfaces.options import AtLeastTwo, Positive, Seed, TestFraction, Words, at_least, check_options
from scaleflow.serving.cells import MISSING, describe_units, make_readers


class Table:
    """Reads tables, one example per row, one input per column.

    An input is a number (float64, NaN is missing), or a string ("" is missing): a category, a text, or a date as
    `2024-01-31T23:59:59`. `Number`, `Category`, `WordBag` or `Text`, and `Date` convert them inside the saved model.
    Columns of strings, and all columns of a CSV file, get the type that fits all of their values. Other columns have
    the type of the file.

    Args:
        earlier: the learned state of an earlier run. The columns are then read as in that run.

    conf/dataset/table.yaml describes the other arguments.

    Raises:
        ConfigError: if files or columns are missing or do not fit, or an option is invalid.
    """

    @check_options("dataset")
    def __init__(  # noqa: PLR0913  # the keys of a config
        self,
        data_dir: str,
        target: str,
        weights: str | None = None,
        kind: OneKind = "auto",
        columns: Words | None = None,
        drop: Words | None = None,
        numeric: Words | None = None,
        categorical: Words | None = None,
        text: Words | None = None,
        missing: Words | None = MISSING,
        delimiter: str | None = None,
        header: Words | None = None,
        encoding: str = "utf8",
        decimal: Literal[".", ","] | None = None,
        thousands: Literal[",", ".", " ", "'"] | None = None,
        dates: str | None = None,
        most_values: AtLeastTwo = 1000,
        rare: Rare = "other",
        vocabulary: Annotated[int, at_least(3)] = 1000,
        standardize: Standardize = LOWER,
        embed: bool = False,
        tokens: Positive | None = None,
        scale_target: bool = True,
        test: TestFraction = TEST_FRACTION,
        split_seed: Seed = 0,
        learn_on: Positive | None = 100_000,
        cache_dir: str | None = None,
        earlier: EarlierState | None = None,
        split: Split | None = None,
    ) -> None:
        features = FeatureOptions(
            most_values=most_values, vocabulary=vocabulary, standardize=standardize, embed=embed, tokens=tokens
        )
        self._options = ColumnOptions(
            target=target,
            columns=columns,
            weights=weights,
            drop=drop,
            numeric=numeric,
            categorical=categorical,
            text=text,
            decimal=decimal,
            thousands=thousands,
            dates=dates,
            kind=kind,
            most_values=most_values,
            rare=rare,
            scale_target=scale_target,
        )
        self._division = TableDivision(Division(split or Split("random"), test, split_seed))
        form = CsvForm(delimiter, tuple(header or ()), encoding, missing=tuple(missing or ()))
        self.learned_cache = LearnedCache(cache_dir, data_dir)
        self._files = open_tables(data_dir, form, self.learned_cache)
        self._earlier = EarlierTable.from_state(earlier, self)
        self._learn_on = learn_on
        self.unlabelled: dict[str, str] = {}  # by split, a text about the rows that `load` leaves out
        self.load_notes: list[str] = []  # notes about splits whose files `load` has read

        names, users_kinds = self._choose_inputs(data_dir)
        self._used = self._choose_used(names)
        self._files.use(self._used)
        rows = self._open_rows("train" if "train" in self._files.by_split else ALL)
        learner = TypeLearner(rows, names, users_kinds, self._options, division=self._division, earlier=self._earlier)
        self._types = learner.learn()
        kinds, useless = divide_useless(self._types.decisions, target)
        self.outputs: Outputs = parse_leaves([{"name": "", **self._types.outputs}], Outputs)
        self.reading = self._describe_reading(form, names, kinds, useless)
        self.inputs = {name: describe_input_column(kind) for name, kind in kinds.items()}
        self.preprocessing = {name: make_preprocessing(name, kind, features) for name, kind in kinds.items()}
        self._readers = make_readers(self.reading, find_categories(self._earlier.kinds, earlier))
        self._rows = {rows.group: self._convert_rows(rows)}
        self.notes = tuple(self._describe(rows, kinds, useless))

    def _choose_inputs(self, data_dir: str) -> tuple[list[str], dict[str, str]]:
        """Returns the names of the inputs, and the kinds that options name for columns.

        If an earlier run is evaluated or resumed, both come from that run.
        """
        if self._division.division.rule.by == "column" and ALL not in self._files.by_split:
            raise ConfigError(
                f"dataset.split={{by: column}}: the files are named after splits: {', '.join(self._files.by_split)}; "
                "leave it out, or name the files otherwise"
            )
        known = self._earlier.kinds
        if known and self._earlier.is_evaluated:
            self._check_known_inputs(known, data_dir)
            return list(known), dict(known)
        options = self._options
        roles = find_keys(self._division.division.rule, options.weights)
        chosen = choose_columns(
            self._files.names, options.target, options.columns, drop=options.drop, kinds=options.by_kind, roles=roles
        )
        names = [name for name in known if name in chosen]
        names += [name for name in chosen if name not in known]
        return names, parse_column_kinds(names, options.by_kind)

    def _check_known_inputs(self, known: Mapping[str, str], data_dir: str) -> None:
        """Raises ConfigError if the files lack a column that an earlier run read, or an option gives it another role.

        Args:
            known: the inputs of the earlier run.
            data_dir: for messages.
        """
        names = self._files.names
        options = self._options
        check_known_columns([*known], names, data_dir)
        if options.target in known:
            raise ConfigError(f"dataset.target={options.target}: is an input of the earlier run; name another column")
        find_columns([options.target], names, "dataset.target")
        if options.weights:
            find_columns([options.weights], names, "dataset.weights")
        check_weights_name(options.weights, known, options.target, key="the inputs of the earlier run")

    def _choose_used(self, names: Sequence[str]) -> list[str]:
        """Returns the columns that are read: inputs, weights, and the target as the last one."""
        used = list(names)
        if self._options.weights:
            used.append(self._options.weights)
        used.append(self._options.target)
        return used

    def _open_rows(self, group: str) -> FileRows:
        return FileRows(self._files, group, self._used, self._learn_on)

    def _convert_rows(self, rows: FileRows) -> TableRows:
        return TableRows(rows, self._types.forms, self._readers, self.outputs, weights=self._options.weights)

    def _describe_reading(
        self, form: CsvForm, names: Collection[str], kinds: Mapping[str, str], useless: Collection[str]
    ) -> dict[str, Any]:
        """Returns the record of how the table is read.

        Args:
            form: the options of CSV files.
            names: the columns that could be inputs.
            kinds: the inputs with their kinds.
            useless: the columns that are left out because of their values.
        """
        options = self._options
        unused = [name for name in self._files.names if name not in names and name != options.target]
        unused += useless
        reading = {"columns": kinds, "target": options.target, "format": self._files.format, **asdict(form)}
        if options.weights is not None:
            reading["weights"] = options.weights
        reading["unused"] = unused
        reading["forms"] = self._types.forms
        reading["many_words"] = {**self._earlier.reading.get("many_words", {}), **self._types.word_counts}
        return reading

    def _describe(self, rows: FileRows, kinds: Mapping[str, str], useless: Mapping[str, str]) -> Iterator[str]:
        """Yields the notes: the kinds of the columns, and surprises."""
        options = self._options
        types = self._types
        yield describe_columns(kinds, options.target, self.outputs.kind, weights=options.weights)
        yield from describe_forms({name: form for name, form in types.forms.items() if name in types.examined})
        yield from types.bare_numbers
        yield from self._describe_other_units(rows)
        yield from rows.describe_sample()
        unused: list[str] = self.reading["unused"]
        if self._earlier.is_evaluated:
            without_weights = [name for name in unused if name != options.weights]
            yield from describe_new_columns(without_weights, self._earlier.reading)
        yield from types.describe(self._find_surprising(unused, useless), options.most_values)

    def _find_surprising(self, unused: Sequence[str], useless: Mapping[str, str]) -> dict[str, str]:
        """Returns columns that are not used for a reason that the user may not know, with the reasons."""
        options = self._options
        are_inputs_named = self._earlier.kinds or options.columns
        reasons: dict[str, str] = {}
        if not are_inputs_named:
            reasons = find_name_problems(name for name in unused if name not in (options.drop or ()))
        return {**reasons, **useless}

    def _describe_other_units(self, rows: FileRows) -> Iterator[str]:
        """Yields a note about each column with numbers that do not have the unit of training.

        Raises ConfigError if this run learns the unit, and rows outside of the sample have another one.
        """
        types = self._types
        for name, counts in rows.count_other_units(types.forms).items():
            unit = types.forms[name]["unit"]
            if name in types.examined and name not in (self._options.numeric or ()):
                units = f"{unit} and {describe_units(counts)}"
                refuse_several_units(name, units, is_input=name in types.decisions)
            yield describe_other_units(name, unit, counts)

    @property
    def splits(self) -> Collection[str]:
        division = self._division.division
        if ALL in self._files.by_split and division.rule.by == "column":
            masks, _ = self._division.divide(self._rows[ALL].rows, self._types.forms, self.outputs)
            return tuple(masks)
        return list_splits(self._files.by_split, division.test)

    def load(self, split: str) -> Blocks:
        """Returns the rows of a split in blocks, without the rows that have no target."""
        group = split if split in self._files.by_split else ALL
        if group not in self._rows:
            self._rows[group] = self._convert_rows(self._open_rows(group))
            for name, counts in self._rows[group].rows.count_other_units(self._types.forms).items():
                note = describe_other_units(name, self._types.forms[name]["unit"], counts)
                self.load_notes.append(f"{note} (split {split!r})")
        rows = self._rows[group]
        masks, keys = self._division.divide(rows.rows, self._types.forms, self.outputs)
        is_in_split = masks[split]
        hint = "" if self.outputs.kind == "regression" else describe_missing_words(self._types.missing_words)
        unlabelled = rows.describe_unlabelled(is_in_split, hint)
        if unlabelled:
            self.unlabelled[split] = unlabelled
        keep = is_in_split & rows.rows.has_target
        if not keep.any():
            raise ConfigError(f"dataset.target={self._options.target}: no row of the split {split!r} has one")
        return make_blocks(rows, None if keep.all() else keep, keys.select(keep))
