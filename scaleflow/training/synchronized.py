"""Layers that communicate with other replicas in the forward pass, such as a synchronized BatchNormalization."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

#: Under these, replicas communicate with a call that TensorFlow allows neither in a graph loop nor in an XLA program.
STRATEGIES_THAT_MEET = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
)


def list_synchronized_layers(model: keras.Model, strategy: tf.distribute.Strategy) -> list[str]:
    """Names the layers, at any depth, that communicate with the other replicas in a training step.

    A frozen BatchNormalization uses its stored statistics, so it does not communicate.
    """
    if not isinstance(strategy, STRATEGIES_THAT_MEET):
        return []
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "synchronized", False)]
    return [layer.name for layer in layers if layer.trainable]


def list_aggregated_variables(model: keras.Model, strategy: tf.distribute.Strategy) -> list[str]:
    """Lists the paths of the variables that a change in the forward pass would combine over the replicas.

    Those of Keras's layers are not: each replica has its own seeds, and its own statistics without `synchronized`.
    """
    if not isinstance(strategy, STRATEGIES_THAT_MEET):
        return []
    return [variable.path for variable in model.non_trainable_variables if variable.aggregation != "none"]


def keep_losses_apart(model: keras.Model) -> None:
    """Gives each replica its own list of the losses that layers add.

    Keras has one list per layer. Replicas that synchronize in the forward pass run it interleaved, each in its own
    thread. With a shared list, one replica would clear or use the losses of another.
    """
    for layer in model._flatten_layers():
        object.__setattr__(layer, "_losses", ReplicaLosses())


class ReplicaLosses(threading.local):
    """The losses that a layer adds in this thread, with the methods of a list that Keras calls."""

    def __init__(self) -> None:
        self._losses: list[Any] = []

    def __getitem__(self, place: slice) -> list[Any]:
        return self._losses[place]

    def extend(self, losses: Iterable[Any]) -> None:
        self._losses.extend(losses)

    def clear(self) -> None:
        self._losses.clear()
