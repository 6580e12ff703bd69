"""Selects and configures TensorFlow's devices, and returns their peak speed."""

from scaleflow.hardware.devices import Devices, configure_devices
from scaleflow.hardware.peaks import process_peak

__all__ = ["Devices", "configure_devices", "process_peak"]
