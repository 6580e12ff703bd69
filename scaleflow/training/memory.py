"""Peak memory of this process, on the host and on its devices."""

from __future__ import annotations

import resource
import sys

import tensorflow as tf

#: `ru_maxrss` counts bytes on macOS and KiB elsewhere (getrusage(2)).
RSS_UNIT = 1 if sys.platform == "darwin" else 1 << 10
MIB = 1 << 20


def measure_peaks() -> dict[str, float]:
    """Returns the peaks since the process began, in MiB: resident host memory, and the largest of the GPUs.

    TensorFlow keeps no such count for CPU and TPU devices.
    """
    host = {"perf/peak_host_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / MIB}
    device_peaks = [peak for peak in map(measure_device_peak, list_gpu_names()) if peak is not None]
    return host | ({"perf/peak_device_mb": max(device_peaks) / MIB} if device_peaks else {})


def measure_device_peak(device: str) -> int | None:
    """Returns the peak of a device in bytes; None if TensorFlow does not count it."""
    try:
        return int(tf.config.experimental.get_memory_info(device)["peak"])
    except ValueError:
        return None


def list_gpu_names() -> list[str]:
    return [f"GPU:{number}" for number, _ in enumerate(tf.config.list_logical_devices("GPU"))]
