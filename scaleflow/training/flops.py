"""What a training step computes, counted in the graph that was traced of it.

Multiplications of matrices and convolutions, forward and backward, a multiplication and an addition as two operations:
that is what a device's peak is about, and nearly all that a network does. What is elementwise (activations, norms, the
optimizer's update) is not counted, nor are lookups in tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Batching


class Uncountable(Exception):
    """A shape, or how often a loop goes round, is not known before it runs."""


def count_flops(graph: Any, rounds: tuple[int, ...] = ()) -> float | None:
    """The operations of one run of a graph, its functions included; None where that can't be known.

    Args:
        graph: a function's.
        rounds: how often the loops in it go round, the outermost first; deeper ones have an unknown number of rounds.
    """
    try:
        return float(count_operations(graph, rounds))
    except Exception:  # what can't be counted, or not as TensorFlow is today, is no reason not to train
        return None


def count_operations(graph: Any, rounds: tuple[int, ...]) -> int:
    return sum(count_operation(operation, graph, rounds) for operation in list_used_operations(graph))


def list_used_operations(graph: Any) -> list[tf.Operation]:
    """The operations that something depends on; what a tape makes beside, such as the images' gradient, is not run."""
    found: dict[str, tf.Operation] = {}
    waiting = [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found[operation.name] = operation
            waiting += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return list(found.values())


def flops_per_example(
    graph: Any, strategy: tf.distribute.Strategy, batching: Batching, is_unrolled: bool = False
) -> float | None:
    """Of a graph that takes a step in each of this process's replicas, in a loop or not.

    Args:
        graph: a function's; the micro-batches of a step are the rounds of an innermost loop, unless unrolled.
        strategy: whose replicas they are.
        batching: how a step's examples are divided.
        is_unrolled: whether the micro-batches follow each other in the graph, without a loop.
    """
    inner = (batching.accumulate,) if batching.accumulate > 1 and not is_unrolled else ()
    is_loop = any(operation.type in ("While", "StatelessWhile") for operation in list_used_operations(graph))
    found = count_flops(graph, (1, *inner) if is_loop else inner)
    return found / batching.share / local_replicas(strategy) if found else None


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    try:
        return len(strategy.extended.worker_devices)
    except RuntimeError:  # the default strategy has none
        return 1


def count_operation(operation: tf.Operation, graph: Any, rounds: tuple[int, ...]) -> int:
    if operation.type in COUNTS:
        return COUNTS[operation.type](operation)
    if operation.type in ("While", "StatelessWhile"):
        inside = count_operations(find_function(operation, graph, "body"), rounds[1:])
        if inside and not rounds:
            raise Uncountable(operation.name)
        return inside * rounds[0] if inside else 0
    if operation.type in ("If", "StatelessIf"):
        return max(
            count_operations(find_function(operation, graph, branch), rounds)
            for branch in ("then_branch", "else_branch")
        )
    if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
        return count_operations(find_function(operation, graph, "f"), rounds)
    return 0


def find_function(operation: tf.Operation, graph: Any, attribute: str) -> Any:
    """The graph of a function that an operation calls."""
    found = graph._get_function(operation.get_attr(attribute).name)
    if found is None or getattr(found, "graph", None) is None:
        raise Uncountable(operation.name)
    return found.graph


def read_dimensions(tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise Uncountable(tensor.name)
    return [int(n) for n in tensor.shape]


def count_matmul(operation: tf.Operation) -> int:
    """[m, k] x [k, n], or so transposed; also in batches."""
    is_transposed = next(
        operation.get_attr(name) for name in ("transpose_a", "adj_x") if name in operation.node_def.attr
    )
    a = read_dimensions(operation.inputs[0])
    return 2 * math.prod(read_dimensions(operation.outputs[0])) * a[-2 if is_transposed else -1]


def count_einsum(operation: tf.Operation) -> int:
    """The product of all dimensions that the equation names."""
    equation = operation.get_attr("equation").decode()
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.partition("->")[0].split(","), operation.inputs, strict=True):
        shape = read_dimensions(tensor)
        head, dots, tail = labels.partition("...")
        rest = len(shape) - len(head) - len(tail)
        names = [*head, *(f"...{number}" for number in range(rest, 0, -1)), *tail] if dots else list(labels)
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))  # what the dots stand for is broadcast
    return (2 if len(operation.inputs) > 1 else 0) * math.prod(sizes.values())


def count_convolution(operation: tf.Operation) -> int:
    """[n, ..., out channels], and a filter [..., in channels of a group, out channels]."""
    return count_products(read_dimensions(operation.outputs[0]), read_dimensions(operation.inputs[1]))


def count_convolution_to_input(operation: tf.Operation) -> int:
    return count_products(read_dimensions(operation.inputs[2]), read_dimensions(operation.inputs[1]))


def count_convolution_to_filter(operation: tf.Operation) -> int:
    return count_products(read_dimensions(operation.inputs[2]), read_dimensions(operation.outputs[0]))


def count_products(outputs: list[int], filters: list[int]) -> int:
    return 2 * math.prod(outputs) * math.prod(filters[:-1])


def count_depthwise(operation: tf.Operation, outputs: tf.Tensor, filters: tf.Tensor) -> int:
    """Each output is of one input channel; the filter is [height, width, in channels, multiplier]."""
    return 2 * math.prod(read_dimensions(outputs)) * math.prod(read_dimensions(filters)[:2])


COUNTS: dict[str, Callable[[tf.Operation], int]] = {
    "MatMul": count_matmul,
    "BatchMatMul": count_matmul,
    "BatchMatMulV2": count_matmul,
    "BatchMatMulV3": count_matmul,
    "Einsum": count_einsum,
    "Conv2D": count_convolution,
    "Conv2DBackpropInput": count_convolution_to_input,
    "Conv2DBackpropFilter": count_convolution_to_filter,
    "Conv3D": count_convolution,
    "Conv3DBackpropInputV2": count_convolution_to_input,
    "Conv3DBackpropFilterV2": count_convolution_to_filter,
    "DepthwiseConv2dNative": lambda o: count_depthwise(o, o.outputs[0], o.inputs[1]),
    "DepthwiseConv2dNativeBackpropInput": lambda o: count_depthwise(o, o.inputs[2], o.inputs[1]),
    "DepthwiseConv2dNativeBackpropFilter": lambda o: count_depthwise(o, o.inputs[2], o.outputs[0]),
}
