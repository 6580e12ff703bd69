"""Selects and configures TensorFlow's devices, and returns their memory and peak speed."""

from scaleflow.hardware.devices import Devices, configure_devices
from scaleflow.hardware.memory import device_bytes
from scaleflow.hardware.peaks import process_peak

__all__ = ["Devices", "configure_devices", "device_bytes", "process_peak"]
