"""Weights of examples: as an argument with weighted metrics, and as the third part of a tf.data element."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(19)
rng = np.random.default_rng(19)
x = rng.normal(size=(300, 6)).astype("float32")
noise = rng.uniform(0.1, 2.0, size=300)
y = (x @ np.arange(6) + noise * rng.normal(size=300)).astype("float32")
weights = (1 / noise**2).astype("float32")


def build_model():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile(
        optimizer=keras.optimizers.Adam(0.05),
        loss="mse",
        metrics=["mae"],
        weighted_metrics=[keras.metrics.MeanSquaredError(name="wmse")],
    )
    return model


array_model = build_model()
array_history = array_model.fit(
    x[:240],
    y[:240],
    sample_weight=weights[:240],
    validation_data=(x[240:], y[240:], weights[240:]),
    batch_size=50,
    epochs=2,
)

dataset = tf.data.Dataset.from_tensor_slices((x[:240], y[:240], weights[:240])).shuffle(240).repeat().batch(50)
dataset_model = build_model()
dataset_history = dataset_model.fit(dataset, steps_per_epoch=5, epochs=2, validation_data=(x[240:], y[240:]))
