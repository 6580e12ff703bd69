"""`hardware.xla`: compiles the model's forward and backward pass with XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import InputStructure, label_leaf, name_leaves
from scaleflow.training.synchronized import synchronized_layers


def with_xla(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function to one XLA program per combination of input shapes.

    Use it only for what a replica computes alone. XLA compiles neither the reading of data nor, on a CPU,
    communication between replicas.
    """
    compiled: Callable[..., Any] = tf.function(function, autograph=False, jit_compile=True)
    return compiled


def check_xla(model: keras.Model, inputs: InputStructure, strategy: tf.distribute.Strategy) -> None:
    """Rejects what is known not to compile. Otherwise the error would come in the first step only.

    Raises:
        ConfigError: if the inputs are text, or if layers communicate with other replicas.
    """
    for name, each in name_leaves(inputs).items():
        if each.dtype == "string":
            label = label_leaf("inputs", name)
            raise ConfigError(
                f"hardware.xla=true: the dataset's {label} are text, which XLA cannot compile; use hardware.xla=false"
            )
    if synchronized := synchronized_layers(model, strategy):
        replicas = strategy.num_replicas_in_sync
        raise ConfigError(
            f"hardware.xla=true: the layer {synchronized[0]} is synchronised over {replicas} "
            f"replica{'s' if replicas > 1 else ''}, inside what XLA compiles; use hardware.xla=false, or "
            "strategy=one_device"
        )
