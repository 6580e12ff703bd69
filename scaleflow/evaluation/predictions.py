"""The record of kept predictions, `predictions.parquet`: what the model returned for the examples of a split.

A row for each example, in the order of the split. docs/predictions.md describes the columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from scaleflow.errors import ConfigError
from scaleflow.evaluation.collector import ROWS_AT_ONCE, WEIGHT
from scaleflow.interfaces import Outputs, OutputStructure, name_leaves
from scaleflow.interfaces.learned_state import parse_leaves

#: The version of the record. A reader refuses newer ones.
VERSION = 1

#: The name of the file, and the key of its schema's metadata that has the rest of the record.
PREDICTIONS, METADATA = "predictions.parquet", b"scaleflow.predictions"

#: The columns that say where an example comes from, besides its place in the split: its file, its row, the user's id.
FILE, ROW, ID = "file", "row", "id"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Predictions:
    """Kept predictions of a split.

    Attributes:
        table: a pyarrow Table with a row for each kept example.
        outputs: of the model, as the dataset describes them.
        split: `test`, `validation`, `train` or `all`.
        examples: the number of examples of the split. The table has fewer rows if it is a sample.
        digest: of the split, as in the record of what the run learned; empty if it is not known.
        positions: of outputs for sequences, by name: the sum of the losses at each position (`loss`), and the number of
            targets there that count (`count`), over all examples of the split.
    """

    table: Any
    outputs: OutputStructure
    split: str
    examples: int
    digest: str = ""
    positions: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    @property
    def is_sample(self) -> bool:
        return len(self.table) < self.examples

    def has(self, name: str, output: str = "") -> bool:
        """Returns whether there is a column, such as `prediction`, of an output."""
        return name_column(output, name) in self.table.column_names

    def column(self, name: str, output: str = "") -> Array:
        """Returns a column of an output as an array [rows], of objects for text; a missing number is NaN."""
        values: Array = self.table[name_column(output, name)].to_numpy()
        return values

    def weights(self) -> Array | None:
        """Returns the weights of the examples, [rows]; None if they have none."""
        return self.column(WEIGHT) if self.has(WEIGHT) else None


def name_column(output: str, column: str) -> str:
    """Returns the name of a column of an output, which begins with the output's own name."""
    return f"{output}_{column}" if output else column


def save_predictions(path: Path, predictions: Predictions) -> None:
    """Writes the record. Raises OSError if it cannot be written."""
    record = {
        "version": VERSION,
        "outputs": [{"name": name, **asdict(each)} for name, each in name_leaves(predictions.outputs).items()],
        "split": predictions.split,
        "examples": predictions.examples,
        "digest": predictions.digest,
        "positions": predictions.positions,
    }
    table = predictions.table.replace_schema_metadata({METADATA: json.dumps(record)})
    partial = path.with_suffix(".partial")
    parquet.write_table(table, partial, row_group_size=ROWS_AT_ONCE)
    partial.replace(path)


def load_predictions(path: Path, columns: Sequence[str] | None = None) -> Predictions:
    """Reads the record, or some of its columns. Raises ConfigError if it cannot be used."""
    try:
        table = parquet.read_table(path, columns=columns)
        record = json.loads((table.schema.metadata or {})[METADATA])
        if record["version"] > VERSION:
            raise ValueError(f"it has the version {record['version']}, and this scaleflow reads up to {VERSION}")
        outputs = parse_leaves(record["outputs"], Outputs)
        return Predictions(table, outputs, record["split"], record["examples"], record["digest"], record["positions"])
    except (OSError, pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: these kept predictions cannot be read: {error}") from error
