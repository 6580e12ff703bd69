"""Selects and configures TensorFlow's devices, and returns their peak speed."""

from scaleflow.hardware.devices import Devices, apply_debug, configure_devices, process_peak
