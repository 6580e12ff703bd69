"""The kinds of columns: what a column of each kind looks like in tables, schemas, checks, drift and charts.

How cells of files, DataFrames and JSON become values travels with a saved model (`serving/cells.py`). What a kind
learns, and its layer, are in `tables/columns.py`. A new kind is an object in `KINDS`. No TensorFlow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleflow.interfaces import Inputs

#: Text with more different values, or more words, is no category.
MOST_VALUES, MOST_WORDS = 100, 3

#: The ends of ranges that each have about a tenth of the numbers, for histograms that are compared.
QUANTILES = np.arange(1, 10) / 10

#: The most categories that are kept, and the most characters of one.
MOST_CATEGORIES, MOST_LETTERS = 1000, 100

#: The most values of an input without columns that are columns themselves.
MOST_EXPANDED = 64

Array = np.ndarray[Any, Any]
Column = dict[str, Any]


def average_values(values: Array) -> Array:
    return np.asarray(values.reshape(len(values), -1).mean(axis=1, dtype=np.float64))


def count_letters(texts: Array) -> Array:
    return np.array([len(text) for text in texts], np.float64)


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


def summarise_arrays(values: Array) -> Column:
    return {"shape": [*map(int, values.shape[1:])], **summarise_numbers(average_values(values)), "missing": 0.0}


def summarise_texts(known: Array) -> Column:
    return {**summarise_numbers(count_letters(known)), "distinct": len(set(known.tolist()))}


def find_ends(known: Array) -> Column:
    return {"min": min(known, default=""), "max": max(known, default="")}


def count_categories(known: Array) -> Column:
    counts = Counter(str(value)[:MOST_LETTERS] for value in known.tolist())
    kept = dict(counts.most_common(MOST_CATEGORIES))
    return {"distinct": len(counts), "values": kept, "others": sum(counts.values()) - sum(kept.values())}


def are_numbers(described: Inputs, values: Array) -> bool:
    return values.dtype != object and described.vocabulary is None


def has_few_words(described: Inputs, values: Array) -> bool:
    if values.dtype != object:
        return True
    words = np.mean([text.count(" ") + 1 for text in values[:1000]]) if len(values) else 0
    return len(set(values[:10_000].tolist())) <= MOST_VALUES and bool(words <= MOST_WORDS)


def are_pictures(described: Inputs, values: Array) -> bool:
    return len(described.shape) == 3 and described.shape[-1] in (1, 3, 4) and values.ndim == 4


@dataclass(frozen=True)
class ColumnKind:
    """What the columns of one kind have in common."""

    name: str  # in schemas and findings
    #: Whether values [n, ...] of an input whose source says no kind are of this one, and of none before it
    takes: Callable[[Inputs, Array], bool]
    summarise: Callable[[Array], Column]  # describes values that are not missing, for a schema
    #: Returns the numbers by which values are compared, [n]; None: they are counted, or not compared
    reduce: Callable[[Array], Array] | None = None
    measure: str = ""  # what these are, in a chart
    plural: str = ""  # what notes and the record of `dataset=table` call such columns; empty if a table has none

    def describe(self, values: Array) -> Column:
        """Describes a column for a schema: its kind, the share that is missing, how its values are distributed."""
        if values.dtype != object:
            return {"kind": self.name, "missing": 0.0, **self.summarise(values)}
        missing = float(np.mean(values == "")) if len(values) else 0.0
        return {"kind": self.name, **self.summarise(values[values != ""]), "missing": missing}


PICTURE = ColumnKind("picture", are_pictures, summarise_arrays, reduce=average_values, measure="mean brightness")
ARRAY = ColumnKind("array", lambda _, values: values.ndim > 1, summarise_arrays, reduce=average_values, measure="mean")
NUMBER = ColumnKind(
    "number", are_numbers, summarise_numbers, reduce=lambda values: values.astype(np.float64), plural="numbers"
)
CATEGORY = ColumnKind("category", has_few_words, count_categories, plural="categories")
DATE = ColumnKind("date", lambda *_: False, find_ends, plural="dates")
TEXT = ColumnKind("text", lambda *_: True, summarise_texts, reduce=count_letters, measure="characters", plural="texts")

#: All kinds by name, in the order in which they are asked for values of which no source says a kind.
KINDS = {each.name: each for each in (PICTURE, ARRAY, NUMBER, CATEGORY, DATE, TEXT)}

#: Those of tables.
TABLE_KINDS = {each.plural: each for each in (NUMBER, CATEGORY, TEXT, DATE)}


def list_input_columns(name: str, described: Inputs) -> dict[str, int | None]:
    """Returns the name of an input, or of each of a few numbers in it, with their places."""
    count = described.shape[0] if len(described.shape) == 1 else 0
    is_vector = 0 < count <= MOST_EXPANDED and described.vocabulary is None and described.dtype != "string"
    return {f"{name or 'input'}[{n}]": n for n in range(count)} if is_vector else {name or "input": None}


def find_column_kind(described: Inputs, values: Array) -> ColumnKind:
    """Returns the kind of a column: what its source says, or what its values are."""
    return KINDS.get(described.kind or "") or next(kind for kind in KINDS.values() if kind.takes(described, values))
