"""Two strategies timed in a loop: the same model under OneDeviceStrategy and MirroredStrategy."""

import time

import keras
import numpy as np
import tensorflow as tf

EPOCHS = 2
BATCH_SIZE = 64

rng = np.random.default_rng(17)
x_train = rng.normal(size=(512, 32)).astype("float32")
y_train = (x_train.sum(axis=1) > 0).astype("int32")

strategies = {
    "one_device": tf.distribute.OneDeviceStrategy("/cpu:0"),
    "mirrored": tf.distribute.MirroredStrategy(),
}
histories = {}
seconds = {}
for name, strategy in strategies.items():
    keras.utils.set_random_seed(17)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((32,)),
                keras.layers.Dense(32, activation="tanh"),
                keras.layers.Dense(2),
            ]
        )
        model.compile(
            optimizer="adam",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    start = time.perf_counter()
    history = model.fit(x_train, y_train, epochs=EPOCHS, batch_size=BATCH_SIZE, verbose=0)
    seconds[name] = time.perf_counter() - start
    histories[name] = history.history
    print(f"{name}: {seconds[name]:.2f} s, accuracy {history.history['accuracy'][-1]:.3f}")

one_device_history = histories["one_device"]
mirrored_history = histories["mirrored"]
