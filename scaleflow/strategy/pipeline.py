"""Pipeline parallelism: each stage of a model is on its own device, and a batch passes through them in micro-batches.

A stage's variables, forward pass and backward pass are on its device. The micro-batches (GPipe; Huang et al. 2019,
arXiv:1811.06965) are unrolled in the graph. Stages work on different micro-batches at the same time, because the graph
has no dependency that makes them wait. With one micro-batch this is plain model parallelism.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Objective, Strategy
from scaleflow.strategy.recompute import check_states
from scaleflow.strategy.segments import Segment, choose_segments, list_layers
from scaleflow.strategy.stages import Graph, Stage, build_graph, divide_graph

#: The device on which a model is built before its variables move to the stages: it may be too large for each of them.
HOST = "CPU:0"

Batch = tuple[Any, Any, tf.Tensor]


def create_pipeline(devices: Sequence[str], options: Strategy) -> tf.distribute.Strategy:
    """Returns the default strategy, because the others place variables themselves.

    Raises ConfigError if the number of devices is not the number of stages.
    """
    stages, count = options.stages, len(devices)
    if count == stages:
        return tf.distribute.get_strategy()
    is_cpu = devices[0].startswith("CPU")
    if count < stages:
        more = f"hardware.logical_devices={stages}" if is_cpu else "more devices"
        fewer = f"strategy.stages={count}" if count > 1 else "strategy=one_device"
        available = "there is 1" if count == 1 else f"there are {count}"
        raise ConfigError(
            f"strategy.stages={stages}: each stage needs a device, and {available}; use {more}, or {fewer}"
        )
    fewer = f"hardware.logical_devices={stages}" if is_cpu else f"hardware.devices={list(range(stages))}"
    raise ConfigError(
        f"strategy.stages={stages}: there are {count} devices, and a pipeline is not replicated over data; use "
        f"strategy.stages={count}, or {fewer}"
    )


def variable_scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Returns the device scope in which the variables of a strategy's model are created."""
    return tf.device(HOST) if name == "pipeline" else contextlib.nullcontext()


def build_pipeline(
    model: keras.Model, objective: Objective, devices: Sequence[str], options: Strategy, is_recomputed: bool = False
) -> tuple[Pipeline, list[str]]:
    """Divides a model into stages and moves its variables to the stages' devices.

    The model is new: no optimizer and no compiled function uses its variables yet. `is_recomputed` makes the backward
    pass compute the segments of each stage again. Returns (the forward and backward pass, notes for the user). Raises
    ConfigError if the model cannot be divided like that.
    """
    graph = build_graph(model)
    stages = divide_graph(graph, len(devices), options.cuts)
    move_variables(stages, devices)
    placement = ", ".join(f"{s} on {d} ({s.parameters:,} parameters)" for s, d in zip(stages, devices, strict=True))
    notes = [f"strategy=pipeline: {placement}"]
    if options.micro_batches > 1 and any(isinstance(call.run, keras.layers.BatchNormalization) for call in graph.calls):
        notes.append(
            f"strategy.micro_batches={options.micro_batches}: BatchNormalization uses the statistics of a "
            "micro-batch, so the result differs from that of strategy=one_device; with strategy.micro_batches=1 it "
            "does not"
        )
    segments = [divide_stage(stage, graph.source, options.micro_batches, is_recomputed) for stage in stages]
    return Pipeline(model, graph, stages, devices, objective, options.micro_batches, segments), notes


def divide_stage(stage: Stage, source: int, micro_batches: int, is_recomputed: bool) -> list[Segment]:
    """Divides a stage into the segments in which training runs it."""
    if not is_recomputed:
        return [Segment(stage.calls, stage.inputs, stage.outputs, is_recomputed=False)]
    check_states(list_layers(stage.calls))
    return choose_segments(stage.calls, set(stage.outputs), source, copies=micro_batches, keeps_last=False)


def move_variables(stages: Sequence[Stage], devices: Sequence[str]) -> None:
    """Creates each variable again on its stage's device, with the same value."""
    for stage, device in zip(stages, devices, strict=True):
        with tf.device(device):
            for variable in stage.variables:
                variable._initialize(variable.value.read_value())


@dataclass
class ForwardState:
    """The forward pass of one micro-batch, as its backward pass needs it."""

    values: dict[int, Any]  # all tensors by number
    tapes: list[tf.GradientTape] = field(default_factory=list)  # one for each stage
    #: Each stage's scalar part of the loss, scaled; None if it has none
    stage_losses: list[tf.Tensor | None] = field(default_factory=list)
    loss: tf.Tensor | None = None  # the scalar sum of the examples' losses times their weights


class Pipeline:
    """The forward and backward pass of a model in stages (a `ForwardBackward`). `build_pipeline` creates it."""

    def __init__(
        self,
        model: keras.Model,
        graph: Graph,
        stages: Sequence[Stage],
        devices: Sequence[str],
        objective: Objective,
        micro_batches: int,
        segments: Sequence[Sequence[Segment]],
    ) -> None:
        self.variables = list(model.trainable_variables)
        self.keeps_rows = False
        device_of = {id(v): device for stage, device in zip(stages, devices, strict=True) for v in stage.variables}
        self.devices = [device_of.get(id(v), "") for v in self.variables]
        self._graph = graph
        self._stages = list(zip(stages, devices, strict=True))
        self._segments = segments
        self._first, self._last = devices[0], devices[-1]
        self._loss = objective.loss
        self._count = micro_batches

    def count_recomputed(self) -> int:
        """Returns the number of segments that the backward pass computes again."""
        return sum(segment.is_recomputed for segments in self._segments for segment in segments)

    def forward(self, inputs: Any) -> Any:
        size = tf.nest.flatten(inputs)[0].shape[0]
        parts = self._count if size is not None and size % self._count == 0 else 1
        outputs = [self._outputs(part) for part in divide_tensors(inputs, parts, self._first)]
        return self._join(outputs)

    def backward(
        self, batch: tuple[Any, Any], weights: tf.Tensor, parts: int, scale: Callable[[Any], Any]
    ) -> tuple[tf.Tensor, Any, list[tf.Tensor | None]]:
        inputs, targets = batch
        shares = zip(
            divide_tensors(inputs, self._count, self._first),
            divide_tensors(targets, self._count, self._last),
            divide_tensors(weights, self._count, self._last),
            strict=True,
        )
        states = [
            self._forward_micro_batch(share, parts, scale, counts_weights=i == 0) for i, share in enumerate(shares)
        ]
        sums: dict[int, tf.Tensor] = {}
        for state in states:
            self._backward_micro_batch(state, sums)
        with tf.device(self._last):
            loss = tf.add_n([state.loss for state in states])
        outputs = self._join([self._pick_outputs(state.values) for state in states])
        return loss, outputs, [sums.get(id(v)) for v in self.variables]

    def _join(self, outputs: Sequence[Any]) -> Any:
        """Concatenates the outputs of the micro-batches, on the last device."""
        with tf.device(self._last):
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    def _pick_outputs(self, values: dict[int, Any]) -> Any:
        """Returns the model's outputs, in their structure."""
        return tf.nest.map_structure(values.__getitem__, self._graph.sinks)

    def _outputs(self, inputs: Any) -> Any:
        """Returns the outputs of all stages, for an evaluation."""
        values = {self._graph.source: inputs}
        for stage, device in self._stages:
            with tf.device(device):
                stage.run(values, training=False)
        return self._pick_outputs(values)

    def _forward_micro_batch(
        self, share: Batch, parts: int, scale: Callable[[Any], Any], counts_weights: bool
    ) -> ForwardState:
        """Runs one micro-batch through all stages, each under its own tape.

        One tape around all stages would put all operations of the backward pass on one device. `counts_weights` adds
        the regularization of weights, which counts once for each batch; the rest is as in `ForwardBackward.backward`.
        """
        inputs, targets, weights = share
        state = ForwardState({self._graph.source: inputs})
        last_stage = self._stages[-1][0]
        for (stage, device), segments in zip(self._stages, self._segments, strict=True):
            with tf.device(device), tf.GradientTape() as tape:
                tape.watch(list_differentiable_inputs(stage, state))
                layer_losses = [loss for segment in segments for loss in segment.run(state.values)]
                losses = [tf.reduce_sum(tf.cast(loss, tf.float32)) / (parts * self._count) for loss in layer_losses]
                if counts_weights:
                    losses += [v.regularizer(v) / parts for v in stage.trainable if v.regularizer is not None]
                if stage is last_stage:
                    state.loss = tf.reduce_sum(self._loss(targets, self._pick_outputs(state.values)) * weights)
                    losses.append(state.loss)
                state.stage_losses.append(scale(tf.add_n(losses)) if losses else None)
            state.tapes.append(tape)
        return state

    def _backward_micro_batch(self, state: ForwardState, sums: dict[int, tf.Tensor]) -> None:
        """Runs the backward pass of one micro-batch, last stage first; adds gradients to `sums` by id(variable)."""
        arriving: dict[int, list[tf.Tensor]] = defaultdict(list)  # by id(tensor): a tensor may have several numbers
        for (stage, device), tape, loss in reversed(
            list(zip(self._stages, state.tapes, state.stage_losses, strict=True))
        ):
            with tf.device(device):
                targets = [t for t in list_distinct_tensors(stage.outputs, state) if id(t) in arriving]
                output_gradients = [tf.add_n(arriving.pop(id(t))) for t in targets]
                if loss is not None:
                    targets, output_gradients = [*targets, loss], [*output_gradients, tf.ones_like(loss)]
                if not targets:
                    continue
                inputs = list_differentiable_inputs(stage, state)
                sources = [*inputs, *(v.value for v in stage.trainable)]
                gradients = tape.gradient(targets, sources, output_gradients=output_gradients)
                # An embedding's gradient is `IndexedSlices`, whose sums and norms differ from a dense gradient's.
                gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
                for tensor, gradient in zip(inputs, gradients, strict=False):
                    if gradient is not None:
                        arriving[id(tensor)].append(gradient)
                for variable, gradient in zip(stage.trainable, gradients[len(inputs) :], strict=True):
                    if gradient is not None:
                        key = id(variable)
                        sums[key] = sums[key] + gradient if key in sums else gradient


def list_differentiable_inputs(stage: Stage, state: ForwardState) -> list[tf.Tensor]:
    """Returns a stage's inputs from earlier stages that have gradients."""
    return [tensor for tensor in list_distinct_tensors(stage.inputs, state) if tensor.dtype.is_floating]


def list_distinct_tensors(numbers: Sequence[int], state: ForwardState) -> list[tf.Tensor]:
    """Returns the tensors of these numbers, each once: a layer without effect returns its input tensor."""
    return list({id(state.values[number]): state.values[number] for number in numbers}.values())


def divide_tensors(batch: Any, parts: int, device: str) -> list[Any]:
    """Splits a batch into equal parts of its structure, on the device of the stage that takes them."""
    with tf.device(device):
        pieces = [tf.split(tensor, parts) for tensor in tf.nest.flatten(batch)]
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*pieces, strict=True)]
