"""ONNX. tf2onnx converts, onnxruntime computes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.features.formats.formats import Calibration, Compute, ExportFormat, PortableModel

if TYPE_CHECKING:
    import numpy as np

#: Version of ONNX's operations: the newest that tf2onnx writes.
OPSET = 18

#: Messages of onnxruntime about an operation that it lacks.
UNSUPPORTED = r"No Op registered for (\w+)|Could not find an implementation for (\w+)"


def write_onnx(model: PortableModel, path: Path, calibration: Calibration) -> None:
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    signature = list(model.specs.values())
    tf2onnx.convert.from_function(model.function, input_signature=signature, opset=OPSET, output_path=str(path))


def open_onnx(path: Path) -> Compute:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    input_names = {model_input.name for model_input in session.get_inputs()}

    def compute(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Mapping[str, np.ndarray[Any, Any]]:
        values = session.run(None, {name: array for name, array in arrays.items() if name in input_names})
        return dict(zip(names, values, strict=True))

    return compute


FORMATS = (
    ExportFormat(
        name="onnx",
        file="model.onnx",
        modules=("tf2onnx", "onnxruntime"),
        extra="onnx",
        convert=write_onnx,
        open=open_onnx,
        unsupported=UNSUPPORTED,
    ),
)
