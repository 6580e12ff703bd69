"""Memory growth and an environment variable before the import: device settings at the top of a script."""

import os

# It counts only before TensorFlow is imported. It changes the last bits of results.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf

gpus = tf.config.list_physical_devices("GPU")
if gpus:
    try:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        print(error)
print(len(gpus), "physical GPUs")
tf.config.threading.set_inter_op_parallelism_threads(2)

tf.keras.utils.set_random_seed(123)
rng = np.random.default_rng(123)
x = rng.normal(size=(400, 24, 4)).astype(np.float32)
y = (x[:, :, 0].sum(axis=1, keepdims=True) > 0).astype(np.float32)

model = tf.keras.Sequential(
    [
        tf.keras.Input((24, 4)),
        tf.keras.layers.Conv1D(8, 3, activation="relu"),
        tf.keras.layers.GlobalMaxPooling1D(),
        tf.keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="rmsprop", loss="binary_crossentropy", metrics=["AUC"])
history = model.fit(x, y, epochs=2, validation_split=0.25, verbose=2)
