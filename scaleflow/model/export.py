"""Writes a trained model in both forms, and makes sure that what was written is what was trained."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ExportError
from scaleflow.interfaces import Inputs, Outputs

KERAS_FILE = "model.keras"
WEIGHTS_FILE = "model.weights.h5"
SAVED_MODEL = "saved_model"
SIGNATURE = "signature.json"
EXAMPLE = "input_example.npy"

#: How far the SavedModel may be from the live model, relative to the largest output.
TOLERANCE = {"float32": 1e-4, "mixed_float16": 1e-2, "mixed_bfloat16": 5e-2}


def write_model(
    model: keras.Model,
    inputs: Inputs,
    outputs: Outputs,
    batch: np.ndarray[Any, Any],
    policy: str,
    folder: Path,
    on_host: bool = False,
    preprocessing_model: Callable[[], keras.Layer] | None = None,
) -> None:
    """Exports the model into `folder`, loads the SavedModel again and compares.

    The folder then holds `model.keras` (the Keras file; `model.weights.h5` if Keras cannot write one), `saved_model/`
    (one endpoint `serve` from raw inputs [batch, *inputs.shape] to [batch, *outputs.shape] float32), `signature.json`
    and `input_example.npy`.

    Args:
        model: trained.
        inputs, outputs: what the dataset says it takes and returns.
        batch: a few raw inputs, to compare on and to keep as the example.
        policy: the dtype policy it computes in, which decides how equal is equal.
        folder: is made.
        preprocessing_model: makes the preprocessing that the saved model begins with, so that it takes raw inputs.
        on_host: compare in the host's memory, where the model is too large for a device.

    Raises:
        ExportError: if the outputs differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_whole = keras_file_fault(model) is None
    if not is_whole:
        model.save_weights(folder / WEIGHTS_FILE)  # without the preprocessing: that is for the model's own code
    if preprocessing_model is not None:
        model = add_preprocessing(preprocessing_model(), model, inputs)
    if is_whole:
        model.save(folder / KERAS_FILE)
    spec = tf.TensorSpec([None, *inputs.shape], inputs.dtype, name="inputs")
    write_saved_model(model, spec, folder / SAVED_MODEL)
    with tf.device("CPU:0") if on_host else contextlib.nullcontext():
        check_export(model, batch, TOLERANCE[policy], folder)
    np.save(folder / EXAMPLE, to_numpy_strings(batch[:2]) if inputs.dtype == "string" else batch[:2])
    signature = {
        "inputs": {"dtype": inputs.dtype, "shape": [-1, *inputs.shape]},
        "outputs": {"dtype": "float32", "shape": [-1, *outputs.shape]},
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    (folder / SIGNATURE).write_text(json.dumps(signature, indent=2))


def write_saved_model(model: keras.Model, spec: tf.TensorSpec, folder: Path) -> None:
    """Writes the model as it is in an evaluation.

    Keras's `model.export` leaves it to each layer whether it trains: its random layers (`RandomFlip`, ...) then do.
    """
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", lambda inputs: model(inputs, training=False), input_signature=[spec])
    archive.write_out(folder, verbose=False)


def keras_file_fault(model: keras.Model) -> str | None:
    """Why Keras cannot write a model as a Keras file; None if it can. Looks at the config alone, no weights."""
    try:
        json.dumps(keras.saving.serialize_keras_object(model))
    except Exception as error:  # whatever the `get_config` of a layer raises
        reason = " ".join(str(error).split()).partition(". ")[0]
        return f"{type(error).__name__}: {reason}"
    return None


def add_preprocessing(preprocessing_model: keras.Layer, model: keras.Model, inputs: Inputs) -> keras.Model:
    """The model behind its preprocessing."""
    own = keras.Input(inputs.shape, dtype=inputs.dtype)
    first = keras.Model(
        own, preprocessing_model(own), name=f"{model.name}_preprocessing"
    )  # its layers may be called as the model is
    raw = keras.Input(inputs.shape, dtype=inputs.dtype, name="inputs")
    return keras.Model(raw, model(first(raw)), name=f"{model.name}_on_raw_inputs")


def to_numpy_strings(batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Strings as numpy's own type, which a file holds without pickle."""
    words = [word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in batch.ravel()]
    return np.array(words).reshape(batch.shape)


def check_export(model: keras.Model, batch: np.ndarray[Any, Any], tolerance: float, folder: Path) -> None:
    """Compares the SavedModel, loaded from disk, with the live model."""
    live = tf.function(lambda x: model(x, training=False))(tf.constant(batch)).numpy()
    loaded = tf.saved_model.load(str(folder / SAVED_MODEL))  # keeps its variables alive
    saved = loaded.serve(tf.constant(batch)).numpy()
    difference = float(np.max(np.abs(live - saved), initial=0.0))
    largest = float(np.max(np.abs(live), initial=1.0))
    if not difference <= tolerance * largest:
        raise ExportError(
            f"the SavedModel's outputs differ from the trained model's by {difference:.3g}, "
            f"where {tolerance * largest:.3g} is allowed; its folder is {folder}"
        )
