"""The most memory that this process has held, on the host and on its devices."""

from __future__ import annotations

import resource
import sys

import tensorflow as tf

#: `ru_maxrss` counts bytes on macOS and KiB elsewhere (getrusage(2)).
RSS_UNIT = 1 if sys.platform == "darwin" else 1 << 10
MIB = 1 << 20


def measure_peaks() -> dict[str, float]:
    """In MiB: resident on the host since the process began, and of each kind of device the fullest one's.

    TensorFlow keeps no such count for a CPU as a device, nor for a TPU.
    """
    found = {"perf/peak_host_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / MIB}
    used = [peak for peak in map(measure_device_peak, list_gpus()) if peak is not None]
    return found | ({"perf/peak_device_mb": max(used) / MIB} if used else {})


def measure_device_peak(device: str) -> int | None:
    """In bytes; None of a device that does not count."""
    try:
        return int(tf.config.experimental.get_memory_info(device)["peak"])
    except ValueError:
        return None


def list_gpus() -> list[str]:
    return [f"GPU:{number}" for number, _ in enumerate(tf.config.list_logical_devices("GPU"))]
