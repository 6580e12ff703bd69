"""Layers that compute with the other replicas in the middle of the forward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

#: Under these, replicas meet in a call that TensorFlow allows neither in a loop of the graph nor in a compiled part.
STRATEGIES_THAT_MEET = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
)


def synchronized_layers(model: keras.Model, strategy: tf.distribute.Strategy) -> list[str]:
    """The names of the layers, at any depth, whose training step waits for the other replicas.

    A frozen BatchNormalization uses its stored statistics, so it waits for nobody.
    """
    if not isinstance(strategy, STRATEGIES_THAT_MEET):
        return []
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "synchronized", False)]
    return [layer.name for layer in layers if layer.trainable]


def keep_losses_apart(model: keras.Model) -> None:
    """Gives each replica a list of its own for the losses that layers add.

    Keras has one list in each layer. Replicas that meet in the forward pass take turns in it, each in its own thread,
    so one would clear the losses of another, or take them for its own.
    """
    for layer in model._flatten_layers():
        object.__setattr__(layer, "_losses", ReplicaLosses())


class ReplicaLosses(threading.local):
    """The losses that a layer has added in this thread, as the list that Keras expects."""

    def __init__(self) -> None:
        self._losses: list[Any] = []

    def __getitem__(self, place: slice) -> list[Any]:
        return self._losses[place]

    def extend(self, losses: Iterable[Any]) -> None:
        self._losses.extend(losses)

    def clear(self) -> None:
        self._losses.clear()
