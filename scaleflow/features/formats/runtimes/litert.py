"""LiteRT, for phones and small devices, in float32 and int8. Only its built-in operations are used."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.features.formats.formats import Calibration, Compute, ExportFormat, PortableModel

if TYPE_CHECKING:
    import numpy as np

SIGNATURE = "portable"

#: The converter's message about an operation that it cannot express.
UNSUPPORTED = r"'tf\.(\w+)' op is neither a custom op nor a flex op"


def write_litert(model: PortableModel, path: Path, calibration: Calibration, is_int8: bool) -> None:
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(str(model.folder), signature_keys=[SIGNATURE])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]  # not TensorFlow's: other runtimes lack them
    if is_int8:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: ((SIGNATURE, dict(example)) for example in calibration())
        converter.target_spec.supported_ops += [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    path.write_bytes(converter.convert())


def open_litert(path: Path) -> Compute:
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(model_path=str(path), num_threads=1).get_signature_runner(SIGNATURE)

    def compute(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Mapping[str, np.ndarray[Any, Any]]:
        outputs: Mapping[str, np.ndarray[Any, Any]] = run(**arrays)
        return outputs

    return compute


def make_format(name: str, is_int8: bool) -> ExportFormat:
    return ExportFormat(
        name=name,
        file="model.tflite",
        modules=("ai_edge_litert",),
        extra="litert",
        convert=functools.partial(write_litert, is_int8=is_int8),
        open=open_litert,
        unsupported=UNSUPPORTED,
        is_quantized=is_int8,
    )


FORMATS = (make_format("litert", False), make_format("litert_int8", True))
