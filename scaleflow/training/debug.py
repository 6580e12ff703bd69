"""TensorFlow's debugging switches (config group `debug`)."""

from __future__ import annotations

import tensorflow as tf

from scaleflow.interfaces import Debug


def apply_debug(debug: Debug) -> None:
    """Configures this process. Call it before any operation runs."""
    if debug.placement:
        tf.debugging.set_log_device_placement(True)
    if debug.nan:
        tf.debugging.enable_check_numerics()
    if debug.eager:
        tf.config.run_functions_eagerly(True)
