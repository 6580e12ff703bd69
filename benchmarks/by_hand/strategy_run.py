"""A distributed loop as the tutorials write it: `strategy.run`, one step to a call.

python strategy_run.py cnn --strategy mirrored --examples 16384 --epochs 5

MirroredStrategy on two logical CPUs, or MultiWorkerMirroredStrategy on two processes, of which the first is this one.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import keras
import tensorflow as tf
from data import synthetic
from models import MODELS, SHAPES


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--strategy", choices=("mirrored", "multi_worker"), required=True)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=128, help="per replica")
    args = parser.parse_args()

    if args.strategy == "mirrored":
        cpus = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
        train(args, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    elif "TF_CONFIG" in os.environ:
        train(args, tf.distribute.MultiWorkerMirroredStrategy())
    else:
        workers = start_two_workers()
        output = workers[0].communicate()[0]
        for worker in workers:
            assert worker.wait() == 0
        print(output)


def start_two_workers():
    sockets = [socket.socket() for _ in range(2)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    peers = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    tasks = [{"cluster": {"worker": peers}, "task": {"type": "worker", "index": index}} for index in range(2)]
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv], env={**os.environ, "TF_CONFIG": json.dumps(task)},
            stdout=subprocess.PIPE, text=True,
        )
        for task in tasks
    ]  # fmt: skip


def train(args, strategy):
    keras.utils.set_random_seed(0)
    global_batch_size = args.batch_size * strategy.num_replicas_in_sync
    data = tf.data.Dataset.from_tensor_slices(synthetic(args.examples, SHAPES[args.model])).shuffle(10_000, seed=0)
    data = data.repeat().batch(global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    batches = iter(strategy.experimental_distribute_dataset(data))
    with strategy.scope():
        model = MODELS[args.model]()
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica_step(inputs, targets):
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            loss = tf.nn.compute_average_loss(loss_of(targets, logits), global_batch_size=global_batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        hits = tf.reduce_sum(keras.metrics.sparse_categorical_accuracy(targets, logits))
        return loss, hits / global_batch_size

    @tf.function
    def step(batches):
        loss, hits = strategy.run(replica_step, args=next(batches))
        return strategy.reduce("SUM", loss, axis=None), strategy.reduce("SUM", hits, axis=None)

    steps = args.examples // global_batch_size
    rates = []
    for _ in range(args.epochs):
        begin = time.perf_counter()
        results = [step(batches) for _ in range(steps)]
        results = [(float(loss), float(hits)) for loss, hits in results]
        rates.append(steps * global_batch_size / (time.perf_counter() - begin))
    accuracy = statistics.mean(hits for _, hits in results)
    # The first epoch compiles.
    print(json.dumps({"examples_per_second": statistics.median(rates[1:]), "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
