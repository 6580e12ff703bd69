"""Lets layers compute on the devices of another replica of a pipeline, with copies of their variables."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.strategy.stages import ModelStage


class ReplicaScope(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """Gives layers copies of their variables, made when the scope is created. Updates go to the variables themselves.

    So states (of random generators, moving averages) go on from one scope to the next, as they do between the
    micro-batches of one replica.

    Args:
        stages: the stages, whose variables exist once.
        devices: the device of each stage's copies.

    Attributes:
        copies: id(variable) -> its copy.
    """

    def __init__(self, stages: Sequence[ModelStage], devices: Sequence[str]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.copies = {
            id(variable): copy_value(variable, device)
            for stage, device in zip(stages, devices, strict=True)
            for variable in stage.variables
        }
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # Not by Keras, which would cast them to the dtype that the layer around computes in.
        self.state_mapping = dict(self.copies)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        value = self.state_mapping.get(id(variable))
        # In a loop, which is a graph of its own, a copy would stay what it was before the loop.
        is_in_loop = self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph
        return read_in_place(variable) if value is None or (is_in_loop and not variable.trainable) else value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if variable.trainable:  # the gradient of its copy would not contain what is computed after this
            raise ConfigError(
                f"strategy.replicas: the model changes its trained weights {variable.path} in its forward pass, which "
                "only one replica of a pipeline can do; use strategy.replicas=1, or another strategy"
            )
        # It is read again from the variable, because the value may be a tensor of an inner graph.
        self.state_mapping.pop(id(variable), None)
        with tf.device(variable._value.device):
            variable._direct_assign(value)


def copy_value(variable: keras.Variable, device: str) -> tf.Tensor:
    """Copies a variable's value to a device."""
    value = read_in_place(variable)
    with tf.device(device):
        return tf.identity(value)


def read_in_place(variable: keras.Variable) -> tf.Tensor:
    """Reads a variable on its own device."""
    with tf.device(variable._value.device):
        return tf.convert_to_tensor(variable._value)
