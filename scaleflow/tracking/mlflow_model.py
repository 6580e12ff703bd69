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
from collections.abc import Mapping
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
    metadata = json.loads((exported / "signature.json").read_text())
    data = folder / "data"
    data.mkdir(parents=True)
    for path in (path for pattern in DATA for path in exported.glob(pattern)):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, data / path.name)
    package = copy_serving_code(folder / "code")
    requirements = write_requirements(folder, metadata)
    state = LearnedState.from_json(json.loads((exported / "learned_state.json").read_text("utf-8")))
    signature = ModelSignature(make_input_schema(metadata["inputs"], state.pictures), make_output_schema(state), PARAMS)
    model = Model(artifact_path="model", run_id=run_id, model_id=model_id, signature=signature)
    write_input_example(model, read_example(exported, state.pictures), folder)
    add_to_model(
        model,
        loader_module=f"{package}.loader",
        data="data",
        code="code",
        conda_env="conda.yaml",
        python_env="python_env.yaml",
    )
    model.metadata = {"tensorflow": metadata["tensorflow"], "keras": metadata["keras"], "requirements": requirements}
    model.save(str(folder / "MLmodel"))


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
        return pd.DataFrame({"picture": decode_pictures(example)}) if pictures else example
    with np.load(exported / "input_example.npz") as arrays:
        named = dict(arrays)
    if not pictures:
        return named
    return pd.DataFrame(
        {name: decode_pictures(each) if name in pictures else list(each) for name, each in named.items()}
    )


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
    if "" not in named and all(len(tensor["shape"]) == 1 or name in pictures for name, tensor in named.items()):
        return Schema([ColSpec(DataType.binary if name in pictures else AnyType(), name) for name in named])
    return make_tensor_schema(tensors)


def make_output_schema(state: LearnedState) -> Schema:
    """Returns the schema of the predictions. A column with a value for each position contains arrays."""
    outputs = name_leaves(state.outputs)
    empty = make_prediction_columns(
        outputs, {name: np.zeros((1, *each.model_shape), each.dtype) for name, each in outputs.items()}
    )
    return Schema([ColSpec(to_column_type(values), name) for name, values in empty.items()])


def to_column_type(values: np.ndarray[Any, Any]) -> Any:
    """Returns MLflow's type for the cells of a column. `values` [1] or [1, ...] are an example of the column."""
    found: Any = DataType.float if values.dtype == np.float32 else COLUMN_TYPES[values.dtype.kind]
    for _ in values.shape[1:]:
        found = ArrayType(found)
    return found


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
    return {name: each for key, part in tensors.items() for name, each in name_tensors(part, start + key).items()}


def to_tensor_spec(tensor: dict[str, Any], name: str | None = None) -> TensorSpec:
    return TensorSpec(
        np.dtype(object if tensor["dtype"] == "string" else tensor["dtype"]), tuple(tensor["shape"]), name
    )


def write_requirements(folder: Path, exporter: Mapping[str, str]) -> list[str]:
    """Writes a server's requirements to MLflow's three files and returns them. `exporter` has the worker's versions."""
    versions = {name: exporter[name] for name in ("tensorflow", "keras")} | {name: version(name) for name in NEEDED}
    requirements = [f"{name}=={each}" for name, each in versions.items()]
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    write_environment(folder, requirements)
    return requirements
