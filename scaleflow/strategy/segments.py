"""`hardware.remat`: computes parts of a model again in the backward pass.

The parts are layers that the user names, or segments of the graph of layers, chosen by the estimated size of their
activations. The `call` of the layers or of the model is replaced. Evaluations and the saved model do not change.

This is the gradient checkpointing of Chen et al. 2016 (arXiv:1604.06174). It trades time for memory: the forward pass
of such a part runs twice, and its activations are not kept. Both runs use the same weights and the same states of
random generators, so they compute the same values, with the same dropout masks. Only the first run updates states (of
random generators, moving averages).

`tf.recompute_grad` copies all its arguments, including the weights, and takes no boolean ones. Keras's `RematScope`
does not work inside a `tf.function`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat import keras as private
from scaleflow.compat.tensorflow import are_recorded, draws_random, find_called_graph, stop_recording
from scaleflow.errors import ConfigError
from scaleflow.strategy.model_stages import (
    Call,
    build_graph,
    format_range,
    list_inputs,
    list_outputs,
    list_variables,
    run_calls,
)


def recompute(
    function: Callable[[Any], Any], arguments: Any, weights: Sequence[keras.Variable], label: str
) -> tuple[Any, list[tf.Tensor]]:
    """Calls a function of layers, and computes its activations again in the backward pass.

    Args:
        function: takes `arguments`, a structure with tensors, and returns a structure. It is called again in the
            backward pass.
        weights: the trainable weights of the layers.
        label: the name of the function, for messages.

    Returns the result of the function, and the losses that its layers add. Raises ConfigError if a second run would not
    compute the same.
    """
    part = RecomputedPart(function, arguments, weights, label)
    is_eager = tf.executing_eagerly()
    first_operation = 0 if is_eager else len(tf.compat.v1.get_default_graph().get_operations())
    tensors = part.run_first()
    check_operations(first_operation, label)
    check_captures(first_operation, part.list_tensors(), label)
    part.scope.apply_updates()
    remaining = iter(tensors)
    outputs = keras.tree.map_structure(lambda output: replace_output(output, remaining, label), part.outputs)
    return outputs, list(remaining)


class RecomputedPart:
    """A call of layers that runs once in the forward pass, and once more in the backward pass.

    The arguments are described in `recompute`. The attributes are set by the first run.

    Attributes:
        outputs: the result of the first run.
        scope: the scope of the first run, with the states that it read and its updates.
    """

    outputs: Any
    scope: RunScope

    def __init__(
        self, function: Callable[[Any], Any], arguments: Any, weights: Sequence[keras.Variable], label: str
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._weights = weights
        self._label = label
        self._inputs: dict[int, tf.Tensor] = {}  # the distinct tensors of the arguments that may need a gradient
        self._masks: dict[int, Any] = {}
        for leaf in keras.tree.flatten(arguments):
            if is_differentiable(leaf) and may_have_gradient(leaf):
                self._inputs[id(leaf)] = leaf
                self._masks[id(leaf)] = private.read_mask(leaf)
        outer_scope = private.find_stateless_scope()
        self._values = [read_value(weight, outer_scope) for weight in weights]
        self._layer_state = private.read_layer_state()

    def list_tensors(self) -> list[tf.Tensor]:
        """Returns the tensors that may need a gradient: inputs, then the values of the weights."""
        return [*self._inputs.values(), *self._values]

    def run_first(self) -> list[tf.Tensor]:
        """Runs the function. Returns its tensors with gradients: outputs, then the losses that layers added."""
        tensors = self.list_tensors()
        if tensors:
            return list(tf.custom_gradient(self._differentiate)(*tensors))
        self.outputs, self.scope = self._run(tensors, ())
        return list_differentiable(self.outputs, self.scope)

    def _differentiate(self, *tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        """Returns the tensors of the first run, and a function for their gradients, as `tf.custom_gradient` asks."""
        with stop_recording():
            self.outputs, self.scope = self._run(tensors, ())

        def backward(*gradients: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
            results = self._compute_gradients(tensors, gradients)
            if variables:  # they are frozen
                return results, [None for _ in variables]
            return results

        return list_differentiable(self.outputs, self.scope), backward

    def _compute_gradients(
        self, tensors: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor | None]
    ) -> list[tf.Tensor | None]:
        """Runs the function again. Returns the gradients of `tensors`; `gradients` belong to the outputs."""
        known = [gradient for gradient in gradients if gradient is not None]
        # The dependency keeps TensorFlow from starting early, and from reusing the first run's results.
        with tf.control_dependencies(known), tf.GradientTape() as tape:
            copies = [tf.identity(tensor) for tensor in tensors]
            tape.watch(copies)
            outputs = list_differentiable(*self._run(copies, self.scope.first_values()))
        targets = []
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None:
                targets.append(output)
        results = tape.gradient(targets, copies, output_gradients=known)
        return [None if result is None else tf.convert_to_tensor(result) for result in results]

    def _run(self, tensors: Sequence[tf.Tensor], states: Iterable[tuple[Any, tf.Tensor]]) -> tuple[Any, RunScope]:
        """Runs the function with other tensors, as `list_tensors` orders them, and with values of states."""
        replaced = dict(zip(self._inputs, tensors, strict=False))  # the weights' values follow
        for key, tensor in replaced.items():
            private.set_mask(tensor, self._masks[key])
        arguments = keras.tree.map_structure(lambda leaf: replaced.get(id(leaf), leaf), self._arguments)
        weight_values = zip(self._weights, tensors[len(self._inputs) :], strict=True)
        scope = RunScope([*weight_values, *states], self._label)
        with private.use_layer_state(self._layer_state), scope:
            return self._function(arguments), scope


def list_differentiable(outputs: Any, scope: RunScope) -> list[tf.Tensor]:
    """Lists the tensors of a run that have gradients: outputs, then the losses that layers added."""
    return [*filter(is_differentiable, keras.tree.flatten(outputs)), *scope.added]


def is_differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def may_have_gradient(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor's gradient may be needed. In a traced function this is unknown, so it returns True."""
    return not tf.executing_eagerly() or are_recorded([tensor])


def replace_output(output: Any, tensors: Iterator[tf.Tensor], label: str) -> Any:
    """Returns the next of `tensors`, with the mask of an output, if the output has a gradient; else the output.

    Raises ConfigError for a structure that would lose its gradient.
    """
    if not isinstance(output, tf.Tensor | bool | int | float | str | None):
        raise ConfigError(
            f"hardware.remat: {label} returns a {type(output).__name__}, whose gradient would be lost; return tensors "
            "in tuples, lists or dicts, or use hardware.remat=false"
        )
    if not is_differentiable(output):
        return output
    tensor = next(tensors)
    private.set_mask(tensor, private.read_mask(output))
    return tensor


class RunScope(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """Gives layers the values of their variables, and collects updates and losses instead of applying them.

    Args:
        values: (variable, value) pairs. Other variables are read once, when a layer first uses them.
        label: the name of the part that runs, for messages.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, tf.Tensor]], label: str) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        # Set here, because Keras would cast the values to the compute dtype of the layer around.
        self.state_mapping = {id(variable): value for variable, value in values}
        self.added: list[tf.Tensor] = []  # Keras removes a layer's losses when it is called again outside a model
        self._label = label
        self._graph = tf.compat.v1.get_default_graph()
        self._read: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._updated: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        if id(variable) not in self.state_mapping:
            if variable.trainable:
                raise ConfigError(
                    f"hardware.remat: {self._label} uses the weights {variable.path} of another layer, whose gradient "
                    "would be lost; make them weights of the layer that uses them, or use hardware.remat=false"
                )
            value = read_value(variable, self.original_scope)
            self._read[id(variable)] = (variable, value)
            self.state_mapping[id(variable)] = value
        return self.state_mapping[id(variable)]

    def add_loss(self, loss: tf.Tensor) -> None:
        super().add_loss(loss)
        self.added.append(loss)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, _ = update
        if tf.compat.v1.get_default_graph() is not self._graph:  # a loop, whose values do not leave it
            raise ConfigError(
                f"hardware.remat: {self._label} changes {variable.path} in a loop or a branch, which cannot be run "
                "again; use hardware.remat=false, or name other layers"
            )
        self.get_current_value(variable)
        self._updated[id(variable)] = variable
        super().add_update(update)

    def first_values(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables that were read, with the values that they had before the run."""
        return list(self._read.values())

    def apply_updates(self) -> None:
        """Assigns the collected updates. Call it outside the scope."""
        for key, variable in self._updated.items():
            variable.assign(self.state_mapping[key])


def read_value(variable: keras.Variable, scope: keras.StatelessScope | None) -> tf.Tensor:
    """Returns the value of a variable in a scope of Keras, or its own."""
    value = None if scope is None else scope.get_current_value(variable)
    return tf.convert_to_tensor(private.read_stored(variable) if value is None else value)


def check_operations(first: int, label: str) -> None:
    """Raises ConfigError if an operation of the graph, from index `first` on, draws other numbers each time."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    for operation in list_operations(graph, graph.get_operations()[first:]):
        if draws_random(operation.type):
            raise ConfigError(
                f"hardware.remat: {label} draws random numbers with TensorFlow ({operation.type}), which are others "
                "when it is computed again; use keras.random with a keras.random.SeedGenerator, or hardware.remat=false"
            )


def list_operations(graph: Any, operations: Iterable[Any]) -> Iterator[Any]:
    """Yields operations, and the operations of functions that they call, such as the bodies of loops."""
    for operation in operations:
        yield operation
        for value in operation.node_def.attr.values():
            called = find_called_graph(graph, value.func.name) if value.HasField("func") else None
            if called is not None:
                yield from list_operations(called, called.get_operations())


def check_captures(first: int, arguments: Iterable[tf.Tensor], label: str) -> None:
    """Raises ConfigError if operations from index `first` on take a tensor with a gradient that is not an argument."""
    if tf.executing_eagerly():
        return
    operations = tf.compat.v1.get_default_graph().get_operations()
    earlier = {operation.name for operation in operations[:first]}
    known = {tensor.name for tensor in arguments}
    for operation in operations[first:]:
        for tensor in operation.inputs:
            is_taken = tensor.op.name in earlier and tensor.name not in known
            if is_taken and is_differentiable(tensor) and are_recorded([tensor]):
                raise ConfigError(
                    f"hardware.remat: {label} uses the tensor {tensor.name}, which is not an argument of its call, so "
                    "its gradient would be lost; pass it as an argument, or use hardware.remat=false"
                )


#: The number of limits of a segment's size that `choose_segments` tries.
LIMITS = 32


@dataclass(frozen=True)
class Segment:
    """Consecutive calls of a model's graph."""

    calls: Sequence[Call]
    inputs: Sequence[int]  # the numbers of the tensors that they take from earlier calls
    outputs: Sequence[int]  # the numbers of the tensors that later calls take, and of the model's outputs
    is_recomputed: bool  # whether they are computed again in the backward pass

    def run(self, values: dict[int, Any]) -> list[tf.Tensor]:
        """Runs the calls in training, adds their outputs to `values`, and returns the losses that layers add."""
        if not self.is_recomputed:
            return run_calls(self.calls, values, training=True)

        def run_again(inputs: dict[int, Any]) -> list[Any]:
            own = dict(inputs)
            run_calls(self.calls, own, training=True)
            return [own[number] for number in self.outputs]

        weights = [variable for variable in list_variables(self.calls) if variable.trainable]
        inputs = {number: values[number] for number in self.inputs}
        outputs, losses = recompute(run_again, inputs, weights, label=str(self))
        values.update(zip(self.outputs, outputs, strict=True))
        return losses

    def __str__(self) -> str:
        return format_range(self.calls)


def recompute_segments(model: keras.Model) -> list[Segment]:
    """Makes training steps compute segments of a model again. Returns these segments.

    Raises ConfigError if the model has no graph of layers, or no segments that would save memory.
    """
    if private.find_plain_graph(model) is None:
        raise ConfigError(
            f"hardware.remat=true: the model {model.name} ({type(model).__name__}) is not a graph of layers, so it "
            f"cannot be divided; name layers to compute again, such as hardware.remat=[{name_example(model)}]"
        )
    graph = build_graph(model)
    segments = choose_segments(graph.calls, graph.sink_numbers, graph.source)
    recomputed = [segment for segment in segments if segment.is_recomputed]
    if not recomputed:
        raise ConfigError(
            f"hardware.remat=true: the model {model.name} has no part whose activations need more memory than its "
            "result; use hardware.remat=false"
        )

    def call(plain_call: Any, inputs: Any, training: bool | None = None, mask: Any = None, **named: Any) -> Any:
        if not training:
            return plain_call(inputs, training=training, mask=mask, **named)
        values = {graph.source: inputs}
        for tensor, mask_of_tensor in zip(keras.tree.flatten(inputs), keras.tree.flatten(mask), strict=False):
            private.set_mask(tensor, mask_of_tensor)  # as `Functional.call` does
        for segment in segments:
            losses = segment.run(values)
            if segment.is_recomputed:
                keras.layers.Layer.add_loss(model, losses)  # `Model` rejects it
        return keras.tree.map_structure(values.__getitem__, graph.sinks)

    private.wrap(model, "call", call)  # no part of the model's state, so a saved model does not have it
    return recomputed


def recompute_layers(layers: Sequence[keras.Layer], setting: str, *, is_divided: bool) -> int:
    """Makes training steps compute layers again, one by one. Returns the number of layers, without inner ones.

    Args:
        layers: the layers. A layer inside another one is computed again with the outer one.
        setting: the key and its value, for messages.
        is_divided: whether the model is divided into stages, with nested models expanded.

    Raises ConfigError if a layer cannot be computed again.
    """
    outer = list_outer_layers(layers)
    for layer in outer:
        parts = private.flatten_layers(layer)
        if any(isinstance(part, keras.layers.Embedding) for part in parts):
            raise ConfigError(
                f"{setting}: {layer.name} looks up rows of a table, which saves no memory and would read the whole "
                "table; leave it out"
            )
        if is_divided and private.find_plain_graph(layer) is not None:
            names = ", ".join(part.name for part in parts[1:] if part.weights)
            raise ConfigError(
                f"{setting}: {layer.name} is a model, which strategy=pipeline divides; use hardware.remat=true, or "
                f"name layers of it: {names}"
            )
        private.wrap(layer, "call", functools.partial(call_again, layer))
    return len(outer)


def list_outer_layers(layers: Sequence[keras.Layer]) -> list[keras.Layer]:
    """Returns the distinct layers that are not inside another one."""
    inner_ids: set[int] = set()
    for layer in layers:
        inner_ids.update(map(id, private.flatten_layers(layer, include_self=False)))
    outer = {id(layer): layer for layer in layers if id(layer) not in inner_ids}
    return list(outer.values())


def call_again(layer: keras.Layer, plain_call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls a layer. In training its activations are computed again in the backward pass."""
    if not private.is_training(layer):
        return plain_call(*args, **named)

    def call_with(arguments: tuple[Sequence[Any], dict[str, Any]]) -> Any:
        positional, keywords = arguments
        return plain_call(*positional, **keywords)

    outputs, losses = recompute(call_with, (args, named), layer.trainable_variables, label=layer.name)
    layer.add_loss(losses)
    return outputs


def list_inner_layers(calls: Sequence[Call]) -> list[keras.Layer]:
    """Lists the layers of calls, at any depth."""
    layers: list[keras.Layer] = []
    for call in calls:
        if isinstance(call.run, keras.layers.Layer):
            layers += private.flatten_layers(call.run)
    return layers


def name_example(model: keras.Model) -> str:
    """Returns the name of the model's largest layer, for a message."""
    usable = []
    for layer in model.layers:
        if layer.weights and not isinstance(layer, keras.layers.Embedding):
            usable.append(layer)
    if not usable:
        return "PATTERN"
    largest = max(usable, key=lambda layer: layer.count_params())
    return str(largest.name)


def choose_segments(
    calls: Sequence[Call], sinks: set[int], source: int, *, copies: int = 1, keeps_last: bool = True
) -> list[Segment]:
    """Divides calls into segments so that training needs little memory, estimated from the layers' outputs.

    Tensors that segments pass on are kept until the backward pass, for each of `copies` micro-batches. Tensors inside a
    segment need memory only while that segment is computed again.

    Args:
        calls: consecutive calls of a graph.
        sinks: the numbers of the tensors that are used after these calls.
        source: the number of the model's input.
        copies: micro-batches whose forward passes run before the first backward pass.
        keeps_last: whether the last segment is not computed again, because its backward pass is the first.
    """
    sizes = estimate_sizes(calls, sinks, source)
    last = len(calls)
    kept = np.where(sizes.is_plain, sizes.inside, sizes.passed).astype(float)
    needed = np.where(sizes.is_plain, 0, sizes.inside).astype(float)
    if keeps_last:
        kept[:, last] = 0
        needed[:, last] = sizes.inside[:, last]
    best_starts: list[int] = []
    least_memory = np.inf
    total_size = sizes.inside[0, last]
    for limit in np.geomspace(max(total_size / 1000, 1), max(total_size, 1), LIMITS):
        kept_memory, starts = find_cheapest_starts(np.where(needed <= limit, kept, np.inf))
        largest = max(map(needed.__getitem__, pair_with_ends(starts, last)))
        memory = copies * kept_memory + largest
        if memory < least_memory:
            least_memory = memory
            best_starts = starts
    segments = []
    for start, end in pair_with_ends(best_starts, last):
        is_kept = sizes.is_plain[start, end] or (keeps_last and end == last)
        segments.append(make_segment(calls, sinks, start, end=end, is_recomputed=not is_kept))
    return segments


def pair_with_ends(starts: Sequence[int], last: int) -> list[tuple[int, int]]:
    """Returns (start, end) of consecutive segments."""
    return list(zip(starts, [*starts[1:], last], strict=True))


@dataclass(frozen=True)
class SegmentSizes:
    """Estimated bytes of the segment of calls i to j - 1, at [i, j]."""

    inside: np.ndarray[Any, Any]  # all activations
    passed: np.ndarray[Any, Any]  # the tensors that it passes on
    is_plain: np.ndarray[Any, Any]  # whether computing it again saves nothing


def estimate_sizes(calls: Sequence[Call], sinks: set[int], source: int) -> SegmentSizes:
    """Estimates the sizes of all segments.

    A layer with inner layers is assumed to make one tensor of its output's size for each of them. Activations that no
    weight influences have size 0, because no backward pass needs them.
    """
    count = len(calls)
    sizes = np.zeros(count + 1, np.int64)
    tables = np.zeros(count + 1, np.int64)
    trained = list_inputs(calls) - list_outputs(calls) - {source}  # tensors that a weight influences
    for index, call in enumerate(calls):
        inner = list_inner_layers([call])
        if call.inputs & trained or any(variable.trainable for variable in call.variables):
            trained.update(call.outputs)
            sizes[index + 1] = sum(call.sizes) * max(len(inner), 1)
        tables[index + 1] = any(isinstance(layer, keras.layers.Embedding) for layer in inner)
    passed = measure_passed(calls, sinks)
    totals = sizes.cumsum()
    table_counts = tables.cumsum()
    inside = totals[None, :] - totals[:, None]
    has_table = table_counts[None, :] > table_counts[:, None]
    return SegmentSizes(inside, passed, is_plain=has_table | (inside <= passed))


def measure_passed(calls: Sequence[Call], sinks: set[int]) -> np.ndarray[Any, Any]:
    """Returns the bytes of the tensors that the segment of calls i to j - 1 passes on, at [i, j].

    The segments with start <= c < end <= last use pass on tensor t of call c. These are rectangles, and their sums are
    the cumulative sums of their corners.
    """
    count = len(calls)
    last_use: dict[int, int] = {}
    for index, call in enumerate(calls):
        for number in call.inputs:
            last_use[number] = index
    for number in sinks:
        last_use[number] = count
    corners = np.zeros((count + 2, count + 2), np.int64)
    for index, call in enumerate(calls):
        for number, size in zip(call.outputs, call.sizes, strict=True):
            end = last_use.get(number, index)
            corners[0, index + 1] += size
            corners[0, end + 1] -= size
            corners[index + 1, index + 1] -= size
            corners[index + 1, end + 1] += size
    return corners.cumsum(axis=0).cumsum(axis=1)[: count + 1, : count + 1]


def find_cheapest_starts(costs: np.ndarray[Any, Any]) -> tuple[float, list[int]]:
    """Divides 0 ... n into ranges with the smallest sum of `costs[start, end]`; returns (the sum, their starts)."""
    count = costs.shape[0] - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0
    previous = np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        sums = best[:end] + costs[:end, end]
        previous[end] = int(np.argmin(sums))
        best[end] = sums[previous[end]]
    starts: list[int] = []
    end = count
    while end:
        end = int(previous[end])
        starts.append(end)
    return float(best[count]), starts[::-1]


def make_segment(calls: Sequence[Call], sinks: set[int], start: int, end: int, is_recomputed: bool) -> Segment:
    """Returns the segment of the calls [start, end), with the tensors that it takes and those that it passes on."""
    own = calls[start:end]
    outputs = list_outputs(own)
    inputs = list_inputs(own)
    used_later = sinks | list_inputs(calls[end:])
    return Segment(own, sorted(inputs - outputs), sorted(outputs & used_later), is_recomputed=is_recomputed)
