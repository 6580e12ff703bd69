"""A loop of one's own, 64 steps to a call, the data in a tensor and batches gathered by index.

python loop_gather.py mlp --examples 57344 --epochs 8
"""

import argparse
import json
import statistics
import time

import keras
import tensorflow as tf
from data import synthetic
from models import MODELS, SHAPES

STEPS_PER_CALL = 64


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    x, y = map(tf.constant, synthetic(args.examples, SHAPES[args.model]))

    model = MODELS[args.model]()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train(x, y, order, first):
        losses = hits = 0.0
        for step in tf.range(STEPS_PER_CALL):
            begin = (first + step) * args.batch_size
            chosen = order[begin : begin + args.batch_size]
            inputs, targets = tf.gather(x, chosen), tf.gather(y, chosen)
            with tf.GradientTape() as tape:
                logits = model(inputs, training=True)
                loss = loss_of(targets, logits)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            losses += loss
            hits += tf.reduce_mean(keras.metrics.sparse_categorical_accuracy(targets, logits))
        return losses / STEPS_PER_CALL, hits / STEPS_PER_CALL

    calls = args.examples // (args.batch_size * STEPS_PER_CALL)
    rates = []
    for _ in range(args.epochs):
        begin = time.perf_counter()
        order = tf.random.shuffle(tf.range(args.examples))
        firsts = [tf.constant(call * STEPS_PER_CALL) for call in range(calls)]
        results = [[float(value) for value in train(x, y, order, first)] for first in firsts]
        seconds = time.perf_counter() - begin
        rates.append(calls * STEPS_PER_CALL * args.batch_size / seconds)
    accuracy = statistics.mean(accuracy for _, accuracy in results)
    # The first epoch compiles.
    print(json.dumps({"examples_per_second": statistics.median(rates[1:]), "accuracy": accuracy}))


if __name__ == "__main__":
    main()
