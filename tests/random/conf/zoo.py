"""Models, steps and callbacks as a user writes them; `model=zoo model.kind=NAME`."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

Tensor = Any
KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {}


def kind(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Registers the body of a functional model: (what goes in, the number of outputs) -> outputs [b, outputs]."""
    KINDS[function.__name__] = function
    return function


def build(inputs: Any, outputs: Any, kind: str) -> keras.Model:
    """The model of this name, for what the dataset gives."""
    if kind in TOWERS:
        return TOWERS[kind](inputs, outputs)
    size = math.prod(outputs.shape)
    if isinstance(inputs, dict):
        return of_columns(inputs, size, kind)
    if kind in SUBCLASSED:
        return SUBCLASSED[kind](size, inputs.scale or 1.0, name=kind)
    raw = x = keras.Input(inputs.shape, dtype=inputs.dtype)
    if inputs.scale is not None:
        x = layers.Rescaling(inputs.scale)(x)
    if inputs.vocabulary is not None:
        x = TOKENS[kind](x, inputs.vocabulary)
        return keras.Model(raw, layers.Dense(size, dtype="float32")(x), name=kind)
    return keras.Model(raw, KINDS[kind](x, size), name=kind)


def of_columns(inputs: dict[str, Any], size: int, kind: str) -> keras.Model:
    """The model of this name for the columns of a table, joined to one vector."""
    raw = {name: keras.Input(each.shape, dtype=each.dtype) for name, each in inputs.items()}
    x = layers.Concatenate()([layers.Flatten()(each) for each in raw.values()])
    outputs = SUBCLASSED[kind](size, 1.0, name="inner")(x) if kind in SUBCLASSED else KINDS[kind](x, size)
    return keras.Model(raw, outputs, name=kind)


def head(x: Tensor, size: int) -> Tensor:
    return layers.Dense(size, dtype="float32", name="head")(x)


def rows(x: Tensor) -> Tensor:
    """[b, ...] -> [b, steps, width]."""
    shape = x.shape[1:]
    if len(shape) == 2:
        return x
    return layers.Reshape((shape[0], math.prod(shape[1:]) if len(shape) > 1 else 1))(x)


# Of anything -----------------------------------------------------------------------------------


@kind
def nested(x: Tensor, size: int) -> Tensor:
    inner_in = keras.Input((8,))
    inner = keras.Model(inner_in, layers.Dense(8, activation="tanh")(inner_in), name="inner")
    x = layers.Dense(8)(layers.Flatten()(x))
    return head(layers.Add()([inner(x), x]), size)


@kind
def shared(x: Tensor, size: int) -> Tensor:
    """A layer called twice."""
    layer = layers.Dense(8, activation="relu")
    x = layers.Dense(8)(layers.Flatten()(x))
    return head(layer(layer(x)), size)


@kind
def shared_nested(x: Tensor, size: int) -> Tensor:
    """A model that is called twice, with a layer in it that is called twice."""
    layer = layers.Dense(6, activation="tanh")
    inner_in = keras.Input((6,))
    inner = keras.Model(inner_in, layer(layer(inner_in)), name="twice")
    x = layers.Dense(6)(layers.Flatten()(x))
    return head(layers.Concatenate()([inner(x), inner(inner(x))]), size)


@kind
def branches(x: Tensor, size: int) -> Tensor:
    x = layers.Flatten()(x)
    left, right = layers.Dense(5, activation="gelu")(x), layers.Dense(5, activation="sigmoid")(x)
    return head(layers.Concatenate()([left * right, keras.ops.abs(left - right)]), size)


@kind
def regularized(x: Tensor, size: int) -> Tensor:
    """Penalties on kernels and biases, in one layer in the dtype that it computes in and in one in float32."""
    x = layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1")(layers.Flatten()(x))
    return layers.Dense(size, dtype="float32", kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-3))(x)


@kind
def constrained(x: Tensor, size: int) -> Tensor:
    x = layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(1.0), activation="relu")(layers.Flatten()(x))
    return head(layers.Dense(8, kernel_constraint="non_neg")(x), size)


@kind
def active(x: Tensor, size: int) -> Tensor:
    """A penalty on what a layer gives."""
    return head(layers.Dense(8, activation="relu", activity_regularizer="l2")(layers.Flatten()(x)), size)


@kind
def frozen(x: Tensor, size: int) -> Tensor:
    x = layers.Dense(8, activation="relu", trainable=False)(layers.Flatten()(x))
    return head(layers.Dense(4)(x), size)


@kind
def frozen_norm(x: Tensor, size: int) -> Tensor:
    x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
    return head(layers.BatchNormalization(trainable=False)(x), size)


@kind
def noisy(x: Tensor, size: int) -> Tensor:
    x = layers.GaussianNoise(0.1)(layers.Dense(8)(layers.Flatten()(x)))
    return head(layers.GaussianDropout(0.1)(layers.AlphaDropout(0.1)(x)), size)


@kind
def normed(x: Tensor, size: int) -> Tensor:
    """BatchNorm of each replica's own."""
    x = layers.Dense(8)(layers.Flatten()(x))
    return head(layers.ReLU()(layers.BatchNormalization()(x)), size)


@kind
def sync_normed(x: Tensor, size: int) -> Tensor:
    x = layers.Dense(8)(layers.Flatten()(x))
    return head(layers.ReLU()(layers.BatchNormalization(synchronized=True)(x)), size)


@kind
def layer_normed(x: Tensor, size: int) -> Tensor:
    x = layers.LayerNormalization()(layers.Dense(8)(layers.Flatten()(x)))
    x = layers.UnitNormalization()(layers.PReLU()(x))
    return head(layers.RMSNormalization()(x), size)


@kind
def spectral(x: Tensor, size: int) -> Tensor:
    """A layer whose state changes in training without a gradient."""
    return head(layers.SpectralNormalization(layers.Dense(8))(layers.Flatten()(x)), size)


@kind
def unnamed_lambda(x: Tensor, size: int) -> Tensor:
    """Operations that are no layers."""
    x = layers.Dense(8)(layers.Flatten()(x))
    return head(keras.ops.softmax(x * 2.0, axis=-1) + keras.ops.mean(x, axis=-1, keepdims=True), size)


# Of sequences ----------------------------------------------------------------------------------


@kind
def lstm(x: Tensor, size: int) -> Tensor:
    return head(layers.LSTM(6)(rows(x)), size)


@kind
def stacked_gru(x: Tensor, size: int) -> Tensor:
    return head(layers.GRU(5)(layers.Bidirectional(layers.GRU(4, return_sequences=True))(rows(x))), size)


@kind
def dropped_rnn(x: Tensor, size: int) -> Tensor:
    return head(layers.LSTM(5, dropout=0.2, recurrent_dropout=0.2)(rows(x)), size)


@kind
def rnn_cells(x: Tensor, size: int) -> Tensor:
    return head(layers.RNN([layers.SimpleRNNCell(4), layers.GRUCell(4)])(rows(x)), size)


@kind
def masked(x: Tensor, size: int) -> Tensor:
    return head(layers.SimpleRNN(6)(layers.Masking(0.0)(rows(x))), size)


@kind
def per_step(x: Tensor, size: int) -> Tensor:
    x = layers.TimeDistributed(layers.Dense(5, activation="relu"))(rows(x))
    return head(layers.GlobalMaxPooling1D()(x), size)


@kind
def attention(x: Tensor, size: int) -> Tensor:
    x = layers.Dense(8)(rows(x))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True))
    return head(layers.GlobalAveragePooling1D()(x), size)


@kind
def grouped_attention(x: Tensor, size: int) -> Tensor:
    x = layers.Dense(8)(rows(x))
    x = layers.GroupQueryAttention(4, 4, 2)(x, x)
    return head(layers.Flatten()(layers.AdditiveAttention()([x, x])), size)


@kind
def conv1d(x: Tensor, size: int) -> Tensor:
    x = layers.Conv1D(6, 3, padding="causal", dilation_rate=2, activation="relu")(rows(x))
    return head(layers.Flatten()(layers.SeparableConv1D(6, 3, padding="same")(x)), size)


# Of images -------------------------------------------------------------------------------------


@kind
def separable(x: Tensor, size: int) -> Tensor:
    x = layers.SeparableConv2D(6, 3, activation="relu", padding="same")(x)
    return head(layers.GlobalAveragePooling2D()(layers.DepthwiseConv2D(3)(x)), size)


@kind
def transposed(x: Tensor, size: int) -> Tensor:
    x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    return head(layers.Flatten()(layers.AveragePooling2D(4)(layers.UpSampling2D(2)(x))), size)


@kind
def group_normed(x: Tensor, size: int) -> Tensor:
    x = layers.GroupNormalization(2)(layers.Conv2D(4, 3, groups=1)(x))
    return head(layers.GlobalMaxPooling2D()(layers.SpatialDropout2D(0.0)(x)), size)


@kind
def spatial_dropout(x: Tensor, size: int) -> Tensor:
    return head(layers.Flatten()(layers.SpatialDropout2D(0.3)(layers.Conv2D(4, 3, strides=2)(x))), size)


@kind
def distorting(x: Tensor, size: int) -> Tensor:
    """Random layers of Keras's own in the model."""
    x = layers.RandomTranslation(0.1, 0.1)(layers.RandomFlip("horizontal")(x))
    return head(layers.Flatten()(layers.Conv2D(4, 3, strides=2)(layers.RandomRotation(0.1)(x))), size)


@kind
def resized(x: Tensor, size: int) -> Tensor:
    x = layers.ZeroPadding2D(1)(layers.Resizing(6, 6)(x))
    return head(layers.Flatten()(layers.Conv2D(4, 3, strides=2, activation="swish")(x)), size)


@kind
def conv_lstm(x: Tensor, size: int) -> Tensor:
    frames = keras.ops.stack([x, keras.ops.flip(x, axis=2)], axis=1)
    return head(layers.Flatten()(layers.ConvLSTM2D(3, 3, strides=2)(frames)), size)


# Of words --------------------------------------------------------------------------------------


def word_lstm(x: Tensor, vocabulary: int) -> Tensor:
    return layers.LSTM(6)(layers.Embedding(vocabulary, 6, mask_zero=True)(x))


def word_bag(x: Tensor, vocabulary: int) -> Tensor:
    x = layers.Embedding(vocabulary, 6, embeddings_regularizer="l2")(x)
    return layers.GlobalAveragePooling1D()(layers.SpatialDropout1D(0.0)(x))


def word_convolution(x: Tensor, vocabulary: int) -> Tensor:
    return layers.GlobalMaxPooling1D()(layers.Conv1D(6, 3, activation="relu")(layers.Embedding(vocabulary, 6)(x)))


def word_attention(x: Tensor, vocabulary: int) -> Tensor:
    words = layers.Embedding(vocabulary, 8, mask_zero=True)(x)
    return layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 4)(words, words))


TOKENS: dict[str, Callable[[Tensor, int], Tensor]] = {
    function.__name__: function for function in (word_lstm, word_bag, word_convolution, word_attention)
}


# Subclassed ------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("zoo")
class Subclassed(keras.Model):
    """A model whose layers only its `call` knows."""

    def __init__(self, size: int, scale: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.size, self.scale = size, scale
        self.flat, self.hidden, self.out = layers.Flatten(), layers.Dense(8, "relu"), layers.Dense(size)

    def call(self, inputs: Tensor) -> Tensor:
        return self.out(self.hidden(self.flat(keras.ops.cast(inputs, self.compute_dtype) * self.scale)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "size": self.size, "scale": self.scale}


@keras.saving.register_keras_serializable("zoo")
class Losing(Subclassed):
    """Adds a loss of its own, of its weights."""

    def call(self, inputs: Tensor) -> Tensor:
        self.add_loss(1e-2 * keras.ops.sum(keras.ops.square(keras.ops.cast(self.hidden.kernel, "float32"))))
        return super().call(inputs)

    def build(self, shape: Any) -> None:
        self.hidden.build((None, math.prod(shape[1:])))
        self.out.build((None, 8))
        super().build(shape)


@keras.saving.register_keras_serializable("zoo")
class Trained(Subclassed):
    """Behaves otherwise in training, with a random generator of its own."""

    def __init__(self, size: int, scale: float = 1.0, **options: Any) -> None:
        super().__init__(size, scale, **options)
        self.generator = keras.random.SeedGenerator(7)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        x = self.hidden(self.flat(keras.ops.cast(inputs, self.compute_dtype) * self.scale))
        if training:
            x += keras.random.normal(keras.ops.shape(x), stddev=0.01, dtype=x.dtype, seed=self.generator)
        return self.out(x)


SUBCLASSED: dict[str, Callable[..., keras.Model]] = {
    "subclassed": Subclassed,
    "subclassed_losing": Losing,
    "subclassed_random": Trained,
}


# Of dicts ----------------------------------------------------------------------------------------


def towers(inputs: Any, outputs: Any) -> keras.Model:
    """A tower for each input; an output that leaves early, and one that is computed from it."""
    raw = {name: keras.Input(each.shape, dtype=each.dtype) for name, each in inputs.items()}
    series = layers.Conv1D(4, 2, activation="relu")(raw["series"])
    row = layers.Dense(4, activation="tanh")(raw["row"])
    amount = layers.Dense(outputs["amount"].shape[-1], dtype="float32", name="amount")(row)
    x = layers.Concatenate()([layers.GlobalAveragePooling1D()(series), row, amount])
    return keras.Model(raw, {"amount": amount, "kind": head(x, outputs["kind"].shape[-1])}, name="towers")


class SubclassedTowers(keras.Model):
    """The same without a graph of layers."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        super().__init__(name="subclassed_towers")
        self.heads = {name: layers.Dense(each.shape[-1], dtype="float32") for name, each in outputs.items()}
        self.hidden = layers.Dense(4, activation="relu")

    def call(self, inputs: Any) -> Any:
        x = self.hidden(keras.ops.concatenate([inputs["row"], inputs["series"][:, 0]], axis=-1))
        return {name: layer(x) for name, layer in self.heads.items()}


TOWERS: dict[str, Callable[[Any, Any], keras.Model]] = {"towers": towers, "subclassed_towers": SubclassedTowers}


# Steps and callbacks ---------------------------------------------------------------------------


def own_loss(model: Any, batch: tuple[Any, Any], weights: Any, shift: float = 0.0) -> tuple[Any, Any]:
    """A training step: the squared distance from an answer that is the same for all."""
    inputs, _ = batch
    outputs = model(inputs, training=True)
    losses = tf.add_n(
        [tf.reduce_mean(tf.square(tf.cast(each, tf.float32) - shift), axis=-1) for each in tf.nest.flatten(outputs)]
    )
    return tf.reduce_sum(losses * weights), outputs


class Spread(keras.metrics.Mean):  # type: ignore[misc]  # keras has no types
    """The mean distance between an example's largest output and its smallest."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.reduce_max(y_pred, axis=-1) - tf.reduce_min(y_pred, axis=-1), sample_weight)


class OwnUpdates:
    """A training step that applies an optimizer of its own."""

    def build(self, model: Any, make_optimizer: Any) -> None:
        self.variables = model.trainable_variables
        self.optimizer = make_optimizer(self.variables)

    def update(self, model: Any, batch: tuple[Any, Any], weights: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss, outputs = own_loss(model, batch, weights, 1.0)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.variables), self.variables, strict=True))
        return loss, outputs


class Stop(keras.callbacks.Callback):
    """Sends its process a signal after the step that the environment names, as a cluster or a user would."""

    def __init__(self) -> None:
        super().__init__()
        self.at = int(os.environ.get("RANDOM_STOP_AT", "0"))
        self.by = int(os.environ.get("RANDOM_STOP_BY", str(int(signal.SIGTERM))))
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.at and self.epoch * self.params["steps"] + batch + 1 >= self.at:
            self.at = 0
            os.kill(os.getpid(), self.by)


class Counting(keras.callbacks.Callback):
    """Has a state that is kept in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1

    def get_state(self) -> int:
        return self.epochs

    def set_state(self, state: int) -> None:
        self.epochs = state
