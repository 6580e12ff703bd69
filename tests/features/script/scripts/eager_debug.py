"""`run_eagerly=True` while debugging, with NumPy in a custom metric and plain Python in the loss."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(41)
rng = np.random.default_rng(41)
x = rng.normal(size=(128, 6)).astype("float32")
y = (x[:, 0] > 0).astype("float32")[:, np.newaxis]


def focal_loss(y_true, y_pred, gamma=2.0):
    chance = tf.where(y_true > 0.5, y_pred, 1 - y_pred)
    return -tf.reduce_mean((1 - chance) ** gamma * tf.math.log(tf.clip_by_value(chance, 1e-7, 1.0)), axis=-1)


def balanced_accuracy(y_true, y_pred):
    right = (y_pred.numpy() > 0.5) == (y_true.numpy() > 0.5)
    return float(np.mean(right))


model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")])
model.compile(optimizer="adagrad", loss=focal_loss, metrics=[balanced_accuracy], run_eagerly=True)
history = model.fit(x, y, epochs=2, batch_size=32, validation_split=0.25, verbose=0)
print(history.history)
