"""The two models of the tutorials."""

import keras
from keras import layers

SHAPES = {"mlp": (28, 28, 1), "cnn": (32, 32, 3)}


def mlp():
    return keras.Sequential(
        [
            keras.Input(SHAPES["mlp"]),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input(SHAPES["cnn"]),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


MODELS = {"mlp": mlp, "cnn": cnn}
