"""A GradientTape loop that never calls `fit`, with MLflow calls of its own."""

import mlflow
import numpy as np
import tensorflow as tf

EPOCHS = 3
BATCH_SIZE = 32
LEARNING_RATE = 0.01

tf.keras.utils.set_random_seed(30)
rng = np.random.default_rng(30)
x = rng.normal(size=(320, 10)).astype("float32")
y = rng.integers(0, 3, size=320)
x[np.arange(320), y] += 2
train_dataset = tf.data.Dataset.from_tensor_slices((x[:256], y[:256])).shuffle(256).batch(BATCH_SIZE)
val_dataset = tf.data.Dataset.from_tensor_slices((x[256:], y[256:])).batch(BATCH_SIZE)

model = tf.keras.Sequential([tf.keras.Input((10,)), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(3)])
optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_acc_metric = tf.keras.metrics.SparseCategoricalAccuracy()
val_acc_metric = tf.keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(features, labels):
    with tf.GradientTape() as tape:
        logits = model(features, training=True)
        loss_value = loss_fn(labels, logits)
    grads = tape.gradient(loss_value, model.trainable_weights)
    optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
    train_acc_metric.update_state(labels, logits)
    return loss_value


@tf.function
def test_step(features, labels):
    val_acc_metric.update_state(labels, model(features, training=False))


history = {"loss": [], "accuracy": [], "val_accuracy": []}
mlflow.log_params({"epochs": EPOCHS, "learning_rate": LEARNING_RATE})
for epoch in range(EPOCHS):
    for features, labels in train_dataset:
        loss_value = train_step(features, labels)
    for features, labels in val_dataset:
        test_step(features, labels)
    history["loss"].append(float(loss_value))
    history["accuracy"].append(float(train_acc_metric.result()))
    history["val_accuracy"].append(float(val_acc_metric.result()))
    for name, values in history.items():
        mlflow.log_metric(name, values[-1], step=epoch)
    print(f"Epoch {epoch}: loss {history['loss'][-1]:.4f}, val {history['val_accuracy'][-1]:.4f}")
    train_acc_metric.reset_state()
    val_acc_metric.reset_state()
mlflow.log_text(model.to_json(), "architecture.json")
