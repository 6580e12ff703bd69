"""Counts the floating-point operations of a training step in its traced graph.

Counted are matrix multiplications and convolutions, forward and backward, with a multiply-add as two operations. They
are nearly all that a network computes, and what a device's peak refers to. Elementwise operations (activations,
norms, the optimizer's update) and table lookups are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Batching

LOOPS = ("While", "StatelessWhile")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


class Uncountable(Exception):
    """The graph does not contain a shape or the number of iterations of a loop."""


def count_flops(graph: Any, rounds: tuple[int, ...] = ()) -> float | None:
    """Counts the operations of one run of a graph and of the functions that it calls.

    Args:
        graph: the graph of a concrete function.
        rounds: iterations of the nested loops, the outermost first. The iterations of deeper loops are unknown.

    Returns:
        The operations, or None if they cannot be counted.
    """
    try:
        return float(count_operations(graph, rounds))
    except Exception:  # whatever fails here, also after a change of TensorFlow's internals, must not stop the training
        return None


def count_operations(graph: Any, rounds: tuple[int, ...]) -> int:
    return sum(count_operation(operation, graph, rounds) for operation in list_used_operations(graph))


def list_used_operations(graph: Any) -> list[tf.Operation]:
    """Lists the operations that the outputs need. TensorFlow prunes the others, such as the gradient of the images."""
    used: dict[str, tf.Operation] = {}
    pending = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    while pending:
        operation = pending.pop()
        if operation.name not in used:
            used[operation.name] = operation
            pending += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return list(used.values())


def flops_per_example(
    graph: Any, strategy: tf.distribute.Strategy, batching: Batching, is_unrolled: bool = False
) -> float | None:
    """Counts the operations per example of a graph that takes a step in each replica of this process.

    Args:
        graph: the graph of a concrete function. The step may be in a loop; its micro-batches are the iterations of an
            inner loop, unless unrolled.
        strategy: the strategy of the replicas.
        batching: how a step's examples are divided.
        is_unrolled: whether the micro-batches are unrolled.

    Returns:
        The operations, or None if there are none or they cannot be counted.
    """
    inner = (batching.accumulate,) if batching.accumulate > 1 and not is_unrolled else ()
    flops = count_flops(graph, (1, *inner) if has_loop(graph) else inner)
    return flops / batching.share / local_replicas(strategy) if flops else None


def has_loop(graph: Any) -> bool:
    """Returns whether a graph, or a function that it calls, has a loop."""
    for operation in list_used_operations(graph):
        if operation.type in LOOPS:
            return True
        if operation.type in CALLS and has_loop(find_function(operation, graph, "f")):
            return True
    return False


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    try:
        return len(strategy.extended.worker_devices)
    except RuntimeError:  # the default strategy has none
        return 1


def count_operation(operation: tf.Operation, graph: Any, rounds: tuple[int, ...]) -> int:
    if operation.type in COUNTS:
        return COUNTS[operation.type](operation)
    if operation.type in LOOPS:
        inside = count_operations(find_function(operation, graph, "body"), rounds[1:])
        if inside and not rounds:
            raise Uncountable(operation.name)
        return inside * rounds[0] if inside else 0
    if operation.type in ("If", "StatelessIf"):
        return max(
            count_operations(find_function(operation, graph, branch), rounds)
            for branch in ("then_branch", "else_branch")
        )
    if operation.type in CALLS:
        return count_operations(find_function(operation, graph, "f"), rounds)
    return 0


def find_function(operation: tf.Operation, graph: Any, attribute: str) -> Any:
    """Returns the graph of the function that an operation names in an attribute."""
    function = graph._get_function(operation.get_attr(attribute).name)
    if function is None or getattr(function, "graph", None) is None:
        raise Uncountable(operation.name)
    return function.graph


def read_dimensions(tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise Uncountable(tensor.name)
    return [int(n) for n in tensor.shape]


def count_matmul(operation: tf.Operation) -> int:
    """Counts [m, k] x [k, n], either factor possibly transposed, with or without batch dimensions."""
    is_transposed = next(
        operation.get_attr(name) for name in ("transpose_a", "adj_x") if name in operation.node_def.attr
    )
    a = read_dimensions(operation.inputs[0])
    return 2 * math.prod(read_dimensions(operation.outputs[0])) * a[-2 if is_transposed else -1]


def count_einsum(operation: tf.Operation) -> int:
    """Counts the product of all dimensions that the equation names."""
    equation = operation.get_attr("equation").decode()
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.partition("->")[0].split(","), operation.inputs, strict=True):
        shape = read_dimensions(tensor)
        head, dots, tail = labels.partition("...")
        rest = len(shape) - len(head) - len(tail)
        names = [*head, *(f"...{number}" for number in range(rest, 0, -1)), *tail] if dots else list(labels)
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))  # the dimensions of an ellipsis are broadcast
    return (2 if len(operation.inputs) > 1 else 0) * math.prod(sizes.values())


def count_convolution(operation: tf.Operation) -> int:
    """Counts a convolution, or its gradient with respect to the inputs or to the filter.

    Outputs are [n, ..., out channels]. The filter is [..., in channels of a group, out channels], or, if it is
    depthwise, [height, width, in channels, multiplier], where each output depends on one input channel.
    """
    outputs, filters = operation.outputs[0], operation.inputs[1]
    if "BackpropInput" in operation.type:
        outputs = operation.inputs[2]
    elif "BackpropFilter" in operation.type:
        outputs, filters = operation.inputs[2], operation.outputs[0]
    summed_axes = read_dimensions(filters)[: -2 if "Depthwise" in operation.type else -1]
    return 2 * math.prod(read_dimensions(outputs)) * math.prod(summed_axes)


COUNTS: dict[str, Callable[[tf.Operation], int]] = {
    "MatMul": count_matmul,
    "BatchMatMul": count_matmul,
    "BatchMatMulV2": count_matmul,
    "BatchMatMulV3": count_matmul,
    "Einsum": count_einsum,
    "Conv2D": count_convolution,
    "Conv2DBackpropInput": count_convolution,
    "Conv2DBackpropFilter": count_convolution,
    "Conv3D": count_convolution,
    "Conv3DBackpropInputV2": count_convolution,
    "Conv3DBackpropFilterV2": count_convolution,
    "DepthwiseConv2dNative": count_convolution,
    "DepthwiseConv2dNativeBackpropInput": count_convolution,
    "DepthwiseConv2dNativeBackpropFilter": count_convolution,
}
