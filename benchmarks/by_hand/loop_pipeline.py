"""A loop of one's own, 64 steps to a call, fed by tf.data.

python loop_pipeline.py mlp --examples 57344 --epochs 8
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
    x, y = synthetic(args.examples, SHAPES[args.model])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).cache().shuffle(args.examples).repeat()
    batches = iter(dataset.batch(args.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE))

    model = MODELS[args.model]()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train(batches):
        losses = hits = 0.0
        for _ in tf.range(STEPS_PER_CALL):
            inputs, targets = next(batches)
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
        results = [[float(value) for value in train(batches)] for _ in range(calls)]
        seconds = time.perf_counter() - begin
        rates.append(calls * STEPS_PER_CALL * args.batch_size / seconds)
    accuracy = statistics.mean(accuracy for _, accuracy in results)
    # The first epoch compiles.
    print(json.dumps({"examples_per_second": statistics.median(rates[1:]), "accuracy": accuracy}))


if __name__ == "__main__":
    main()
