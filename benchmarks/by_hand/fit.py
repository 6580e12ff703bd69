"""Plain Keras: `compile` and `fit`; with many steps to a call, under MirroredStrategy, with MLflow's autolog.

python fit.py mlp --examples 57344 --epochs 8
"""

import argparse
import contextlib
import itertools
import json
import statistics
import time

import keras
import tensorflow as tf
from data import synthetic
from models import MODELS, SHAPES


class EpochEnds(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.ends = []

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=128, help="per replica")
    parser.add_argument("--steps-per-execution", type=int, default=1)
    parser.add_argument("--mirrored", action="store_true", help="on two logical CPUs")
    parser.add_argument("--autolog", action="store_true", help="into the store of MLFLOW_TRACKING_URI")
    args = parser.parse_args()

    if args.autolog:
        import mlflow

        mlflow.set_experiment("by_hand")
        mlflow.tensorflow.autolog()

    strategy = mirrored() if args.mirrored else None
    replicas = strategy.num_replicas_in_sync if strategy else 1
    keras.utils.set_random_seed(0)
    x, y = synthetic(args.examples, SHAPES[args.model])
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = MODELS[args.model]()
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=args.steps_per_execution,
        )
    times = EpochEnds()
    size = args.batch_size * replicas
    history = model.fit(x, y, batch_size=size, epochs=args.epochs, callbacks=[times], verbose=0)
    # The first epoch compiles.
    rate = args.examples / statistics.median(b - a for a, b in itertools.pairwise(times.ends))
    print(json.dumps({"examples_per_second": rate, "accuracy": history.history["accuracy"][-1]}))


def mirrored():
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


if __name__ == "__main__":
    main()
