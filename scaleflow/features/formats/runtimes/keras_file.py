"""The Keras file, which every export has. Its runtime is Keras."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.features.formats.formats import Compute, ExportFormat
from scaleflow.interfaces.data import name_leaves

if TYPE_CHECKING:
    import numpy as np

#: Environment variables: the modules of the user's layers, and whether code in the file is forbidden.
MODULES = "SCALEFLOW_EXPORT_MODULES"
IS_SAFE = "SCALEFLOW_EXPORT_SAFE"


def open_keras_file(path: Path) -> Compute:
    os.environ["TF_NUM_INTRAOP_THREADS"] = os.environ["TF_NUM_INTEROP_THREADS"] = "1"
    import keras
    import tensorflow as tf

    for module in filter(None, os.environ.get(MODULES, "").split(",")):
        import_module(module)
    model = keras.models.load_model(path, compile=False, safe_mode=os.environ.get(IS_SAFE) != "no")
    run = tf.function(lambda inputs: model(inputs, training=False), autograph=False, reduce_retracing=True)

    def compute(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Mapping[str, np.ndarray[Any, Any]]:
        inputs: dict[str, Any] = {}
        for name, array in arrays.items():
            *parents, leaf = name.split("/")
            place = inputs
            for parent in parents:
                place = place.setdefault(parent, {})
            place[leaf] = tf.constant(array)
        outputs = run(inputs.get("", inputs))
        return {name: tensor.numpy() for name, tensor in name_leaves(outputs).items()}

    return compute


FORMATS = (ExportFormat(name="keras", file="model.keras", open=open_keras_file, takes_raw=True),)
