"""The record of kept predictions, `predictions.parquet`: the model's outputs for the examples of a split.

It has a row per example, in the order of the split. docs/predictions.md describes the columns. The files of `scaleflow
predict` have the same columns for the model's outputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from pyarrow import parquet

from scaleflow.errors import ConfigError
from scaleflow.evaluation.collector import EXAMPLE, ROWS_AT_ONCE, WEIGHT, PredictionCollector, choose_form
from scaleflow.evaluation.intervals import Intervals
from scaleflow.evaluation.resampling import Units, number_blocks
from scaleflow.interfaces import Outputs, OutputStructure, name_leaves
from scaleflow.interfaces.learned_state import parse_leaves
from scaleflow.serving.prediction_columns import (
    divide_columns,
    find_not_finite,
    is_one_of_several,
    make_logit_columns,
    make_prediction_columns,
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PredictionColumns:
    """Converts the outputs of a model to columns."""

    outputs: Mapping[str, Outputs]  # the model's outputs by name
    has_all: bool = False  # whether every class gets a column, regardless of their number
    has_logits: bool = False  # whether to add columns for logits

    def convert(self, values: dict[str, Array]) -> dict[str, Any]:
        """Converts outputs [rows, ...] by name to columns by name, see `serving/prediction_columns.py`."""
        values = {name: np.asarray(array, self.outputs[name].dtype) for name, array in values.items()}
        arrays = make_prediction_columns(self.outputs, values, self.has_all)
        if self.has_logits:
            arrays |= make_logit_columns(self.outputs, values)
        columns = {name: to_column(array) for name, array in arrays.items()}
        for name, described in self.outputs.items():
            columns |= mask_not_finite(name, described, values[name], columns)
        return columns

    def make_empty(self) -> dict[str, Any]:
        """Returns the columns without values."""
        no_rows = {name: np.zeros((0, *described.model_shape)) for name, described in self.outputs.items()}
        return self.convert(no_rows)

    def make_schema(self) -> Any:
        """Returns the names and types of the columns."""
        return pyarrow.schema([(name, array.type) for name, array in self.make_empty().items()])


def mask_not_finite(output: str, described: Outputs, values: Array, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the prediction columns of an output, with missing values where the output is not finite.

    A number that is not finite is its own prediction. Predictions of positions are not changed.
    """
    if described.kind == "regression" or not described.kind:
        return {}
    is_bad = find_not_finite(described, values)
    if not is_bad.any() or is_bad.ndim > 2 or (is_bad.ndim == 2 and is_one_of_several(described)):
        return {}
    if is_bad.ndim == 1:
        is_missing_in = {"prediction": is_bad, "prediction_set": is_bad}
    else:
        is_missing_in = divide_columns("prediction", is_bad, described.names)
    masked = {}
    for key, is_missing in is_missing_in.items():
        name = name_column(output, key)
        if is_missing.ndim == 1 and name in columns:
            masked[name] = mask_values(columns[name], is_missing)
    return masked


def spread(label: str, values: Array, names: Sequence[str] | None) -> dict[str, Any]:
    """Converts values [rows], [rows, k] or [rows, ...] to one column, to k columns, or to one column of lists."""
    return {name: to_column(column) for name, column in divide_columns(label, values, names).items()}


def to_column(values: Array) -> Any:
    """Converts values [rows, ...] to a pyarrow column. More than one dimension becomes nested lists."""
    if values.dtype == object:
        column = pyarrow.array(values.ravel().tolist(), pyarrow.string())
    else:
        column = pyarrow.array(values.ravel())
    for size in reversed(values.shape[1:]):
        # Parquet could not read lists of a fixed size if some of them are missing.
        column = pyarrow.LargeListArray.from_arrays(np.arange(0, len(column) + 1, size), column)
    return column


#: The version of the record. A newer version is an error.
VERSION = 1

#: The name of the file, and the key in its schema's metadata with the rest of the record.
PREDICTIONS = "predictions.parquet"
METADATA = b"scaleflow.predictions"

#: Columns that identify an example, in addition to its place in the split: its file, its row, the user's id.
FILE = "file"
ROW = "row"
ID = "id"

#: Columns with the groups or times that `dataset.split` used to divide the examples.
GROUP = "group"
TIME = "time"


@dataclass(frozen=True)
class Predictions:
    """Kept predictions of a split.

    Attributes:
        table: a pyarrow Table with a row per kept example.
        outputs: the model's outputs, as the dataset describes them.
        split: `test`, `validation`, `train` or `all`.
        examples: the number of examples of the split. The table has fewer rows if it is a sample.
        digest: the digest of the split, as in the run's learned state; empty if unknown.
        positions: by output with sequences: the sum of the losses at each position (`loss`) and the number of targets
            that count there (`count`), over all examples of the split.
        divided_by: the column of `dataset.split` with the groups or times of the examples; empty if there is no such
            column or no groups and times.
    """

    table: Any
    outputs: OutputStructure
    split: str
    examples: int
    digest: str = ""
    positions: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    divided_by: str = ""

    @property
    def is_sample(self) -> bool:
        return len(self.table) < self.examples

    def has(self, name: str, output: str = "") -> bool:
        """Returns whether an output has a column, such as `prediction`."""
        return name_column(output, name) in self.table.column_names

    def column(self, name: str, output: str = "") -> Array:
        """Returns a column of an output as an array [rows]. Text is dtype object; a missing number is NaN."""
        values: Array = self.table[name_column(output, name)].to_numpy()
        return values

    def weights(self) -> Array | None:
        """Returns the weights of the examples, [rows]; None without weights."""
        return self.column(WEIGHT) if self.has(WEIGHT) else None

    @functools.cached_property
    def units(self) -> Units | None:
        """The examples that are resampled together: groups, or blocks of rows in time; None: each by itself."""
        if self.has(GROUP):
            numbers = np.unique(self.column(GROUP), return_inverse=True)[1]
            divided_by = f" of {self.divided_by}" if self.divided_by else ""
            return Units(numbers, "group", divided_by)
        if self.has(TIME):
            return Units(number_blocks(self.column(TIME)), "block", f" in the order of {self.divided_by or 'time'}")
        return None

    def make_intervals(self, rows: Array, is_wanted: bool = True) -> Intervals:
        """Returns the object that makes the intervals of metrics for some rows of the table."""
        weights = self.weights()
        own = None if weights is None else weights[rows]
        return Intervals(len(rows), own, find_units((self, rows)), is_wanted=is_wanted)


def find_units(*tables: tuple[Predictions, Array]) -> Units | None:
    """Returns the units of the same examples in several tables, from the first table that has units."""
    for predictions, rows in tables:
        units = predictions.units
        if units is not None:
            return units.take(rows)
    return None


def name_column(output: str, column: str) -> str:
    """Returns the name of an output's column, with the output's name as prefix."""
    return f"{output}_{column}" if output else column


def save_predictions(path: Path, predictions: Predictions) -> None:
    """Writes the record. Raises OSError if it cannot be written."""
    outputs = []
    for name, described in name_leaves(predictions.outputs).items():
        outputs.append({"name": name, **asdict(described)})
    record = {
        "version": VERSION,
        "outputs": outputs,
        "split": predictions.split,
        "examples": predictions.examples,
        "digest": predictions.digest,
        "positions": predictions.positions,
        "divided_by": predictions.divided_by,
    }
    table = predictions.table.replace_schema_metadata({METADATA: json.dumps(record)})
    partial = path.with_suffix(".partial")
    parquet.write_table(table, partial, row_group_size=ROWS_AT_ONCE)
    partial.replace(path)


def load_predictions(path: Path) -> Predictions:
    """Reads the record. Raises ConfigError if it cannot be read."""
    try:
        table = parquet.read_table(path)
        record = json.loads((table.schema.metadata or {})[METADATA])
        if record["version"] > VERSION:
            raise ValueError(f"it has the version {record['version']}, and this scaleflow reads up to {VERSION}")
        outputs = parse_leaves(record["outputs"], Outputs)
        kept = {name: record[name] for name in ("split", "examples", "digest", "positions", "divided_by")}
        return Predictions(table, outputs, **kept)
    except (OSError, pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: these kept predictions cannot be read: {error}") from error


def make_predictions_table(outputs: OutputStructure, collector: PredictionCollector) -> Any:
    """Returns a pyarrow Table with a row per kept example, in the order of the split."""
    described = name_leaves(outputs)
    return pyarrow.concat_tables([convert_arrays(described, arrays) for arrays in collector.take_rows()])


def convert_arrays(outputs: Mapping[str, Outputs], arrays: Mapping[str, Array]) -> Any:
    """Converts collected values, [rows, ...] by name, to a pyarrow Table."""
    columns = {EXAMPLE: to_column(arrays[EXAMPLE])}
    for name, described in outputs.items():
        own = {}
        for key, values in arrays.items():
            if key.startswith(f"{name}/"):
                own[key.removeprefix(f"{name}/")] = values
        for column, values in make_kept_columns(described, own).items():
            columns[name_column(name, column)] = values
    if WEIGHT in arrays:
        columns[WEIGHT] = to_column(arrays[WEIGHT])
    return pyarrow.table(columns)


def make_kept_columns(described: Outputs, values: Mapping[str, Array]) -> dict[str, Any]:
    """Returns the columns of one output.

    Args:
        values: depends on the output's form. `class`, `labels`, `values`: `target` and `output` from the dataset and
            the model; `best`: `target`, `prediction`, `probability`, `target_probability`, `target_rank`; `positions`:
            sums and means, which are not converted.
    """
    form = choose_form(described)
    if form == "positions":
        return {name: to_column(array) for name, array in values.items()}
    if form in ("labels", "values"):
        targets = values["target"] if form == "values" else values["target"] > 0.5
        columns = spread("target", targets, described.names)
        if described.ignore is not None:
            is_ignored = (values["target"] == described.ignore).reshape(len(targets), -1).T
            for name, is_missing in zip(list(columns), is_ignored, strict=True):
                columns[name] = mask_values(columns[name], is_missing)
        return {**columns, **PredictionColumns({"": described}).convert({"": values["output"]})}
    targets = values["target"].reshape(-1).astype(np.int64)
    is_ignored = np.zeros(len(targets), bool) if described.ignore is None else targets == described.ignore
    targets = np.where(is_ignored, 0, targets)

    def name_classes(numbers: Array) -> Any:
        return to_column(numbers if described.names is None else np.array(described.names, object)[numbers])

    columns = {"target": name_classes(targets)}
    if form == "best":
        is_bad = ~np.isfinite(values["probability"])
        predicted = {
            "prediction": mask_values(name_classes(values["prediction"]), is_bad),
            "probability": to_column(values["probability"]),
        }
        chance = values["target_probability"]
        rank = values["target_rank"]
    else:
        predicted = PredictionColumns({"": described}).convert({"": values["output"]})
        of_classes = [column for name, column in predicted.items() if name.startswith("probability_")]
        chances = np.stack(of_classes, axis=1)
        chance = chances[np.arange(len(targets)), targets]
        rank = 1 + (chances > chance[:, None]).sum(axis=1)
    columns["target_probability"] = to_column(chance)
    columns["target_rank"] = to_column(rank.astype(np.int32))
    masked = {name: mask_values(column, is_ignored) for name, column in columns.items()}
    return {**masked, **predicted}


def mask_values(column: Any, is_missing: Array) -> Any:
    """Returns a column with missing values in some rows, [rows] bool."""
    if not is_missing.any():
        return column
    return pyarrow.compute.if_else(pyarrow.array(is_missing), None, column)
