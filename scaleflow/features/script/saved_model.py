"""Saves the last fitted model of a script: as a Keras file, and as a SavedModel that MLflow serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from scaleflow.compat.keras import find_functional
from scaleflow.features.script.recorder import ScriptRecorder
from scaleflow.interfaces.events import ModelExported, Note
from scaleflow.model.export import SAVED_MODEL, digest_weights, use_first_copies
from scaleflow.runs import WorkerProcess
from scaleflow.serving.signature_files import PLAIN_SIGNATURE
from scaleflow.worker.failures import guard

#: The file with the Keras model.
KERAS_FILE = "model.keras"


def save_model(model: Any, inputs: Any, recorder: ScriptRecorder, process: WorkerProcess) -> None:
    """Saves a model to the run's folder, so that the launcher logs it. What cannot be saved becomes a note.

    Args:
        model: the model.
        inputs: the argument `x` of its `fit`: arrays, a structure of them, or a dataset.
    """
    folder = process.spec.files.model
    folder.mkdir(parents=True, exist_ok=True)
    with guard("the Keras file of the model", process.emit):
        model.save(folder / KERAS_FILE)
    is_served = False
    with guard("the model in the store", process.emit):
        specs = find_input_specs(model, inputs)
        if specs is None:
            process.emit(Note("the model is not logged: its inputs are unknown; begin it with keras.Input"))
        else:
            write_saved_model(model, specs, folder)
            is_served = True
    if is_served:
        process.emit(ModelExported(str(folder), recorder.step, digest_weights(model)))


def find_input_specs(model: Any, inputs: Any) -> Any:
    """Returns the `tf.TensorSpec`s of a model's inputs in their structure; None if they are unknown."""
    try:
        structure = model.input
    except (AttributeError, ValueError):  # a subclass of keras.Model, or one that was never called
        structure = None
    if structure is not None:
        return keras.tree.map_structure(lambda each: make_spec(each.shape, each.dtype, each.name), structure)
    if isinstance(inputs, tf.data.Dataset):
        element = inputs.element_spec
        first = element[0] if isinstance(element, tuple) else element
        return tf.nest.map_structure(lambda each: make_spec(each.shape, each.dtype, None), first)
    leaves = keras.tree.flatten(inputs)
    if not leaves or not all(hasattr(each, "shape") and hasattr(each, "dtype") for each in leaves):
        functional = find_functional(model)
        if functional is None:
            return None
        inputs = functional.input
    return keras.tree.map_structure(lambda each: make_spec(each.shape, each.dtype, None), inputs)


def make_spec(shape: Any, dtype: Any, name: str | None) -> tf.TensorSpec:
    """Returns the spec of a batch of any size."""
    return tf.TensorSpec([None, *list(shape)[1:]], tf.as_dtype(dtype), name=name)


def write_saved_model(model: Any, specs: Any, folder: Path) -> None:
    """Writes a SavedModel with the endpoint `serve`, which computes the model with `training=False`, and a description
    of its inputs and outputs.
    """

    def serve(given: Any) -> Any:
        return model(given, training=False)

    with use_first_copies(model):
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serve", serve, input_signature=[specs])
        archive.write_out(str(folder / SAVED_MODEL), verbose=False)
        traced = tf.function(serve, input_signature=[specs], autograph=False).get_concrete_function()
        outputs = traced.structured_outputs
    description = {
        "inputs": describe_tensors(specs, "input"),
        "outputs": describe_tensors(outputs, "output"),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    (folder / PLAIN_SIGNATURE).write_text(json.dumps(description))


def describe_tensors(structure: Any, kind: str) -> dict[str, Any]:
    """Returns the structure of tensors (`one`, `list` or `dict`), and the name, dtype and shape of each.

    Raises ValueError for a nested structure.
    """
    if isinstance(structure, Mapping):
        form = "dict"
        named = dict(structure)
    elif isinstance(structure, list | tuple):
        form = "list"
        named = {find_name(each, f"{kind}_{place}"): each for place, each in enumerate(structure)}
    else:
        form = "one"
        named = {"": structure}
    tensors: list[dict[str, Any]] = []
    for name, each in named.items():
        if not hasattr(each, "shape"):
            raise ValueError(f"the {kind}s of the model are nested")
        shape = [-1 if size is None else int(size) for size in each.shape]
        tensors.append({"name": str(name), "dtype": tf.as_dtype(each.dtype).name, "shape": shape})
    return {"form": form, "tensors": tensors}


def find_name(tensor: Any, default: str) -> str:
    name = getattr(tensor, "name", None)
    return str(name) if isinstance(tensor, tf.TensorSpec) and name else default
