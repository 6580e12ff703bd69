"""`hardware.remat`: which parts of a model are computed again in the backward pass, and how.

They are segments of the graph of layers, which are chosen by the estimated size of activations, or layers that are
named. Either way the model's `call` is replaced, or that of the layers. Evaluations and the saved model do not change.

This is the gradient checkpointing of Chen et al. 2016 (arXiv:1604.06174). It trades time for memory: the forward pass
of such a part runs twice, and its activations are not kept. Both runs use the same weights and the same states of
random generators, so they compute the same values, with the same dropout masks. States (of random generators, moving
averages) are updated by the first run only.

`tf.recompute_grad` copies all its arguments, the weights too, and takes no boolean ones. Keras's `RematScope` does not
work inside a `tf.function`.
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
from scaleflow.strategy.model_stages import Call, build_graph, format_range


def recompute(
    function: Callable[[Any], Any], arguments: Any, weights: Sequence[keras.Variable], label: str
) -> tuple[Any, list[tf.Tensor]]:
    """Calls a function of layers; its activations are computed again in the backward pass.

    Args:
        function: takes `arguments`, a structure with tensors, and returns one. It is called again in the backward pass.
        label: what the function is, for a message.

    Returns what the function returns, and the losses that its layers add. Raises ConfigError if a second run would not
    compute the same.
    """
    leaves = {id(leaf): leaf for leaf in keras.tree.flatten(arguments) if isinstance(leaf, tf.Tensor)}
    inputs = {key: x for key, x in leaves.items() if is_differentiable(x) and may_have_gradient(x)}
    masks = {key: private.read_mask(x) for key, x in inputs.items()}
    around = private.find_stateless_scope()
    values = [read_value(weight, around) for weight in weights]
    layer_state = private.read_layer_state()

    def run(tensors: Sequence[tf.Tensor], states: Iterable[tuple[Any, tf.Tensor]]) -> tuple[Any, RunScope]:
        replaced = dict(zip(inputs, tensors, strict=False))  # the weights' values follow
        for key, tensor in replaced.items():
            private.set_mask(tensor, masks[key])
        given = keras.tree.map_structure(lambda leaf: replaced.get(id(leaf), leaf), arguments)
        scope = RunScope([*zip(weights, tensors[len(inputs) :], strict=True), *states], label)
        with private.use_layer_state(layer_state), scope:
            return function(given), scope

    first: list[tuple[Any, RunScope]] = []

    @tf.custom_gradient
    def differentiate(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        with stop_recording():
            first.append(run(tensors, ()))

        def backward(*gradients: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
            known = [gradient for gradient in gradients if gradient is not None]
            # The dependency keeps TensorFlow from starting early, and from reusing the first run's results.
            with tf.control_dependencies(known), tf.GradientTape() as tape:
                again = [tf.identity(tensor) for tensor in tensors]
                tape.watch(again)
                targets = list_differentiable(*run(again, first[0][1].first_values()))
            pairs = [pair for pair in zip(targets, gradients, strict=True) if pair[1] is not None]
            results = tape.gradient([t for t, _ in pairs], again, output_gradients=[g for _, g in pairs])
            results = [None if result is None else tf.convert_to_tensor(result) for result in results]
            return (results, [None for _ in variables]) if variables else results  # these are frozen

        return list_differentiable(*first[0]), backward

    before = 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())
    if inputs or weights:
        tensors = iter(differentiate(*inputs.values(), *values))
    else:
        first.append(run((), ()))
        tensors = iter(list_differentiable(*first[0]))
    check_operations(before, label)
    check_captures(before, [*inputs.values(), *values], label)
    outputs, scope = first[0]
    scope.apply_updates()
    return keras.tree.map_structure(lambda x: replace_output(x, tensors, label), outputs), list(tensors)


def list_differentiable(outputs: Any, scope: RunScope) -> list[tf.Tensor]:
    """Lists the tensors of a run that have gradients: outputs, then the losses that layers added."""
    return [*filter(is_differentiable, keras.tree.flatten(outputs)), *scope.added]


def is_differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def may_have_gradient(tensor: tf.Tensor) -> bool:
    """Returns whether a gradient of a tensor may be needed. A function that is called in a step does not know it."""
    return not tf.executing_eagerly() or are_recorded([tensor])


def replace_output(output: Any, tensors: Iterator[tf.Tensor], label: str) -> Any:
    """Returns the next of `tensors` for an output that has a gradient, with the output's mask; others unchanged.

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
        label: what runs, for a message.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, tf.Tensor]], label: str) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        # Not by Keras, which would cast them to the dtype that the layer around computes in.
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
            self._read[id(variable)] = variable, value
            self.state_mapping[id(variable)] = value
        return self.state_mapping[id(variable)]

    def add_loss(self, loss: tf.Tensor) -> None:
        super().add_loss(loss)
        self.added.append(loss)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:  # of a loop, whose values do not leave it
            raise ConfigError(
                f"hardware.remat: {self._label} changes {update[0].path} in a loop or a branch, which cannot be run "
                "again; use hardware.remat=false, or name other layers"
            )
        self.get_current_value(update[0])
        self._updated[id(update[0])] = update[0]
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
    """Yields operations, and those of the functions that they call, such as the bodies of loops."""
    for operation in operations:
        yield operation
        for value in operation.node_def.attr.values():
            called = find_called_graph(graph, value.func.name) if value.HasField("func") else None
            if called is not None:
                yield from list_operations(called, called.get_operations())


def check_captures(first: int, given: Iterable[tf.Tensor], label: str) -> None:
    """Raises ConfigError if operations from index `first` on take a tensor with a gradient that is not `given`."""
    if tf.executing_eagerly():
        return
    operations = tf.compat.v1.get_default_graph().get_operations()
    earlier, known = {each.name for each in operations[:first]}, {tensor.name for tensor in given}
    for tensor in (tensor for operation in operations[first:] for tensor in operation.inputs):
        is_taken = tensor.op.name in earlier and tensor.name not in known
        if is_taken and is_differentiable(tensor) and are_recorded([tensor]):
            raise ConfigError(
                f"hardware.remat: {label} uses the tensor {tensor.name}, which is not an argument of its call, so its "
                "gradient would be lost; pass it as an argument, or use hardware.remat=false"
            )


#: How many limits of a segment's size are tried.
LIMITS = 32


@dataclass(frozen=True)
class Segment:
    """Consecutive calls of a model's graph."""

    calls: Sequence[Call]  # the calls
    inputs: Sequence[int]  # the numbers of the tensors that they take from earlier calls
    outputs: Sequence[int]  # the numbers of the tensors that later calls take, and of the model's outputs
    is_recomputed: bool  # whether they are computed again in the backward pass

    def run(self, values: dict[int, Any]) -> list[tf.Tensor]:
        """Runs the calls in training, adds their outputs to `values`, and returns the losses that layers add."""
        if not self.is_recomputed:
            return run_calls(self.calls, values)

        def run_again(given: dict[int, Any]) -> list[Any]:
            own = dict(given)
            run_calls(self.calls, own)
            return [own[number] for number in self.outputs]

        weights = {id(v): v for call in self.calls for v in call.variables if v.trainable}
        given = {number: values[number] for number in self.inputs}
        outputs, losses = recompute(run_again, given, list(weights.values()), label=str(self))
        values.update(zip(self.outputs, outputs, strict=True))
        return losses

    def __str__(self) -> str:
        return format_range(self.calls)


def run_calls(calls: Sequence[Call], values: dict[int, Any]) -> list[tf.Tensor]:
    return [loss for call in calls for loss in call(values, training=True)]


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
        for tensor, each in zip(keras.tree.flatten(inputs), keras.tree.flatten(mask), strict=False):
            private.set_mask(tensor, each)  # as `Functional.call` does
        for segment in segments:
            losses = segment.run(values)
            if segment.is_recomputed:
                keras.layers.Layer.add_loss(model, losses)  # `Model` rejects it
        return keras.tree.map_structure(values.__getitem__, graph.sinks)

    private.wrap(model, "call", call)  # no part of the model's state, so a saved model does not have it
    return recomputed


def recompute_layers(layers: Sequence[keras.Layer], setting: str, *, is_divided: bool) -> int:
    """Makes training steps compute these layers again, each by itself. Returns their number, without inner ones.

    Args:
        layers: the layers; one that is inside another one is computed again with that.
        setting: the key and its value, for messages.
        is_divided: whether the model is divided into stages, with nested models expanded.

    Raises ConfigError if a layer cannot be computed again.
    """
    inner = {id(each) for layer in layers for each in private.flatten_layers(layer, include_self=False)}
    outer = {id(layer): layer for layer in layers if id(layer) not in inner}
    for layer in outer.values():
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


def call_again(layer: keras.Layer, plain_call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls a layer; in training its activations are computed again in the backward pass."""
    if not private.is_training(layer):
        return plain_call(*args, **named)
    outputs, losses = recompute(
        lambda given: plain_call(*given[0], **given[1]), (args, named), layer.trainable_variables, label=layer.name
    )
    layer.add_loss(losses)
    return outputs


def list_inner_layers(calls: Sequence[Call]) -> list[keras.Layer]:
    """Lists the layers of calls, at any depth."""
    layers = (call.run for call in calls if isinstance(call.run, keras.layers.Layer))
    return [part for layer in layers for part in private.flatten_layers(layer)]


def name_example(model: keras.Model) -> str:
    """Returns the name of the model's largest layer, for a message."""
    layers = [layer for layer in model.layers if layer.weights]
    usable = [each for each in layers if not isinstance(each, keras.layers.Embedding)]
    largest = max(usable, key=lambda layer: layer.count_params(), default=None)
    return "PATTERN" if largest is None else str(largest.name)


def choose_segments(
    calls: Sequence[Call], sinks: set[int], source: int, *, copies: int = 1, keeps_last: bool = True
) -> list[Segment]:
    """Divides calls into segments so that the least memory is needed, by the sizes of the layers' outputs.

    What all segments pass on is kept until the backward pass, for each of `copies` micro-batches. What is inside a
    segment is needed only while that segment is computed again.

    Args:
        calls: consecutive calls of a graph.
        sinks: the numbers of the tensors that are used after these calls.
        source: the number of the model's input.
        copies: micro-batches whose forward passes run before the first backward pass.
        keeps_last: whether the last segment is not computed again, because its backward pass is the first.
    """
    inside, passed, is_plain = estimate_sizes(calls, sinks, source)
    last = len(calls)
    kept = np.where(is_plain, inside, passed).astype(float)
    needed = np.where(is_plain, 0, inside).astype(float)
    if keeps_last:
        kept[:, last], needed[:, last] = 0, inside[:, last]
    starts: list[int] = []
    least = np.inf
    for limit in np.geomspace(max(inside[0, last] / 1000, 1), max(inside[0, last], 1), LIMITS):
        total, found = find_cheapest_starts(np.where(needed <= limit, kept, np.inf))
        ends = [*found[1:], last]
        memory = copies * total + max(needed[start, end] for start, end in zip(found, ends, strict=True))
        if memory < least:
            least, starts = memory, found
    ends = [*starts[1:], last]
    recomputed = [
        not is_plain[pair] and not (keeps_last and pair[1] == last) for pair in zip(starts, ends, strict=True)
    ]
    return [
        make_segment(calls, sinks, start, end=end, is_recomputed=is_recomputed)
        for start, end, is_recomputed in zip(starts, ends, recomputed, strict=True)
    ]


def estimate_sizes(
    calls: Sequence[Call], sinks: set[int], source: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Estimates, for the segment of calls i to j - 1 at [i, j]: the bytes of all activations in it, those of the
    tensors that it passes on, and whether computing it again saves nothing.

    A layer that contains others is assumed to make as many tensors of its output's size. Activations that no weight
    influences count as nothing, because no backward pass needs them.
    """
    count = len(calls)
    last_use = {number: index for index, call in enumerate(calls) for number in call.inputs}
    last_use |= dict.fromkeys(sinks, count)
    # Tensor t of call c is passed on by the segments with start <= c < end <= last use. Sums of these rectangles are
    # the cumulative sums of their corners.
    corners = np.zeros((count + 2, count + 2), np.int64)
    sizes = np.zeros(count + 1, np.int64)
    tables = np.zeros(count + 1, np.int64)
    made = {number for call in calls for number in call.outputs}
    trained = {number for call in calls for number in call.inputs} - made - {source}
    for index, call in enumerate(calls):
        inner = list_inner_layers([call])
        if call.inputs & trained or any(variable.trainable for variable in call.variables):
            trained.update(call.outputs)
            sizes[index + 1] = sum(call.sizes) * max(len(inner), 1)
        tables[index + 1] = any(isinstance(layer, keras.layers.Embedding) for layer in inner)
        for number, size in zip(call.outputs, call.sizes, strict=True):
            end = last_use.get(number, index)
            for row, sign in ((0, 1), (index + 1, -1)):
                corners[row, index + 1] += sign * size
                corners[row, end + 1] -= sign * size
    passed = corners.cumsum(axis=0).cumsum(axis=1)[: count + 1, : count + 1]
    totals, table_counts = sizes.cumsum(), tables.cumsum()
    inside = totals[None, :] - totals[:, None]
    has_table = table_counts[None, :] > table_counts[:, None]
    return inside, passed, has_table | (inside <= passed)


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
    own = calls[start:end]
    made = {number for call in own for number in call.outputs}
    taken = {number for call in own for number in call.inputs}
    wanted = sinks | {number for call in calls[end:] for number in call.inputs}
    return Segment(own, sorted(taken - made), sorted(made & wanted), is_recomputed=is_recomputed)
