"""Small colour images through tf.data: cache, shuffle, augmentation in `map` and in layers, batch and prefetch."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

AUTOTUNE = tf.data.AUTOTUNE
BATCH_SIZE = 32
EPOCHS = 2
SEED = 8

tf.keras.utils.set_random_seed(SEED)
rng = np.random.default_rng(SEED)
colors = rng.integers(60, 200, size=(10, 1, 1, 3))
labels = rng.integers(0, 10, size=(320, 1))
images = np.clip(colors[labels[:, 0]] + rng.normal(0, 40, size=(320, 32, 32, 3)), 0, 255).astype("uint8")
x_train, y_train, x_val, y_val = images[:256], labels[:256], images[256:], labels[256:]


def augment(image, label):
    image = tf.image.random_flip_left_right(image)
    image = tf.image.random_brightness(image, max_delta=0.1)
    return image, label


def scale(image, label):
    return tf.cast(image, tf.float32) / 255.0, label


train_ds = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train))
    .map(scale, num_parallel_calls=AUTOTUNE)
    .cache()
    .shuffle(256)
    .map(augment)
    .batch(BATCH_SIZE)
    .prefetch(AUTOTUNE)
)
val_ds = tf.data.Dataset.from_tensor_slices((x_val, y_val)).map(scale).batch(BATCH_SIZE).prefetch(AUTOTUNE)

model = tf.keras.Sequential(
    [
        layers.Input((32, 32, 3)),
        layers.RandomRotation(0.05),
        layers.Conv2D(8, 3, padding="same", activation="relu"),
        layers.BatchNormalization(),
        layers.MaxPooling2D(4),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dropout(0.3),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer="adam",
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy", tf.keras.metrics.SparseTopKCategoricalAccuracy(k=3, name="top3")],
)
model.summary()
history = model.fit(train_ds, epochs=EPOCHS, validation_data=val_ds)
print(model.evaluate(val_ds, verbose=0, return_dict=True))
