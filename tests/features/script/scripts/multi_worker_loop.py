"""MultiWorkerMirroredStrategy with a loop of its own. TF_CONFIG names the workers; without it there is one.

Each worker reads all examples. tf.data divides them.
"""

import json
import os
import socket

import keras
import numpy as np
import tensorflow as tf

GLOBAL_BATCH_SIZE = 64
EPOCHS = 2
SEED = 3


def find_free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


if "TF_CONFIG" not in os.environ:
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"localhost:{find_free_port()}"]},
            "task": {"type": "worker", "index": 0},
        }
    )

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(SEED)

rng = np.random.default_rng(SEED)
x = rng.normal(size=(384, 12)).astype("float32")
y = (x @ rng.normal(size=(12, 1)) + 0.1 * rng.normal(size=(384, 1))).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH_SIZE)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))

with strategy.scope():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)


def train_step(batch):
    features, targets = batch
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        squares = tf.reduce_sum(tf.square(predictions - targets), axis=-1)
        loss = tf.nn.compute_average_loss(squares, global_batch_size=GLOBAL_BATCH_SIZE)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def distributed_train_step(batch):
    losses = strategy.run(train_step, args=(batch,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


history = {"loss": []}
for epoch in range(EPOCHS):
    total = 0.0
    steps = 0
    for batch in distributed:
        total += float(distributed_train_step(batch))
        steps += 1
    history["loss"].append(total / steps)
    print(f"Epoch {epoch + 1}: loss {total / steps:.4f}")
