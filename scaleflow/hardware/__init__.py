"""Devices: which there are, and how TensorFlow is told to use them."""

from scaleflow.hardware.devices import Devices, configure_devices
from scaleflow.hardware.memory import device_bytes
from scaleflow.hardware.peaks import process_peak

__all__ = ["Devices", "configure_devices", "device_bytes", "process_peak"]
