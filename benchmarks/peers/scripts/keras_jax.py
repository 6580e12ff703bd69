"""Keras `fit` on the JAX backend.

python keras_jax.py mlp --file images.npz --epochs 8
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import time

import keras
from contestant import load, parse_arguments, report
from keras import layers


def mlp():
    return [layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)]


def cnn():
    return [
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ]


MODELS = {"mlp": mlp, "cnn": cnn}


def main():
    args = parse_arguments()
    keras.utils.set_random_seed(0)
    x, y = load(args.file)
    model = keras.Sequential([keras.Input(x.shape[1:]), layers.Rescaling(1 / 255), *MODELS[args.model]()])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    ends = []
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))
    fitted = model.fit(x, y, epochs=args.epochs, batch_size=args.batch_size, callbacks=[clock], verbose=0)
    report(ends, len(x), fitted.history["accuracy"][-1])


if __name__ == "__main__":
    main()
