"""Packages an exported model as an MLflow model, without TensorFlow.

MLflow's own savers write either the Keras file or the SavedModel. This model contains both, and the code of
`scaleflow.serving`, so that a server does not need scaleflow:

    MLmodel  requirements.txt  python_env.yaml  conda.yaml  input_example.json
    code/scaleflow_serving_DIGEST/
    data/model.keras           keras.models.load_model; data/model.weights.h5 if Keras cannot write the model
    data/saved_model/          tf.saved_model.load
    data/learned_state.json    the learned state of the run: classes, columns, ...
    data/FORMAT/               the formats of `export.formats` that gave the same outputs as the SavedModel
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mlflow.models import Model, ModelSignature
from mlflow.pyfunc import add_to_model
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
from mlflow.types.schema import AnyType
from mlflow.types.schema import Array as ArrayType

from scaleflow.compat.mlflow import write_environment, write_input_example
from scaleflow.interfaces import LearnedState, name_leaves
from scaleflow.serving.prediction_columns import make_prediction_columns
from scaleflow.serving.signature_files import PLAIN_SIGNATURE

#: The package whose code is copied into the model, and the packages that it needs in addition to TensorFlow and Keras.
SERVING = "scaleflow.serving"
NEEDED = ("mlflow-skinny", "numpy", "pandas", "pyarrow")

#: Files and folders of the export that go into the logged model. Each of `export.formats` has its own folder.
DATA = ("model.*", "learned_state.*", "example_outputs.npz", "saved_model", "formats/*")

#: The inference parameter that selects predictions, probabilities or logits (`serving/loader.py`).
PARAMS = ParamSchema([ParamSpec("output", DataType.string, "prediction")])

#: Kind of a NumPy dtype -> MLflow's type of a column.
COLUMN_TYPES = {"b": DataType.boolean, "i": DataType.long, "f": DataType.double, "O": DataType.string}


def write_mlflow_model(exported: Path, folder: Path, *, run_id: str, model_id: str) -> None:
    """Converts a folder from `scaleflow.model.export` to an MLflow model. `folder` must be empty."""
    if (exported / PLAIN_SIGNATURE).exists():
        write_plain_model(exported, folder, run_id=run_id, model_id=model_id)
        return
    metadata = json.loads((exported / "signature.json").read_text())
    data = folder / "data"
    data.mkdir(parents=True)
    for pattern in DATA:
        for path in exported.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, data / path.name)
    package = copy_serving_code(folder / "code")
    requirements = write_requirements(folder, metadata)
    state = LearnedState.from_json(json.loads((exported / "learned_state.json").read_text("utf-8")))
    signature = ModelSignature(make_input_schema(metadata["inputs"], state.pictures), make_output_schema(state), PARAMS)
    model = Model(artifact_path="model", run_id=run_id, model_id=model_id, signature=signature)
    write_input_example(model, read_example(exported, state.pictures), folder)
    write_model_file(model, folder, f"{package}.loader", metadata, requirements)


def write_plain_model(exported: Path, folder: Path, *, run_id: str, model_id: str) -> None:
    """Converts an exported model that answers in its own terms, such as that of a script, to an MLflow model."""
    described = json.loads((exported / PLAIN_SIGNATURE).read_text())
    data = folder / "data"
    data.mkdir(parents=True)
    shutil.copytree(exported / "saved_model", data / "saved_model")
    for name in (PLAIN_SIGNATURE, "model.keras"):
        if (exported / name).exists():
            shutil.copy(exported / name, data / name)
    package = copy_serving_code(folder / "code")
    requirements = write_requirements(folder, described)
    signature = ModelSignature(make_plain_schema(described["inputs"]), make_plain_schema(described["outputs"]))
    model = Model(artifact_path="model", run_id=run_id, model_id=model_id, signature=signature)
    write_model_file(model, folder, f"{package}.plain_model", described, requirements)


def write_model_file(
    model: Model, folder: Path, loader: str, exporter: Mapping[str, Any], requirements: Sequence[str]
) -> None:
    """Writes the file `MLmodel` of an MLflow model.

    Args:
        loader: the dotted name of the module that loads the model.
        exporter: the versions of `tensorflow` and `keras` in the worker that exported the model.
        requirements: the packages that a server needs.
    """
    add_to_model(
        model,
        loader_module=loader,
        data="data",
        code="code",
        conda_env="conda.yaml",
        python_env="python_env.yaml",
    )
    model.metadata = {
        "tensorflow": exporter["tensorflow"],
        "keras": exporter["keras"],
        "requirements": list(requirements),
    }
    model.save(str(folder / "MLmodel"))


def make_plain_schema(described: Mapping[str, Any]) -> Schema:
    """Returns the schema of the inputs or the outputs of a plain model. A single text per example is a column."""
    tensors = described["tensors"]
    if described["form"] == "one":
        return make_tensor_schema(tensors[0])
    return make_tensor_schema({tensor["name"]: tensor for tensor in tensors})


def copy_serving_code(folder: Path) -> str:
    """Copies the modules of `scaleflow.serving` to a new package and returns its name.

    The name contains a digest of the code, because one process may load models from several versions of scaleflow.
    """
    spec = find_spec(SERVING)
    assert spec is not None
    assert spec.origin is not None
    sources = {path.name: path.read_text("utf-8") for path in sorted(Path(spec.origin).parent.glob("*.py"))}
    package = f"scaleflow_serving_{hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:8]}"
    (folder / package).mkdir(parents=True)
    for name, text in sources.items():
        (folder / package / name).write_text(text.replace(f"{SERVING}.", f"{package}."), "utf-8")
    return package


def read_example(exported: Path, pictures: Any) -> Any:
    """Returns the input example: an array, or a dict of arrays by name. With pictures, a DataFrame."""
    single = exported / "input_example.npy"
    if single.is_file():
        example = np.load(single)
        if pictures:
            return pd.DataFrame({"picture": decode_pictures(example)})
        return example
    with np.load(exported / "input_example.npz") as arrays:
        named = dict(arrays)
    if not pictures:
        return named
    columns = {}
    for name, values in named.items():
        columns[name] = decode_pictures(values) if name in pictures else list(values)
    return pd.DataFrame(columns)


def decode_pictures(texts: Any) -> list[bytes]:
    return [base64.b64decode(text) for text in texts]


def make_input_schema(tensors: dict[str, Any], pictures: Any = ()) -> Schema:
    """Returns the schema of the inputs: columns if there are several inputs with a single value each, else tensors.

    Columns have no type, and the loader converts their values. With a schema of tensors, MLflow accepts a DataFrame
    only if its index starts at 0 and its first row has no None and no dates. With numeric columns, it rejects integers.
    A picture is a column of bytes, which is base64 in JSON.
    """
    named = name_tensors(tensors)
    if list(pictures) == [""]:
        return Schema([ColSpec(DataType.binary)])
    has_single_values = all(len(tensor["shape"]) == 1 or name in pictures for name, tensor in named.items())
    if "" in named or not has_single_values:
        return make_tensor_schema(tensors)
    columns = []
    for name in named:
        columns.append(ColSpec(DataType.binary if name in pictures else AnyType(), name))
    return Schema(columns)


def make_output_schema(state: LearnedState) -> Schema:
    """Returns the schema of the predictions. A column with a value for each position contains arrays."""
    outputs = name_leaves(state.outputs)
    logits = {name: np.zeros((1, *output.model_shape), output.dtype) for name, output in outputs.items()}
    columns = make_prediction_columns(outputs, logits)
    return Schema([ColSpec(to_column_type(values), name) for name, values in columns.items()])


def to_column_type(values: np.ndarray[Any, Any]) -> Any:
    """Returns MLflow's type for the cells of a column. `values` [1] or [1, ...] are an example of the column."""
    cell_type: Any = DataType.float if values.dtype == np.float32 else COLUMN_TYPES[values.dtype.kind]
    for _ in values.shape[1:]:
        cell_type = ArrayType(cell_type)
    return cell_type


def make_tensor_schema(tensors: dict[str, Any]) -> Schema:
    """Returns a schema of tensors. MLflow checks inputs against it before it calls the loader.

    MLflow's tensor schemas have no string type. One text per example becomes a string column. Clients may send it
    as a list, an array or a DataFrame. Several texts per example become objects, so a DataFrame may also have numbers.

    Args:
        tensors: `dtype` and `shape` of one tensor, or a dict of such dicts, whose keys name the tensors.
    """
    named = name_tensors(tensors)
    if set(named) != {""}:
        return Schema([to_tensor_spec(tensor, name) for name, tensor in named.items()])
    if tensors["dtype"] == "string" and len(tensors["shape"]) == 1:
        return Schema([ColSpec("string")])
    return Schema([to_tensor_spec(tensors)])


def name_tensors(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Flattens nested descriptions of tensors to a dict by name. A name joins the keys with `/`."""
    if isinstance(tensors.get("dtype"), str):
        return {prefix: dict(tensors)}
    start = f"{prefix}/" if prefix else ""
    named: dict[str, dict[str, Any]] = {}
    for key, inner in tensors.items():
        named |= name_tensors(inner, start + key)
    return named


def to_tensor_spec(tensor: dict[str, Any], name: str | None = None) -> TensorSpec:
    """Returns MLflow's description of a tensor. Texts are objects, since its tensors have no string type."""
    dtype = np.dtype(object if tensor["dtype"] == "string" else tensor["dtype"])
    return TensorSpec(dtype, tuple(tensor["shape"]), name)


def write_requirements(folder: Path, exporter: Mapping[str, str]) -> list[str]:
    """Writes a server's requirements to MLflow's three files and returns them. `exporter` has the worker's versions."""
    requirements = [f"{name}=={exporter[name]}" for name in ("tensorflow", "keras")]
    requirements += [f"{name}=={version(name)}" for name in NEEDED]
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    write_environment(folder, requirements)
    return requirements
