"""Samples of splits as columns, and the schema of their columns and targets. No TensorFlow.

The schema of the training split is a part of the learned state.
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
from scaleflow.interfaces import Inputs, InputStructure, Outputs, OutputStructure, Rows, Source, name_leaves
from scaleflow.serving.cells import decode_text

#: Maximum number of examples in a sample.
MAX_EXAMPLES = 2000

#: Maximum number of values in a sample, unless it has the minimum number of examples.
MAX_VALUES = 1 << 20

#: Minimum number of examples in a sample.
MIN_EXAMPLES = 32

#: Maximum number of columns in a sample that are no inputs.
MAX_OTHERS = 50

#: The name of an own dataset's groups among the columns that are no inputs.
GROUPS = "group"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SplitSample:
    """Some examples of a split, or all.

    Attributes:
        columns: the inputs by name, [n, ...]: numbers, or `str` objects ("" is missing).
        kinds: of these columns.
        targets: by output, [n]: the names of classes as `str` objects, or numbers. Targets that do not count
            (`Outputs.ignore`) are "" or NaN. Outputs with several values per example are left out.
        examples: the number of examples in the split.
        is_table: whether the inputs are several columns.
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
        """Returns a column, which may be no input. It is empty if there is no column of this name."""
        return {**self.others, **self.columns}.get(name, np.empty(0))

    def select(self, chosen: Array) -> "SplitSample":
        """Returns a sample with some of the examples."""

        def take(columns: Mapping[str, Array]) -> dict[str, Array]:
            return {name: values[chosen] for name, values in columns.items()}

        return replace(self, columns=take(self.columns), targets=take(self.targets), others=take(self.others))

    def list_kind(self, *kinds: ColumnKind) -> dict[str, Array]:
        """Returns the columns of some kinds."""
        return {name: values for name, values in self.columns.items() if self.kinds[name] in kinds}


def sample_split(
    source: Source,
    examples: Rows,
    raw_sample: Any,
    most: tuple[int, int] = (MAX_EXAMPLES, MAX_VALUES),
    reads_all: bool = False,
) -> SplitSample:
    """Reads a sample of a split.

    Args:
        source: describes the inputs and outputs.
        examples: the split, before its preprocessing.
        raw_sample: some of its raw inputs. Their size decides on the number of examples.
        most: the maximum number of examples, and of values in all of them.
        reads_all: whether a stream that is not in memory is read to its end. Otherwise, its first examples are read.
    """
    max_examples, max_values = most
    leaves = name_leaves(raw_sample).values()
    values_per_example = sum(array.size for array in leaves) / max(1, max(map(len, leaves), default=1))
    count = min(max_examples, max(MIN_EXAMPLES, int(max_values / max(1.0, values_per_example))))
    places, (inputs, targets, *_) = examples.read_spread(count, reads_all)
    sample = make_sample(source.inputs, source.outputs, (inputs, targets), examples=len(examples))
    return replace(sample, others=read_others(source, examples, places))


def read_others(source: Source, examples: Rows, places: Any) -> dict[str, Any]:
    """Returns values besides inputs and targets: unused columns of a table, and groups of an own dataset."""
    others: dict[str, Any] = {} if examples.groups is None else {GROUPS: examples.groups[places]}
    reading = getattr(source, "reading", {})
    unused = reading.get("unused", [])[:MAX_OTHERS] if isinstance(reading, Mapping) else []
    if not unused:
        return others
    from pyarrow import ArrowException

    from scaleflow.serving.cells import to_texts

    with contextlib.suppress(ConfigError, ArrowException):  # a file lacks one, or values that are no texts
        read = examples.open_columns(unused, "dataset.check")(places)
        others |= {name: to_texts(column)[0] for name, column in read.items()}
    return others


def make_sample(inputs: InputStructure, outputs: OutputStructure, raw: tuple[Any, Any], examples: int) -> SplitSample:
    """Makes a sample of raw examples (inputs, targets), [n, ...]. `examples` is the number of them in the split."""
    raw_inputs, raw_targets = raw
    described_inputs = name_leaves(inputs)
    columns: dict[str, Array] = {}
    kinds: dict[str, ColumnKind] = {}
    for name, values in name_leaves(raw_inputs).items():
        for column, column_values in expand_input(name, described_inputs[name], np.asarray(values)).items():
            is_text = column_values.dtype.kind in "OSU"
            columns[column] = to_texts_array(column_values) if is_text else column_values
            kinds[column] = find_column_kind(described_inputs[name], columns[column])
    described_outputs = name_leaves(outputs)
    targets: dict[str, Array] = {}
    for name, values in name_leaves(raw_targets).items():
        array = np.asarray(values)
        if array.size == len(array):
            targets[name] = name_targets(array.reshape(len(array)), described_outputs[name])
    is_table = isinstance(inputs, Mapping) and len(columns) > 1
    return SplitSample(columns, kinds, targets, examples=examples, is_table=is_table)


def name_targets(targets: Array, output: Outputs) -> Array:
    """Returns targets [n] as the names of their classes, or as numbers. "" or NaN: the target does not count."""
    is_ignored = np.zeros(len(targets), bool) if output.ignore is None else targets == output.ignore
    if output.kind == "regression":
        return np.where(is_ignored, np.nan, targets.astype(np.float64))
    count = output.shape[-1] if output.kind == "classification" else 2
    names = np.array([*(output.names or map(str, range(count))), ""], object)
    is_class = (targets >= 0) & (targets < count) & ~is_ignored
    named: Array = names[np.where(is_class, targets, count).astype(np.int64)]
    return named


def expand_input(name: str, described: Inputs, values: Array) -> dict[str, Array]:
    """Returns an input as one column, or a short vector of numbers as a column for each."""
    places = list_input_columns(name, described)
    return {column: values if place is None else values[:, place] for column, place in places.items()}


def to_texts_array(values: Array) -> Array:
    """Returns texts [n] as `str` objects. "" is missing."""
    return np.array([decode_text(value) for value in values.reshape(len(values), -1)[:, 0]], object)


def make_schema(sample: SplitSample) -> dict[str, Any]:
    """Returns the schema of a split, as values that JSON can hold: its `columns` and `targets`, by name."""
    columns = {name: sample.kinds[name].describe(values) for name, values in sample.columns.items()}
    targets: dict[str, Any] = {}
    for name, values in sample.targets.items():
        kind = CATEGORY if values.dtype == object else NUMBER
        targets[f"target {name}".strip()] = kind.describe(values)
    return {"rows": len(sample), "columns": columns, "targets": targets}
