"""Examples as columns: what the checks look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scaleflow.evaluation.slices import decode_text
from scaleflow.interfaces import Inputs, InputStructure, OutputStructure, name_leaves

#: What a column is.
NUMBER, CATEGORY, TEXT, DATE, PICTURE, ARRAY = "number", "category", "text", "date", "picture", "array"

#: The same in the words of `dataset=table`.
OF_TABLES = {"numbers": NUMBER, "categories": CATEGORY, "texts": TEXT, "dates": DATE}

#: Text with more different values, or more words, is no category.
MOST_VALUES, MOST_WORDS = 100, 3

#: The most values of an input without columns that are columns themselves.
MOST_EXPANDED = 64

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SplitSample:
    """Some examples of a split, or all.

    Attributes:
        columns: the inputs by name, [n, ...]: numbers, or `str` objects ("" is missing).
        kinds: what each column is.
        targets: by the name of the output, [n]: the names of classes as `str` objects, or numbers. Outputs with several
            values for an example are left out.
        examples: the number of examples of the split.
        is_table: whether the columns are those of a table.
    """

    columns: Mapping[str, Array]
    kinds: Mapping[str, str]
    targets: Mapping[str, Array]
    examples: int
    is_table: bool = field(default=False)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def list_kind(self, *kinds: str) -> dict[str, Array]:
        """Returns the columns of some kinds."""
        return {name: values for name, values in self.columns.items() if self.kinds[name] in kinds}


def make_sample(
    inputs: InputStructure,
    outputs: OutputStructure,
    raw: tuple[Any, Any],
    examples: int,
    known: Mapping[str, str] | None = None,
) -> SplitSample:
    """Makes the columns of raw examples.

    Args:
        inputs, outputs: of the source.
        raw: (inputs, targets), [n, ...] each.
        examples: the number of examples of the split.
        known: the kinds of a table's columns, as its source calls them.
    """
    described, columns, kinds = name_leaves(inputs), {}, {}
    for name, values in name_leaves(raw[0]).items():
        expanded = expand_input(name, described[name], np.asarray(values))
        for column, each in expanded.items():
            columns[column] = to_texts_array(each) if each.dtype.kind in "OSU" else each
            kinds[column] = OF_TABLES.get((known or {}).get(column, "")) or infer_kind(described[name], columns[column])
    targets = {}
    for name, values in name_leaves(raw[1]).items():
        output, flat = name_leaves(outputs)[name], np.asarray(values)
        if flat.size != len(flat):
            continue
        flat = flat.reshape(len(flat))
        if output.kind == "regression":
            targets[name] = flat.astype(np.float64)
        else:
            count = 2 if output.kind != "classification" else output.shape[-1]
            names = np.array([*(output.names or map(str, range(count))), ""], object)
            targets[name] = names[np.where((flat >= 0) & (flat < count), flat, count).astype(np.int64)]
    return SplitSample(columns, kinds, targets, examples, isinstance(inputs, Mapping) and len(columns) > 1)


def expand_input(name: str, described: Inputs, values: Array) -> dict[str, Array]:
    """Returns an input by its name, or each of a few numbers by its own."""
    shape = described.shape
    is_vector = (
        len(shape) == 1 and shape[0] <= MOST_EXPANDED and described.vocabulary is None and values.dtype.kind in "iufb"
    )
    if is_vector:
        return {f"{name or 'input'}[{n}]": values[:, n] for n in range(shape[0])}
    return {name or "input": values}


def to_texts_array(values: Array) -> Array:
    """Returns texts [n] as `str` objects; "" for a missing one."""
    return np.array([decode_text(value) for value in values.reshape(len(values), -1)[:, 0]], object)


def infer_kind(described: Inputs, values: Array) -> str:
    """Returns what a column is, by its description and its values."""
    shape = described.shape
    if len(shape) == 3 and shape[-1] in (1, 3, 4) and values.ndim == 4:
        return PICTURE
    if values.ndim > 1:
        return ARRAY
    if values.dtype != object:
        return CATEGORY if described.vocabulary is not None else NUMBER
    words = np.mean([text.count(" ") + 1 for text in values[:1000]]) if len(values) else 0
    return CATEGORY if len(set(values[:10_000].tolist())) <= MOST_VALUES and words <= MOST_WORDS else TEXT
