"""Samples of splits as columns, and their schema: what each column and target looks like. No TensorFlow.

The schema of the training split is kept with what the run learned.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scaleflow.dataset.column_kinds import (
    CATEGORY,
    NUMBER,
    ColumnKind,
    find_column_kind,
    list_input_columns,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, InputStructure, OutputStructure, Rows, Source, name_leaves
from scaleflow.serving.cells import decode_text

#: The most examples, and the most values of all of them, that a run looks at.
MOST_EXAMPLES, MOST_VALUES = 2000, 1 << 20

#: The fewest examples, however large they are.
FEWEST_EXAMPLES = 32

#: The most columns that are no inputs, of which rows may belong together.
MOST_OTHERS = 50

#: The name of the groups that a dataset gives, among the columns that are no inputs.
GROUPS = "group"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SplitSample:
    """Some examples of a split, or all.

    Attributes:
        columns: the inputs by name, [n, ...]: numbers, or `str` objects ("" is missing).
        targets: by the name of the output, [n]: the names of classes as `str` objects, or numbers; "" or NaN for one
            that does not count (`Outputs.ignore`). Outputs with several
            values for an example are left out.
        others: columns that are no inputs, [n]: `str` objects, or numbers.
    """

    columns: Mapping[str, Array]
    kinds: Mapping[str, ColumnKind]
    targets: Mapping[str, Array]
    examples: int
    is_table: bool = field(default=False)
    others: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def find(self, name: str) -> Array:
        """Returns a column, an input or not; without values if there is none of this name."""
        return {**self.others, **self.columns}.get(name, np.empty(0))

    def select(self, chosen: Array) -> "SplitSample":
        """Returns some of its examples, as a sample of its own."""
        parts = (self.columns, self.targets, self.others)
        columns, targets, others = ({name: values[chosen] for name, values in each.items()} for each in parts)
        return replace(self, columns=columns, targets=targets, others=others)

    def list_kind(self, *kinds: ColumnKind) -> dict[str, Array]:
        """Returns the columns of some kinds."""
        return {name: values for name, values in self.columns.items() if self.kinds[name] in kinds}


def sample_split(
    source: Source,
    examples: Rows,
    few: Any,
    most: tuple[int, int] = (MOST_EXAMPLES, MOST_VALUES),
    reads_all: bool = False,
) -> SplitSample:
    """Reads examples of a split, as columns.

    Args:
        examples: the split, before its preprocessing.
        few: some of its raw inputs.
        most: the most examples, and the most values of all of them.
        reads_all: whether a stream that is not in memory is read to its end; else its first examples are read.
    """
    leaves = name_leaves(few).values()
    values = sum(array.size for array in leaves) / max(1, max(map(len, leaves), default=1))
    count = min(most[0], max(FEWEST_EXAMPLES, int(most[1] / max(1.0, values))))
    places, (inputs, targets, *_) = examples.read_spread(count, reads_all)
    sample = make_sample(source.inputs, source.outputs, (inputs, targets), examples=len(examples))
    return replace(sample, others=read_others(source, examples, places))


def read_others(source: Source, examples: Rows, places: Any) -> dict[str, Any]:
    """Returns what examples have besides inputs and targets: columns of a table's files, groups of an own dataset."""
    others = {} if examples.groups is None else {GROUPS: examples.groups[places]}
    reading = getattr(source, "reading", {})
    if not (unused := reading.get("unused", [])[:MOST_OTHERS] if isinstance(reading, Mapping) else []):
        return others
    from pyarrow import ArrowException

    from scaleflow.serving.cells import to_texts

    with contextlib.suppress(ConfigError, ArrowException):  # a file lacks one, or values that are no texts
        read = examples.open_columns(unused, "dataset.check")(places)
        others |= {name: to_texts(column)[0] for name, column in read.items()}
    return others


def make_sample(inputs: InputStructure, outputs: OutputStructure, raw: tuple[Any, Any], examples: int) -> SplitSample:
    """Makes the columns of raw examples: (inputs, targets), [n, ...] each."""
    described, columns, kinds = name_leaves(inputs), {}, {}
    for name, values in name_leaves(raw[0]).items():
        expanded = expand_input(name, described[name], np.asarray(values))
        for column, each in expanded.items():
            columns[column] = to_texts_array(each) if each.dtype.kind in "OSU" else each
            kinds[column] = find_column_kind(described[name], columns[column])
    targets = {}
    for name, values in name_leaves(raw[1]).items():
        output, flat = name_leaves(outputs)[name], np.asarray(values)
        if flat.size != len(flat):
            continue
        flat = flat.reshape(len(flat))
        is_ignored = np.zeros(len(flat), bool) if output.ignore is None else flat == output.ignore
        if output.kind == "regression":
            targets[name] = np.where(is_ignored, np.nan, flat.astype(np.float64))
        else:
            count = 2 if output.kind != "classification" else output.shape[-1]
            names = np.array([*(output.names or map(str, range(count))), ""], object)
            is_class = (flat >= 0) & (flat < count) & ~is_ignored
            targets[name] = names[np.where(is_class, flat, count).astype(np.int64)]
    is_table = isinstance(inputs, Mapping) and len(columns) > 1
    return SplitSample(columns, kinds, targets, examples=examples, is_table=is_table)


def expand_input(name: str, described: Inputs, values: Array) -> dict[str, Array]:
    """Returns an input by its name, or each of a few numbers by its own."""
    places = list_input_columns(name, described)
    return {column: values if place is None else values[:, place] for column, place in places.items()}


def to_texts_array(values: Array) -> Array:
    """Returns texts [n] as `str` objects; "" for a missing one."""
    return np.array([decode_text(value) for value in values.reshape(len(values), -1)[:, 0]], object)


def make_schema(sample: SplitSample) -> dict[str, Any]:
    """Returns the schema of a split, as values that JSON can hold: its `columns` and `targets`, by name."""
    return {
        "rows": len(sample),
        "columns": {name: sample.kinds[name].describe(values) for name, values in sample.columns.items()},
        "targets": {
            f"target {name}".strip(): (CATEGORY if values.dtype == object else NUMBER).describe(values)
            for name, values in sample.targets.items()
        },
    }
