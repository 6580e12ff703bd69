"""The profiler through the TensorBoard callback, which traces a few batches."""

from datetime import datetime
from pathlib import Path

import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(21)


def normalize(image, label):
    return tf.cast(image, tf.float32) / 255.0, label


rng = np.random.default_rng(21)
images = rng.integers(0, 256, size=(320, 28, 28, 1), dtype=np.uint8)
labels = rng.integers(0, 10, size=320)
images[np.arange(320), labels] = 255
ds_train = tf.data.Dataset.from_tensor_slices((images[:256], labels[:256])).map(normalize).batch(32)
ds_test = tf.data.Dataset.from_tensor_slices((images[256:], labels[256:])).map(normalize).batch(32)

model = tf.keras.models.Sequential(
    [
        tf.keras.layers.Flatten(input_shape=(28, 28, 1)),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    loss="sparse_categorical_crossentropy",
    optimizer=tf.keras.optimizers.Adam(0.001),
    metrics=["accuracy"],
)

logs = Path("logs") / datetime.now().strftime("%Y%m%d-%H%M%S")
tensorboard = tf.keras.callbacks.TensorBoard(log_dir=str(logs), histogram_freq=1, profile_batch=(3, 5))
history = model.fit(ds_train, epochs=2, validation_data=ds_test, callbacks=[tensorboard])
print("Trace files:", len(list(logs.rglob("*.xplane.pb"))))
