"""Probes TensorFlow on this machine in a separate process, because TensorFlow's libraries can hang or crash.

`python -m scaleflow.features.doctor.tensorflow_probe` prints one JSON object in the last line of standard output. On a
GPU it takes only the memory of a small multiplication. It does not touch a TPU, because that would take the TPU from
its current user.
"""

import ctypes
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scaleflow.errors import read_reason
from scaleflow.interfaces import Hardware, Precision, Strategy
from scaleflow.worker.keras_import import import_keras

DTYPES = ("float32", "float16", "bfloat16")


def main() -> None:
    print(json.dumps(probe_tensorflow()))


def probe_tensorflow() -> dict[str, Any]:
    """Returns versions, devices, libraries, and the resolution of `auto` and `mixed` on these devices."""
    import_keras()
    import keras
    import tensorflow as tf

    from scaleflow import hardware, precision, strategy

    physical = tf.config.list_physical_devices()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    devices = hardware.configure_devices(Hardware())
    return {
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
        "devices": [describe_device(device) for device in physical],
        "cuda": describe_cuda(dict(tf.sysconfig.get_build_info())),
        "kind": devices.kind,
        "strategy": strategy.resolve_strategy(Strategy(), devices.names),
        "mixed": {kind: precision.resolve_policy(Precision("mixed"), kind) for kind in ("CPU", "GPU", "TPU")},
        "computes": {dtype: multiplication_error(dtype, devices.names[0]) for dtype in DTYPES},
    }


def describe_device(device: Any) -> dict[str, Any]:
    """Returns a physical device's name and kind, and a GPU's model and compute capability."""
    import tensorflow as tf

    details = tf.config.experimental.get_device_details(device) if device.device_type == "GPU" else {}
    capability = details.get("compute_capability")
    return {
        "name": device.name.rpartition("physical_device:")[2],
        "kind": device.device_type,
        "model": details.get("device_name"),
        "compute_capability": None if capability is None else ".".join(map(str, capability)),
    }


def multiplication_error(dtype: str, device: str) -> str | None:
    """Returns why a small multiplication fails, or None if its result is right."""
    import tensorflow as tf

    try:
        with tf.device(device):
            total = tf.reduce_sum(tf.matmul(tf.ones([8, 8], dtype), tf.ones([8, 8], dtype))).numpy()
    except Exception as error:
        return f"{type(error).__name__}: {read_reason(error)}"
    return None if float(total) == 512 else f"the sum of 8 x 8 eights came out as {total}"


def describe_cuda(build: dict[str, Any]) -> dict[str, Any]:
    """Returns the CUDA and cuDNN versions that TensorFlow was built for, and which libraries it finds."""
    if not build.get("is_cuda_build"):
        absent = ("cuda", "cudnn", "cuda_found", "cudnn_found", "driver_found")
        return {"built": False, **dict.fromkeys(absent)}
    cuda = str(build.get("cuda_version", ""))
    cudnn = str(build.get("cudnn_version", ""))
    return {
        "built": True,
        "cuda": cuda,
        "cudnn": cudnn,
        "cuda_found": find_library("cuda_runtime", f"libcudart.so.{cuda.partition('.')[0]}"),
        "cudnn_found": find_library("cudnn", f"libcudnn.so.{cudnn.partition('.')[0]}"),
        "driver_found": can_load("libcuda.so.1"),
    }


def find_library(package: str, name: str) -> str | None:
    """Returns a library's path in NVIDIA's Python packages, `system` if the loader finds it elsewhere, or None."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, package, "lib", name)
        if path.exists():
            return str(path)
    return "system" if can_load(name) else None


def can_load(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
    sys.stdout.flush()
