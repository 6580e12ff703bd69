"""Exports a trained model as a Keras file and a SavedModel, and checks that the SavedModel computes the same."""

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

#: The largest allowed difference between SavedModel and live model, relative to the largest output (at least 1).
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
    """Exports the model into `folder`, loads the SavedModel again and compares the outputs.

    The folder then holds `model.keras` (`model.weights.h5` if Keras cannot write a Keras file), `saved_model/` (one
    endpoint `serve` from raw inputs [batch, *inputs.shape] to [batch, *outputs.shape] float32), `signature.json` and
    `input_example.npy`.

    Args:
        model: the trained model.
        inputs, outputs: the dataset's description of raw inputs and of outputs.
        batch: raw inputs [b, *inputs.shape] for the comparison; the first two become the input example.
        policy: the model's dtype policy, which sets the tolerance.
        folder: created if missing.
        on_host: compare in the host's memory, for a model that is too large for one device.
        preprocessing_model: creates the preprocessing, which becomes the first part of the exported model.

    Raises:
        ExportError: if the outputs differ by more than the tolerance.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_whole = keras_file_fault(model) is None
    if not is_whole:
        model.save_weights(folder / WEIGHTS_FILE)  # no preprocessing: the user's code loads them into the model alone
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
    """Writes a SavedModel that runs with `training=False`.

    Keras's `model.export` sets no `training`, and random layers (`RandomFlip`, ...) then run in training mode.
    """
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", lambda inputs: model(inputs, training=False), input_signature=[spec])
    archive.write_out(folder, verbose=False)


def keras_file_fault(model: keras.Model) -> str | None:
    """Returns why Keras cannot write a model as a Keras file, or None if it can. Checks the config, not the weights."""
    try:
        json.dumps(keras.saving.serialize_keras_object(model))
    except Exception as error:  # a user's `get_config` can raise anything
        reason = " ".join(str(error).split()).partition(". ")[0]
        return f"{type(error).__name__}: {reason}"
    return None


def add_preprocessing(preprocessing_model: keras.Layer, model: keras.Model, inputs: Inputs) -> keras.Model:
    """Returns a model that applies the preprocessing to raw inputs, then `model`."""
    nested_raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    # A nested model, because a layer of the preprocessing may have the model's name.
    preprocess = keras.Model(nested_raw, preprocessing_model(nested_raw), name=f"{model.name}_preprocessing")
    raw = keras.Input(inputs.shape, dtype=inputs.dtype, name="inputs")
    return keras.Model(raw, model(preprocess(raw)), name=f"{model.name}_on_raw_inputs")


def to_numpy_strings(batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Converts strings to numpy's `str` dtype, which `np.save` writes without pickle."""
    words = [word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in batch.ravel()]
    return np.array(words).reshape(batch.shape)


def check_export(model: keras.Model, batch: np.ndarray[Any, Any], tolerance: float, folder: Path) -> None:
    """Compares the outputs of the SavedModel, loaded from disk, with the live model's."""
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
