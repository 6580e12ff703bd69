"""Devices: which there are, and how TensorFlow is told to use them."""

from scaleflow.hardware.devices import Devices, configure
from scaleflow.hardware.memory import device_bytes
from scaleflow.hardware.peaks import peak

__all__ = ["Devices", "configure", "device_bytes", "peak"]
