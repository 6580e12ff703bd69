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

#: Operations of a multiply-add: forward, for the gradient of the layer's input, and for that of its weight.
OPERATIONS = 2

#: Operations of a product of matrices that take as long as the update of one parameter. The update waits for memory:
#: 460 for Adam on one core of a CPU (measured); about as many follow from the bandwidth of a GPU in float32.
UPDATE = 500

#: Layers that use their weights at each position of their input. Others use them at each position of their output.
BY_INPUT = (
    *(keras.layers.RNN, keras.layers.Bidirectional),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
)


def estimate_costs(layers: Sequence[Any], positions: Sequence[int], examples: int) -> list[int]:
    """Estimates the operations of each call in a training step, its update included.

    Counted are products with weights, forward and backward, and the updates of weights. Frozen weights have no gradient
    and no update, and what is before all trained weights has no backward pass. Operations without weights, such as
    activations and the products inside attention, are not counted.

    Args:
        layers: what each call runs; a function costs nothing.
        positions: how often each call uses its weights for one example.
    """
    costs = []
    has_trained = False  # an earlier call has trained weights
    for layer, count, updated in zip(layers, positions, count_parameters(layers, only_trained=True), strict=True):
        products = sum(math.prod(w.shape) * (1 + has_trained + w.trainable) for w in list_matrices(layer))
        costs.append(OPERATIONS * examples * count * products + UPDATE * updated)
        has_trained = has_trained or any(w.trainable for w in list_weights(layer))
    return costs


def list_weights(layer: Any) -> list[Any]:
    """Returns the weights of a layer; none of a function."""
    return list(layer.weights) if isinstance(layer, keras.layers.Layer) else []


def list_matrices(layer: Any) -> list[Any]:
    """Returns the weights that a layer multiplies something with: all matrices but the tables of embeddings."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    tables = (part for part in private.flatten_layers(layer) if isinstance(part, keras.layers.Embedding))
    looked_up = {id(weight) for table in tables for weight in table.weights}
    return [w for w in layer.weights if len(w.shape) > 1 and id(w) not in looked_up]


def count_parameters(layers: Sequence[Any], only_trained: bool = False) -> list[int]:
    """Returns for each call the number of parameters that no earlier call uses."""
    seen: set[int] = set()
    counts = []
    for layer in layers:
        weights = [w for w in list_weights(layer) if w.trainable or not only_trained]
        new = {id(w): w for w in weights if id(w) not in seen}
        seen |= set(new)
        counts.append(sum(w.shape.num_elements() for w in new.values()))
    return counts


def count_positions(layer: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts how often a layer uses its weights for one example; an unknown dimension counts as 1.

    Args:
        inputs, outputs: the symbolic tensors of one call, [batch, ...positions, channels].
    """
    tensors = inputs if isinstance(layer, BY_INPUT) and inputs else outputs
    shape = tensors[0].shape
    is_first = getattr(layer, "data_format", None) == "channels_first"
    return math.prod(size or 1 for size in (shape[2:] if is_first else shape[1:-1]))


@dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor, by its number, in the arguments of a call."""

    number: int


@dataclass(frozen=True)
class Call:
    """One call of one layer."""

    #: The names of the models around the layer and its own, joined with `/`; the entry of a nested model ends in `/`,
    #: that of the whole model is empty
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
        return [loss for call in self.calls for loss in call(values, training)]

    def __str__(self) -> str:
        """Returns the names of the first and the last layer."""
        return format_range(self.calls)


def format_range(calls: Sequence[Call]) -> str:
    """Returns the names of the first and the last layer of consecutive calls."""
    named = [call.name for call in calls if call.name and not call.name.endswith("/")]
    return named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}"


def divide_graph(graph: Graph, count: int, cuts: Sequence[str] | None, examples: int) -> list[ModelStage]:
    """Divides a model before each layer in `cuts`, or into `count` stages balanced by estimated cost.

    Args:
        cuts: the first layers of all stages but the first, or None.
        examples: examples of a training step, on which the cost depends.

    Raises ConfigError if the model cannot be cut there.
    """
    layers = [call.run for call in graph.calls]
    parameters = count_parameters(layers)
    costs = estimate_costs(layers, [call.positions for call in graph.calls], examples)
    starts = find_named_starts(graph.calls, cuts) if cuts else find_balanced_starts(graph.calls, costs, count)
    total = max(sum(costs), 1)
    stages = []
    earlier: set[int] = set()
    for first, end in itertools.pairwise([0, *starts, len(graph.calls)]):
        calls = graph.calls[first:end]
        inputs = {number for call in calls for number in call.inputs}
        outputs = {number for call in calls for number in call.outputs}
        if end == len(graph.calls):
            inputs |= graph.sink_numbers
        wanted_later = graph.sink_numbers | {number for call in graph.calls[end:] for number in call.inputs}
        variables = {id(v): v for call in calls for v in call.variables}
        stages.append(
            ModelStage(
                calls=calls,
                inputs=sorted(inputs & earlier),
                outputs=sorted(outputs & wanted_later),
                variables=list(variables.values()),
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
    sinks = keras.tree.pack_sequence_as(functional.output, [ref.number for ref in outputs])
    return Graph(calls, source, sinks)


def list_calls(
    model: keras.Model, given: Any, prefix: str, numbers: Iterator[int]
) -> tuple[list[Call], list[TensorRef]]:
    """Returns a model's calls, with nested models expanded, and its outputs.

    Args:
        given: the structure of its inputs, with a `TensorRef` for each tensor.
        numbers: yields unused tensor numbers.
    """
    graph = private.find_plain_graph(model)
    assert graph is not None
    entries = [TensorRef(next(numbers)) for _ in graph.inputs]
    standardize = functools.partial(private.standardize_inputs, model, graph)
    entry_numbers = tuple(ref.number for ref in entries)
    calls = [Call(prefix, standardize, ((given,), {}), outputs=entry_numbers, sizes=measure_tensors(graph.inputs))]
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
    numbers_of_outputs = tuple(ref.number for ref in outputs)
    positions = count_positions(layer, node.input_tensors, node.outputs)
    sizes = measure_tensors(node.outputs)
    name = prefix + layer.name
    call = Call(name, layer, (args, named), outputs=numbers_of_outputs, sizes=sizes, positions=positions)
    return [call], outputs


def measure_tensors(tensors: Sequence[keras.KerasTensor]) -> tuple[int, ...]:
    """Returns the bytes of each tensor for one example; an unknown dimension counts as 1."""
    return tuple(math.prod(size or 1 for size in each.shape) * tf.as_dtype(each.dtype).size for each in tensors)


def find_shared_cuts(calls: Sequence[Call]) -> dict[int, str]:
    """Returns index -> layer name, of each call before which a cut would separate two users of a variable."""
    first: dict[int, int] = {}
    shared: dict[int, str] = {}
    for index, call in enumerate(calls):
        for variable in call.variables:
            begin = first.setdefault(id(variable), index)
            shared.update(dict.fromkeys(range(begin + 1, index + 1), call.name))
    return shared


def find_balanced_starts(calls: Sequence[Call], costs: Sequence[int], count: int) -> list[int]:
    """Returns the first calls of all stages but the first, so that the largest stage costs as little as possible.

    A stage begins with a layer that has parameters. Layers without, such as an activation or a pooling, stay with the
    layer before them.

    Raises ConfigError if the model has fewer places to cut than `count` stages need.
    """
    shared, parameters = find_shared_cuts(calls), count_parameters([call.run for call in calls])
    possible = [i for i, size in enumerate(parameters) if size and i not in shared][1:]
    if len(possible) + 1 < count:
        names = sorted(set(shared.values()))
        because = f" (all calls of {', '.join(names)} belong to one)" if names else ""
        most = len(possible) + 1
        instead = f"use strategy.stages={most} and fewer devices" if most > 1 else "use strategy=one_device"
        raise ConfigError(
            f"strategy.stages={count}: a stage begins with a layer that has parameters, so this model can be divided "
            f"into {most} stage{'s' if most > 1 else ''} at most{because}; {instead}"
        )
    blocks = [sum(costs[first:end]) for first, end in itertools.pairwise([0, *possible, len(calls)])]
    return [possible[block - 1] for block in balance_blocks(blocks, count)]


def balance_blocks(blocks: Sequence[int], count: int) -> tuple[int, ...]:
    """Divides blocks into `count` consecutive groups with the smallest maximum; returns the starts but the first."""
    total = [0, *itertools.accumulate(blocks)]

    @functools.cache
    def best(first: int, groups: int) -> tuple[int, tuple[int, ...]]:
        if groups == 1:
            return total[-1] - total[first], ()
        ends = range(first + 1, len(blocks) - groups + 2)
        rest = {end: best(end, groups - 1) for end in ends}
        return min((max(total[end] - total[first], rest[end][0]), (end, *rest[end][1])) for end in ends)

    return best(0, count)[1]


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
    """Returns the first call of the layer or nested model of that name."""
    matches = {call.name: i for i, call in reversed(list(enumerate(calls))) if is_named(call, name)}
    if len(matches) == 1:
        return matches.popitem()[1]
    if matches:
        raise ConfigError(f"{key}: {name} may be {' or '.join(sorted(matches))}; write one of them")
    raise ConfigError(f"{key}: the model has no layer {name}; it has {', '.join(list_layer_names(calls))}")


def is_named(call: Call, name: str) -> bool:
    return bool(call.name) and f"/{call.name.rstrip('/')}".endswith(f"/{name}")


def list_layer_names(calls: Sequence[Call]) -> list[str]:
    """Returns the layers' names as a cut may use them."""
    return [name for name in dict.fromkeys(call.name for call in calls) if name and not name.endswith("/")]
