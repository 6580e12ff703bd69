"""Records the formats of a tracked model in its store."""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.features.formats.events import FormatExported
from scaleflow.tracking.model_uris import ModelReference
from scaleflow.tracking.store import MlflowTracker
from scaleflow.tracking.tracked_runs import download_artifact

#: The run's artifact with a table of its exported formats.
TABLE = "export/formats.json"


def log_formats(
    tracker: MlflowTracker, model: ModelReference, formats: Sequence[FormatExported], table: Mapping[str, Any]
) -> None:
    """Logs the files of good formats to the model, and the metrics and results of all formats to the run."""
    now = int(time.time() * 1000)
    for exported in formats:
        folder = Path(exported.path).parent
        if not exported.error and folder.name == exported.name:  # the Keras file is already part of the model
            for path in sorted(folder.iterdir()):
                tracker.log_model_file(str(model.model_id), path, f"data/{exported.name}")
        metrics = {f"export/{exported.name}/{key}": value for key, value in exported.values.items()}
        tracker.log_model_metrics(str(model.model_id), metrics, step=model.step, time=now)
        tracker.set_tags(exported.list_tags())
    with tempfile.TemporaryDirectory() as temporary:
        before = download_artifact(f"runs:/{model.run_id}/{TABLE}", tracker.uri, Path(temporary))
        path = Path(temporary, Path(TABLE).name)
        path.write_text(json.dumps(merge_tables(read_table(before), table), indent=1))
        tracker.log_artifact(path, Path(TABLE).parent.name)


def read_table(path: Path | None) -> Mapping[str, Any]:
    """Returns the table in a file; one without rows if there is no file, or if it has no table."""
    empty: dict[str, Any] = {"columns": [], "data": []}
    if path is None:
        return empty
    try:
        table = json.loads(path.read_text())
    except ValueError:
        return empty
    if not isinstance(table, dict) or not {"columns", "data"} <= table.keys():
        return empty
    return table


def merge_tables(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Joins two tables. If both have a row with the same first cell, the row in `now` wins."""
    columns = list(dict.fromkeys([*now["columns"], *before["columns"]]))
    rows: dict[Any, dict[str, Any]] = {}
    for table in (before, now):
        for cells in table["data"]:
            if cells:
                rows[cells[0]] = dict(zip(table["columns"], cells, strict=False))
    data = []
    for row in rows.values():
        data.append([row.get(column) for column in columns])
    return {"columns": columns, "data": data}
