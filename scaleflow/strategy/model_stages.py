"""Divides a model's graph of layers into consecutive stages.

Nested models are expanded, so that a cut may be inside them. A stage may take tensors of any earlier stage, so skip
connections can cross stages. All calls that use the same variable are in the same stage.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from scaleflow.compat import keras as private
from scaleflow.errors import ConfigError

#: Operations of a multiply-add.
MULTIPLY_ADD = 2

#: Operations of a matrix product that take as long as the update of one parameter, which waits for memory. Measured:
#: 460 for Adam on one core of a CPU. The bandwidth of a GPU in float32 gives about the same.
UPDATE = 500

#: Layers that use their weights at each position of their input. Others use them at each position of their output.
BY_INPUT = (
    *(keras.layers.RNN, keras.layers.Bidirectional),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
)


def estimate_costs(calls: Sequence[Call], examples: int) -> list[int]:
    """Estimates the operations of each call in a training step, its update included.

    It counts products with weights, forward and backward, and the updates of weights. A frozen weight has no gradient
    and no update, and calls before the first trained weight have no backward pass. Operations without weights, such as
    activations and the products inside attention, do not count, nor do functions.
    """
    costs = []
    has_trained = False  # an earlier call has trained weights
    for call, updated in zip(calls, count_parameters(calls, only_trained=True), strict=True):
        products = 0
        for weight in list_matrices(call.run):
            passes = 1 + has_trained + weight.trainable  # forward, and the gradients of the input and of the weight
            products += passes * math.prod(weight.shape)
        costs.append(MULTIPLY_ADD * examples * call.positions * products + UPDATE * updated)
        has_trained = has_trained or any(weight.trainable for weight in list_weights(call.run))
    return costs


def list_weights(layer: Any) -> list[Any]:
    """Returns the weights of a layer; a function has none."""
    return list(layer.weights) if isinstance(layer, keras.layers.Layer) else []


def list_matrices(layer: Any) -> list[Any]:
    """Returns the weights that a layer uses in products: all matrices but the tables of embeddings."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    table_ids: set[int] = set()
    for part in private.flatten_layers(layer):
        if isinstance(part, keras.layers.Embedding):
            table_ids.update(map(id, part.weights))
    return [weight for weight in layer.weights if len(weight.shape) > 1 and id(weight) not in table_ids]


def count_parameters(calls: Sequence[Call], only_trained: bool = False) -> list[int]:
    """Returns for each call the number of parameters that no earlier call uses."""
    seen: set[int] = set()
    counts = []
    for call in calls:
        count = 0
        for weight in list_weights(call.run):
            is_counted = weight.trainable or not only_trained
            if is_counted and id(weight) not in seen:
                seen.add(id(weight))
                count += weight.shape.num_elements()
        counts.append(count)
    return counts


def count_positions(layer: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts how often a layer uses its weights for one example; an unknown dimension counts as 1.

    Args:
        inputs, outputs: the symbolic tensors of one call, [batch, ...positions, channels].
    """
    tensors = inputs if isinstance(layer, BY_INPUT) and inputs else outputs
    shape = tensors[0].shape
    is_first = getattr(layer, "data_format", None) == "channels_first"
    position_axes = shape[2:] if is_first else shape[1:-1]
    return multiply_sizes(position_axes)


def multiply_sizes(shape: Sequence[int | None]) -> int:
    """Returns the number of elements; an unknown dimension counts as 1."""
    return math.prod(size or 1 for size in shape)


@dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor, by its number, in the arguments of a call."""

    number: int


def list_numbers(refs: Sequence[TensorRef]) -> tuple[int, ...]:
    return tuple(ref.number for ref in refs)


@dataclass(frozen=True)
class Call:
    """One call of one layer."""

    #: The names of the models around the layer and its own, joined with `/`. The name of a nested model's entry ends in
    #: `/`; the name of the whole model's entry is empty
    name: str
    run: Callable[..., Any]  # the layer, or the function that prepares a model's inputs
    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # (positional, by name), with a `TensorRef` for each tensor
    outputs: tuple[int, ...]  # the numbers of the output tensors
    sizes: tuple[int, ...]  # the bytes of each output for one example; an unknown dimension counts as 1
    positions: int = 0  # how often it uses its weights for one example

    @property
    def inputs(self) -> set[int]:
        return {leaf.number for leaf in keras.tree.flatten(self.arguments) if isinstance(leaf, TensorRef)}

    @property
    def variables(self) -> list[keras.Variable]:
        """The layer's weights, statistics and states of random generators."""
        return list(self.run.variables) if isinstance(self.run, keras.layers.Layer) else []

    def __call__(self, values: dict[int, Any], training: bool) -> list[tf.Tensor]:
        """Runs the call, adds its outputs to `values`, and returns the losses that the layer adds."""
        args, named = keras.tree.map_structure(
            lambda leaf: values[leaf.number] if isinstance(leaf, TensorRef) else leaf, self.arguments
        )
        is_layer = isinstance(self.run, keras.layers.Layer)
        if is_layer:
            named = {**named, "training": training}  # as in Keras, overrides the recorded argument
        outputs = keras.tree.flatten(self.run(*args, **named))
        values.update(zip(self.outputs, outputs, strict=True))
        return private.list_own_losses(self.run) if is_layer else []


@dataclass(frozen=True)
class Graph:
    """A model's calls, each after those whose outputs it takes."""

    calls: Sequence[Call]
    source: int  # the number of the model's input, which may be a dict of tensors
    sinks: Any  # the numbers of the model's outputs, in their structure

    @property
    def sink_numbers(self) -> set[int]:
        return set(keras.tree.flatten(self.sinks))


@dataclass(frozen=True)
class ModelStage:
    """Consecutive calls on one device."""

    calls: Sequence[Call]
    #: Numbers of the tensors that it takes from earlier stages. The last stage takes all outputs of the model, for the
    #: loss.
    inputs: Sequence[int]
    outputs: Sequence[int]  # numbers of the tensors that later stages take, and of the model's outputs
    variables: Sequence[keras.Variable]
    parameters: int  # the number of parameters in its layers' weights
    cost: float  # its share of the estimated cost of a training step

    @property
    def trainable(self) -> list[keras.Variable]:
        return [v for v in self.variables if v.trainable]

    def run(self, values: dict[int, Any], training: bool) -> list[tf.Tensor]:
        """Runs all calls in order. Returns the losses that layers add, except the regularization of weights."""
        return run_calls(self.calls, values, training)

    def __str__(self) -> str:
        """Returns the names of the first and the last layer."""
        return format_range(self.calls)


def run_calls(calls: Sequence[Call], values: dict[int, Any], training: bool) -> list[tf.Tensor]:
    """Runs calls in order, adds their outputs to `values`, and returns the losses that layers add."""
    losses = []
    for call in calls:
        losses += call(values, training)
    return losses


def list_inputs(calls: Sequence[Call]) -> set[int]:
    """Returns the numbers of the tensors that calls take."""
    return set().union(*(call.inputs for call in calls))


def list_outputs(calls: Sequence[Call]) -> set[int]:
    """Returns the numbers of the tensors that calls make."""
    return set().union(*(call.outputs for call in calls))


def list_variables(calls: Sequence[Call]) -> list[keras.Variable]:
    """Returns the distinct variables of calls."""
    variables: dict[int, keras.Variable] = {}
    for call in calls:
        for variable in call.variables:
            variables[id(variable)] = variable
    return list(variables.values())


def format_range(calls: Sequence[Call]) -> str:
    """Returns the names of the first and the last layer of consecutive calls."""
    named = [call.name for call in calls if call.name and not call.name.endswith("/")]
    if len(named) == 1:
        return named[0]
    return f"{named[0]} to {named[-1]}"


def divide_graph(graph: Graph, count: int, cuts: Sequence[str] | None, examples: int) -> list[ModelStage]:
    """Divides a model before each layer in `cuts`, or into `count` stages balanced by estimated cost.

    Args:
        cuts: the first layers of all stages but the first, or None.
        examples: the number of examples of a training step. The cost depends on it.

    Raises ConfigError if the model cannot be cut there.
    """
    parameters = count_parameters(graph.calls)
    costs = estimate_costs(graph.calls, examples)
    starts = find_named_starts(graph.calls, cuts) if cuts else find_balanced_starts(graph.calls, costs, count)
    total = max(sum(costs), 1)
    stages = []
    earlier: set[int] = set()
    for first, end in itertools.pairwise([0, *starts, len(graph.calls)]):
        calls = graph.calls[first:end]
        inputs = list_inputs(calls)
        outputs = list_outputs(calls)
        if end == len(graph.calls):
            inputs |= graph.sink_numbers
        used_later = graph.sink_numbers | list_inputs(graph.calls[end:])
        stages.append(
            ModelStage(
                calls=calls,
                inputs=sorted(inputs & earlier),
                outputs=sorted(outputs & used_later),
                variables=list_variables(calls),
                parameters=sum(parameters[first:end]),
                cost=sum(costs[first:end]) / total,
            )
        )
        earlier |= outputs
    return stages


def build_graph(model: keras.Model) -> Graph:
    """Returns the graph of a functional or sequential model.

    Raises ConfigError if it is another kind of model, which has no graph of layers.
    """
    functional = private.find_plain_graph(model)
    if functional is None:
        raise ConfigError(
            f"strategy=pipeline: the model {model.name} ({type(model).__name__}) is not a graph of layers, so it "
            "cannot be divided into stages; build it with keras.Model(inputs, outputs) or keras.Sequential"
        )
    numbers = itertools.count()
    source = next(numbers)
    calls, outputs = list_calls(model, TensorRef(source), "", numbers=numbers)
    sinks = keras.tree.pack_sequence_as(functional.output, list(list_numbers(outputs)))
    return Graph(calls, source, sinks)


def list_calls(
    model: keras.Model, inputs: Any, prefix: str, numbers: Iterator[int]
) -> tuple[list[Call], list[TensorRef]]:
    """Returns a model's calls, with nested models expanded, and its outputs.

    Args:
        inputs: the structure of its inputs, with a `TensorRef` for each tensor.
        numbers: yields unused tensor numbers.
    """
    graph = private.find_plain_graph(model)
    assert graph is not None
    entries = [TensorRef(next(numbers)) for _ in graph.inputs]
    standardize = functools.partial(private.standardize_inputs, model, graph)
    sizes = measure_tensors(graph.inputs)
    calls = [Call(prefix, standardize, ((inputs,), {}), outputs=list_numbers(entries), sizes=sizes)]
    refs = dict(zip(map(id, graph.inputs), entries, strict=True))
    for node in private.list_nodes(graph):
        node_calls, outputs = list_node_calls(node, refs, prefix, numbers=numbers)
        calls += node_calls
        refs.update(zip(map(id, node.outputs), outputs, strict=True))
    return calls, [refs[id(tensor)] for tensor in graph.outputs]


def list_node_calls(
    node: Any, refs: Mapping[int, TensorRef], prefix: str, numbers: Iterator[int]
) -> tuple[list[Call], list[TensorRef]]:
    """Returns the call of one node of a graph, or the calls of a nested model, and the node's outputs."""
    layer = node.operation
    args, named = keras.tree.map_structure(
        lambda leaf: refs[id(leaf)] if isinstance(leaf, keras.KerasTensor) else leaf,
        (node.arguments.args, node.arguments.kwargs),
    )
    extra_arguments = [name for name, value in named.items() if value is not None and name != "training"]
    if private.find_plain_graph(layer) is not None and len(args) == 1 and not extra_arguments:
        return list_calls(layer, args[0], f"{prefix}{layer.name}/", numbers=numbers)
    outputs = [TensorRef(next(numbers)) for _ in node.outputs]
    positions = count_positions(layer, node.input_tensors, node.outputs)
    sizes = measure_tensors(node.outputs)
    name = prefix + layer.name
    call = Call(name, layer, (args, named), outputs=list_numbers(outputs), sizes=sizes, positions=positions)
    return [call], outputs


def measure_tensors(tensors: Sequence[keras.KerasTensor]) -> tuple[int, ...]:
    """Returns the bytes of each tensor for one example; an unknown dimension counts as 1."""
    return tuple(multiply_sizes(tensor.shape) * tf.as_dtype(tensor.dtype).size for tensor in tensors)


def find_shared_cuts(calls: Sequence[Call]) -> dict[int, str]:
    """Returns the calls that no stage can begin with, because a cut would separate two users of a variable.

    Returns:
        The name of the layer with the variable, by the index of the call.
    """
    first_users: dict[int, int] = {}
    shared: dict[int, str] = {}
    for index, call in enumerate(calls):
        for variable in call.variables:
            first_user = first_users.setdefault(id(variable), index)
            for between in range(first_user + 1, index + 1):
                shared[between] = call.name
    return shared


def find_balanced_starts(calls: Sequence[Call], costs: Sequence[int], count: int) -> list[int]:
    """Returns the first calls of all stages but the first, so that the largest stage costs as little as possible.

    A stage begins with a layer that has parameters. Layers without, such as an activation or a pooling, stay with the
    layer before them.

    Raises ConfigError if the model has fewer places to cut than `count` stages need.
    """
    shared = find_shared_cuts(calls)
    possible = []
    for index, size in enumerate(count_parameters(calls)):
        if size and index not in shared:
            possible.append(index)
    possible = possible[1:]  # the first stage begins with the first call
    if len(possible) + 1 < count:
        names = sorted(set(shared.values()))
        because = f" (all calls of {', '.join(names)} belong to one)" if names else ""
        most = len(possible) + 1
        instead = f"use strategy.stages={most} and fewer devices" if most > 1 else "use strategy=one_device"
        raise ConfigError(
            f"strategy.stages={count}: a stage begins with a layer that has parameters, so this model can be divided "
            f"into {most} stage{'s' if most > 1 else ''} at most{because}; {instead}"
        )
    block_costs = []
    for first, end in itertools.pairwise([0, *possible, len(calls)]):
        block_costs.append(sum(costs[first:end]))
    return [possible[block - 1] for block in balance_blocks(block_costs, count)]


def balance_blocks(blocks: Sequence[int], count: int) -> tuple[int, ...]:
    """Divides blocks into `count` consecutive groups, so that the largest group costs as little as possible.

    Returns the first block of each group but the first one.
    """
    total = [0, *itertools.accumulate(blocks)]

    @functools.cache
    def divide(first: int, groups: int) -> tuple[int, tuple[int, ...]]:
        """Divides the blocks from `first` on. Returns the cost of the largest group, and the starts."""
        if groups == 1:
            return total[-1] - total[first], ()
        divisions = []
        for end in range(first + 1, len(blocks) - groups + 2):
            largest, starts = divide(end, groups - 1)
            cost = total[end] - total[first]
            divisions.append((max(cost, largest), (end, *starts)))
        return min(divisions)

    _, starts = divide(0, count)
    return starts


def find_named_starts(calls: Sequence[Call], cuts: Sequence[str]) -> list[int]:
    """Returns the first calls of the stages that `cuts` names by their first layers.

    Raises ConfigError if a name is unknown or ambiguous, a stage is empty, or a cut separates users of a variable.
    """
    key = f"strategy.cuts=[{', '.join(cuts)}]"
    starts = [find_start(calls, name, key) for name in cuts]
    shared = find_shared_cuts(calls)
    for name, start, previous in zip(cuts, starts, [0, *starts], strict=False):
        if not list_layer_names(calls[previous:start]):
            raise ConfigError(
                f"{key}: there is no layer between {name} and the previous cut; name the first layers of the second "
                f"and later stages in the order in which they run: {', '.join(list_layer_names(calls)[1:])}"
            )
        if start in shared:
            raise ConfigError(
                f"{key}: a cut before {name} would separate the calls of {shared[start]}, whose variables can be on "
                "one device only; cut before the first of these calls or after the last"
            )
    return starts


def find_start(calls: Sequence[Call], name: str, key: str) -> int:
    """Returns the index of the first call of a layer or nested model. Raises ConfigError if the name is not unique."""
    matches: dict[str, int] = {}
    for index, call in enumerate(calls):
        if is_named(call, name):
            matches.setdefault(call.name, index)
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        raise ConfigError(f"{key}: {name} may be {' or '.join(sorted(matches))}; write one of them")
    raise ConfigError(f"{key}: the model has no layer {name}; it has {', '.join(list_layer_names(calls))}")


def is_named(call: Call, name: str) -> bool:
    """Returns whether a name equals the last part, or the last parts, of a call's name."""
    return bool(call.name) and f"/{call.name.rstrip('/')}".endswith(f"/{name}")


def list_layer_names(calls: Sequence[Call]) -> list[str]:
    """Returns the distinct names of layers as a cut may use them."""
    names: dict[str, None] = {}
    for call in calls:
        if call.name and not call.name.endswith("/"):
            names[call.name] = None
    return list(names)
