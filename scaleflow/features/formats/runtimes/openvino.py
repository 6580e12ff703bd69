"""OpenVINO's format, for Intel processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.features.formats.formats import Calibration, Compute, ExportFormat, PortableModel

if TYPE_CHECKING:
    import numpy as np

#: One thread, and float32 even on processors that would compute in lower precision.
OPTIONS = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}

#: The converter's message about an operation that it cannot express.
UNSUPPORTED = r"No translator found for (?:the following operation[^:]*: )?([\w, ]+)"


def write_openvino(model: PortableModel, path: Path, calibration: Calibration) -> None:
    import openvino

    # Not `convert_model`: it sends usage data to a server.
    openvino.save_model(openvino.Core().read_model(str(model.folder)), str(path), compress_to_fp16=False)


def open_openvino(path: Path) -> Compute:
    import openvino

    model = openvino.Core().compile_model(str(path), "CPU", OPTIONS)
    used: set[str] = set()
    for port in model.inputs:
        used |= set(port.names)

    def compute(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Mapping[str, np.ndarray[Any, Any]]:
        values = model({name: array for name, array in arrays.items() if name in used})
        named: dict[str, Any] = {}
        for port, value in values.items():
            named |= dict.fromkeys(port.names, value)
        return named

    return compute


FORMATS = (
    ExportFormat(
        name="openvino",
        file="model.xml",
        modules=("openvino",),
        extra="openvino",
        convert=write_openvino,
        open=open_openvino,
        unsupported=UNSUPPORTED,
    ),
)
