"""Packages a model that a worker exported as an MLflow model, without TensorFlow.

MLflow's own savers write either the Keras file or the SavedModel. This model contains both, and a loader in `code/`, so
that a server does not need scaleflow:

    MLmodel  requirements.txt  python_env.yaml  conda.yaml  input_example.json
    code/scaleflow_loader.py
    data/model.keras           keras.models.load_model; data/model.weights.h5 if Keras cannot write the model
    data/saved_model/          tf.saved_model.load
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mlflow.models import Model, ModelSignature
from mlflow.models.utils import _save_example
from mlflow.pyfunc import add_to_model
from mlflow.types import ColSpec, Schema, TensorSpec
from mlflow.types.schema import AnyType
from mlflow.utils.environment import _mlflow_conda_env, _PythonEnv

LOADER = "scaleflow_loader"


def write_mlflow_model(exported: Path, folder: Path, *, run_id: str, model_id: str) -> None:
    """Writes the folder that `scaleflow.model.export` wrote as an MLflow model into an empty folder."""
    metadata = json.loads((exported / "signature.json").read_text())
    data = folder / "data"
    data.mkdir(parents=True)
    for pattern in ("model.*", "learned_state.*"):
        for file in exported.glob(pattern):
            shutil.copy(file, data)
    shutil.copytree(exported / "saved_model", data / "saved_model")
    code = folder / "code"
    code.mkdir()
    shutil.copy(Path(__file__).with_name("loader.py"), code / f"{LOADER}.py")
    requirements = write_requirements(folder, metadata["tensorflow"])
    signature = ModelSignature(make_input_schema(metadata["inputs"]), make_tensor_schema(metadata["outputs"]))
    model = Model(artifact_path="model", run_id=run_id, model_id=model_id, signature=signature)
    _save_example(model, read_example(exported), str(folder))
    add_to_model(
        model, loader_module=LOADER, data="data", code="code", conda_env="conda.yaml", python_env="python_env.yaml"
    )
    model.metadata = {"tensorflow": metadata["tensorflow"], "keras": metadata["keras"], "requirements": requirements}
    model.save(str(folder / "MLmodel"))


def read_example(exported: Path) -> Any:
    """Returns the example of the inputs: an array, or a dict of arrays by name."""
    single = exported / "input_example.npy"
    if single.is_file():
        return np.load(single)
    with np.load(exported / "input_example.npz") as arrays:
        return dict(arrays)


def make_input_schema(tensors: dict[str, Any]) -> Schema:
    """Returns the schema of the inputs: columns if there are several inputs with a single value each, else tensors.

    MLflow takes a DataFrame for tensors only if its index begins with 0 and its first row has no None and no dates, and
    for columns of numbers it refuses integers. So the columns have no type, and the loader converts their values.
    """
    named = name_tensors(tensors)
    if "" not in named and all(len(tensor["shape"]) == 1 for tensor in named.values()):
        return Schema([ColSpec(AnyType(), name) for name in named])
    return make_tensor_schema(tensors)


def make_tensor_schema(tensors: dict[str, Any]) -> Schema:
    """Returns the schema of tensors, which MLflow checks inputs against before it calls the loader.

    MLflow's tensor schemas have no string type. One text per example becomes a string column, which may be a list, an
    array or a DataFrame. Several texts per example become objects, so that a DataFrame may also have numbers.

    Args:
        tensors: `dtype` and `shape` of one tensor, or a dict of such dicts, whose tensors are named in the schema.
    """
    named = name_tensors(tensors)
    if set(named) != {""}:
        return Schema([to_tensor_spec(tensor, name) for name, tensor in named.items()])
    if tensors["dtype"] == "string" and len(tensors["shape"]) == 1:
        return Schema([ColSpec("string")])
    return Schema([to_tensor_spec(tensors)])


def name_tensors(tensors: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Returns the descriptions of tensors by name: the keys of nested dicts, joined with `/`."""
    if isinstance(tensors.get("dtype"), str):
        return {prefix: tensors}
    start = f"{prefix}/" if prefix else ""
    return {name: each for key, part in tensors.items() for name, each in name_tensors(part, start + key).items()}


def to_tensor_spec(tensor: dict[str, Any], name: str | None = None) -> TensorSpec:
    return TensorSpec(
        np.dtype(object if tensor["dtype"] == "string" else tensor["dtype"]), tuple(tensor["shape"]), name
    )


def write_requirements(folder: Path, tensorflow: str) -> list[str]:
    """Writes a server's requirements in MLflow's three files, and returns them."""
    requirements = [f"mlflow=={version('mlflow')}", f"tensorflow=={tensorflow}", f"keras=={version('keras')}"]
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    _PythonEnv.current().to_yaml(str(folder / "python_env.yaml"))
    _mlflow_conda_env(path=str(folder / "conda.yaml"), additional_pip_deps=requirements[1:])
    return requirements
