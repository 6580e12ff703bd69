"""Helpers for loops in a TensorFlow graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

#: Iterations of a loop that may overlap. TensorFlow's own default.
OVERLAPPING_ITERATIONS = 10

#: How the names of convolutions begin, as types of operations.
CONVOLUTIONS = ("Conv", "DepthwiseConv")


def repeat_in_graph(
    body: Callable[..., Any], first: tf.Tensor, count: tf.Tensor, state: Any, *, overlaps: bool = False
) -> Any:
    """Runs `state = body(index, *state)` for `count` indices from `first` on, in the graph; returns the last state.

    Iterations run one at a time (`parallel_iterations=1`). If they overlap, one kernel runs several times at once.
    oneDNN's convolution with a fused bias and sum keeps its working data in the kernel, so it then reads freed memory:
    it crashes, hangs, or is wrong (TF 2.21: an evaluation on a CPU with ten parallel iterations ends with SIGSEGV).
    For work that must overlap, `body` does it one iteration ahead and passes it on in the state, or the caller sets
    `overlaps`, for a body that has no convolution.
    """
    last = first + count
    return tf.while_loop(
        lambda index, *_: index < last,
        lambda index, *carried: (index + 1, *body(index, *carried)),
        (first, *state),
        parallel_iterations=OVERLAPPING_ITERATIONS if overlaps else 1,
    )[1:]


def list_operation_types(graph: Any) -> list[str]:
    """Lists the types of the operations in the functions that a graph calls, such as the body of its loop."""
    return [node.op for function in graph.as_graph_def().library.function for node in function.node_def]


def has_convolution(graph: Any) -> bool:
    """Returns whether the loop of a traced training call computes convolutions."""
    return any(operation.startswith(CONVOLUTIONS) for operation in list_operation_types(graph))


@contextlib.contextmanager
def keep_devices() -> Iterator[None]:
    """Keeps the state of the loops in this context on the devices that computed it.

    TensorFlow passes the results of a loop's body through identities without a device and places those on the first
    device. Without this context the state is copied there and back in each iteration.
    """
    with tf.compat.v1.get_default_graph().device(find_input_device):
        yield


def find_input_device(operation: tf.Operation) -> str:
    """Returns the device of an operation, or of its input for an identity without a device."""
    uses_input_device = operation.type == "Identity" and not operation.device
    return str(operation.inputs[0].device if uses_input_device else operation.device)
