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
    for each in formats:
        folder = Path(each.path).parent
        if not each.error and folder.name == each.name:  # the Keras file is already part of the model
            for path in sorted(folder.iterdir()):
                tracker.log_model_file(str(model.model_id), path, f"data/{each.name}")
        names = {f"export/{each.name}/{key}": value for key, value in each.values.items()}
        tracker.log_model_metrics(str(model.model_id), names, step=model.step, time=now)
        tracker.set_tags(each.list_tags())
    with tempfile.TemporaryDirectory() as temporary:
        before = download_artifact(f"runs:/{model.run_id}/{TABLE}", tracker.uri, Path(temporary))
        path = Path(temporary, Path(TABLE).name)
        path.write_text(json.dumps(merge_tables(read_table(before), table), indent=1))
        tracker.log_artifact(path, Path(TABLE).parent.name)


def read_table(path: Path | None) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text()) if path is not None else {}
    except ValueError:
        found = {}
    return found if isinstance(found, dict) and {"columns", "data"} <= found.keys() else {"columns": [], "data": []}


def merge_tables(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Joins two tables. If both have a row with the same first cell, the row in `now` wins."""
    columns = list(dict.fromkeys([*now["columns"], *before["columns"]]))
    rows = {
        row[0]: dict(zip(table["columns"], row, strict=False))
        for table in (before, now)
        for row in table["data"]
        if row
    }
    return {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows.values()]}
