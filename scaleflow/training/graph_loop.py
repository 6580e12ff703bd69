"""Loops in the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def repeat_in_graph(body: Callable[..., Any], first: tf.Tensor, count: tf.Tensor, state: Any) -> Any:
    """`state = body(index, *state)` for `count` indices from `first` on, in the graph; gives the last state.

    One round at a time. Where rounds overlap, a kernel computes several at once, and oneDNN's convolution into which
    TensorFlow fuses a bias and a sum keeps what it works on in the kernel: it then reads freed memory, and ends the
    process, hangs, or is wrong (measured with TF 2.21: ten rounds at once end an evaluation on a CPU by SIGSEGV).
    What is to overlap, `body` does ahead and carries on.
    """
    last = first + count
    return tf.while_loop(
        lambda index, *_: index < last,
        lambda index, *carried: (index + 1, *body(index, *carried)),
        (first, *state),
        parallel_iterations=1,
    )[1:]


@contextlib.contextmanager
def keep_devices() -> Iterator[None]:
    """What a loop carries on stays on the device that it was computed on.

    TensorFlow passes the results of a loop's body through identities without a device, which are
    then the first device's: without this they travel there and back in each round.
    """
    with tf.compat.v1.get_default_graph().device(find_input_device):
        yield


def find_input_device(operation: tf.Operation) -> str:
    """The device of an operation, which for an identity without one is its input's."""
    passes_on = operation.type == "Identity" and not operation.device
    return str(operation.inputs[0].device if passes_on else operation.device)
