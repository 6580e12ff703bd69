"""Devices: which there are, and how TensorFlow is told to use them."""

from scaleflow.hardware.devices import Devices, configure

__all__ = ["Devices", "configure"]
