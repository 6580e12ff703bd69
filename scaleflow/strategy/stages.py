"""A model's graph of layers, divided into stages that follow each other.

Models inside the model are laid open, so that a cut may fall into them. A stage may take tensors of
any earlier one: a connection that skips stages is no obstacle. What holds a stage together is its
variables: all calls that use one of them are in the same stage.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from scaleflow.errors import ConfigError


@dataclass(frozen=True)
class TensorRef:
    """Stands in a call's arguments for a tensor that is known by its number."""

    number: int


@dataclass(frozen=True)
class Call:
    """One call of one layer.

    Attributes:
        name: the layer's, behind those of the models that it is in.
        run: the layer itself, or what stands at the entry of a model.
        arguments: positional and by name, with a `TensorRef` for each tensor.
        outputs: the numbers of its outputs.
    """

    name: str
    run: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: tuple[int, ...]

    @property
    def inputs(self) -> set[int]:
        return {leaf.number for leaf in keras.tree.flatten(self.arguments) if isinstance(leaf, TensorRef)}

    @property
    def variables(self) -> list[keras.Variable]:
        """All of them: weights, statistics, and the state of random numbers."""
        return list(self.run.variables) if isinstance(self.run, keras.layers.Layer) else []

    def __call__(self, values: dict[int, Any], training: bool) -> list[tf.Tensor]:
        """Puts its outputs among the values; gives the losses that the layer adds of its own."""
        args, named = keras.tree.map_structure(
            lambda leaf: values[leaf.number] if isinstance(leaf, TensorRef) else leaf, self.arguments
        )
        if "training" in getattr(self.run, "_call_context_args", ()):
            named = {**named, "training": training}  # as Keras does, whatever the graph was recorded with
        outputs = keras.tree.flatten(self.run(*args, **named))
        values.update(zip(self.outputs, outputs, strict=True))
        if not isinstance(self.run, keras.layers.Layer):
            return []
        return [loss for layer in self.run._flatten_layers() for loss in layer._get_own_losses()]


@dataclass(frozen=True)
class Graph:
    """A model's calls, each behind those whose outputs it takes."""

    calls: Sequence[Call]
    source: int
    sink: int


@dataclass(frozen=True)
class Stage:
    """Calls that follow each other on one device.

    Attributes:
        inputs: tensors of earlier stages.
        outputs: tensors that later stages take, and the model's output.
        variables: of all its layers.
        parameters: how many numbers its layers' weights are.
    """

    calls: Sequence[Call]
    inputs: Sequence[int]
    outputs: Sequence[int]
    variables: Sequence[keras.Variable]
    parameters: int

    @property
    def trainable(self) -> list[keras.Variable]:
        return [v for v in self.variables if v.trainable]

    def run(self, values: dict[int, Any], training: bool) -> list[tf.Tensor]:
        """All calls in their order; gives the losses that layers add of their own, but for those of weights."""
        return [loss for call in self.calls for loss in call(values, training)]

    def __str__(self) -> str:
        """From which layer to which."""
        named = [call.name for call in self.calls if call.name and not call.name.endswith("/")]
        return named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}"


def divide_graph(graph: Graph, count: int, cuts: Sequence[str] | None = None) -> list[Stage]:
    """The stages of a model, before each of the named layers or balanced by their parameters.

    Raises:
        ConfigError: if the model can't be cut so.
    """
    starts = find_named_starts(graph.calls, cuts) if cuts else find_balanced_starts(graph.calls, count)
    bounds = itertools.pairwise([0, *starts, len(graph.calls)])
    return list(make_stages(graph, [graph.calls[first:end] for first, end in bounds]))


def make_stages(graph: Graph, parts: Sequence[Sequence[Call]]) -> Iterator[Stage]:
    """Each part with what it takes from the parts before and gives to those behind."""
    earlier: set[int] = set()
    for index, calls in enumerate(parts):
        given = {number for call in calls for number in call.outputs}
        wanted = {graph.sink} | {number for part in parts[index + 1 :] for call in part for number in call.inputs}
        taken = {number for call in calls for number in call.inputs}
        variables = {id(v): v for call in calls for v in call.variables}
        yield Stage(
            calls=calls,
            inputs=sorted(taken & earlier),
            outputs=sorted(given & wanted),
            variables=list(variables.values()),
            parameters=sum(count_parameters(calls)),
        )
        earlier |= given


# ---------------------------------------------------------------------------------------------
# The graph
# ---------------------------------------------------------------------------------------------


def build_graph(model: keras.Model) -> Graph:
    """The graph of a functional or sequential model.

    Raises:
        ConfigError: if it is another kind, of which no graph is known.
    """
    if find_functional(model) is None:
        raise ConfigError(
            f"strategy=pipeline: the model {model.name} ({type(model).__name__}) is no graph of layers that could be "
            "cut; make it with keras.Model(inputs, outputs) or keras.Sequential"
        )
    numbers = itertools.count()
    source = next(numbers)
    calls, outputs = list_calls(model, TensorRef(source), "", numbers)
    return Graph(calls, source, outputs[0].number)


def find_functional(operation: Any) -> Functional | None:
    """The graph that a functional or sequential model runs; None where its class runs something of its own."""
    if isinstance(operation, keras.Sequential) and type(operation).call is keras.Sequential.call:
        return operation._functional
    return operation if isinstance(operation, Functional) and type(operation).call is Functional.call else None


def list_calls(
    model: keras.Model, given: Any, prefix: str, numbers: Iterator[int]
) -> tuple[list[Call], list[TensorRef]]:
    """A model's calls, those of models inside it in their place, and its outputs.

    Args:
        model: one with a graph.
        given: a `TensorRef` for each tensor that it is called with, in whatever structure.
        prefix: of the names.
        numbers: that no tensor has yet.
    """
    graph = find_functional(model)
    assert graph is not None
    entries = [TensorRef(next(numbers)) for _ in graph.inputs]
    calls = [
        Call(
            prefix,
            functools.partial(standardize_inputs, model, graph),
            ((given,), {}),
            tuple(p.number for p in entries),
        )
    ]
    places = dict(zip(map(id, graph.inputs), entries, strict=True))
    for node in sort_nodes(graph):
        more, outputs = list_node_calls(node, places, prefix, numbers)
        calls += more
        places.update(zip(map(id, node.outputs), outputs, strict=True))
    return calls, [places[id(tensor)] for tensor in graph.outputs]


def list_node_calls(
    node: Any, places: Mapping[int, TensorRef], prefix: str, numbers: Iterator[int]
) -> tuple[list[Call], list[TensorRef]]:
    """What one node of a graph becomes: a call, or those of the model inside."""
    layer = node.operation
    args, named = keras.tree.map_structure(
        lambda leaf: places[id(leaf)] if isinstance(leaf, keras.KerasTensor) else leaf,
        (node.arguments.args, node.arguments.kwargs),
    )
    more = [name for name, value in named.items() if value is not None and name != "training"]
    if find_functional(layer) is not None and len(args) == 1 and not more:
        return list_calls(layer, args[0], f"{prefix}{layer.name}/", numbers)
    outputs = [TensorRef(next(numbers)) for _ in node.outputs]
    return [Call(prefix + layer.name, layer, (args, named), tuple(p.number for p in outputs))], outputs


def sort_nodes(graph: Functional) -> Iterator[Any]:
    """The nodes in the order in which Keras runs them, inputs left out."""
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        yield from (node for node in graph._nodes_by_depth[depth] if not node.is_input)


def standardize_inputs(model: keras.Model, graph: Functional, given: Any) -> list[tf.Tensor]:
    """What Keras does with a model's inputs before its first layer."""
    if model._convert_input_args:
        given = keras.tree.map_structure(
            lambda x: model.dtype_policy.convert_input(x, model.autocast, model.input_dtype), given
        )
    inputs: list[tf.Tensor] = graph._standardize_inputs(given)
    return inputs


# ---------------------------------------------------------------------------------------------
# Where it is cut
# ---------------------------------------------------------------------------------------------


def count_parameters(calls: Sequence[Call]) -> list[int]:
    """How many each call is the first to use."""
    seen: set[int] = set()
    counts = []
    for call in calls:
        weights = call.run.weights if isinstance(call.run, keras.layers.Layer) else []
        new = {id(w): w for w in weights if id(w) not in seen}
        seen |= set(new)
        counts.append(sum(w.shape.num_elements() for w in new.values()))
    return counts


def find_shared_cuts(calls: Sequence[Call]) -> dict[int, str]:
    """The places in which a cut would part two calls that use the same variable, with the layer's name."""
    first: dict[int, int] = {}
    held: dict[int, str] = {}
    for index, call in enumerate(calls):
        for variable in call.variables:
            begin = first.setdefault(id(variable), index)
            held.update(dict.fromkeys(range(begin + 1, index + 1), call.name))
    return held


def find_balanced_starts(calls: Sequence[Call], count: int) -> list[int]:
    """Where `count` stages begin, so that the largest has as few parameters as can be.

    A stage begins with a layer that has parameters: what has none, such as an activation or a
    pooling, stays with the layer whose output it works on.
    """
    parameters = count_parameters(calls)
    held = find_shared_cuts(calls)
    possible = [i for i, size in enumerate(parameters) if size and i not in held][1:]
    if len(possible) + 1 < count:
        shared = sorted(set(held.values()))
        because = f" (all calls of {', '.join(shared)} belong to one)" if shared else ""
        most = len(possible) + 1
        instead = f"use strategy.stages={most} and as many devices" if most > 1 else "use strategy=one_device"
        raise ConfigError(
            f"strategy.stages={count}: a stage begins with a layer that has parameters, so this model can be divided "
            f"into {most} stage{'s' if most > 1 else ''} at the most{because}; {instead}"
        )
    blocks = [sum(parameters[first:end]) for first, end in itertools.pairwise([0, *possible, len(calls)])]
    return [possible[block - 1] for block in balance_blocks(blocks, count)]


def balance_blocks(blocks: Sequence[int], count: int) -> tuple[int, ...]:
    """The blocks with which groups but the first begin, of `count` groups whose largest is the smallest."""
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
    """Where stages begin that are named by their first layers."""
    starts = [find_start(calls, name, cuts) for name in cuts]
    told = f"strategy.cuts=[{', '.join(cuts)}]"
    held = find_shared_cuts(calls)
    for name, start, before in zip(cuts, starts, [0, *starts], strict=False):
        if not list_layer_names(calls[before:start]):
            raise ConfigError(
                f"{told}: there is nothing between {name} and the cut before it; name the first layers of the second "
                f"and later stages in the order in which they run: {', '.join(list_layer_names(calls)[1:])}"
            )
        if start in held:
            raise ConfigError(
                f"{told}: a cut before {name} would part the calls of {held[start]}, whose variables can be on one "
                "device only; cut before the first of them or behind the last"
            )
    return starts


def find_start(calls: Sequence[Call], name: str, cuts: Sequence[str]) -> int:
    """The first call of the layer, or model inside the model, of that name."""
    found = {call.name: i for i, call in reversed(list(enumerate(calls))) if is_named(call, name)}
    if len(found) == 1:
        return found.popitem()[1]
    told = f"strategy.cuts=[{', '.join(cuts)}]"
    if found:
        raise ConfigError(f"{told}: {name} may be {' or '.join(sorted(found))}; write one of them")
    raise ConfigError(f"{told}: the model has no layer {name}; it has {', '.join(list_layer_names(calls))}")


def is_named(call: Call, name: str) -> bool:
    return bool(call.name) and f"/{call.name.rstrip('/')}".endswith(f"/{name}")


def list_layer_names(calls: Sequence[Call]) -> list[str]:
    """Of the layers, as a cut can name them."""
    return [name for name in dict.fromkeys(call.name for call in calls) if name and not name.endswith("/")]
