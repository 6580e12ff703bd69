"""Explains predictions: how much each column of a row moves the prediction away from a typical row's prediction.

The contributions are Shapley values against one reference row (Sundararajan and Najmi 2020, "The many Shapley values
for model explanation"). They need no gradient, so columns may be of any kind. For a picture or a text, the contribution
of a part is the decrease of the prediction without it (occlusion, Zeiler and Fergus 2014). Needs only NumPy.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.serving.cells import decode_text
from scaleflow.serving.prediction_columns import compute_probabilities, is_one_of_several, take_prediction

if TYPE_CHECKING:
    from scaleflow.interfaces import Outputs

Array = np.ndarray[Any, Any]
Columns = Mapping[str, Array]

#: If the columns have at most ALL_ORDERS orders, all are tried. Otherwise SAMPLED random orders and their reverses are.
ALL_ORDERS = 24
SAMPLED = 8
SEED = 0x5EA50


#: Prefix of the columns with contributions, and the name of the column with the typical row's prediction. The names
#: cannot clash.
REASON = "reason_"
TYPICAL = "prediction_typical"

#: Prefix of the key for a layer's result, because an output may have the same name as a layer.
LAYER = "layer:"

#: The column with the contributions of the parts of a picture or a text.
PARTS = "reasons"

#: Pictures are divided into GRID x GRID parts. In texts, at most MAX_WORDS words are explained.
GRID = 8
MAX_WORDS = 40


def name_reason(column: str) -> str:
    """Returns the name of a column's contribution. For "" it is the name of the typical row's prediction."""
    return f"{REASON}{column}" if column else TYPICAL


def find_typical(schema: Mapping[str, Any], dtypes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a typical row of the training data.

    A column has its most frequent category, or the lower end of the bin with its median. A number without a known range
    is NaN. A text or a date is "".

    Args:
        schema: as in `LearnedState.schema`.
        dtypes: the dtypes of the inputs by name.
    """
    columns = schema.get("columns", {})
    typical = dict[str, Any]()
    for name, dtype in dtypes.items():
        described = columns.get(name, {})
        is_number = dtype != "string" and np.dtype(dtype).kind in "fiu"
        value: Any = ""
        if described.get("values"):
            counts = described["values"]
            value = max(counts, key=counts.__getitem__)
        elif is_number:
            value = find_median_range(described)
        typical[name] = np.array(value, dtype) if is_number else str(value)
    return typical


def find_median_range(described: Mapping[str, Any]) -> float:
    """Returns the start of the range with the median, from a column's entry in the schema; NaN without an entry."""
    starts = [described.get("min", math.nan), *(described.get("edges") or [])]
    sums = np.cumsum(described.get("counts") or [1])
    middle = int(np.searchsorted(sums, sums[-1] / 2, side="right"))
    start: float = starts[min(middle, len(starts) - 1)]
    return start


class Explainer:
    """Explains the predictions of a model.

    Args:
        inputs: the shape of one row and the dtype of each input, by name.
        outputs: the model's outputs by name.
        schema: as in `LearnedState.schema`.

    Attributes:
        columns: the names of the columns that `explain` returns.
        cost: the number of predictions per row, in words.
        typical: the typical row of a table; empty for a picture or a text.

    Raises ValueError if it cannot explain this kind of model. The message names the kinds that it can explain.
    """

    def __init__(
        self, inputs: Mapping[str, tuple[Sequence[int], Any]], outputs: Mapping[str, Outputs], schema: Mapping[str, Any]
    ) -> None:
        self._name, self._described = next(iter(outputs.items()))
        shape = self._described.shape
        is_class = is_one_of_several(self._described) and len(shape) < 2
        is_number = shape in ((), (1,))
        if len(outputs) > 1 or not (is_class or is_number):
            raise ValueError("a model with one class or one number for each row")
        self.typical: Mapping[str, Any] = {}
        self._occlude = choose_occlusion(inputs, schema)
        if self._occlude is not None:
            self.columns = [PARTS]
            if self._occlude is explain_texts:
                self.cost = f"up to {MAX_WORDS + 1} predictions for each text"
            else:
                self.cost = f"{GRID**2 + 1} predictions for each picture"
            return
        if "" in inputs or any(shape for shape, _ in inputs.values()) or not schema.get("columns"):
            pixels = f"{GRID} x {GRID} pixels or more"
            raise ValueError(f"a model of a picture of {pixels}, of a text, or of a table whose columns its run knows")
        self.typical = find_typical(schema, {name: dtype for name, (_, dtype) in inputs.items()})
        self.columns = [name_reason(name) for name in ("", *inputs)]
        self.cost = f"{count_predictions(len(inputs)):,} predictions for each row"

    def make_empty(self) -> dict[str, Array]:
        """Returns the columns for zero rows."""
        dtype = float if self._occlude is None else object
        return {name: np.array([], dtype) for name in self.columns}

    def explain(
        self, compute: Callable[[Columns], Mapping[str, Array]], rows: Columns, outputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Returns columns [n]: numbers for a table, JSON with the contributions of all parts for pictures and texts.

        Args:
            compute: inputs by name -> outputs by name.
            rows: the inputs by name.
            outputs: the outputs of these rows.
        """
        measure = choose_measure(self._described, outputs[self._name])

        def compute_number(inputs: Columns) -> Array:
            return measure(compute(inputs)[self._name])

        if self._occlude is not None:
            return {PARTS: self._occlude(compute_number, rows)}
        contributions = explain_rows(compute_number, rows, self.typical)
        return {name_reason(column): values for column, values in contributions.items()}


def choose_occlusion(inputs: Mapping[str, tuple[Sequence[int], Any]], schema: Mapping[str, Any]) -> Any:
    """Returns the function that explains a model's picture or text; None if the model has other or several inputs."""
    if len(inputs) > 1:
        return None
    name, (shape, dtype) = next(iter(inputs.items()))
    if is_picture_shape(shape):
        return explain_pictures
    kind = schema.get("columns", {}).get(name, {}).get("kind", "text")
    has_texts = dtype == "string" or np.dtype(dtype).kind not in "fiub"
    if len(shape) == 0 and has_texts and kind == "text":
        return explain_texts
    return None


def is_picture_shape(shape: Sequence[int]) -> bool:
    """Returns whether arrays of this shape are pictures, with sides of at least `GRID` pixels."""
    return len(shape) == 3 and shape[-1] in (1, 3, 4) and min(shape[:2]) >= GRID


def explain_pictures(compute: Callable[[Columns], Array], rows: Columns) -> Array:
    """Returns, for each picture, the contributions of a grid of parts as JSON [[contribution, ...], ...]."""
    ((name, pictures),) = rows.items()
    whole = np.asarray(compute(rows), np.float64)
    effects = [whole - compute({name: cover_part(pictures, place)}) for place in range(GRID**2)]
    grids = np.stack(effects, axis=1).reshape(-1, GRID, GRID)
    return to_cells(round_effects(grid) for grid in grids)


def explain_texts(compute: Callable[[Columns], Array], rows: Columns) -> Array:
    """Returns, for each text, its first `MAX_WORDS` words with contributions as JSON [[word, contribution], ...]."""
    ((name, encoded),) = rows.items()
    whole = np.asarray(compute(rows), np.float64)
    texts = list(map(decode_text, encoded))
    words_of = [text.split()[:MAX_WORDS] for text in texts]
    effects = []
    for place in range(max(map(len, words_of), default=0)):
        without = np.array([drop_word(text, place) for text in texts], object)
        effects.append(whole - compute({name: without}))
    explained = []
    for row, words in enumerate(words_of):
        explained.append([[word, round_effects(effects[place][row])] for place, word in enumerate(words)])
    return to_cells(explained)


def to_cells(values: Iterable[Any]) -> Array:
    """Returns values as JSON, `str` objects."""
    return np.array([json.dumps(value, ensure_ascii=False) for value in values], object)


def round_effects(values: Any) -> Any:
    """Rounds a number, or (nested) lists, to six significant digits, because targets may be as small as 1e-9."""
    if np.ndim(values):
        return list(map(round_effects, values))
    return float(f"{values:.6g}")


def cover_part(pictures: Array, place: int) -> Array:
    """Covers part `place` of the grid, counted from 0, with the mean colour. Pictures are [..., h, w, channels]."""
    height, width = pictures.shape[-3:-1]
    down, across = divmod(place, GRID)
    rows = slice(height * down // GRID, height * (down + 1) // GRID)
    columns = slice(width * across // GRID, width * (across + 1) // GRID)
    changed = pictures.copy()
    changed[..., rows, columns, :] = pictures.mean(axis=(-3, -2), keepdims=True)
    return changed


def drop_word(text: str, place: int) -> str:
    """Removes one word, counted from 0, from a text. Returns the whole text if it has fewer words."""
    spans = [match.span() for match in re.finditer(r"\S+\s*", text)]
    if place >= len(spans):
        return text
    start, end = spans[place]
    return text[:start] + text[end:] if end < len(text) else text[:start].rstrip()


def list_orders(count: int) -> Sequence[Sequence[int]]:
    """Returns the orders for replacing the columns of the typical row by those of the explained row."""
    if math.factorial(min(count, 10)) <= ALL_ORDERS:
        return list(itertools.permutations(range(count)))
    random = np.random.default_rng([SEED, count])
    orders = []
    for _ in range(SAMPLED):
        order = random.permutation(count).tolist()
        orders += [order, order[::-1]]
    return orders


def count_predictions(columns: int) -> int:
    """Returns the number of predictions for the contributions of one row."""
    return len(list_orders(columns)) * max(0, columns - 1) + 2


def explain_rows(compute: Callable[[Columns], Array], rows: Columns, typical: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the contribution of each column [n] float64 by name, and the typical row's prediction under "".

    For each row, all of these sum to its prediction.

    Args:
        compute: columns by name -> the prediction to explain, a number for each row [n].
        rows: the columns, [n] each.
        typical: the typical row.
    """
    names = sorted(rows)
    count = len(next(iter(rows.values())))
    base = {name: np.full(count, typical[name], values.dtype) for name, values in rows.items()}
    first = np.asarray(compute(base), np.float64)
    last = np.asarray(compute(rows), np.float64)
    orders = list_orders(len(names))
    sums = {name: np.zeros(count) for name in names}
    for order in orders:
        mixed = dict(base)
        before = first
        for n, place in enumerate(order, 1):
            mixed[names[place]] = rows[names[place]]
            after = last if n == len(names) else np.asarray(compute(mixed), np.float64)
            sums[names[place]] += after - before
            before = after
    contributions = {name: total / len(orders) for name, total in sums.items()}
    return {"": first, **contributions}


def choose_measure(described: Outputs, outputs: Array) -> Callable[[Array], Array]:
    """Returns a function from outputs [n, ...] to the number to explain, [n].

    The number is the predicted value, the probability of the second of two classes, or the probability of the class
    that the row's original outputs predict.
    """
    of_outputs = compute_probabilities(described, outputs)
    if of_outputs is None:
        return lambda values: take_prediction(described, values).reshape(len(values))
    has_two_classes = of_outputs.shape[1] == 2
    classes = np.ones(len(of_outputs), np.int64) if has_two_classes else of_outputs.argmax(axis=1)

    def take_probability(values: Array) -> Array:
        chances = compute_probabilities(described, values)
        assert chances is not None
        return np.asarray(chances[np.arange(len(chances)), classes])

    return take_probability
