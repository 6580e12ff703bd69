"""A model that exists as soon as this module is imported."""

import keras


class ResidualBlock(keras.layers.Layer):
    """Two dense layers whose answer is added to their input."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.first = keras.layers.Dense(units, activation="relu")
        self.second = keras.layers.Dense(units)

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build((*input_shape[:-1], self.units))

    def call(self, inputs):
        return inputs + self.second(self.first(inputs))


def build_model(features, blocks=2):
    inputs = keras.Input((features,))
    hidden = inputs
    for _ in range(blocks):
        hidden = ResidualBlock(features)(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


keras.utils.set_random_seed(35)
model = build_model(6)
