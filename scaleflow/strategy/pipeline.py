"""A model whose stages are on a device each, and the batch that goes through them in parts.

The layers are divided over the devices; a stage's variables, its way forward and its way back are on
its own. A batch is divided into micro-batches (GPipe; Huang et al. 2019, arXiv:1811.06965) that are
unrolled in the graph: while one stage works on a micro-batch, the stage before works on the next,
because nothing in the graph says that it should wait. With one micro-batch this is plain model
parallelism.
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
from scaleflow.strategy.stages import Graph, Stage, build_graph, divide_graph

#: Where a model is born before its variables go to their stages: it may be too large for any one of them.
HOST = "CPU:0"

Batch = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def create_pipeline(devices: Sequence[str], options: Strategy) -> tf.distribute.Strategy:
    """The default strategy: any other has its own mind about where variables are.

    Raises:
        ConfigError: if there is not one device to each stage.
    """
    stages, found = options.stages, len(devices)
    if found == stages:
        return tf.distribute.get_strategy()
    is_cpu = devices[0].startswith("CPU")
    if found < stages:
        more = f"hardware.logical_devices={stages}" if is_cpu else "more devices"
        fewer = f"strategy.stages={found}" if found > 1 else "strategy=one_device"
        there = "there is 1" if found == 1 else f"there are {found}"
        raise ConfigError(f"strategy.stages={stages}: each stage needs a device, and {there}; use {more}, or {fewer}")
    fewer = f"hardware.logical_devices={stages}" if is_cpu else f"hardware.devices={list(range(stages))}"
    raise ConfigError(
        f"strategy.stages={stages}: there are {found} devices, and a pipeline is not replicated over data; use "
        f"strategy.stages={found}, or {fewer}"
    )


def variable_scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """Where the variables of a strategy's model are made."""
    return tf.device(HOST) if name == "pipeline" else contextlib.nullcontext()


def build_pipeline(
    model: keras.Model, objective: Objective, devices: Sequence[str], options: Strategy
) -> tuple[Pipeline, list[str]]:
    """Divides a model, moves its variables to their stages' devices, and gives the way through them.

    Args:
        model: new, so that no optimizer and no function knows its variables.
        objective: what is minimised.
        devices: one to each stage.
        options: how it is divided.

    Returns:
        The passes, and what the user should know.

    Raises:
        ConfigError: if the model can't be divided so.
    """
    graph = build_graph(model)
    stages = divide_graph(graph, len(devices), options.cuts)
    move_variables(stages, devices)
    told = ", ".join(f"{s} on {d} ({s.parameters:,} parameters)" for s, d in zip(stages, devices, strict=True))
    notes = [f"strategy=pipeline: {told}"]
    if options.micro_batches > 1 and any(is_batch_norm(call.run) for call in graph.calls):
        notes.append(
            f"strategy.micro_batches={options.micro_batches}: BatchNormalization takes its statistics over a "
            "micro-batch, so the result differs from that of strategy=one_device; with strategy.micro_batches=1 not"
        )
    return Pipeline(model, graph, stages, devices, objective, options.micro_batches), notes


def is_batch_norm(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization)


def move_variables(stages: Sequence[Stage], devices: Sequence[str]) -> None:
    """Makes each variable again, with the value that it has, on its stage's device."""
    for stage, device in zip(stages, devices, strict=True):
        with tf.device(device):
            for variable in stage.variables:
                variable._initialize(variable.value.read_value())


@dataclass
class ForwardState:
    """One micro-batch's way forward, and what its way back needs.

    Attributes:
        values: of all tensors, by number.
        tapes: one to each stage.
        stage_losses: what each stage adds to the loss, scaled; None where it adds nothing.
        loss: the scalar sum of losses times weights.
    """

    values: dict[int, Any]
    tapes: list[tf.GradientTape] = field(default_factory=list)
    stage_losses: list[tf.Tensor | None] = field(default_factory=list)
    loss: tf.Tensor | None = None


class Pipeline:
    """The passes of a model in stages.

    Args:
        model: the whole, whose variables are on their stages' devices.
        graph: its calls.
        stages: those calls, divided.
        devices: one to each stage.
        objective: what is minimised.
        micro_batches: parts of a batch.
    """

    def __init__(
        self,
        model: keras.Model,
        graph: Graph,
        stages: Sequence[Stage],
        devices: Sequence[str],
        objective: Objective,
        micro_batches: int,
    ) -> None:
        self.variables = list(model.trainable_variables)
        where = {id(v): device for stage, device in zip(stages, devices, strict=True) for v in stage.variables}
        self.devices = [where.get(id(v), "") for v in self.variables]
        self._graph = graph
        self._stages = list(zip(stages, devices, strict=True))
        self._first, self._last = devices[0], devices[-1]
        self._loss = objective.loss
        self._count = micro_batches

    def forward(self, inputs: tf.Tensor) -> tf.Tensor:
        size = inputs.shape[0]
        parts = self._count if size is not None and size % self._count == 0 else 1
        ways = [self._outputs(part) for part in divide_tensor(inputs, parts, self._first)]
        with tf.device(self._last):
            return tf.concat(ways, axis=0)

    def backward(
        self, batch: tuple[tf.Tensor, tf.Tensor], weights: tf.Tensor, parts: int, scale: Callable[[Any], Any]
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor | None]]:
        inputs, targets = batch
        shares = zip(
            divide_tensor(inputs, self._count, self._first),
            divide_tensor(targets, self._count, self._last),
            divide_tensor(weights, self._count, self._last),
            strict=True,
        )
        ways = [self._forward_micro_batch(share, parts, scale, counts_weights=i == 0) for i, share in enumerate(shares)]
        sums: dict[int, tf.Tensor] = {}
        for way in ways:
            self._backward_micro_batch(way, sums)
        with tf.device(self._last):
            loss = tf.add_n([way.loss for way in ways])
            outputs = tf.concat([way.values[self._graph.sink] for way in ways], axis=0)
        return loss, outputs, [sums.get(id(v)) for v in self.variables]

    def _outputs(self, inputs: tf.Tensor) -> tf.Tensor:
        """Through all stages, for an evaluation."""
        values = {self._graph.source: inputs}
        for stage, device in self._stages:
            with tf.device(device):
                stage.run(values, training=False)
        return values[self._graph.sink]

    def _forward_micro_batch(
        self, share: Batch, parts: int, scale: Callable[[Any], Any], counts_weights: bool
    ) -> ForwardState:
        """One micro-batch through all stages, each under a tape of its own.

        A tape around the whole would put every operation of the way back on one device.

        Args:
            share: (inputs, targets, weights) of one micro-batch.
            parts: as `backward` has it.
            scale: as `backward` has it.
            counts_weights: whether the losses of weights count with it; they do once to a batch.
        """
        inputs, targets, weights = share
        state = ForwardState({self._graph.source: inputs})
        for stage, device in self._stages:
            with tf.device(device), tf.GradientTape() as tape:
                tape.watch(list_differentiable_inputs(stage, state))
                own = stage.run(state.values, training=True)
                aims = [tf.reduce_sum(tf.cast(loss, tf.float32)) / (parts * self._count) for loss in own]
                if counts_weights:
                    aims += [v.regularizer(v) / parts for v in stage.trainable if v.regularizer is not None]
                if self._graph.sink in stage.outputs:
                    state.loss = tf.reduce_sum(self._loss(targets, state.values[self._graph.sink]) * weights)
                    aims.append(state.loss)
                state.stage_losses.append(scale(tf.add_n(aims)) if aims else None)
            state.tapes.append(tape)
        return state

    def _backward_micro_batch(self, state: ForwardState, sums: dict[int, tf.Tensor]) -> None:
        """The way back of one micro-batch, last stage first; adds its gradients to `sums`, by variable."""
        arriving: dict[int, list[tf.Tensor]] = defaultdict(list)  # by tensor: one may have several numbers
        for (stage, device), tape, aim in reversed(
            list(zip(self._stages, state.tapes, state.stage_losses, strict=True))
        ):
            with tf.device(device):
                targets = [t for t in list_distinct_tensors(stage.outputs, state) if id(t) in arriving]
                given = [tf.add_n(arriving.pop(id(t))) for t in targets]
                if aim is not None:
                    targets, given = [*targets, aim], [*given, tf.ones_like(aim)]
                if not targets:
                    continue
                takes = list_differentiable_inputs(stage, state)
                sources = [*takes, *(v.value for v in stage.trainable)]
                found = to_dense(tape.gradient(targets, sources, output_gradients=given))
                for tensor, gradient in zip(takes, found, strict=False):
                    if gradient is not None:
                        arriving[id(tensor)].append(gradient)
                for variable, gradient in zip(stage.trainable, found[len(takes) :], strict=True):
                    if gradient is not None:
                        key = id(variable)
                        sums[key] = sums[key] + gradient if key in sums else gradient


def list_differentiable_inputs(stage: Stage, state: ForwardState) -> list[tf.Tensor]:
    """Of what a stage takes from earlier ones, that which a gradient goes back to."""
    return [tensor for tensor in list_distinct_tensors(stage.inputs, state) if tensor.dtype.is_floating]


def list_distinct_tensors(numbers: Sequence[int], state: ForwardState) -> list[tf.Tensor]:
    """The tensors of these numbers, each once: a layer that does nothing gives the tensor that it takes."""
    return list({id(state.values[number]): state.values[number] for number in numbers}.values())


def divide_tensor(tensor: tf.Tensor, parts: int, device: str) -> list[tf.Tensor]:
    """Equal parts of a batch, on the device of the stage that they go to."""
    with tf.device(device):
        split: list[tf.Tensor] = tf.split(tensor, parts)
        return split


def to_dense(gradients: Sequence[Any]) -> list[tf.Tensor | None]:
    """An embedding's gradient comes as rows, of which sums and norms are another thing."""
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]
