"""The objective of an ensemble, each of whose members minimises a loss of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import HELD_OUT, MEMBERS, PREDICTION, SHARES, Objective


def average_losses(goal: Objective) -> Objective:
    """Returns an objective that minimises the mean of the members' losses, and reports those of their average.

    Its loss takes {PREDICTION: outputs, MEMBERS: outputs [b, k, ...]}, as the model returns them in training, and with
    folds also SHARES: the weight of each member's loss [b, k]. Evaluations then are of HELD_OUT.
    """

    def loss(targets: Any, outputs: Any) -> tf.Tensor:
        count = tf.nest.flatten(outputs[MEMBERS])[0].shape[1]
        apart = tf.nest.map_structure(lambda each: tf.reshape(each, [-1, *each.shape[2:]]), outputs[MEMBERS])
        repeated = tf.nest.map_structure(lambda each: tf.repeat(each, count, axis=0), targets)
        losses = tf.reshape(goal.loss(repeated, apart), [-1, count])
        return tf.reduce_mean(losses * outputs[SHARES] if SHARES in outputs else losses, axis=1)

    def report(outputs: Any, evaluates: bool) -> Any:
        return outputs[HELD_OUT if evaluates and HELD_OUT in outputs else PREDICTION]

    return replace(goal, loss=loss, reported_loss=goal.reported_loss or goal.loss, report=report)
