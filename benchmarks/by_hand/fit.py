"""Plain Keras: `compile` and `fit`.

python fit.py mlp --examples 57344 --epochs 8
"""

import argparse
import json
import statistics
import time

import keras
from data import synthetic
from models import MODELS, SHAPES


class EpochTimes(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.begin)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    x, y = synthetic(args.examples, SHAPES[args.model])
    model = MODELS[args.model]()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    times = EpochTimes()
    history = model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, callbacks=[times], verbose=0)
    rate = args.examples / statistics.median(times.seconds[1:])  # the first epoch compiles
    print(json.dumps({"examples_per_second": rate, "accuracy": history.history["accuracy"][-1]}))


if __name__ == "__main__":
    main()
