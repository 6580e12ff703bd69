"""Collects what a model returns for the examples of a split, batch by batch, and makes a table of it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.compute

from scaleflow.evaluation.columns import (
    MOST_PROBABILITIES,
    OutputColumns,
    convert_best,
    spread,
    to_column,
)
from scaleflow.evaluation.predictions import EXAMPLE, ROWS_OF_GROUP, WEIGHT, name_column
from scaleflow.interfaces import Outputs, OutputStructure, name_leaves

#: The most examples that are kept, and the most memory that their values take. Of more, a fixed sample is kept.
MOST_EXAMPLES, MOST_BYTES = 1_000_000, 192 << 20

#: The most labels, or values, that have columns of their own.
MOST_VALUES = 64

#: Begins the names of sums over examples by position.
POSITIONS = "positions"

#: Draws the sample.
SAMPLE_SEED = 0x5A3B1E

Array = np.ndarray[Any, Any]

#: What is kept of an output. `class`: the probabilities of one class for each example; `best`: of many classes, the
#: most likely one; `labels`, `values`: all of them; `positions`: sums over the positions of each example.
Form = Literal["class", "best", "labels", "values", "positions"]


def choose_form(described: Outputs) -> Form:
    """Returns what is kept of an output."""
    if described.is_one_class or described.shape == ():
        if described.kind == "regression":
            return "values"
        return "best" if described.shape[-1:] and described.shape[-1] > MOST_PROBABILITIES else "class"
    if described.kind == "classification" or len(described.shape) != 1 or described.shape[0] > MOST_VALUES:
        return "positions"
    return "values" if described.kind == "regression" else "labels"


class PredictionCollector:
    """Collects the values of one evaluation of a split. Batches may come in any order.

    Args:
        outputs: of the model.
        examples: the number of examples of the split.

    Attributes:
        positions: as in `Predictions`.
    """

    def __init__(self, outputs: OutputStructure, examples: int) -> None:
        self._outputs: Mapping[str, Outputs] = name_leaves(outputs)
        self._examples = examples
        self._parts: list[dict[str, Array]] = []
        self._is_kept: Array | None = None
        self._is_chosen = False
        self.positions: dict[str, dict[str, Array]] = {}

    def clear(self) -> None:
        """Forgets what was collected: another evaluation begins."""
        self._parts, self.positions = [], {}

    def add(self, places: Array, values: Mapping[str, Array]) -> None:
        """Adds examples.

        Args:
            places: of the examples in the split, [b] int64.
            values: what is kept of them, [b, ...] by name: `OUTPUT/NAME`, as `make_columns` takes it, or `weight`.
                `OUTPUT/losses` and `OUTPUT/counted` [b, positions] are summed over all examples.
        """
        kept = dict(values)
        for name in self._outputs:
            if (losses := kept.pop(f"{name}/losses", None)) is not None:
                sums = {"loss": losses.sum(axis=0, dtype=np.float64)}
                sums["count"] = kept.pop(f"{name}/counted").sum(axis=0, dtype=np.float64)
                self._add_positions(name, sums)
        if not self._is_chosen:
            width = places.itemsize + sum(value.nbytes // max(1, len(value)) for value in kept.values())
            self._is_kept = draw_sample(self._examples, min(MOST_EXAMPLES, MOST_BYTES // width))
            self._is_chosen = True
        rows = slice(None) if self._is_kept is None else self._is_kept[places]
        self._parts.append({EXAMPLE: places[rows], **{name: np.array(value[rows]) for name, value in kept.items()}})

    def _add_positions(self, name: str, sums: Mapping[str, Array]) -> None:
        before = self.positions.get(name, {})
        self.positions[name] = {key: values + before.get(key, 0.0) for key, values in sums.items()}

    def to_bytes(self) -> bytes:
        """Returns what was collected, for `merge` in another process; empty if that is nothing."""
        content = io.BytesIO()
        sums = {f"{POSITIONS}/{name}/{key}": v for name, each in self.positions.items() for key, v in each.items()}
        if self._parts:
            arrays: dict[str, Any] = {**concatenate_parts(self._parts), **sums}
            np.savez(content, **arrays)
        return content.getvalue()

    def merge(self, content: bytes) -> None:
        """Adds what was collected in another process."""
        if not content:
            return
        with np.load(io.BytesIO(content)) as arrays:
            part = {name: arrays[name] for name in arrays.files}
        for name in [name for name in part if name.startswith(f"{POSITIONS}/") and name.endswith("/loss")]:
            output = name.split("/")[1]
            self._add_positions(output, {key: part.pop(f"{POSITIONS}/{output}/{key}") for key in ("loss", "count")})
        self._parts.append(part)

    def to_table(self) -> Any:
        """Returns a pyarrow Table with a row for each kept example, in the order of the split."""
        arrays = concatenate_parts(self._parts)
        self._parts = []
        order = np.argsort(arrays[EXAMPLE], kind="stable")
        tables = []
        for first in range(0, len(order), ROWS_OF_GROUP):
            rows = order[first : first + ROWS_OF_GROUP]
            tables.append(make_table(self._outputs, {name: values[rows] for name, values in arrays.items()}))
        return pyarrow.concat_tables(tables)


def draw_sample(examples: int, most: int) -> Array | None:
    """Returns which of the examples are kept, always the same: [examples] bool; None if all are."""
    if examples <= most:
        return None
    is_kept = np.zeros(examples, bool)
    is_kept[np.random.default_rng([SAMPLE_SEED, examples]).choice(examples, most, replace=False, shuffle=False)] = True
    return is_kept


def concatenate_parts(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def make_table(outputs: Mapping[str, Outputs], arrays: Mapping[str, Array]) -> Any:
    """Converts what was collected, [rows, ...] by name, to a pyarrow Table."""
    columns = {EXAMPLE: to_column(arrays[EXAMPLE])}
    for name, described in outputs.items():
        own = {key.removeprefix(f"{name}/"): values for key, values in arrays.items() if key.startswith(f"{name}/")}
        made = make_columns(described, own)
        columns |= {name_column(name, column): values for column, values in made.items()}
    if WEIGHT in arrays:
        columns[WEIGHT] = to_column(arrays[WEIGHT])
    return pyarrow.table(columns)


def make_columns(described: Outputs, values: Mapping[str, Array]) -> dict[str, Any]:
    """Returns the columns of one output.

    Args:
        described: the output.
        values: by the form of the output. `class`, `labels`, `values`: `target` and `output`, as the dataset and the
            model give them; `best`: `target`, `prediction`, `probability`, `target_probability`, `target_rank`;
            `positions`: sums and means, which stay as they are.
    """
    form = choose_form(described)
    if form == "positions":
        return {name: to_column(each) for name, each in values.items()}
    if form in ("labels", "values"):
        targets = values["target"] if form == "values" else values["target"] > 0.5
        columns = spread("target", targets, described.names)
        if described.ignore is not None:
            is_ignored = (values["target"] == described.ignore).reshape(len(targets), -1).T
            pairs = zip(columns.items(), is_ignored, strict=True)
            columns = {name: mask_values(each, missing) for (name, each), missing in pairs}
        return {**columns, **OutputColumns({"": described}).convert({"": values["output"]})}
    targets = values["target"].reshape(-1).astype(np.int64)
    is_ignored = np.zeros(len(targets), bool) if described.ignore is None else targets == described.ignore
    targets = np.where(is_ignored, 0, targets)
    columns = {"target": to_column(targets if described.names is None else np.array(described.names, object)[targets])}
    if form == "best":
        predicted = convert_best(values["prediction"], values["probability"], described.names)
        chance, rank = values["target_probability"], values["target_rank"]
    else:
        predicted = OutputColumns({"": described}).convert({"": values["output"]})
        chances = np.stack([each for name, each in predicted.items() if name.startswith("probability_")], axis=1)
        chance = chances[np.arange(len(targets)), targets]
        rank = 1 + (chances > chance[:, None]).sum(axis=1)
    columns |= {"target_probability": to_column(chance), "target_rank": to_column(rank.astype(np.int32))}
    return {**{name: mask_values(each, is_ignored) for name, each in columns.items()}, **predicted}


def mask_values(column: Any, is_missing: Array) -> Any:
    """Returns a column with missing values in some rows, [rows] bool."""
    return column if not is_missing.any() else pyarrow.compute.if_else(pyarrow.array(is_missing), None, column)
