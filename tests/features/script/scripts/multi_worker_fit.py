"""MultiWorkerMirroredStrategy with `fit`. TF_CONFIG names the workers; without it there is one.

Plain Keras 3 trains one worker. With two it fails in `fit`.
"""

import json
import os
import socket

import keras
import numpy as np
import tensorflow as tf

GLOBAL_BATCH_SIZE = 64
EPOCHS = 2
STEPS_PER_EPOCH = 6


def find_free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def make_dataset(batch_size):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(384, 12)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype("int64")
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(384, seed=7).repeat().batch(batch_size)


def build_and_compile_model():
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )
    return model


if "TF_CONFIG" not in os.environ:
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"localhost:{find_free_port()}"]},
            "task": {"type": "worker", "index": 0},
        }
    )
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])
print(f"Worker {tf_config['task']['index']} of {num_workers}")

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(7)
with strategy.scope():
    multi_worker_model = build_and_compile_model()

history = multi_worker_model.fit(
    make_dataset(GLOBAL_BATCH_SIZE),
    epochs=EPOCHS,
    steps_per_epoch=STEPS_PER_EPOCH,
)
