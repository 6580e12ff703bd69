"""A loop of its own with `experimental_distribute_dataset` and `strategy.run`, under the script's own strategy."""

import numpy as np
import tensorflow as tf

SEED = 11
BUFFER_SIZE = 320
BATCH_SIZE_PER_REPLICA = 32
EPOCHS = 2

tf.keras.utils.set_random_seed(SEED)
strategy = tf.distribute.MirroredStrategy()
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

rng = np.random.default_rng(SEED)
prototypes = rng.uniform(size=(10, 28, 28, 1))
labels = rng.integers(0, 10, size=400)
images = (prototypes[labels] + 0.3 * rng.normal(size=(400, 28, 28, 1))).astype(np.float32)

train_dataset = tf.data.Dataset.from_tensor_slices((images[:320], labels[:320]))
train_dataset = train_dataset.shuffle(BUFFER_SIZE, seed=SEED).batch(GLOBAL_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices((images[320:], labels[320:])).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    return tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            tf.keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = create_model()
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.001)
    optimizer.build(model.trainable_variables)


def compute_loss(targets, predictions):
    per_example_loss = loss_object(targets, predictions)
    return tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)


def train_step(inputs):
    batch_images, targets = inputs
    with tf.GradientTape() as tape:
        predictions = model(batch_images, training=True)
        loss = compute_loss(targets, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(targets, predictions)
    return loss


def test_step(inputs):
    batch_images, targets = inputs
    predictions = model(batch_images, training=False)
    test_loss.update_state(loss_object(targets, predictions))
    test_accuracy.update_state(targets, predictions)


@tf.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(inputs):
    strategy.run(test_step, args=(inputs,))


history = {"loss": [], "accuracy": [], "val_loss": [], "val_accuracy": []}
for epoch in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    for batch in train_dist_dataset:
        total_loss += distributed_train_step(batch)
        num_batches += 1
    for batch in test_dist_dataset:
        distributed_test_step(batch)
    history["loss"].append(float(total_loss / num_batches))
    history["accuracy"].append(float(train_accuracy.result()))
    history["val_loss"].append(float(test_loss.result()))
    history["val_accuracy"].append(float(test_accuracy.result()))
    print(f"Epoch {epoch + 1}", {name: round(values[-1], 4) for name, values in history.items()})
    test_loss.reset_state()
    train_accuracy.reset_state()
    test_accuracy.reset_state()
