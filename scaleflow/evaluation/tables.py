"""Makes the table of kept predictions of what was collected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from scaleflow.evaluation.collector import EXAMPLE, WEIGHT, PredictionCollector, choose_form
from scaleflow.evaluation.columns import OutputColumns, convert_best, spread, to_column
from scaleflow.evaluation.predictions import name_column
from scaleflow.interfaces import Outputs, OutputStructure, name_leaves

Array = np.ndarray[Any, Any]


def make_predictions_table(outputs: OutputStructure, collector: PredictionCollector) -> Any:
    """Returns a pyarrow Table with a row for each kept example, in the order of the split."""
    described = name_leaves(outputs)
    return pyarrow.concat_tables([convert_arrays(described, arrays) for arrays in collector.take_rows()])


def convert_arrays(outputs: Mapping[str, Outputs], arrays: Mapping[str, Array]) -> Any:
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
