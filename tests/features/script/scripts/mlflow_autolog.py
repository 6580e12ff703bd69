"""MLflow's autologging in one line before `fit`."""

import mlflow
import numpy as np
import tensorflow as tf

mlflow.tensorflow.autolog(log_models=False, log_datasets=False)

tf.keras.utils.set_random_seed(33)
rng = np.random.default_rng(33)
x = rng.random((300, 4)).astype("float32")
y = (x.sum(axis=1) > 2).astype("float32")

model = tf.keras.Sequential(
    [
        tf.keras.Input((4,)),
        tf.keras.layers.Dense(8, activation="relu"),
        tf.keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, epochs=2, batch_size=32, validation_split=0.2, verbose=0)
print(history.history)
