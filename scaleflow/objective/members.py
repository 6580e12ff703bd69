"""The objective of an ensemble, each of whose members minimises a loss of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import MEMBERS, PREDICTION, Objective


def average_losses(goal: Objective) -> Objective:
    """Returns an objective that minimises the mean of the members' losses, and reports those of their average.

    Its loss takes {PREDICTION: outputs, MEMBERS: outputs [b, k, ...]}, as the model returns them in training.
    """

    def loss(targets: Any, outputs: Any) -> tf.Tensor:
        count = tf.nest.flatten(outputs[MEMBERS])[0].shape[1]
        apart = tf.nest.map_structure(lambda each: tf.reshape(each, [-1, *each.shape[2:]]), outputs[MEMBERS])
        repeated = tf.nest.map_structure(lambda each: tf.repeat(each, count, axis=0), targets)
        return tf.reduce_mean(tf.reshape(goal.loss(repeated, apart), [-1, count]), axis=1)

    return replace(
        goal, loss=loss, reported_loss=goal.reported_loss or goal.loss, report=lambda outputs: outputs[PREDICTION]
    )
