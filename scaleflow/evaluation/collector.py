"""Collects a model's outputs for the examples of a split, batch by batch. Does not import pyarrow."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from scaleflow.interfaces import Outputs, OutputStructure, name_leaves
from scaleflow.serving.prediction_columns import MAX_PROBABILITIES

#: Maximum number of kept examples and memory of their values. Above it, a fixed sample is kept.
MAX_EXAMPLES = 1_000_000
MAX_BYTES = 192 << 20

#: The columns with the place of an example in its split, and with its weight.
EXAMPLE = "example"
WEIGHT = "weight"

#: Maximum number of labels, or values, that get their own columns.
MAX_VALUES = 64

ROWS_AT_ONCE = 65_536

#: The prefix of sums over examples by position.
POSITIONS = "positions"

#: The seed that draws the sample.
SAMPLE_SEED = 0x5A3B1E

Array = np.ndarray[Any, Any]

#: How an output is kept. `class`: the probabilities of all classes; `best`: only the most likely class,
#: for many classes; `labels`, `values`: all labels or values; `positions`: sums over the positions of each example.
Form = Literal["class", "best", "labels", "values", "positions"]


def choose_form(described: Outputs) -> Form:
    """Returns how an output is kept."""
    if described.is_one_class or described.shape == ():
        if described.kind == "regression":
            return "values"
        return "best" if described.shape[-1:] and described.shape[-1] > MAX_PROBABILITIES else "class"
    if described.kind == "classification" or len(described.shape) != 1 or described.shape[0] > MAX_VALUES:
        return "positions"
    return "values" if described.kind == "regression" else "labels"


class PredictionCollector:
    """Collects the values of one evaluation of a split. Batches may come in any order."""

    def __init__(self, outputs: OutputStructure, examples: int) -> None:
        self._outputs: Mapping[str, Outputs] = name_leaves(outputs)
        self._examples = examples
        self._parts: list[dict[str, Array]] = []
        self._is_kept: Array | None = None  # which examples are kept; None: all, once `_is_chosen` is True
        self._is_chosen = False  # the first batch shows how large an example is, and so how many are kept
        self.positions: dict[str, dict[str, Array]] = {}

    def clear(self) -> None:
        """Discards the collected values before another evaluation, which keeps the same examples."""
        self._parts = []
        self.positions = {}

    def add(self, places: Array, values: Mapping[str, Array]) -> None:
        """Adds examples.

        Args:
            places: the places of the examples in the split, [b] int64.
            values: the values to keep, [b, ...] by name: `OUTPUT/NAME` in the form that `make_kept_columns` takes, or
                `weight`. `OUTPUT/losses` and `OUTPUT/counted` [b, positions] are summed over all examples.
        """
        kept = dict(values)
        for name in self._outputs:
            losses = kept.pop(f"{name}/losses", None)
            if losses is not None:
                sums = {"loss": losses.sum(axis=0, dtype=np.float64)}
                sums["count"] = kept.pop(f"{name}/counted").sum(axis=0, dtype=np.float64)
                self._add_positions(name, sums)
        if not self._is_chosen:
            width = places.itemsize + sum(value.nbytes // max(1, len(value)) for value in kept.values())
            self._is_kept = draw_sample(self._examples, min(MAX_EXAMPLES, MAX_BYTES // width))
            self._is_chosen = True
        rows = slice(None) if self._is_kept is None else self._is_kept[places]
        part = {EXAMPLE: places[rows]}
        for name, value in kept.items():
            part[name] = np.array(value[rows])
        self._parts.append(part)

    def _add_positions(self, name: str, sums: Mapping[str, Array]) -> None:
        before = self.positions.get(name, {})
        self.positions[name] = {key: values + before.get(key, 0.0) for key, values in sums.items()}

    def to_bytes(self) -> bytes:
        """Serializes the collected values for `merge` in another process; empty if there are no values."""
        if not self._parts:
            return b""
        arrays: dict[str, Any] = concatenate_parts(self._parts)
        for name, sums in self.positions.items():
            for key, values in sums.items():
                arrays[f"{POSITIONS}/{name}/{key}"] = values
        content = io.BytesIO()
        np.savez(content, **arrays)
        return content.getvalue()

    def merge(self, content: bytes) -> None:
        """Adds the values that another process collected."""
        if not content:
            return
        with np.load(io.BytesIO(content)) as arrays:
            part = {name: arrays[name] for name in arrays.files}
        for name in list(part):
            if name.startswith(f"{POSITIONS}/") and name.endswith("/loss"):
                output = name.split("/")[1]
                loss = part.pop(f"{POSITIONS}/{output}/loss")
                count = part.pop(f"{POSITIONS}/{output}/count")
                self._add_positions(output, {"loss": loss, "count": count})
        self._parts.append(part)

    def take_rows(self) -> Iterator[dict[str, Array]]:
        """Yields the collected values in the order of the split, `ROWS_AT_ONCE` examples each, and discards them."""
        arrays = concatenate_parts(self._parts)
        self._parts = []
        order = np.argsort(arrays[EXAMPLE], kind="stable")
        for first in range(0, len(order), ROWS_AT_ONCE):
            rows = order[first : first + ROWS_AT_ONCE]
            yield {name: values[rows] for name, values in arrays.items()}


def draw_sample(examples: int, most: int) -> Array | None:
    """Returns which examples are kept, [examples] bool, always the same; None if all are kept."""
    if examples <= most:
        return None
    random = np.random.default_rng([SAMPLE_SEED, examples])
    is_kept = np.zeros(examples, bool)
    is_kept[random.choice(examples, most, replace=False, shuffle=False)] = True
    return is_kept


def concatenate_parts(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Joins arrays of several parts by name."""
    joined = {}
    for name in parts[0]:
        joined[name] = np.concatenate([part[name] for part in parts])
    return joined
