"""Reads what the logged model of a run takes and returns, downloads its SavedModel, and adds formats to it.

TensorFlow is not needed for that. The contents of a store are untrusted input.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Inputs, Kind, LearnedState, Outputs
from scaleflow.interfaces.events import FormatExported
from scaleflow.tracking.model_uris import ModelReference
from scaleflow.tracking.store import MlflowTracker
from scaleflow.tracking.tracked_runs import download_artifact, find_model

#: The SavedModel within a logged model.
SAVED_MODEL = "data/saved_model"

#: The splits that training logs as inputs of the run; an evaluation logs others.
TRAINING_SPLITS = ("train", "validation", "test")


def describe_model(tracker: MlflowTracker, model: ModelReference) -> LearnedState:
    """Returns what the logged model of a run takes and returns, if the run has no record of it.

    The store says it of the model and of the run's dataset. Raises ConfigError if the run has no logged model, or the
    model has no description that can be read.
    """
    from mlflow.models import Model

    address = find_model(tracker, model)
    with tempfile.TemporaryDirectory(prefix="scaleflow-") as folder:
        path = download_artifact(f"{address}/MLmodel", tracker.uri, Path(folder))
        try:
            signature = None if path is None else Model.load(str(path)).signature
            if signature is None or signature.inputs is None or signature.outputs is None:
                raise ValueError("it has no signature")
            inputs = {name: Inputs(shape, dtype) for name, shape, dtype in read_schema(signature.inputs)}
            shapes = {name: shape for name, shape, _ in read_schema(signature.outputs)}
        except Exception as error:  # MLflow and YAML raise many types
            reason = read_reason(error)
            raise ConfigError(
                f"{model.run_id}: the description of its model {model.model_id} cannot be read: {reason[:300]}"
            ) from error
    kinds, names = read_target_kinds(tracker.fetch_run())
    outputs = {name: describe_output(shape, pick(kinds, name), pick(names, name)) for name, shape in shapes.items()}
    return LearnedState(inputs, outputs)


def download_saved_model(tracker: MlflowTracker, model: ModelReference, folder: Path) -> Path:
    """Downloads the SavedModel of the logged model of a run. Raises ConfigError if there is none."""
    path = download_artifact(f"{find_model(tracker, model)}/{SAVED_MODEL}", tracker.uri, folder)
    if path is None:
        raise ConfigError(
            f"{model.run_id}: its model {model.model_id} has no {SAVED_MODEL}; it is not a model of scaleflow"
        )
    return path


def read_schema(schema: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns the name, the shape without the batch dimension and the dtype of each entry of MLflow's schema."""
    if schema.is_tensor_spec():
        return [(spec.name or "", tuple(spec.shape[1:]), str(spec.type)) for spec in schema.inputs]
    return [(spec.name or "", (), "any" if spec.name else "string") for spec in schema.inputs]


def read_target_kinds(run: Any) -> tuple[Any, Any]:
    """Returns kinds and names of the targets that a run was trained on, each a dict if there are several outputs."""
    for entry in run.inputs.dataset_inputs if run.inputs else []:
        if any(tag.key == "mlflow.data.context" and tag.value in TRAINING_SPLITS for tag in entry.tags):
            try:
                profile = json.loads(entry.dataset.profile)
            except (TypeError, ValueError):
                continue
            if isinstance(profile, dict):
                return profile.get("kind"), profile.get("classes")
    return None, None


def pick(values: Any, name: str) -> Any:
    return values.get(name) if isinstance(values, dict) else values


def describe_output(shape: tuple[int, ...], kind: Any, names: Any) -> Outputs:
    """Describes an output; its kind is None if it is not known."""
    known: Any = kind if kind in get_args(Kind) else None
    return Outputs(known, shape, tuple(map(str, names)) if isinstance(names, list) else None)


def drop_unfit_names(outputs: Outputs) -> Outputs:
    """Returns outputs without names that do not fit their shape, or are there twice."""
    count = 2 if outputs.kind == "binary" else outputs.shape[-1] if outputs.shape else 1
    return (
        outputs if len(set(outputs.names or ())) == len(outputs.names or ()) == count else replace(outputs, names=None)
    )


#: The table of the formats among a run's artifacts.
TABLE = "export/formats.json"


def download_exported(tracker: MlflowTracker, model: ModelReference, folder: Path) -> Path:
    """Downloads the data of a logged model: what the worker exported. Raises ConfigError if there is none."""
    path = download_artifact(f"{find_model(tracker, model)}/data", tracker.uri, folder)
    if path is None or not (path / "saved_model").is_dir():
        raise ConfigError(
            f"{model.run_id}: its model {model.model_id} has no SavedModel; it is not a model of scaleflow"
        )
    return path


def log_formats(
    tracker: MlflowTracker, model: ModelReference, formats: Sequence[FormatExported], table: Mapping[str, Any]
) -> None:
    """Logs the files of good formats to the model, and the metrics, results and the table of all to the run."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    for each in formats:
        folder = Path(each.path).parent
        if not each.error and folder.name == each.name:  # the Keras file is there already
            for path in sorted(folder.iterdir()):
                tracker.log_model_file(str(model.model_id), path, f"data/{each.name}")
        names = {f"export/{each.name}/{key}": value for key, value in each.values.items()}
        tracker.log_batch(
            [Metric(key, value, now, model.step, model_id=model.model_id) for key, value in names.items()]
        )
        tracker.set_tags({f"scaleflow.export.{each.name}": each.error or "good"})
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
    """Returns a table with the rows of both; of rows with the same first cell, the later one."""
    columns = list(dict.fromkeys([*now["columns"], *before["columns"]]))
    rows = {
        row[0]: dict(zip(table["columns"], row, strict=False))
        for table in (before, now)
        for row in table["data"]
        if row
    }
    return {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows.values()]}
