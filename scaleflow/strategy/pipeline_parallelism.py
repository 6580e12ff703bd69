"""Pipeline parallelism: each stage of a model is on its own device, and a batch passes through them in micro-batches.

A stage's variables, forward pass and backward pass are on its device. The micro-batches (GPipe; Huang et al. 2019,
arXiv:1811.06965) are unrolled in the graph. Stages work on different micro-batches at the same time, because the graph
has no dependency that makes them wait. With one micro-batch this is plain model parallelism.

Replicas of the stages, on other devices, divide the batch further. All variables are on the first replica's devices.
The other replicas copy them in each step, and the first replica's devices sum the gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from scaleflow.compat.keras import read_stored, store_variable
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Objective, Strategy
from scaleflow.strategy.model_stages import Graph, ModelStage, build_graph, divide_graph
from scaleflow.strategy.segments import Segment, choose_segments


class ReplicaScope(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """Makes layers use copies of their variables. The copies are made when the scope is created.

    Updates change the variables themselves. So states (of random generators, moving averages) continue from one scope
    to the next, as they do between the micro-batches of one replica.

    Args:
        stages: the stages. Their variables exist once, on the first replica's devices.
        devices: the device of each stage's copies.

    Attributes:
        copies: id(variable) -> its copy.
    """

    def __init__(self, stages: Sequence[ModelStage], devices: Sequence[str]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.copies: dict[int, tf.Tensor] = {}
        for stage, device in zip(stages, devices, strict=True):
            for variable in stage.variables:
                self.copies[id(variable)] = copy_value(variable, device)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # Set here, because Keras would cast the copies to the compute dtype of the layer around.
        self.state_mapping = dict(self.copies)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        value = self.state_mapping.get(id(variable))
        if value is None:
            return read_in_place(variable)
        # A loop is another graph. In it the copy of a state would keep the value from before the loop.
        is_in_loop = self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph
        if is_in_loop and not variable.trainable:
            return read_in_place(variable)
        return value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if variable.trainable:  # the gradient of its copy would lack the operations after the update
            raise ConfigError(
                f"strategy.replicas: the model changes its trained weights {variable.path} in its forward pass, which "
                "only one replica of a pipeline can do; use strategy.replicas=1, or another strategy"
            )
        # Later reads use the variable, because the value may be a tensor of an inner graph.
        self.state_mapping.pop(id(variable), None)
        stored = read_stored(variable)
        with tf.device(stored.device):
            stored.assign(tf.cast(value, stored.dtype))


def copy_value(variable: keras.Variable, device: str) -> tf.Tensor:
    """Copies a variable's value to a device."""
    value = read_in_place(variable)
    with tf.device(device):
        return tf.identity(value)


def read_in_place(variable: keras.Variable) -> tf.Tensor:
    """Reads a variable on its own device."""
    stored = read_stored(variable)
    with tf.device(stored.device):
        return tf.convert_to_tensor(stored)


#: A model is built on this device before its variables move to the stages. It may be too large for the other devices.
HOST = "CPU:0"

Batch = tuple[Any, Any, tf.Tensor]


def create_pipeline_parallel(devices: Sequence[str], options: Strategy) -> tf.distribute.Strategy:
    """Returns the default strategy, because the others place variables themselves.

    Raises ConfigError if the number of devices is not stages x replicas.
    """
    stages = options.stages
    replicas = options.replicas
    count = len(devices)
    needed = stages * replicas
    if count == needed:
        return tf.distribute.get_strategy()
    is_cpu = devices[0].startswith("CPU")
    setting = f"strategy.stages={stages}" + (f" strategy.replicas={replicas}" if replicas > 1 else "")
    available = "there is 1" if count == 1 else f"there are {count}"
    other = f"strategy.replicas={count // stages}" if count % stages == 0 else f"strategy.stages={count}"
    if replicas > 1 and count % stages:
        other += " strategy.replicas=1"
    if count < needed:
        more = f"hardware.logical_devices={needed}" if is_cpu else "more devices"
        raise ConfigError(
            f"{setting}: each stage of each replica needs a device, {needed} in all, and {available}; use {more}, or "
            f"{other if count > 1 else 'strategy=one_device'}"
        )
    fewer = f"hardware.logical_devices={needed}" if is_cpu else f"hardware.devices with {needed} of them"
    raise ConfigError(
        f"{setting}: each stage of each replica needs a device, {needed} in all, and {available}; use {other}, or "
        f"{fewer}"
    )


def variable_scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Returns the device scope for creating the variables of a strategy's model."""
    return tf.device(HOST) if name == "pipeline" else contextlib.nullcontext()


def divide_model(
    model: keras.Model,
    objective: Objective,
    devices: Sequence[str],
    options: Strategy,
    examples: int,
    is_recomputed: bool = False,
) -> tuple[StagedForwardBackward, list[str]]:
    """Divides a model into stages and moves its variables to the devices of the first replica's stages.

    The model is new: no optimizer and no compiled function uses its variables yet.

    Args:
        devices: the devices of the first replica's stages, then of the next replica's stages.
        examples: examples of a replica in a step.
        is_recomputed: whether the backward pass computes the segments of each stage again.

    Returns:
        (the forward and backward pass, notes for the user).

    Raises ConfigError if the model cannot be divided like that.
    """
    graph = build_graph(model)
    stages = divide_graph(graph, options.stages, options.cuts, examples=examples)
    replicas = []
    for first in range(0, len(devices), options.stages):
        replicas.append(devices[first : first + options.stages])
    move_variables(stages, replicas[0])
    notes = [describe_model_stages(stages, replicas)]
    if any(isinstance(call.run, keras.layers.BatchNormalization) for call in graph.calls):
        notes += warn_batch_statistics(options)
    segments = []
    for stage in stages:
        segments.append(divide_model_stage(stage, graph.source, options, is_recomputed))
    count = options.micro_batches * len(replicas)
    passes = StagedForwardBackward(
        model, graph, stages, replicas=replicas, objective=objective, count=count, segments=segments
    )
    return passes, notes


def warn_batch_statistics(options: Strategy) -> list[str]:
    """Returns a note that BatchNormalization uses the statistics of a micro-batch, if a batch has several."""
    values = {"replicas": options.replicas, "micro_batches": options.micro_batches}
    settings = []
    remedies = []
    for name, value in values.items():
        if value > 1:
            settings.append(f"strategy.{name}={value}")
            remedies.append(f"strategy.{name}=1")
    if not settings:
        return []
    return [
        f"{' '.join(settings)}: BatchNormalization uses the statistics of a micro-batch, so the result differs from "
        f"that of strategy=one_device; with {' '.join(remedies)} it does not"
    ]


def describe_model_stages(stages: Sequence[ModelStage], replicas: Sequence[Sequence[str]]) -> str:
    """Lists the stages with their layers, devices, parameters and costs."""
    places = []
    for stage, devices in zip(stages, zip(*replicas, strict=True), strict=True):
        size = f"{stage.parameters:,} parameters, {stage.cost:.0%} of the estimated cost"
        places.append(f"{stage} on {' and '.join(devices)} ({size})")
    return f"strategy=pipeline: {', '.join(places)}"


def divide_model_stage(stage: ModelStage, source: int, options: Strategy, is_recomputed: bool) -> list[Segment]:
    """Divides a stage into segments for training."""
    if not is_recomputed:
        return [Segment(stage.calls, stage.inputs, stage.outputs, is_recomputed=False)]
    return choose_segments(stage.calls, set(stage.outputs), source, copies=options.micro_batches, keeps_last=False)


def move_variables(stages: Sequence[ModelStage], devices: Sequence[str]) -> None:
    """Creates each variable again on its stage's device, with the same value."""
    for stage, device in zip(stages, devices, strict=True):
        with tf.device(device):
            for variable in stage.variables:
                store_variable(variable, variable.value.read_value())


@dataclass
class ForwardState:
    """The results of the forward pass of one micro-batch. The backward pass needs them."""

    values: dict[int, Any]  # all tensors by number
    tapes: list[tf.GradientTape] = field(default_factory=list)  # one for each stage
    #: Each stage's scalar part of the loss, scaled; None if it has none
    stage_losses: list[tf.Tensor | None] = field(default_factory=list)
    loss: tf.Tensor | None = None  # the scalar sum of the examples' losses times their weights
    own_losses: list[tf.Tensor] = field(default_factory=list)  # the parts of the losses that layers add


class StagedForwardBackward:
    """The forward and backward pass of a model in stages (a `ForwardBackward`). `divide_model` creates it."""

    def __init__(
        self,
        model: keras.Model,
        graph: Graph,
        stages: Sequence[ModelStage],
        replicas: Sequence[Sequence[str]],  # the devices of each replica's stages
        objective: Objective,
        count: int,  # the micro-batches of all replicas
        segments: Sequence[Sequence[Segment]],
    ) -> None:
        self.variables = list(model.trainable_variables)
        self.keeps_rows = False
        device_of: dict[int, str] = {}
        for stage, device in zip(stages, replicas[0], strict=True):
            for variable in stage.variables:
                device_of[id(variable)] = device
        self.devices = [device_of.get(id(variable), "") for variable in self.variables]
        self._graph = graph
        self._stages = stages
        self._replicas = replicas
        self._segments = segments
        self._first = replicas[0][0]
        self._last = replicas[0][-1]
        self._loss = objective.loss
        self._count = count

    def count_recomputed(self) -> int:
        """Returns the number of segments that the backward pass computes again."""
        count = 0
        for segments in self._segments:
            count += sum(segment.is_recomputed for segment in segments)
        return count

    def forward(self, inputs: Any) -> Any:
        size = tf.nest.flatten(inputs)[0].shape[0]
        is_divisible = size is not None and size % self._count == 0
        shares = divide_tensors(inputs, self._count if is_divisible else 1, self._first)
        outputs = []
        for devices, own in self._divide(shares, self._replicas if is_divisible else self._replicas[:1]):
            with self._copy_variables(devices) or contextlib.nullcontext():
                outputs += [self._outputs(part, devices) for part in own]
        return self._join(outputs)

    def backward(
        self, batch: tuple[Any, Any], weights: tf.Tensor, parts: int, scale: Callable[[Any], Any]
    ) -> tuple[tf.Tensor, tf.Tensor | None, Any, list[tf.Tensor | None]]:
        inputs, targets = batch
        shares = zip(
            divide_tensors(inputs, self._count, self._first),
            divide_tensors(targets, self._count, self._last),
            divide_tensors(weights, self._count, self._last),
            strict=True,
        )
        forward = functools.partial(self._forward_micro_batch, parts=parts, scale=scale)
        states: list[ForwardState] = []
        sums: list[dict[int, tf.Tensor]] = []
        for devices, own in self._divide(list(shares), self._replicas):
            scope = self._copy_variables(devices)
            with scope or contextlib.nullcontext():
                first = len(states)
                for share in own:
                    states.append(forward(share, devices, scope, counts_weights=not states))
            sums.append({})
            for state in states[first:]:
                self._backward_micro_batch(state, devices, scope, sums=sums[-1])
        with tf.device(self._last):
            loss = tf.add_n([state.loss for state in states])
            own_losses: list[tf.Tensor] = []
            for state in states:
                own_losses += state.own_losses
            extra = tf.add_n(own_losses) if own_losses else None
        outputs = self._join([self._pick_outputs(state.values) for state in states])
        return loss, extra, outputs, self._sum_gradients(sums)

    def _divide(
        self, shares: Sequence[Any], replicas: Sequence[Sequence[str]]
    ) -> Iterator[tuple[Sequence[str], Sequence[Any]]]:
        """Yields each replica's devices and its micro-batches."""
        count = len(shares) // len(replicas)
        for number, devices in enumerate(replicas):
            yield devices, shares[number * count : (number + 1) * count]

    def _copy_variables(self, devices: Sequence[str]) -> ReplicaScope | None:
        """Copies all variables to a replica's devices; None for the first replica, whose devices have them."""
        if devices is self._replicas[0]:
            return None
        return ReplicaScope(self._stages, devices)

    def _sum_gradients(self, sums: Sequence[dict[int, tf.Tensor]]) -> list[tf.Tensor | None]:
        """Sums the replicas' gradients, by id(variable), on the variables' devices."""
        gradients: list[tf.Tensor | None] = []
        for variable, device in zip(self.variables, self.devices, strict=True):
            key = id(variable)
            present = [own[key] for own in sums if key in own]
            with tf.device(device):
                gradients.append(functools.reduce(tf.add, present) if present else None)
        return gradients

    def _join(self, outputs: Sequence[Any]) -> Any:
        """Concatenates the outputs of the micro-batches, on the last device of the first replica."""
        with tf.device(self._last):
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    def _pick_outputs(self, values: dict[int, Any]) -> Any:
        """Returns the model's outputs, in their structure."""
        return tf.nest.map_structure(values.__getitem__, self._graph.sinks)

    def _outputs(self, inputs: Any, devices: Sequence[str]) -> Any:
        """Returns the outputs of all stages, for an evaluation."""
        values = {self._graph.source: inputs}
        for stage, device in zip(self._stages, devices, strict=True):
            with tf.device(device):
                stage.run(values, training=False)
        return self._pick_outputs(values)

    def _forward_micro_batch(
        self,
        share: Batch,
        devices: Sequence[str],
        scope: ReplicaScope | None,
        parts: int,
        scale: Callable[[Any], Any],
        counts_weights: bool,
    ) -> ForwardState:
        """Runs one micro-batch through all stages, each under its own tape.

        One tape around all stages would put all operations of the backward pass on one device. `counts_weights` adds
        the regularization of weights, which counts once for each batch; the rest is as in `ForwardBackward.backward`.
        """
        inputs, targets, weights = share
        state = ForwardState({self._graph.source: inputs})
        for stage, device, segments in zip(self._stages, devices, self._segments, strict=True):
            with tf.device(device), tf.GradientTape() as tape:
                tape.watch(list_differentiable_inputs(stage, state))
                if scope is not None:
                    tape.watch(list_model_stage_weights(stage, scope))
                layer_losses = []
                for segment in segments:
                    layer_losses += segment.run(state.values)
                losses = []
                for loss in layer_losses:
                    losses.append(tf.reduce_sum(tf.cast(loss, tf.float32)) / (parts * self._count))
                if counts_weights:
                    losses += list_regularizations(stage, parts)
                state.own_losses += losses
                if stage is self._stages[-1]:
                    state.loss = tf.reduce_sum(self._loss(targets, self._pick_outputs(state.values)) * weights)
                    losses.append(state.loss)
                state.stage_losses.append(scale(tf.add_n(losses)) if losses else None)
            state.tapes.append(tape)
        return state

    def _backward_micro_batch(
        self, state: ForwardState, devices: Sequence[str], scope: ReplicaScope | None, sums: dict[int, tf.Tensor]
    ) -> None:
        """Runs the backward pass of one micro-batch, last stage first; adds gradients to `sums` by id(variable)."""
        arriving: dict[int, list[tf.Tensor]] = defaultdict(list)  # by id(tensor): a tensor may have several numbers
        passes = list(zip(self._stages, devices, state.tapes, state.stage_losses, strict=True))
        for stage, device, tape, loss in reversed(passes):
            with tf.device(device):
                targets = []
                output_gradients = []
                for tensor in list_distinct_tensors(stage.outputs, state):
                    if id(tensor) in arriving:
                        targets.append(tensor)
                        output_gradients.append(tf.add_n(arriving.pop(id(tensor))))
                if loss is not None:
                    targets.append(loss)
                    output_gradients.append(tf.ones_like(loss))
                if not targets:
                    continue
                inputs = list_differentiable_inputs(stage, state)
                sources = [*inputs, *list_model_stage_weights(stage, scope)]
                gradients = tape.gradient(targets, sources, output_gradients=output_gradients)
                gradients = list(map(densify, gradients))
                # The first gradients are those of the inputs, the others those of the weights.
                for tensor, gradient in zip(inputs, gradients[: len(inputs)], strict=True):
                    if gradient is not None:
                        arriving[id(tensor)].append(gradient)
                for variable, gradient in zip(stage.trainable, gradients[len(inputs) :], strict=True):
                    if gradient is not None:
                        key = id(variable)
                        sums[key] = sums[key] + gradient if key in sums else gradient


def densify(gradient: Any) -> tf.Tensor | None:
    """Returns a gradient as a dense tensor.

    The gradient of an embedding is `IndexedSlices`, whose sums and norms differ from a dense gradient's.
    """
    return None if gradient is None else tf.convert_to_tensor(gradient)


def list_regularizations(stage: ModelStage, parts: int) -> list[tf.Tensor]:
    """Returns the regularization losses of a stage's weights, for one of `parts` parts of a batch."""
    losses = []
    for variable in stage.trainable:
        if variable.regularizer is not None:
            losses.append(variable.regularizer(variable) / parts)
    return losses


def list_model_stage_weights(stage: ModelStage, scope: ReplicaScope | None) -> list[Any]:
    """Returns the weights for the computations of a stage: its trainable variables, or a replica's copies of them."""
    weights = []
    for variable in stage.trainable:
        weights.append(variable.value if scope is None else scope.copies[id(variable)])
    return weights


def list_differentiable_inputs(stage: ModelStage, state: ForwardState) -> list[tf.Tensor]:
    """Returns a stage's inputs from earlier stages that have gradients."""
    return [tensor for tensor in list_distinct_tensors(stage.inputs, state) if tensor.dtype.is_floating]


def list_distinct_tensors(numbers: Sequence[int], state: ForwardState) -> list[tf.Tensor]:
    """Returns the distinct tensors of these numbers. A layer without effect returns its input tensor."""
    tensors = {}
    for number in numbers:
        tensor = state.values[number]
        tensors[id(tensor)] = tensor
    return list(tensors.values())


def divide_tensors(batch: Any, parts: int, device: str) -> list[Any]:
    """Splits a batch into equal parts with its structure, on the device of the stage that takes the parts."""
    with tf.device(device):
        pieces = [tf.split(tensor, parts) for tensor in tf.nest.flatten(batch)]
    batches = []
    for part in zip(*pieces, strict=True):
        batches.append(tf.nest.pack_sequence_as(batch, part))
    return batches
