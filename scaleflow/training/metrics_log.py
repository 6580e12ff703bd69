"""Reports a session's metrics, and measures its speed, also in floating-point operations.

The count has the matrix multiplications and convolutions in the traced graph of a step, forward and backward, with a
multiply-add as two operations. They are nearly all of the work of a network, and a device's peak refers to them.
Elementwise operations (activations, norms, the optimizer's update) and table lookups do not count.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.tensorflow import find_called_graph
from scaleflow.interfaces import Batching, Feed
from scaleflow.interfaces.events import Emit, MetricsLogged, WeightHistograms
from scaleflow.interfaces.quantiles import weighted_quantiles
from scaleflow.training.engine import Engine

#: `ru_maxrss` counts bytes on macOS and KiB elsewhere (getrusage(2)).
RSS_UNIT = 1 if sys.platform == "darwin" else 1 << 10
MIB = 1 << 20


def measure_peaks() -> dict[str, float]:
    """Returns the peaks since the process began, in MiB: resident host memory, and the largest of the GPUs.

    TensorFlow keeps no such count for CPU and TPU devices.
    """
    peaks = {"perf/peak_host_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / MIB}
    device_peaks = []
    for number, _ in enumerate(tf.config.list_logical_devices("GPU")):
        peak = measure_device_peak(f"GPU:{number}")
        if peak is not None:
            device_peaks.append(peak)
    if device_peaks:
        peaks["perf/peak_device_mb"] = max(device_peaks) / MIB
    return peaks


def measure_device_peak(device: str) -> int | None:
    """Returns the peak of a device in bytes; None if TensorFlow does not count it."""
    try:
        return int(tf.config.experimental.get_memory_info(device)["peak"])
    except ValueError:
        return None


BUCKETS = 30


def compute_histograms(model: keras.Model) -> Mapping[str, Mapping[str, Any]]:
    """Computes a histogram of each finite trainable variable, as JSON values, under `weights/<path>`."""
    histograms = {}
    for variable in model.trainable_variables:
        values = np.asarray(variable.numpy(), np.float64)
        if np.isfinite(values).all():
            histograms[f"weights/{variable.path}"] = compute_histogram(values)
    return histograms


def compute_histogram(values: np.ndarray[Any, Any]) -> Mapping[str, Any]:
    """Computes the histogram of finite values; `limits` are the upper ends of the buckets."""
    counts, edges = np.histogram(values, BUCKETS)
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "sum": float(values.sum()),
        "sum_squares": float(np.square(values).sum()),
        "limits": [float(edge) for edge in edges[1:]],
        "counts": [int(count) for count in counts],
    }


class FirstStep(Protocol):
    """Measures the time to the first step, in parts."""

    def end_part(self, part: str) -> None: ...

    def values(self) -> dict[str, float]:
        """Returns the measured times as metrics."""


class MetricsLog:
    """Reports the metrics of one run.

    Args:
        startup_timer: measures the parts of the time to the first step; None: they are not reported.
        peak_flops: the devices' peak, in floating-point operations per second, if known.
        histograms_every: epochs between histograms of the weights; None for no histograms.

    Attributes:
        clock: measures the speed of the epoch.
        values: the values of the epoch's last call.
        compiles: whether the next call compiles the training step.
    """

    def __init__(
        self,
        engine: Engine,
        emit: Emit,
        startup_timer: FirstStep | None = None,
        peak_flops: float | None = None,
        histograms_every: int | None = None,
    ) -> None:
        self.emit = emit
        self.values: dict[str, float] = {}
        self.compiles = True
        self._engine = engine
        self._startup_timer = startup_timer
        self._peak_flops = peak_flops
        self._histograms_every = histograms_every
        self.clock = EpochClock()
        self._earlier_step_ms: float | None = None
        self._has_started = False

    @property
    def usual_ms(self) -> float | None:
        """Mean milliseconds of an untraced step in this epoch, or in an earlier epoch if this one has none yet."""
        return self.clock.step_ms or self._earlier_step_ms

    def begin_epoch(self, is_resumed: bool) -> None:
        self._earlier_step_ms = self.usual_ms
        self.clock = EpochClock()
        if not is_resumed:
            self.values = {}

    def report_first_step(self, step: int) -> None:
        """Reports the operations and the start-up times once, after the first step of this process, `step`."""
        if self._has_started:
            return
        self._has_started = True
        flops = self._engine.flops_per_example
        values = {} if flops is None else {"perf/flops_per_example": flops}
        if self._startup_timer is not None:
            self._startup_timer.end_part("compile")
            values |= self._startup_timer.values()
        self.emit(MetricsLogged(self._engine.count_updates(step), values))

    def report_call(self, step: int, means: Mapping[str, float], rollbacks: int, is_last: bool) -> dict[str, float]:
        """Reports one call.

        Args:
            step: the updates so far.
            means: the loss and metrics, averaged over the epoch so far.
            rollbacks: rollbacks of the run so far.
            is_last: whether the call is the epoch's last one, which also reports the speed.

        Returns:
            The reported values, without the speed.
        """
        engine = self._engine
        training_values = dict(means)
        for name in ("loss_scale", "learning_rate", "gradient_norm"):
            value = getattr(engine, name)
            if value is not None and math.isfinite(value):
                training_values[name] = value
        if rollbacks:
            training_values["rollbacks"] = float(rollbacks)
        values = add_prefix("train", training_values)
        self.values = dict(values)
        if is_last:
            self.values |= self._make_speed_metrics()
            self.values |= measure_peaks()
        compiled = self.compiles or None
        self.compiles = False
        self.emit(MetricsLogged(step, self.values, rate=self.clock.examples_per_second, compiled=compiled))
        return values

    def _make_speed_metrics(self) -> dict[str, float]:
        """Returns the epoch's speed metrics; `perf/mfu` is the used share of the devices' peak."""
        speed = self.clock.speed()
        flops = self._engine.flops_per_example
        if speed and flops is not None and self._peak_flops is not None:
            speed["perf/mfu"] = speed["perf/examples_per_second"] * flops / self._peak_flops
        return speed

    def evaluate(self, prefix: str, feed: Feed | None, step: int) -> dict[str, float]:
        """Evaluates a split, if it exists, and reports the values at a step."""
        if feed is None:
            return {}
        values = add_prefix(prefix, self._engine.evaluate(feed))
        self.emit(MetricsLogged(step, values))
        return values

    def report_histograms(self, epochs: int, step: int) -> None:
        """Reports the histograms of the weights, if they are due after this number of epochs."""
        if self._histograms_every is not None and epochs % self._histograms_every == 0:
            self.emit(WeightHistograms(step, compute_histograms(self._engine.gather_model())))


class EpochClock:
    """Measures the speed of an epoch's training calls, including the wait for input.

    The session does not add the first call of a process, which compiles, nor traced calls of single steps.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._examples = 0
        self._seconds = 0.0
        self._calls: list[tuple[float, int]] = []

    def add(self, examples: int, steps: int, seconds: float, waited: float) -> None:
        """Adds a call.

        Args:
            examples: examples of the call, without padding.
            waited: seconds spent before the call to open the epoch's input; they count in the means only.
        """
        self._examples += examples
        self._steps += steps
        self._seconds += seconds + waited
        self._calls.append((seconds / steps, steps))

    @property
    def examples_per_second(self) -> float | None:
        return self._examples / self._seconds if self._seconds else None

    @property
    def step_ms(self) -> float | None:
        """Mean milliseconds of a step."""
        return 1000 * self._seconds / self._steps if self._steps else None

    def speed(self) -> dict[str, float]:
        """Returns the speed metrics of the epoch; none if no call was added. Each step counts with its call's mean."""
        if not self._seconds:
            return {}
        step_seconds, steps = zip(*self._calls, strict=True)
        p50, p95 = weighted_quantiles(np.array(step_seconds), [0.5, 0.95], np.array(steps))
        return {
            "perf/examples_per_second": self._examples / self._seconds,
            "perf/step_ms": 1000 * self._seconds / self._steps,
            "perf/step_ms_p50": 1000 * float(p50),
            "perf/step_ms_p95": 1000 * float(p95),
        }


def add_prefix(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


LOOPS = ("While", "StatelessWhile")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


class Uncountable(Exception):
    """The graph does not contain a shape or the number of iterations of a loop."""


def count_flops(graph: Any, rounds: tuple[int, ...] = ()) -> float | None:
    """Counts the operations of one run of a graph and of the functions that it calls.

    Args:
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
    pending = [tensor.op for tensor in graph.outputs]
    pending += graph.control_outputs
    while pending:
        operation = pending.pop()
        if operation.name not in used:
            used[operation.name] = operation
            pending += [tensor.op for tensor in operation.inputs]
            pending += operation.control_inputs
    return list(used.values())


def flops_per_example(
    graph: Any, strategy: tf.distribute.Strategy, batching: Batching, is_unrolled: bool = False
) -> float | None:
    """Counts the operations per example of a graph that takes a step in each replica of this process.

    Args:
        graph: the graph of a concrete function. The step may be in a loop; its micro-batches are the iterations of an
            inner loop, unless unrolled.
        batching: how a step's examples are divided.
        is_unrolled: whether the micro-batches are unrolled.

    Returns:
        The operations, or None if the graph has none or they cannot be counted.
    """
    rounds = [1] if has_loop(graph) else []
    if batching.accumulate > 1 and not is_unrolled:
        rounds.append(batching.accumulate)
    flops = count_flops(graph, tuple(rounds))
    if not flops:
        return None
    return flops / batching.share / local_replicas(strategy)


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
        first_count = count_operations(find_function(operation, graph, "then_branch"), rounds)
        second_count = count_operations(find_function(operation, graph, "else_branch"), rounds)
        return max(first_count, second_count)
    if operation.type in CALLS:
        return count_operations(find_function(operation, graph, "f"), rounds)
    return 0


def find_function(operation: tf.Operation, graph: Any, attribute: str) -> Any:
    """Returns the graph of the function that an operation names in an attribute."""
    called = find_called_graph(graph, operation.get_attr(attribute).name)
    if called is None:
        raise Uncountable(operation.name)
    return called


def read_dimensions(tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise Uncountable(tensor.name)
    return [int(n) for n in tensor.shape]


def count_matmul(operation: tf.Operation) -> int:
    """Counts [m, k] x [k, n], either factor possibly transposed, with or without batch dimensions."""
    attribute = "transpose_a" if "transpose_a" in operation.node_def.attr else "adj_x"
    is_transposed = operation.get_attr(attribute)
    dimensions = read_dimensions(operation.inputs[0])
    summed = dimensions[-2 if is_transposed else -1]
    return 2 * math.prod(read_dimensions(operation.outputs[0])) * summed


def count_einsum(operation: tf.Operation) -> int:
    """Counts the product of all dimensions that the equation names."""
    equation = operation.get_attr("equation").decode()
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.partition("->")[0].split(","), operation.inputs, strict=True):
        shape = read_dimensions(tensor)
        head, dots, tail = labels.partition("...")
        rest = len(shape) - len(head) - len(tail)
        names = list(labels)
        if dots:
            names = [*head, *(f"...{number}" for number in range(rest, 0, -1)), *tail]
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))  # the dimensions of an ellipsis are broadcast
    return (2 if len(operation.inputs) > 1 else 0) * math.prod(sizes.values())


def count_convolution(operation: tf.Operation) -> int:
    """Counts a convolution, or its gradient with respect to the inputs or to the filter.

    Outputs are [n, ..., out channels]. The filter is [..., in channels of a group, out channels], or, if it is
    depthwise, [height, width, in channels, multiplier], where each output depends on one input channel.
    """
    outputs = operation.outputs[0]
    filters = operation.inputs[1]
    if "BackpropInput" in operation.type:
        outputs = operation.inputs[2]
    elif "BackpropFilter" in operation.type:
        outputs = operation.inputs[2]
        filters = operation.outputs[0]
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
