"""Keras dtype policies. Variables, gradients and the model's outputs are float32 under each of them."""

from __future__ import annotations

import keras

from scaleflow.interfaces import Precision


def resolve_policy(options: Precision, kind: str) -> str:
    """The policy's name, `mixed` decided by the kind of device (`CPU`, `GPU` or `TPU`)."""
    if options.name != "mixed":
        return options.name
    return "mixed_float16" if kind == "GPU" else "mixed_bfloat16"


def apply_policy(policy: str) -> None:
    """Makes `policy` the default of layers built from now on."""
    keras.config.set_dtype_policy(policy)
