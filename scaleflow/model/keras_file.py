"""A saved Keras model (`keras.Model.save`) with its weights."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from scaleflow.errors import ConfigError
from scaleflow.interfaces import InputStructure, OutputStructure, map_leaves
from scaleflow.interfaces.options import check_options
from scaleflow.model.initial import load_keras_file


@check_options("model")
def build(inputs: InputStructure, outputs: OutputStructure, path: str) -> keras.Model:
    """Loads a saved model. Training continues from its weights, with the run's loss, metrics and optimizer.

    If the model was compiled with a different loss, the run is rejected (`worker/compiled.py`). Layers that were saved
    as not trainable stay frozen.

    Args:
        inputs: numbers of the shapes that the model takes.
        outputs: the outputs that the dataset needs. The model returns logits or values for them.
        path: the file.

    conf/model/keras_file.yaml describes the other arguments.

    Raises:
        ConfigError: if the file cannot be loaded, or takes inputs of other shapes.
    """
    if not Path(path).is_file():
        raise ConfigError(f"model.path={path}: there is no such file; use a file that keras.Model.save wrote")
    model = load_keras_file(path, f"model.path={path}")
    expected = map_leaves(lambda leaf: (None, *leaf.shape), inputs)
    if not isinstance(expected, dict) and not fits(model.input_shape, expected):
        raise ConfigError(
            f"model.path={path}: the model takes inputs of the shape {model.input_shape}, and the dataset gives "
            f"{expected}"
        )
    return model


def read_compile_config(path: str) -> Mapping[str, Any] | None:
    """Returns Keras's compile config of a saved model; None if it was not compiled, or only by KerasHub."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
        compiled = None if str(config.get("module")).startswith("keras_hub") else config.get("compile_config")
    else:
        import h5py

        with h5py.File(path) as file:
            compiled = json.loads(file.attrs.get("training_config", "null"))
    return compiled if isinstance(compiled, Mapping) and compiled else None


def fits(model_shape: object, shape: tuple[int | None, ...]) -> bool:
    """Returns whether a model takes tensors of a shape. None in one of the shapes stands for any size."""
    if not isinstance(model_shape, tuple) or len(model_shape) != len(shape):
        return False
    return all(None in pair or pair[0] == pair[1] for pair in zip(model_shape, shape, strict=True))
