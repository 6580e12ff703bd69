"""Makes an MLflow model of what a worker exported, without TensorFlow.

MLflow's own savers write either the Keras file or the SavedModel. Ours holds both, and a loader of its
own in `code/`, so that where it is served scaleflow is not needed:

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
from mlflow.utils.environment import _mlflow_conda_env, _PythonEnv

LOADER = "scaleflow_loader"


def write_mlflow_model(exported: Path, folder: Path, *, run_id: str, model_id: str) -> None:
    """Writes the MLflow model.

    Args:
        exported: the folder that `scaleflow.model.export` wrote.
        folder: empty; becomes the model.
        run_id, model_id: written into MLmodel.
    """
    described = json.loads((exported / "signature.json").read_text())
    data = folder / "data"
    data.mkdir(parents=True)
    for file in exported.glob("model.*"):
        shutil.copy(file, data)
    shutil.copytree(exported / "saved_model", data / "saved_model")
    code = folder / "code"
    code.mkdir()
    shutil.copy(Path(__file__).with_name("loader.py"), code / f"{LOADER}.py")
    requirements = write_environment(folder, described["tensorflow"])
    model = Model(artifact_path="model", run_id=run_id, model_id=model_id, signature=make_signature(described))
    _save_example(model, np.load(exported / "input_example.npy"), str(folder))
    add_to_model(
        model, loader_module=LOADER, data="data", code="code", conda_env="conda.yaml", python_env="python_env.yaml"
    )
    model.metadata = {"tensorflow": described["tensorflow"], "keras": described["keras"], "requirements": requirements}
    model.save(str(folder / "MLmodel"))


def make_signature(described: dict[str, Any]) -> ModelSignature:
    return ModelSignature(make_tensor_schema(described["inputs"]), make_tensor_schema(described["outputs"]))


def make_tensor_schema(tensor: dict[str, Any]) -> Schema:
    """What MLflow checks inputs against before the loader gets them.

    It takes text for no tensor's type: a single one is a column, which may be a list, an array or a DataFrame, and
    a row of them are objects, so that a DataFrame may have numbers in it.
    """
    if tensor["dtype"] != "string":
        return Schema([TensorSpec(np.dtype(tensor["dtype"]), tuple(tensor["shape"]))])
    if len(tensor["shape"]) == 1:
        return Schema([ColSpec("string")])
    return Schema([TensorSpec(np.dtype(object), tuple(tensor["shape"]))])


def write_environment(folder: Path, tensorflow: str) -> list[str]:
    """What a server has to install, in MLflow's three files."""
    requirements = [f"mlflow=={version('mlflow')}", f"tensorflow=={tensorflow}", f"keras=={version('keras')}"]
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    _PythonEnv.current().to_yaml(str(folder / "python_env.yaml"))
    _mlflow_conda_env(path=str(folder / "conda.yaml"), additional_pip_deps=requirements[1:])
    return requirements
