"""Keras dtype policies. Variables, gradients and the model's outputs are float32 under all of them."""

from __future__ import annotations

import keras

from scaleflow.interfaces import Precision


def resolve_policy(options: Precision, kind: str) -> str:
    """Returns the policy's name; resolves `mixed` by the kind of device (`CPU`, `GPU` or `TPU`)."""
    if options.name != "mixed":
        return options.name
    return "mixed_float16" if kind == "GPU" else "mixed_bfloat16"


def apply_policy(policy: str) -> None:
    """Makes `policy` the default of all layers that are built after this call."""
    keras.config.set_dtype_policy(policy)
