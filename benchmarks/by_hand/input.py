"""The usual pipeline over data in memory, read by a loop that does nothing else, 64 batches to a call.

python input.py mlp --examples 57344 --epochs 4
"""

import argparse
import json
import statistics
import time

import tensorflow as tf
from data import synthetic
from models import SHAPES

BATCHES_PER_CALL = 64


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    x, y = synthetic(args.examples, SHAPES[args.model])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(args.examples).repeat()
    batches = iter(dataset.batch(args.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE))

    @tf.function
    def read(batches):
        total, largest = tf.constant(0), tf.constant(0.0)
        for _ in tf.range(BATCHES_PER_CALL):
            inputs, targets = next(batches)
            total += tf.reduce_sum(targets)
            largest = tf.maximum(largest, tf.reduce_max(inputs[:, 0, 0, 0]))
        return total, largest

    calls = args.examples // (args.batch_size * BATCHES_PER_CALL)
    rates, sums = [], []
    for _ in range(args.epochs):
        begin = time.perf_counter()
        sums.append(sum(int(read(batches)[0]) for _ in range(calls)))
        rates.append(calls * BATCHES_PER_CALL * args.batch_size / (time.perf_counter() - begin))
    # The first epoch compiles, and fills the buffer.
    print(json.dumps({"examples_per_second": statistics.median(rates[1:]), "right": sums[0] == int(y.sum())}))


if __name__ == "__main__":
    main()
