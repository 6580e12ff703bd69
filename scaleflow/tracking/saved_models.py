"""Reads what the logged model of a run takes and returns, downloads its SavedModel, and adds formats to it.

TensorFlow is not needed for that. The contents of a store are untrusted input.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import LearnedState, name_leaves
from scaleflow.interfaces.events import FormatExported
from scaleflow.tracking.model_uris import ModelReference
from scaleflow.tracking.store import MlflowTracker
from scaleflow.tracking.tracked_runs import download_artifact, find_model

#: The SavedModel within a logged model.
SAVED_MODEL = "data/saved_model"

#: The splits that training logs as inputs of the run; an evaluation logs others.
TRAINING_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class ModelInput:
    """One input of a model.

    Attributes:
        shape: its shape, without the batch dimension.
        dtype: numpy's name of its dtype, `object` or `string` for text; None if the store does not say it.
    """

    shape: tuple[int, ...]
    dtype: str | None
    is_picture: bool = False


@dataclass(frozen=True)
class ModelOutput:
    """One output of a model.

    Attributes:
        shape: its shape, without the batch dimension.
        kind: `classification`, `binary`, `multi_label` or `regression`; None if the store does not say it.
        names: of the classes, labels or values, in their order; None if they have no names, or too many to be stored.
        dtype: numpy's name of the dtype of its values.
        threshold, margins: as in `Outputs`.
    """

    shape: tuple[int, ...]
    kind: str | None = None
    names: tuple[str, ...] | None = None
    dtype: str = "float32"
    threshold: float | None = None
    margins: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelDescription:
    """Inputs and outputs of a logged model by their names. A single one without a name has the name ""."""

    inputs: Mapping[str, ModelInput]
    outputs: Mapping[str, ModelOutput]


def describe_model(
    tracker: MlflowTracker, model: ModelReference, state: LearnedState | None = None
) -> ModelDescription:
    """Returns what the logged model of a run takes and returns.

    Args:
        state: what the run learned; None: what the store says of the model and of the run's dataset.

    Raises ConfigError if the run has no logged model, or the model has no description that can be read.
    """
    from mlflow.models import Model

    address = find_model(tracker, model)
    if state is not None:
        inputs, outputs = name_leaves(state.inputs), name_leaves(state.outputs)
        return ModelDescription(
            {name: ModelInput(tuple(each.shape), each.dtype, name in state.pictures) for name, each in inputs.items()},
            {
                name: replace(
                    describe_output(tuple(each.shape), each.kind, list(each.names or ())),
                    dtype=each.dtype,
                    threshold=each.threshold,
                    margins=each.margins,
                )
                for name, each in outputs.items()
            },
        )
    with tempfile.TemporaryDirectory(prefix="scaleflow-") as folder:
        path = download_artifact(f"{address}/MLmodel", tracker.uri, Path(folder))
        try:
            signature = None if path is None else Model.load(str(path)).signature
            if signature is None or signature.inputs is None or signature.outputs is None:
                raise ValueError("it has no signature")
            inputs = {name: ModelInput(shape, dtype) for name, shape, dtype in read_schema(signature.inputs)}
            shapes = {name: shape for name, shape, _ in read_schema(signature.outputs)}
        except Exception as error:  # MLflow and YAML raise many types
            reason = read_reason(error)
            raise ConfigError(
                f"{model.run_id}: the description of its model {model.model_id} cannot be read: {reason[:300]}"
            ) from error
    kinds, names = read_target_kinds(tracker.fetch_run())
    return ModelDescription(
        inputs, {name: describe_output(shape, pick(kinds, name), pick(names, name)) for name, shape in shapes.items()}
    )


def download_saved_model(tracker: MlflowTracker, model: ModelReference, folder: Path) -> Path:
    """Downloads the SavedModel of the logged model of a run. Raises ConfigError if there is none."""
    path = download_artifact(f"{find_model(tracker, model)}/{SAVED_MODEL}", tracker.uri, folder)
    if path is None:
        raise ConfigError(
            f"{model.run_id}: its model {model.model_id} has no {SAVED_MODEL}; it is not a model of scaleflow"
        )
    return path


def read_schema(schema: Any) -> list[tuple[str, tuple[int, ...], str | None]]:
    """Returns the name, the shape without the batch dimension and the dtype of each entry of MLflow's schema."""
    if schema.is_tensor_spec():
        return [(spec.name or "", tuple(spec.shape[1:]), str(spec.type)) for spec in schema.inputs]
    return [(spec.name or "", (), "string" if not spec.name else None) for spec in schema.inputs]


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


def describe_output(shape: tuple[int, ...], kind: Any, names: Any) -> ModelOutput:
    """Describes an output. Names that do not fit its shape are left out."""
    if kind not in ("classification", "binary", "multi_label", "regression"):
        return ModelOutput(shape)
    count = 2 if kind == "binary" else shape[-1] if shape else 1
    has_names = isinstance(names, list) and len(names) == count and len(set(map(str, names))) == count
    return ModelOutput(shape, kind, tuple(map(str, names)) if has_names else None)


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
