"""Examples as columns, which the checks look at, and their schema: what each column looks like in the training split.

The schema is kept with what the run learned.
"""

from collections import Counter
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
        targets: by the name of the output, [n]: the names of classes as `str` objects, or numbers. Outputs with several
            values for an example are left out.
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
        raw: (inputs, targets), [n, ...] each.
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


#: The ends of ranges that each have about a tenth of the numbers, for histograms that are compared.
QUANTILES = np.arange(1, 10) / 10

#: The most categories that are kept, and the most characters of one.
MOST_CATEGORIES, MOST_LETTERS = 1000, 100

Column = dict[str, Any]


def make_schema(sample: SplitSample) -> dict[str, Any]:
    """Returns the schema of a split, as values that JSON can hold: its `columns` and `targets`, by name."""
    return {
        "rows": len(sample),
        "columns": {name: describe_column(values, sample.kinds[name]) for name, values in sample.columns.items()},
        "targets": {
            f"target {name}".strip(): describe_column(values, CATEGORY if values.dtype == object else NUMBER)
            for name, values in sample.targets.items()
        },
    }


def describe_column(values: Array, kind: str) -> Column:
    """Describes a column: its kind, the share that is missing, and how its values are distributed."""
    if kind in (PICTURE, ARRAY):
        shape = [int(size) for size in values.shape[1:]]
        return {"kind": kind, "shape": shape, "missing": 0.0, **summarise_numbers(reduce_values(values, kind))}
    if kind == NUMBER:
        return {"kind": kind, **summarise_numbers(values)}
    missing = float(np.mean(values == "")) if len(values) and values.dtype == object else 0.0
    known = values[values != ""] if values.dtype == object else values
    described: Column = {"kind": kind, "missing": missing}
    if kind == DATE:
        return described | {"min": min(known, default=""), "max": max(known, default="")}
    if kind == TEXT:
        numbers = summarise_numbers(reduce_values(known, kind))
        return {**numbers, **described, "distinct": len(set(known.tolist()))}
    counts = Counter(str(value)[:MOST_LETTERS] for value in known.tolist())
    kept = dict(counts.most_common(MOST_CATEGORIES))
    return described | {"distinct": len(counts), "values": kept, "others": sum(counts.values()) - sum(kept.values())}


def reduce_values(values: Array, kind: str) -> Array:
    """Returns the number by which values are compared, [n]: brightness, length, or mean."""
    if kind == NUMBER:
        return values.astype(np.float64)
    if kind == TEXT:
        return np.array([len(text) for text in values], np.float64)
    return np.asarray(values.reshape(len(values), -1).mean(axis=1, dtype=np.float64))


def summarise_numbers(values: Array) -> Column:
    """Returns the range, the mean, the deviation and the histogram of numbers."""
    numbers = values.astype(np.float64)
    known = numbers[np.isfinite(numbers)]
    described: Column = {"missing": 1 - len(known) / max(1, len(numbers)), "distinct": len(np.unique(known))}
    if len(known):
        edges = np.unique(np.quantile(known, QUANTILES))
        counts = np.bincount(np.searchsorted(edges, known, side="right"), minlength=len(edges) + 1)
        described |= {"min": float(known.min()), "max": float(known.max()), "mean": float(known.mean())}
        described |= {"deviation": float(known.std()), "edges": edges.tolist(), "counts": counts.tolist()}
    return described
