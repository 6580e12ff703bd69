"""Mixed precision with a LossScaleOptimizer around Adam, as in the guides to mixed precision."""

import numpy as np
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(42)
keras.mixed_precision.set_global_policy("mixed_float16")
policy = keras.mixed_precision.dtype_policy()
print("Compute dtype:", policy.compute_dtype)
print("Variable dtype:", policy.variable_dtype)

rng = np.random.default_rng(42)
centers = rng.normal(size=(10, 784))
y = rng.integers(0, 10, size=600)
x = (centers[y] + 2 * rng.normal(size=(600, 784))).astype("float32")
x_train, y_train = x[:500], y[:500]
x_test, y_test = x[500:], y[500:]

inputs = keras.Input(shape=(784,), name="digits")
hidden = layers.Dense(64, activation="relu", name="dense_1")(inputs)
hidden = layers.Dense(64, activation="relu", name="dense_2")(hidden)
logits = layers.Dense(10, name="dense_logits")(hidden)
# The softmax is float32, so that it does not overflow.
outputs = layers.Activation("softmax", dtype="float32", name="predictions")(logits)
model = keras.Model(inputs=inputs, outputs=outputs)

optimizer = keras.optimizers.Adam(learning_rate=1e-3)
optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)
model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])

history = model.fit(x_train, y_train, batch_size=64, epochs=3, validation_split=0.2)
test_scores = model.evaluate(x_test, y_test, verbose=2)
print("Test loss:", test_scores[0])
print("Test accuracy:", test_scores[1])
