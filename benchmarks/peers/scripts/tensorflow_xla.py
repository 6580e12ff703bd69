"""All steps of an epoch as one XLA program, by hand.

python tensorflow_xla.py mlp --file images.npz --epochs 8
"""

import keras
import tensorflow as tf
from contestant import load, parse_arguments, train
from keras import layers


def main():
    args = parse_arguments()
    assert args.model == "mlp", "XLA takes minutes to compile a convolution's gradient on a CPU"
    keras.utils.set_random_seed(0)
    x, y = map(tf.constant, load(args.file))
    steps = len(x) // args.batch_size

    model = keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            layers.Rescaling(1 / 255),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(jit_compile=True)
    def take_steps(x, y, order):
        losses = hits = 0.0
        for step in tf.range(steps):
            chosen = order[step]
            inputs, targets = tf.gather(x, chosen), tf.gather(y, chosen)
            with tf.GradientTape() as tape:
                logits = model(inputs, training=True)
                loss = loss_of(targets, logits)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            losses += loss
            hits += tf.reduce_mean(keras.metrics.sparse_categorical_accuracy(targets, logits))
        return losses / steps, hits / steps

    def take_epoch():
        order = tf.random.shuffle(tf.range(len(x)))[: steps * args.batch_size]
        _, accuracy = take_steps(x, y, tf.reshape(order, [steps, args.batch_size]))
        return accuracy

    train(args.epochs, steps * args.batch_size, take_epoch)


if __name__ == "__main__":
    main()
