"""The model exists before the script creates its strategy: Keras then trains it on one device, in silence."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(36)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


def train():
    strategy = tf.distribute.MirroredStrategy()
    print("Replicas:", strategy.num_replicas_in_sync)
    rng = np.random.default_rng(36)
    x = rng.normal(size=(200, 5)).astype("float32")
    y = x.mean(axis=1, keepdims=True)
    model.compile(optimizer="adam", loss="mse")
    return model.fit(x, y, epochs=2, batch_size=50)


history = train()
