"""The kinds of columns, and their descriptions in tables, schemas, checks, drift and charts. No TensorFlow.

`serving/cells.py` converts the cells of files, DataFrames and JSON, because it is a part of a saved model.
`tables/columns.py` has the preprocessing of each kind. A new kind is an object in `KINDS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleflow.interfaces import Inputs

#: Texts with more different values than this are no categories.
MAX_CATEGORY_VALUES = 100

#: Texts with more words than this on average are no categories.
MAX_CATEGORY_WORDS = 3

#: The quantiles between the bars of a histogram. Each bar has about a tenth of the numbers.
QUANTILES = np.arange(1, 10) / 10

#: Maximum number of categories in a schema, and of characters of a category.
MAX_CATEGORIES = 1000
MAX_LETTERS = 100

#: An input that is a vector of at most this many numbers becomes a column for each.
MAX_EXPANDED = 64

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
    counts = Counter(str(value)[:MAX_LETTERS] for value in known.tolist())
    kept = dict(counts.most_common(MAX_CATEGORIES))
    return {"distinct": len(counts), "values": kept, "others": sum(counts.values()) - sum(kept.values())}


def are_numbers(described: Inputs, values: Array) -> bool:
    return values.dtype != object and described.vocabulary is None


def has_few_words(described: Inputs, values: Array) -> bool:
    if values.dtype != object:
        return True
    words = np.mean([text.count(" ") + 1 for text in values[:1000]]) if len(values) else 0
    return len(set(values[:10_000].tolist())) <= MAX_CATEGORY_VALUES and bool(words <= MAX_CATEGORY_WORDS)


def are_pictures(described: Inputs, values: Array) -> bool:
    return len(described.shape) == 3 and described.shape[-1] in (1, 3, 4) and values.ndim == 4


@dataclass(frozen=True)
class ColumnKind:
    """The properties of all columns of one kind."""

    name: str  # in schemas and findings
    #: Whether an input with values [n, ...] is of this kind, if its source names no kind and no earlier kind takes it
    takes: Callable[[Inputs, Array], bool]
    summarise: Callable[[Array], Column]  # describes values that are not missing, for a schema
    #: Returns a number for each value, to compare them, [n]. None: values are counted, or not compared.
    reduce: Callable[[Array], Array] | None = None
    measure: str = ""  # the name of these numbers in a chart
    plural: str = ""  # the name of such columns in notes and in the record of `dataset=table`. "": tables have none.

    def describe(self, values: Array) -> Column:
        """Describes a column for a schema: its kind, the share of missing values, and the distribution of others."""
        if values.dtype != object:
            return {"kind": self.name, "missing": 0.0, **self.summarise(values)}
        # `summarise` gets only known values, so its own share of missing ones is replaced.
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

#: All kinds by name. The first one that takes the values of an input is its kind, unless the source names another.
KINDS = {kind.name: kind for kind in (PICTURE, ARRAY, NUMBER, CATEGORY, DATE, TEXT)}

#: The kinds of columns in tables.
TABLE_KINDS = {kind.plural: kind for kind in (NUMBER, CATEGORY, TEXT, DATE)}


def list_input_columns(name: str, described: Inputs) -> dict[str, int | None]:
    """Returns the columns of an input, with their places in it: one per number of a short vector, otherwise one.

    The place of a whole input is None.
    """
    label = name or "input"
    count = described.shape[0] if len(described.shape) == 1 else 0
    is_short_vector = 0 < count <= MAX_EXPANDED and described.vocabulary is None and described.dtype != "string"
    if is_short_vector:
        return {f"{label}[{place}]": place for place in range(count)}
    return {label: None}


def find_column_kind(described: Inputs, values: Array) -> ColumnKind:
    """Returns the kind of a column: the one that its source names, or the first one that takes its values."""
    if described.kind in KINDS:
        return KINDS[described.kind]
    return next(kind for kind in KINDS.values() if kind.takes(described, values))
