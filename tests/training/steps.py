"""Training steps as a user writes them, good ones and others."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def smoothed(model: Any, batch: Any, weights: Any, smoothing: float = 0.1, consistency: float = 0.5) -> Any:
    """Label smoothing (Szegedy et al. 2015), and the same answer asked for where the input is shifted a little."""
    inputs, targets = batch
    outputs = model(inputs, training=True)
    shifted = model(inputs + 0.5, training=True)
    wanted = tf.one_hot(targets, outputs.shape[-1]) * (1 - smoothing) + smoothing / outputs.shape[-1]
    losses = tf.nn.softmax_cross_entropy_with_logits(wanted, outputs)
    losses += consistency * tf.reduce_mean(tf.square(outputs - shifted), axis=-1)
    return tf.reduce_sum(losses * weights), outputs


def flat(model: Any, batch: Any, weights: Any, penalty: float = 0.1) -> Any:
    """A penalty on the gradient with respect to the inputs: a tape inside the loop's."""
    inputs, targets = batch
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = model(inputs, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    slopes = tape.gradient(losses, inputs)
    losses += penalty * tf.reduce_sum(tf.square(slopes), axis=list(range(1, len(slopes.shape))))
    return tf.reduce_sum(losses * weights), outputs


def plain(model: Any, batch: Any, weights: Any) -> Any:
    """What the loop does without a step of the user's."""
    inputs, targets = batch
    outputs = model(inputs, training=True)
    losses = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    return tf.reduce_sum(losses * weights), outputs


class TwoRates:
    """The last layer learns at another rate than the rest."""

    def __init__(self, head_rate: float = 1.0) -> None:
        self.head_rate = head_rate

    def build(self, model: Any, make_optimizer: Any) -> None:
        *body, head = (layer.trainable_variables for layer in model.layers if layer.trainable_variables)
        self.body, self.head = [variable for layer in body for variable in layer], head
        self.optimizers = {"body": make_optimizer(self.body), "head": make_optimizer(self.head, self.head_rate)}

    def update(self, model: Any, batch: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, outputs = plain(model, batch, weights)
        body, head = tape.gradient(loss, [self.body, self.head])
        self.optimizers["body"].apply_gradients(zip(body, self.body, strict=True))
        self.optimizers["head"].apply_gradients(zip(head, self.head, strict=True))
        return loss, outputs


class Adversarial:
    """A second network learns to disturb the inputs, the model to answer all the same."""

    def __init__(self, strength: float = 2.0) -> None:
        self.strength = strength

    def build(self, model: Any, make_optimizer: Any) -> None:
        shape = model.input_shape[1:]
        self.adversary = keras.Sequential(
            [
                keras.Input(shape),
                keras.layers.Flatten(),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dense(int(tf.math.reduce_prod(shape)), activation="tanh"),
                keras.layers.Reshape(shape),
            ]
        )
        self.defend = make_optimizer(model.trainable_variables)
        self.attack = make_optimizer(self.adversary.trainable_variables, rate_factor=0.5)

    def update(self, model: Any, batch: Any, weights: Any) -> Any:
        inputs, targets = batch
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            disturbed = inputs + self.strength * self.adversary(inputs, training=True)
            loss, outputs = plain(model, (inputs, targets), weights)
            attacked, _ = plain(model, (disturbed, targets), weights)
            both, adverse = loss + attacked, -attacked
        self.defend.apply_gradients(
            zip(tape.gradient(both, model.trainable_variables), model.trainable_variables, strict=True)
        )
        own = self.adversary.trainable_variables
        self.attack.apply_gradients(zip(other.gradient(adverse, own), own, strict=True))
        return both, outputs


# What is refused -----------------------------------------------------------------------------


def of_examples(model: Any, batch: Any, weights: Any) -> Any:
    outputs = model(batch[0], training=True)
    return keras.losses.sparse_categorical_crossentropy(batch[1], outputs, from_logits=True) * weights, outputs


def counted(model: Any, batch: Any, weights: Any) -> Any:
    outputs = model(batch[0], training=True)
    return tf.reduce_sum(tf.cast(weights > 0, tf.int32)), outputs


def chosen(model: Any, batch: Any, weights: Any) -> Any:
    loss, outputs = plain(model, batch, weights)
    return loss, tf.argmax(outputs, axis=-1)


def alone(model: Any, batch: Any, weights: Any) -> Any:
    return plain(model, batch, weights)[0]


def half(model: Any, batch: Any, weights: Any) -> Any:
    return plain(model, batch, weights)[0], None


def unweighted(model: Any, batch: Any) -> Any:
    return plain(model, batch, 1.0)


def not_finite(model: Any, batch: Any, weights: Any) -> Any:
    """The loss of a batch with a bright pixel near a corner is not a number."""
    loss, outputs = plain(model, batch, weights)
    return tf.where(tf.reduce_max(batch[0][:, 0, 6]) > 15, tf.constant(float("nan")), loss), outputs


class OnlyUpdates:
    def update(self, model: Any, batch: Any, weights: Any) -> Any:
        return plain(model, batch, weights)


class UpdatesUnweighted(TwoRates):
    def update(self, model: Any, batch: Any) -> Any:  # type: ignore[override]
        return None


class ReturnsNothing(TwoRates):
    def update(self, model: Any, batch: Any, weights: Any) -> Any:
        super().update(model, batch, weights)


class NotFiniteUpdates(TwoRates):
    def update(self, model: Any, batch: Any, weights: Any) -> Any:
        super().update(model, batch, weights)
        return not_finite(model, batch, weights)
