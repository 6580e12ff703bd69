"""Several steps per execution, validation every second epoch, and targets as one-hot floats in a tf.data pipeline."""

import numpy as np
import tensorflow as tf

keras = tf.keras
keras.utils.set_random_seed(39)

rng = np.random.default_rng(39)
labels = rng.integers(0, 5, size=400)
x = (rng.normal(size=(5, 12))[labels] + rng.normal(size=(400, 12))).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, labels)).map(lambda row, label: (row, tf.one_hot(label, 5)))
train_ds = dataset.take(320).shuffle(320, seed=39, reshuffle_each_iteration=True).batch(20)
val_ds = dataset.skip(320).batch(40)

model = keras.Sequential(
    [
        keras.layers.Dense(16),
        keras.layers.BatchNormalization(),
        keras.layers.Activation("swish"),
        keras.layers.Dense(5, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras.optimizers.AdamW(5e-3, weight_decay=1e-3),
    loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    metrics=[keras.metrics.CategoricalAccuracy(name="acc"), keras.metrics.F1Score(average=None, name="f1")],
    steps_per_execution=4,
)
history = model.fit(train_ds, epochs=4, validation_data=val_ds, validation_freq=2)
print(model.evaluate(val_ds, verbose=0, return_dict=True))
