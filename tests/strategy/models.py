"""Models of many forms, for cutting into stages."""

from __future__ import annotations

from typing import Any

import keras

from scaleflow.interfaces import Inputs, Outputs


@keras.saving.register_keras_serializable("tests")
class WithSpare(keras.layers.Layer):  # type: ignore[misc]
    """Has a weight that nothing comes of."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.spare = self.add_weight(shape=(3,), initializer="ones", name="spare")

    def call(self, x: Any) -> Any:
        return x * self.scale


def block(width: int, name: str) -> keras.Model:
    """Two convolutions, as a model of its own."""
    x = raw = keras.Input((None, None, width))
    x = keras.layers.Conv2D(width, 3, padding="same", activation="tanh", name="in")(x)
    return keras.Model(raw, keras.layers.Conv2D(width, 3, padding="same", name="out")(x), name=name)


def resnet(inputs: Inputs, outputs: Outputs, **unused: Any) -> keras.Model:
    """Skips inside a block and over the whole model, losses of its own, models inside the model."""
    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    x = keras.layers.Rescaling(1 / 16)(raw)
    x = stem = keras.layers.Conv2D(8, 3, padding="same", kernel_regularizer=keras.regularizers.L2(1e-3), name="stem")(x)
    for index in range(3):
        x = keras.layers.Activation("tanh")(x + block(8, f"block{index}")(x))
    x = keras.layers.Concatenate()([WithSpare(name="scaled")(x), stem])
    x = keras.layers.GlobalAveragePooling2D()(x)
    top = keras.Sequential([keras.layers.Dense(16, activation="tanh", activity_regularizer="l2")], name="top")
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32", name="outputs")(top(x)))


def normalised(inputs: Inputs, outputs: Outputs, dropout: float = 0.0, **unused: Any) -> keras.Model:
    """Statistics and random numbers in every stage."""
    layers: list[Any] = [keras.Input(inputs.shape, dtype=inputs.dtype), keras.layers.Flatten()]
    for _ in range(2):
        layers += [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Activation("tanh")]
        layers += [keras.layers.Dropout(dropout)]
    return keras.Sequential([*layers, keras.layers.Dense(*outputs.shape, dtype="float32", name="outputs")])


def smooth_convolutions(inputs: Inputs, outputs: Outputs, **unused: Any) -> keras.Model:
    """Convolutions with statistics of all replicas, without ReLU and max-pooling.

    Both have ties in pictures with empty regions: there rounding decides which way a gradient takes. Nor has it biases
    before the statistics: their gradient is 0 but for rounding, which Adam makes a whole step of.
    """
    layers: list[Any] = [keras.Input(inputs.shape, dtype=inputs.dtype), keras.layers.Rescaling(1 / 16)]
    for filters in (8, 16):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)]
        layers += [keras.layers.BatchNormalization(synchronized=True)]
        layers += [keras.layers.Activation("tanh"), keras.layers.AveragePooling2D(2)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(*outputs.shape, dtype="float32", name="outputs")]
    return keras.Sequential(layers)


# ---------------------------------------------------------------------------------------------
# Graphs with a catch; each takes [batch, 6] integers from 0 to 9 and gives [batch, 3]
# ---------------------------------------------------------------------------------------------


def masked() -> keras.Model:
    """A mask that goes from stage to stage with its tensor."""
    x = raw = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(10, 8, mask_zero=True, name="words")(x)
    x = keras.layers.Dense(8, activation="tanh", name="each")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(raw, keras.layers.Dense(3, name="last")(x))


def skipped() -> keras.Model:
    """Skips over models inside the model, and layers that give the very tensor that they take."""
    raw = keras.Input((6,), dtype="int32")
    x = first = keras.layers.Dense(8, name="first")(keras.ops.cast(raw, "float32"))
    for index in range(3):
        inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dropout(0.0)])
        x = keras.layers.Dropout(0.0)(x + keras.layers.Activation("linear")(inner(x)) * (index + 1))
        x = keras.layers.Identity()(x)
    return keras.Model(raw, keras.layers.Dense(3, name="last")(keras.layers.Concatenate()([x, first])))


def several_tensors() -> keras.Model:
    """The input is taken by the last stage too, several tensors cross, one without a gradient, one of integers."""
    raw = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(10, 8, name="words")(raw)
    left, right = keras.ops.split(x, 2, axis=-1)
    stopped = keras.ops.stop_gradient(left * 2.0)
    middle = keras.layers.Dense(8, activation="tanh", name="middle")(keras.ops.concatenate([left, right], axis=-1))
    x = keras.layers.Concatenate(name="joined")([middle, right, stopped])
    x = x * keras.ops.expand_dims(keras.ops.cast(raw + 1, "float32"), -1)
    return keras.Model(raw, keras.layers.Dense(3, name="last")(keras.layers.Flatten()(x)))


def shared() -> keras.Model:
    """A layer that is called twice, and a model that is called twice."""
    raw = keras.Input((6,), dtype="int32")
    x = keras.layers.Dense(8, name="first")(keras.ops.cast(raw, "float32"))
    twice = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2", name="twice")
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(8, name="b")])
    inner.name = "inner"
    x = inner(twice(inner(twice(x))))
    return keras.Model(raw, keras.layers.Dense(3, name="last")(x))


@keras.saving.register_keras_serializable("tests")
class NoiseInLoop(keras.layers.Layer):  # type: ignore[misc]
    """Adds random numbers in each pass of a loop, and counts the passes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(3)

    def build(self, shape: Any) -> None:
        self.passes = self.add_weight(shape=(), initializer="zeros", trainable=False, name="passes")

    def call(self, x: Any, training: bool = False) -> Any:
        def add(index: Any, x: Any) -> Any:
            self.passes.assign(self.passes + 1.0)
            return x + keras.random.normal(keras.ops.shape(x), stddev=0.1, seed=self.seeds)

        return keras.ops.fori_loop(0, 3, add, x) if training else x


@keras.saving.register_keras_serializable("tests")
class Clipped(keras.layers.Dense):  # type: ignore[misc]
    """Changes its trained weights in its forward pass."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.kernel.assign(keras.ops.clip(self.kernel, -0.3, 0.3))
        return super().call(x)


def clipped() -> keras.Model:
    raw = keras.Input((6,), dtype="int32")
    x = keras.layers.Dense(8, name="first")(keras.ops.cast(raw, "float32"))
    return keras.Model(raw, keras.layers.Dense(3, name="last")(Clipped(8, name="clipped")(x)))


def noisy(loops: bool = False) -> keras.Model:
    """Random numbers and statistics, one layer that is called twice among them, and one with a loop."""
    raw = keras.Input((6,), dtype="int32")
    x = keras.layers.Dense(8, activation="tanh", name="first")(keras.ops.cast(raw, "float32"))
    drop = keras.layers.Dropout(0.5, name="twice")
    x = keras.layers.BatchNormalization(name="norm")(drop(keras.layers.Dense(8, name="second")(drop(x))))
    x = keras.layers.GaussianNoise(0.5, name="noise")(x)
    x = NoiseInLoop(name="loop")(x) if loops else x
    return keras.Model(raw, keras.layers.Dense(3, name="last")(x))


def recurrent() -> keras.Model:
    """A loop in the graph, with dropout."""
    raw = keras.Input((6,), dtype="int32")
    x = keras.layers.Dense(8, name="first")(keras.ops.expand_dims(keras.ops.cast(raw, "float32"), -1))
    x = keras.layers.GRU(8, dropout=0.3, recurrent_dropout=0.3, reset_after=False, name="loop")(x)
    return keras.Model(raw, keras.layers.Dense(3, name="last")(keras.layers.Activation("tanh")(x)))


def chain() -> keras.Model:
    """Four layers with parameters, and some without."""
    layers = [keras.Input((6,), dtype="float32"), keras.layers.Flatten(name="flat")]
    for index, units in enumerate((4, 32, 4)):
        layers += [keras.layers.Dense(units, name=f"d{index}"), keras.layers.Activation("tanh", name=f"t{index}")]
    return keras.Sequential([*layers, keras.layers.Dense(3, name="last")], name="chain")


def nested() -> keras.Model:
    """A chain inside a model, twice the same names."""
    raw = keras.Input((6,), dtype="float32")
    first, second = chain(), chain()
    second.name = "second"
    return keras.Model(raw, second(keras.layers.Dense(6, name="between")(first(raw))))


def broad() -> keras.Model:
    """Convolutions with few parameters and many operations, then a layer with many parameters and few operations."""
    x = raw = keras.Input((6,), dtype="float32")
    x = keras.layers.Reshape((6, 1), name="grid")(x)
    x = keras.layers.UpSampling1D(100, name="grown")(x)
    for index in range(3):
        x = keras.layers.Conv1D(16, 9, padding="same", name=f"c{index}")(x)
    x = keras.layers.GlobalAveragePooling1D(name="mean")(x)
    return keras.Model(raw, keras.layers.Dense(3, name="last")(keras.layers.Dense(200, name="wide")(x)))


class Subclassed(keras.Model):  # type: ignore[misc]
    """No graph is known of it."""

    def __init__(self) -> None:
        super().__init__(name="mine")
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def subclassed() -> keras.Model:
    model = Subclassed()
    model(keras.Input((6,)))
    return model
