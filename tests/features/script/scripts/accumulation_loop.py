"""Gradient accumulation by hand: a loop that adds the gradients of four batches and applies them once."""

import numpy as np
import tensorflow as tf

EPOCHS = 2
BATCH_SIZE = 16
ACCUMULATION_STEPS = 4

tf.keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(256, 20)).astype("float32")
y = (x[:, :3].sum(axis=1) > 0).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(256, seed=0).batch(BATCH_SIZE, drop_remainder=True)

model = tf.keras.Sequential([tf.keras.Input((20,)), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(2)])
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
accumulated = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in model.trainable_variables]


@tf.function
def add_gradients(features, labels):
    with tf.GradientTape() as tape:
        loss = loss_fn(labels, model(features, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    for total, gradient in zip(accumulated, gradients, strict=True):
        total.assign_add(gradient / ACCUMULATION_STEPS)
    return loss


@tf.function
def apply_gradients():
    optimizer.apply_gradients(zip(accumulated, model.trainable_variables, strict=True))
    for total in accumulated:
        total.assign(tf.zeros_like(total))


history = {"loss": []}
for epoch in range(EPOCHS):
    losses = []
    for step, (features, labels) in enumerate(dataset):
        losses.append(float(add_gradients(features, labels)))
        if (step + 1) % ACCUMULATION_STEPS == 0:
            apply_gradients()
    history["loss"].append(sum(losses) / len(losses))
    print(f"epoch {epoch}: loss {history['loss'][-1]:.4f}")
