"""JAX: `jit` around a `lax.scan` over the steps of an epoch, or around each step for convolutions.

python jax_scan.py mlp --file images.npz --epochs 8
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from contestant import load, parse_arguments, train
from jax import lax

LEARNING_RATE, BETA_1, BETA_2, EPSILON = 1e-3, 0.9, 0.999, 1e-7

#: The shapes of the weights, layer by layer; each layer also has a bias.
SHAPES = {
    "mlp": [(784, 128), (128, 10)],
    "cnn": [(3, 3, 3, 32), (3, 3, 32, 64), (2304, 64), (64, 10)],
}


def initialize(model):
    keys = jax.random.split(jax.random.key(0), len(SHAPES[model]))
    glorot = jax.nn.initializers.glorot_uniform()
    return [(glorot(key, shape), jnp.zeros(shape[-1])) for key, shape in zip(keys, SHAPES[model], strict=True)]


def mlp(weights, x):
    (kernel_1, bias_1), (kernel_2, bias_2) = weights
    x = x.reshape(len(x), -1)
    return jax.nn.relu(x @ kernel_1 + bias_1) @ kernel_2 + bias_2


def cnn(weights, x):
    for kernel, bias in weights[:2]:
        x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = lax.reduce_window(jax.nn.relu(x + bias), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return mlp(weights[2:], x)


MODELS = {"mlp": mlp, "cnn": cnn}


def loss_of(weights, model, x, y):
    logits = MODELS[model](weights, x.astype(jnp.float32) / 255)
    loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))
    return loss, jnp.mean(logits.argmax(axis=1) == y)


def adam(weights, gradients, first, second, count):
    first = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g, first, gradients)
    second = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g * g, second, gradients)
    rate = LEARNING_RATE * jnp.sqrt(1 - BETA_2**count) / (1 - BETA_1**count)
    weights = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + EPSILON), weights, first, second)
    return weights, first, second


def take_step(model, x, y, state, chosen):
    weights, first, second, count = state
    gradients_of = jax.value_and_grad(loss_of, has_aux=True)
    (loss, accuracy), gradients = gradients_of(weights, model, x[chosen], y[chosen])
    weights, first, second = adam(weights, gradients, first, second, count + 1)
    return (weights, first, second, count + 1), (loss, accuracy)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="state")
def take_one_step(model, x, y, state, chosen):
    return take_step(model, x, y, state, chosen)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="state")
def scan_steps(model, x, y, state, order):
    return lax.scan(functools.partial(take_step, model, x, y), state, order)


def loop_over_steps(model, x, y, state, order):
    results = []
    for chosen in order:
        state, result = take_one_step(model, x, y, state, chosen)
        results.append(result)
    return state, tuple(jnp.stack(each) for each in zip(*results, strict=True))


#: On a CPU, convolutions are slow inside of a `scan`.
LOOPS = {"mlp": scan_steps, "cnn": loop_over_steps}


def main():
    args = parse_arguments()
    x, y = map(jnp.asarray, load(args.file))
    steps = len(x) // args.batch_size
    weights = initialize(args.model)
    state = weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights), jnp.zeros(())
    random = np.random.default_rng(0)

    def take_epoch():
        nonlocal state
        order = random.permutation(len(x))[: steps * args.batch_size].astype(np.int32)
        state, (_, accuracies) = LOOPS[args.model](args.model, x, y, state, order.reshape(steps, args.batch_size))
        return accuracies.mean()

    train(args.epochs, steps * args.batch_size, take_epoch)


if __name__ == "__main__":
    main()
