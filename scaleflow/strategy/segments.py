"""`hardware.remat`: which parts of a model are computed again in the backward pass.

They are segments of the graph of layers, which are chosen by the estimated size of activations, or layers that are
named. Either way the model's `call` is replaced, or that of the layers. Evaluations and the saved model do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.strategy.recompute import recompute
from scaleflow.strategy.stages import Call, build_graph, find_plain_graph, format_range

#: How many limits of a segment's size are tried.
LIMITS = 32


@dataclass(frozen=True)
class Segment:
    """Consecutive calls of a model's graph.

    Attributes:
        calls: the calls.
        inputs: the numbers of the tensors that they take from earlier calls.
        outputs: the numbers of the tensors that later calls take, and of the model's outputs.
        is_recomputed: whether they are computed again in the backward pass.
    """

    calls: Sequence[Call]
    inputs: Sequence[int]
    outputs: Sequence[int]
    is_recomputed: bool

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
        outputs, losses = recompute(run_again, given, list(weights.values()), str(self))
        values.update(zip(self.outputs, outputs, strict=True))
        return losses

    def __str__(self) -> str:
        return format_range(self.calls)


def run_calls(calls: Sequence[Call], values: dict[int, Any]) -> list[tf.Tensor]:
    return [loss for call in calls for loss in call(values, training=True)]


def recompute_segments(model: keras.Model) -> list[Segment]:
    """Makes training steps compute segments of a model again. Returns these segments.

    Raises:
        ConfigError: if the model has no graph of layers, or no segments that would save memory.
    """
    if find_plain_graph(model) is None:
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
    plain_call = model.call

    def call(inputs: Any, training: bool | None = None, mask: Any = None, **named: Any) -> Any:
        if not training:
            return plain_call(inputs, training=training, mask=mask, **named)
        values = {graph.source: inputs}
        for tensor, each in zip(keras.tree.flatten(inputs), keras.tree.flatten(mask), strict=False):
            if each is not None:  # as `Functional.call` does
                keras.src.backend.set_keras_mask(tensor, each)
        for segment in segments:
            losses = segment.run(values)
            if segment.is_recomputed:
                keras.layers.Layer.add_loss(model, losses)  # `Model` rejects it
        return keras.tree.map_structure(values.__getitem__, graph.sinks)

    replace_call(model, call)
    return recomputed


def recompute_layers(layers: Sequence[keras.Layer], setting: str, *, is_divided: bool) -> int:
    """Makes training steps compute these layers again, each by itself. Returns their number, without inner ones.

    Args:
        layers: the layers; one that is inside another one is computed again with that.
        setting: the key and its value, for messages.
        is_divided: whether the model is divided into stages, with nested models expanded.

    Raises:
        ConfigError: if a layer cannot be computed again.
    """
    inner = {id(each) for layer in layers for each in layer._flatten_layers(include_self=False)}
    outer = {id(layer): layer for layer in layers if id(layer) not in inner}
    for layer in outer.values():
        parts = list(layer._flatten_layers())
        if any(isinstance(part, keras.layers.Embedding) for part in parts):
            raise ConfigError(
                f"{setting}: {layer.name} looks up rows of a table, which saves no memory and would read the whole "
                "table; leave it out"
            )
        if is_divided and find_plain_graph(layer) is not None:
            names = ", ".join(part.name for part in parts[1:] if part.weights)
            raise ConfigError(
                f"{setting}: {layer.name} is a model, which strategy=pipeline divides; use hardware.remat=true, or "
                f"name layers of it: {names}"
            )
        replace_call(layer, make_recomputing_call(layer))
    return len(outer)


def make_recomputing_call(layer: keras.Layer) -> Callable[..., Any]:
    plain_call = layer.call

    def call(*args: Any, **named: Any) -> Any:
        if not layer._get_call_context().training:
            return plain_call(*args, **named)
        outputs, losses = recompute(
            lambda given: plain_call(*given[0], **given[1]), (args, named), layer.trainable_variables, layer.name
        )
        layer.add_loss(losses)
        return outputs

    return call


def replace_call(layer: keras.Layer, call: Callable[..., Any]) -> None:
    """Replaces the `call` of one layer. It is no part of the layer's state, so a saved model does not have it."""
    object.__setattr__(layer, "call", call)


def list_inner_layers(calls: Sequence[Call]) -> list[keras.Layer]:
    """Lists the layers of calls, at any depth."""
    layers = (call.run for call in calls if isinstance(call.run, keras.layers.Layer))
    return [part for layer in layers for part in layer._flatten_layers()]


def name_example(model: keras.Model) -> str:
    """Returns the name of the model's largest layer, for a message."""
    layers = [layer for layer in model._flatten_layers(include_self=False, recursive=False) if layer.weights]
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
        make_segment(calls, sinks, start, end, is_recomputed)
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
    return Segment(own, sorted(taken - made), sorted(made & wanted), is_recomputed)
