"""Digits under the script's own MirroredStrategy, as in the guides to tf.distribute."""

import numpy as np
import tensorflow as tf

EPOCHS = 3
BATCH_SIZE_PER_REPLICA = 32
SEED = 1

tf.keras.utils.set_random_seed(SEED)

strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")
batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

rng = np.random.default_rng(SEED)
prototypes = rng.normal(size=(10, 28, 28))
labels = rng.integers(0, 10, size=480)
images = (prototypes[labels] + rng.normal(size=(480, 28, 28))).astype("float32")

train_data = tf.data.Dataset.from_tensor_slices((images[:400], labels[:400])).cache().shuffle(400, seed=SEED)
train_data = train_data.batch(batch_size)
test_data = tf.data.Dataset.from_tensor_slices((images[400:], labels[400:])).batch(batch_size)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((28, 28)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="tanh"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=["accuracy"],
    )

history = model.fit(train_data, epochs=EPOCHS, validation_data=test_data)
test_loss, test_accuracy = model.evaluate(test_data)
print(f"Test loss {test_loss:.4f}, test accuracy {test_accuracy:.4f}")
