"""Dataset source: tables in CSV, Parquet, Feather or JSON lines files, with an input for each column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.blocks import Blocks, make_blocks, share_rows
from scaleflow.dataset.reading.division import Division, find_keys, find_strata, is_by_target, read_keys
from scaleflow.dataset.reading.files import ALL, TEST_FRACTION, list_splits
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.reading.targets import OneKind, check_weights_name
from scaleflow.dataset.reading.text import LOWER
from scaleflow.dataset.tables.columns import FeatureOptions, describe_input_column, make_preprocessing
from scaleflow.dataset.tables.files import TableFiles, open_tables
from scaleflow.dataset.tables.kinds import (
    ColumnOptions,
    Rare,
    SampleColumns,
    TableTypes,
    check_column_types,
    check_known_columns,
    check_weights_column,
    choose_columns,
    choose_kind,
    count_words,
    describe_columns,
    describe_known_target,
    describe_missing_words,
    divide_useless,
    find_categories,
    find_columns,
    find_limits,
    find_name_problem,
    find_new,
    find_targets,
    find_useless,
    is_like_values,
    parse_column_kinds,
)
from scaleflow.dataset.tables.values import (
    Form,
    are_codes,
    are_plain_numbers,
    convert_target,
    describe_bare_numbers,
    describe_forms,
    describe_other_units,
    find_forms,
    refuse_several_units,
    to_weights,
)
from scaleflow.errors import ConfigError
from scaleflow.files.table_formats import CsvForm
from scaleflow.interfaces import Arrays, DivisionKeys, EarlierState, Outputs, Split, Standardize
from scaleflow.interfaces.formatting import MAX_NAMED, join_first
from scaleflow.interfaces.learned_state import parse_leaves
from scaleflow.interfaces.options import AtLeastTwo, Positive, Seed, TestFraction, Words, at_least, check_options
from scaleflow.serving.cells import (
    CATEGORY,
    EXPECTED,
    MISSING,
    NUMBER,
    Array,
    ColumnReader,
    describe_units,
    is_missing,
    make_readers,
)

#: Maximum number of faults that are recorded with file and row.
NAMED = 10

#: The rows that are learned from are the first ones of so many blocks.
SAMPLED_BLOCKS = 32


class Table:
    """Reads tables, one example per row, one input per column.

    An input is a number (float64, NaN is missing), or a string ("" is missing): a category, a text, or a date as
    `2024-01-31T23:59:59`. `Number`, `Category`, `WordBag` or `Text`, and `Date` convert them inside the saved model.
    A column of strings, and each column of a CSV file, has the type that all its values have. The types of other
    columns are those of the file.

    Args:
        earlier: what an earlier run learned of such a table: the columns are then taken as in that run.

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
        self._division = Division(split or Split("random"), test, split_seed)
        self._divided: dict[str, tuple[Mapping[str, Array], DivisionKeys]] = {}
        self._target = target
        self._weights = weights
        form = CsvForm(delimiter, tuple(header or ()), encoding, missing=tuple(missing or ()))
        self.learned_cache = LearnedCache(cache_dir, data_dir)
        self._files = open_tables(data_dir, form, self.learned_cache)
        self._earlier = earlier
        self._past = {} if earlier is None else earlier.find_reading(self)  # how the earlier run read its table
        self.unlabelled: dict[str, str] = {}  # by split, a text on the rows that `load` leaves out
        self.load_notes: list[str] = []  # notes on splits whose files `load` has read
        self._learn(form, data_dir, learn_on)
        self.preprocessing = {name: make_preprocessing(name, each, features) for name, each in self._kinds.items()}

    def _learn(self, form: CsvForm, data_dir: str, learn_on: int | None) -> None:
        """Chooses the columns, and learns from the first rows what they are."""
        names, given = self._choose_inputs(data_dir)
        used = [*names, *([self._weights] if self._weights else []), self._target]
        self._files.use(used)
        self._read = partial(TableRows, self._files, used, learn_on=learn_on, weights=self._weights)
        rows = self._read("train" if "train" in self._files.by_split else ALL)
        types = self._learn_types(rows, names, given)
        self._kinds, useless = divide_useless(types.found, self._target)
        self._missing_words = types.missing_words
        self.outputs: Outputs = parse_leaves([{"name": "", **types.outputs}], Outputs)
        self.reading = self._describe_reading(form, names, useless, types=types)
        self.inputs = {name: describe_input_column(each) for name, each in self._kinds.items()}
        words = find_categories(self._past.get("columns", {}), self._earlier)
        self._readers = make_readers(self.reading, words)
        self._rows = {rows.group: rows.describe(self._target, self._readers, self.outputs)}
        self.notes = tuple(self._describe(rows, types, useless))

    def _choose_inputs(self, data_dir: str) -> tuple[list[str], dict[str, str]]:
        """Returns the names of the inputs, and what options say that columns are taken for, by name.

        If an earlier run is evaluated or resumed, both are those of that run.
        """
        if self._division.rule.by == "column" and ALL not in self._files.by_split:
            raise ConfigError(
                f"dataset.split={{by: column}}: the files are named after splits: {', '.join(self._files.by_split)}; "
                "leave it out, or name the files otherwise"
            )
        known: Mapping[str, str] = self._past.get("columns", {})
        if known and self._earlier is not None and not self._earlier.extends:
            check_known_columns([*known], self._files.names, data_dir)
            if self._target in known:
                raise ConfigError(f"dataset.target={self._target}: is an input of the earlier run; name another column")
            find_columns([self._target], self._files.names, "dataset.target")
            find_columns([*filter(None, [self._weights])], self._files.names, "dataset.weights")
            check_weights_name(self._weights, known, self._target, key="the inputs of the earlier run")
            return list(known), dict(known)
        options = self._options
        roles = find_keys(self._division.rule, self._weights)
        names = choose_columns(
            self._files.names, self._target, options.columns, drop=options.drop, kinds=options.by_kind, roles=roles
        )
        names = [*(name for name in known if name in names), *(name for name in names if name not in known)]
        return names, parse_column_kinds(names, options.by_kind)

    def _learn_types(self, rows: TableRows, names: Sequence[str], given: Mapping[str, str]) -> TableTypes:
        """Learns what the columns of a sample are, and how their values are written; `rows` are told the latter.

        Args:
            rows: with the sample.
            names: of the inputs.
            given: what columns are taken for, as far as that is said.
        """
        earlier = self._earlier
        known = self._past.get("columns", {})
        sought = [name for name in names if name not in known and given.get(name) in (None, NUMBER)]
        if self._options.kind in ("auto", "regression") and (earlier is None or earlier.find_outputs() is None):
            sought.append(self._target)
        if self._weights is not None and self._weights != self._past.get("weights"):
            sought.append(self._weights)
        facts = {
            "given": given,
            "forms": self._past.get("forms", {}),
            "sought": sought,
            "options": asdict(self._options),
            "known": known,
            "earlier": earlier and (earlier.find_outputs(), earlier.extends),
            "division": asdict(self._division),
        }
        learn = partial(self._learn_from_sample, rows, names, given, sought=sought)
        types = TableTypes(sought, **rows.recall("types", facts, learn))
        rows.forms = types.forms
        rows.missing_words = types.missing_words
        return types

    def _learn_from_sample(
        self, rows: TableRows, names: Sequence[str], given: Mapping[str, str], sought: Sequence[str]
    ) -> dict[str, Any]:
        """Returns the fields of `TableTypes`; `sought` has the columns whose values are looked at."""
        from pyarrow import types

        options = self._options
        known = self._past.get("columns", {})
        known_forms = self._past.get("forms", {})
        columns = self._read_sought(rows, sought)
        new_forms = find_forms(
            columns,
            options.decimal,
            thousands=options.thousands,
            dates=options.dates,
            known=known_forms,
            numeric=options.numeric or (),
            inputs=names,
        )
        rows.forms = {**known_forms, **new_forms}
        sample = rows.sample_columns
        check_column_types(sample, {name: each for name, each in given.items() if name not in known})
        outputs = describe_known_target(sample, self._target, options, earlier=self._earlier)
        is_trained = self._divide(rows, outputs)[0]["train"][rows.sampled]
        outputs = find_limits(outputs, sample.columns[self._target], is_trained, earlier=self._earlier)
        check_weights_column(sample, self._weights)
        taken = {**known, **given}
        free = [name for name in names if name not in taken and options.columns is None]
        taken |= find_useless(sample, free, self._files.names[0], rows=rows.sampled)

        def choose(name: str) -> str:
            return taken.get(name) or choose_kind(sample, name, options, is_free=name in free)

        with ThreadPoolExecutor() as pool:  # pyarrow computes without the interpreter's lock
            found = dict(zip(names, pool.map(choose, names), strict=True))
        texts = [name for name in sought if types.is_string(sample.columns[name].type)]
        inferred = [name for name in texts if name not in given and found.get(name) in EXPECTED]
        categories = [name for name in names if found[name] == CATEGORY]
        return {
            "found": found,
            "outputs": asdict(outputs),
            "forms": rows.forms,
            "codes": [name for name in inferred if are_codes(sample.columns[name])],
            "missing_words": sample.missing_words,
            "unread": [name for name in inferred if name in categories and is_like_values(sample.columns[name])],
            "many": count_words(sample, [name for name in categories if name not in known], options),
            "bare_numbers": list(describe_bare_numbers(columns, new_forms)),
        }

    def _read_sought(self, rows: TableRows, sought: Sequence[str]) -> dict[str, Any]:
        """Returns the columns whose forms are learned from the sample: those `sought`, and the one of the times."""
        columns = {name: rows.raw_columns[name] for name in sought}
        rule = self._division.rule
        if rule.by == "time" and rule.column is not None and rule.column not in self._past.get("forms", {}):
            columns |= rows.open_columns([rule.column], "dataset.split.column")(rows.sampled)
        return columns

    def _describe_reading(
        self, form: CsvForm, names: Sequence[str], useless: Collection[str], types: TableTypes
    ) -> dict[str, Any]:
        unused = [*(name for name in self._files.names if name not in (*names, self._target)), *useless]
        many = {**self._past.get("many_words", {}), **types.many}
        found = {"columns": self._kinds, "target": self._target, "format": self._files.format, **asdict(form)}
        found |= {} if self._weights is None else {"weights": self._weights}
        return found | {"unused": unused, "forms": types.forms, "many_words": many}

    def _describe(self, rows: TableRows, types: TableTypes, useless: Mapping[str, str]) -> Iterator[str]:
        """Yields the notes: what columns are taken for, and what may surprise."""
        yield describe_columns(self._kinds, self._target, self.outputs.kind, weights=self._weights)
        yield from describe_forms({name: each for name, each in types.forms.items() if name in types.sought})
        yield from types.bare_numbers
        yield from self._describe_other_units(rows, types)
        yield from rows.describe_sample()
        unused = self.reading["unused"]
        if self._earlier is not None and not self._earlier.extends:
            yield from find_new([name for name in unused if name != self._weights], self._past)
        options = self._options
        expected = [*(options.drop or ()), *(unused if self._past.get("columns") or options.columns else ())]
        reasons = {name: each for name in unused if name not in expected and (each := find_name_problem(name))}
        yield from types.describe({**reasons, **useless}, options.most_values)

    def _describe_other_units(self, rows: TableRows, types: TableTypes) -> Iterator[str]:
        """Yields a note on each column with numbers of another unit than training had.

        Raises ConfigError if the run itself learns the unit, and rows outside of the sample have another one.
        """
        for name, counts in rows.count_other_units().items():
            unit = types.forms[name]["unit"]
            if name in types.sought and name not in (self._options.numeric or ()):
                refuse_several_units(name, f"{unit} and {describe_units(counts)}", is_input=name in types.found)
            yield describe_other_units(name, unit, counts)

    @property
    def splits(self) -> Collection[str]:
        if ALL in self._files.by_split and self._division.rule.by == "column":
            return tuple(self._divide(self._rows[ALL], self.outputs)[0])
        return list_splits(self._files.by_split, self._division.test)

    def load(self, split: str) -> Blocks:
        """Returns the rows of a split in blocks, without those that have no target."""
        group = split if split in self._files.by_split else ALL
        if group not in self._rows:
            rows = self._rows[group] = self._read(group)
            rows.forms, rows.missing_words = self.reading["forms"], self._missing_words
            rows.describe(self._target, self._readers, self.outputs)
            for name, counts in rows.count_other_units().items():
                note = describe_other_units(name, rows.forms[name]["unit"], counts)
                self.load_notes.append(f"{note} (split {split!r})")
        rows = self._rows[group]
        masks, keys = self._divide(rows, self.outputs)
        is_in_split = masks[split]
        if text := rows.describe_unlabelled(is_in_split):
            self.unlabelled[split] = text
        keep = is_in_split & rows.has_target
        if not keep.any():
            raise ConfigError(f"dataset.target={self._target}: no row of the split {split!r} has one")
        return make_blocks(rows, None if keep.all() else keep, keys.select(keep))

    def _divide(self, rows: TableRows, outputs: Outputs) -> tuple[Mapping[str, Array], DivisionKeys]:
        """Returns the rows of each split, [n] bool, and by what all are divided."""
        if rows.group not in self._divided:
            count = sum(rows.lengths)
            keys = rows.read_keys(self._division.rule, outputs)
            is_whole = rows.group == ALL
            masks = self._division.draw(keys, count) if is_whole else {rows.group: np.ones(count, bool)}
            self._divided[rows.group] = masks, keys
        return self._divided[rows.group]


class TableRows:
    """The rows of some files, as a `RowReader`.

    Args:
        files: all files.
        columns: names of the used ones.
        group: the split whose files are read, or `all`.
        learn_on: number of rows that are read first, to learn from them; None: all.
        weights: the column of the weights of rows, if there is one.
    """

    def __init__(
        self,
        files: TableFiles,
        columns: Sequence[str],
        group: str,
        learn_on: int | None,
        weights: str | None = None,
    ) -> None:
        self.group = group
        self._weights = weights
        self._files = files
        self._columns = list(columns)
        self._learn_on = learn_on
        self.forms: dict[str, Form] = {}  # how numbers and dates are written
        self._readers: Mapping[str, ColumnReader] = {}  # of the inputs
        self._raw_targets: list[Any] = []
        self.missing_words: dict[str, int] = {}  # those that the target has
        self.blocks = files.list_blocks(group, self._columns[-1])
        self.lengths: Sequence[int] = [block.rows for block in self.blocks]
        self.paths: Sequence[str] = [block.path for block in self.blocks]
        self._firsts = np.cumsum([0, *self.lengths])
        self.malformed: Sequence[str] = files.describe_malformed(group)
        self._sampled_blocks, self.sampled = self._choose_sample()
        self.learned = len(self.sampled)

    def recall(self, what: str, options: Any, learn: Callable[[], Any]) -> Any:
        """Returns what `learn` learns from the sample, or what an earlier run has learned from it: see `LearnedCache`.

        Args:
            what: a word for it.
            options: all that it depends on besides the rows.
            learn: returns values that JSON can hold.
        """
        files = self._files
        form = [files.form, str(files.used), files.partitions, self._columns, files.csv.missing, self._learn_on]
        return files.cache.recall(what, files.by_split[self.group], [form, options], learn=learn)

    def find_reader(self, name: str) -> ColumnReader:
        """Returns what reads the cells of a column. What an input is taken for is known after `describe`."""
        if name in self._readers:
            return self._readers[name]
        return ColumnReader(missing=self._files.csv.missing, written=self.forms.get(name))

    @cached_property
    def raw_columns(self) -> Mapping[str, Any]:
        """The sample as it is in the files; it is read when it is first used."""
        import pyarrow

        parts: list[dict[str, Any]] = []
        for block, rows in self._sampled_blocks:  # as strings in a CSV file, whether numbers are known yet or not
            table = self._files.read(self.blocks[block], self._columns, None if rows == self.lengths[block] else rows)
            self._raw_targets.append(table[self._columns[-1]])
            parts.append({name: self.find_reader(name).clean(table[name]) for name in self._columns})
        return {name: pyarrow.chunked_array([c for part in parts for c in part[name].chunks]) for name in parts[0]}

    @cached_property
    def sample_columns(self) -> SampleColumns:
        """The sample, with numbers and dates in one form."""
        columns = {name: self.find_reader(name).rewrite(column) for name, column in self.raw_columns.items()}
        words, (_, classes) = self.count_missing_words(), self._targets
        return SampleColumns(columns, self._name_sample_row, missing_words=words, classes=classes)

    def _name_sample_row(self, row: int) -> str:
        return self.name(int(self.sampled[row]))

    @cached_property
    def _sample(self) -> tuple[Arrays, dict[int, str]]:
        return self._convert(self.sample_columns.columns)

    def describe_sample(self) -> Iterator[str]:
        """Yields a line that says how many rows are learned from, unless these are all."""
        if self.learned < (count := sum(self.lengths)):
            yield (
                f"dataset.learn_on={self.learned}: types, means and words are learned from {self.learned:,} of the "
                f"{count:,} rows"
            )

    @property
    def has_target(self) -> Array:
        """Which rows have a target, [n] bool."""
        return self._targets[0]

    @cached_property
    def _targets(self) -> tuple[Array, list[str] | None]:
        """Which rows have a target, [n] bool, and the classes of all rows; None if they are too many to be classes."""
        files, target = self._files, self._columns[-1]
        if self.learned == self._firsts[-1]:
            return ~is_missing(self.raw_columns[target]), []  # the sample has all classes

        def learn() -> Any:
            reader = self.find_reader(target)
            return find_targets(reader.clean(files.read(block, [target])[target]) for block in self.blocks)

        form = [files.form, str(files.used.field(target)), files.partitions, files.csv.missing]
        absent, classes = files.cache.recall("rows", files.by_split[self.group], form, learn=learn)
        found = np.ones(self._firsts[-1], bool)
        found[absent] = False
        return found, classes

    def describe_unlabelled(self, is_in_split: Array) -> str:
        """Returns a text on the rows of a split, [n] bool, that have no target; "" if there are none."""
        absent = np.flatnonzero(is_in_split & ~self.has_target)
        if not len(absent):
            return ""
        named = join_first([self.name(int(row)) for row in absent[:MAX_NAMED]], count=len(absent), between="; ")
        count = f"{len(absent):,} of {np.count_nonzero(is_in_split):,} rows have no target {self._columns[-1]}"
        hint = "" if self._outputs.kind == "regression" else describe_missing_words(self.missing_words)
        return f"{count} ({named}){hint}"

    def count_missing_words(self) -> dict[str, int]:
        """Returns how often the target has each word of `dataset.missing`."""
        import pyarrow
        from pyarrow import compute, types

        counts: Counter[str] = Counter()
        for column in self._raw_targets if self.raw_columns else ():
            if types.is_string(column.type):
                words = column.filter(compute.is_in(column, value_set=pyarrow.array(self._files.csv.missing)))
                counts.update(word for word in words.to_pylist() if word)
        return dict(counts)

    def count_other_units(self) -> dict[str, dict[str, int]]:
        """Returns how many numbers of all rows have another unit than their column, by column and unit."""
        readers = {name: self.find_reader(name) for name in self._columns if self.forms.get(name, {}).get("unit")}
        if not readers:
            return {}

        def learn() -> dict[str, Counter[str]]:
            if self.learned == self._firsts[-1]:
                return {name: reader.count_other_units(self.raw_columns[name]) for name, reader in readers.items()}
            counts = {name: Counter[str]() for name in readers}
            for block in self.blocks:
                table = self._files.read(block, list(readers))
                for name, reader in readers.items():
                    counts[name] += reader.count_other_units(reader.clean(table[name]))
            return counts

        found = self.recall("types", ["units", {name: self.forms[name] for name in readers}], learn)
        return {name: counts for name, counts in found.items() if counts}

    def describe(self, target: str, readers: Mapping[str, ColumnReader], outputs: Outputs) -> TableRows:
        """Says how columns are converted; rows can be read then. `readers` are those of the inputs."""
        self._target = target
        self._readers = readers
        self._outputs = outputs
        targets = tf.TensorSpec(outputs.target_shape, outputs.target_dtype)
        kinds = {name: reader.kind for name, reader in readers.items()}
        specs = {name: tf.TensorSpec([], tf.float64 if kind == NUMBER else tf.string) for name, kind in kinds.items()}
        self.spec: tuple[Any, ...] = specs, targets
        used = [*(name for name in kinds if kinds[name] == NUMBER), *([target] if outputs.kind == "regression" else [])]
        if self._weights is not None:
            self.spec = specs, targets, tf.TensorSpec([], tf.float32)
            used.append(self._weights)

        def learn() -> Any:
            plain = [name for name in used if name not in self.forms]
            numbers = [name for name in plain if are_plain_numbers(self.sample_columns.columns[name])]
            faults = self._sample[1]
            named = [row for row in sorted(faults) if self.has_target[self.sampled[row]]][:NAMED]
            return numbers, [f"{self._name_sample_row(row)}: {faults[row]}" for row in named]

        self._numbers, faults = self.recall("types", [kinds, outputs, self.forms], learn)
        self.faults: Sequence[str] = [*self.malformed, *faults][:NAMED]
        return self

    def read(self, block: int, rows: int | None = None) -> tuple[Arrays, Mapping[int, str]]:
        """Returns rows of a block. A sample of all rows is kept in memory."""
        first, end = self._firsts[block], self._firsts[block + 1]
        if rows is not None:
            end = min(first + rows, end)
        if self.learned < self._firsts[-1]:
            return self._convert(self._read_columns(block, rows, self._numbers))
        arrays, faults = self._sample
        part = {row - first: reason for row, reason in faults.items() if first <= row < end}
        return arrays.map(lambda array: array[first:end]), part

    def sample(self) -> tuple[Any, Array]:
        return self._sample[0].inputs, self.sampled

    def name(self, row: int) -> str:
        """Names a row by its file; the first row of a file is row 1, and a header does not count."""
        (path,), (number,) = self.locate(np.array([row]))
        return f"{path}, row {number}"

    def locate(self, rows: Array) -> tuple[list[str], Array]:
        """Returns the file of each row, and its number there, as `name` counts: [n]."""
        is_first = np.array([not n or path != self.paths[n - 1] for n, path in enumerate(self.paths)])
        firsts = np.maximum.accumulate(np.where(is_first, self._firsts[:-1], 0))  # the first row of each block's file
        chosen = np.searchsorted(self._firsts, rows, side="right") - 1
        paths, files = np.unique(np.array(self.paths, object), return_inverse=True)
        of_row, numbers = files[chosen], rows - firsts[chosen]
        for file in np.unique(of_row):
            numbers[of_row == file] = self._files.number_rows(paths[file], numbers[of_row == file])
        return paths[of_row].tolist(), numbers

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[Array], dict[str, Any]]:
        """Returns a function that reads columns of the files, used as inputs or not, for ascending rows [n] int64.

        Raises ConfigError, whose message begins with `key`, if a file lacks one.
        """
        import pyarrow

        find_columns(names, self._files.names, key)
        files = replace(self._files)
        files.use(names)

        def read(rows: Array) -> dict[str, Any]:
            chosen, parts = np.searchsorted(self._firsts, rows, side="right") - 1, []
            for block in np.unique(chosen):
                places = rows[chosen == block] - self._firsts[block]
                read_rows = files.read(self.blocks[block], names, int(places[-1]) + 1)
                parts.append(read_rows.take(pyarrow.array(places)))
            table = pyarrow.concat_tables(parts)
            return {name: self.find_reader(name).clean(table[name]) for name in names}

        return read

    def read_keys(self, rule: Split, outputs: Outputs) -> DivisionKeys:
        """Reads what the rows are divided by; `outputs` says what the target is."""
        target, everything = self._columns[-1], np.arange(int(self._firsts[-1]))

        def read(name: str) -> Any:
            column = self.open_columns([name], "dataset.split.column")(everything)[name]
            return self.find_reader(name).rewrite(column) if rule.by == "time" else column

        keys = read_keys(rule, read, self.name)
        is_whole = self.learned == len(everything)
        if not (is_by_target(rule) or (rule.by == "auto" and is_whole and outputs.is_one_class)):
            return keys
        column = self.raw_columns[target] if is_whole else read(target)
        values = np.ravel(convert_target(self.find_reader(target).rewrite(column), outputs)[0])
        values = values[self.has_target]
        strata = np.zeros(len(everything), np.int64)
        strata[self.has_target] = find_strata(values, outputs)
        return replace(keys, strata=strata)

    def _read_columns(self, block: int, rows: int | None, numbers: Sequence[str] = ()) -> dict[str, Any]:
        table = self._files.read(self.blocks[block], self._columns, rows, numbers=numbers)
        columns: dict[str, Any] = {}
        for name in self._columns:
            reader = self.find_reader(name)
            columns[name] = reader.rewrite(reader.clean(table[name]))
        return columns

    def _choose_sample(self) -> tuple[list[tuple[int, int]], Array]:
        """Returns the blocks of the sample with the number of their first rows in it, and the indices of these rows.

        The blocks are spread evenly over the files.
        """
        chosen = np.flatnonzero(self.lengths)
        if not len(chosen):
            files = "the files" if self.group == ALL else f"the files of the split {self.group!r}"
            raise ConfigError(
                f"dataset.data_dir: {files} have no rows{''.join(f'; {row}' for row in self.malformed[:1])}"
            )
        count = int(self._firsts[-1])
        left = count if self._learn_on is None else min(self._learn_on, count)
        if left < count:
            most = -(-left * len(chosen) // count) + 1 if self._files.is_text else SAMPLED_BLOCKS
            chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, min(most, SAMPLED_BLOCKS)).astype(int))]
        blocks = list(share_rows(self.lengths, chosen, left).items())
        return blocks, np.concatenate([self._firsts[block] + np.arange(count) for block, count in blocks])

    def _convert(self, columns: Mapping[str, Any]) -> tuple[Arrays, dict[int, str]]:
        """Converts columns to arrays, and says which rows cannot be used."""
        reasons: dict[int, str] = {}

        def take(name: str, values: Array, is_bad: Array, expected: str) -> Array:
            role = {self._target: "its target ", self._weights: "its weight "}.get(name, "")
            for row in np.flatnonzero(is_bad):
                found = columns[name][int(row)].as_py()
                value = "missing" if found is None else found
                reasons.setdefault(int(row), f"{role}{name} is {value}, expected {expected}")
            return values

        targets = take(self._target, *convert_target(columns[self._target], self._outputs))

        inputs: dict[str, Array] = {}
        for name, reader in self._readers.items():
            dtype = np.dtype(self.spec[0][name].dtype.as_numpy_dtype)
            inputs[name] = take(name, *reader.to_array(columns[name], dtype))
        weights = None
        if self._weights is not None:
            weights = take(self._weights, *to_weights(columns[self._weights]))
        return Arrays(inputs, targets, weights), reasons
