"""Batches from a Python generator without end, with `steps_per_epoch` and `validation_steps`."""

import keras
import numpy as np

BATCH_SIZE = 32
STEPS = 8

keras.utils.set_random_seed(34)


def generate_waves(seed):
    rng = np.random.default_rng(seed)
    while True:
        labels = rng.integers(0, 2, size=BATCH_SIZE)
        phases = rng.uniform(0, 2 * np.pi, size=(BATCH_SIZE, 1))
        times = np.linspace(0, 2 * np.pi, 24)
        waves = np.sin((1 + labels[:, np.newaxis]) * times + phases) + 0.1 * rng.normal(size=(BATCH_SIZE, 24))
        yield waves.astype("float32"), labels


model = keras.Sequential(
    [
        keras.Input((24,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
history = model.fit(
    generate_waves(34),
    steps_per_epoch=STEPS,
    epochs=3,
    validation_data=generate_waves(35),
    validation_steps=2,
)
