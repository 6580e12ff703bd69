"""The compiled half of training: one function that takes many steps.

It is traced once. Position and number of steps are tensors, so that neither a longer stretch nor
another epoch traces again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import NotFinite
from scaleflow.interfaces import READ_SCOPE, STEP_SCOPE, SUM_SCOPE, Feed, ForwardBackward, Objective
from scaleflow.training import state
from scaleflow.training.engine import Host
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.flops import flops_per_example
from scaleflow.training.forward_backward import TapeForwardBackward, make_loss_step
from scaleflow.training.graph_loop import keep_devices, repeat_in_graph
from scaleflow.training.metric_sums import MetricSums
from scaleflow.training.rate import scale_rate
from scaleflow.training.synchronized import keep_losses_apart, synchronized_layers
from scaleflow.training.xla import with_xla

NEVER = np.iinfo(np.int64).max


class Loop:
    """Trains and evaluates one model under one strategy.

    Every example has the weight 1 / (valid examples in its global batch), and gradients are summed
    over micro-batches and replicas: so the update is the mean over the global batch, however it was
    divided, and a partial last batch counts what it holds.

    Make it in the strategy's scope.

    Args:
        strategy: whose replicas work.
        model: built; returns float32.
        optimizer: takes gradients that are summed over the replicas; None where `_update` does without it.
        objective: what is minimised and watched.
        clip_norm: the global norm that the gradient of the global batch is clipped to.
        xla: compile the model's forward and backward pass with XLA.
        passes: the way forward and backward, where it is not that of a model in one piece.
        evaluation: where that is not done under the strategy, in the forward pass.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None,
        objective: Objective,
        clip_norm: float | None = None,
        xla: bool = False,
        *,
        passes: ForwardBackward | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.strategy = strategy
        self.model = model
        self.optimizer: Any = optimizer
        self.objective = objective
        self.passes = passes or TapeForwardBackward(model, make_loss_step(objective))
        forward = with_xla(self.passes.forward) if xla else self.passes.forward
        self._evaluation = evaluation or Evaluation(strategy, forward, objective)
        self._clip_norm = clip_norm
        self._differentiate = with_xla(self._gradients) if xla else self._gradients
        self._tally = MetricSums(objective)
        self._epoch = np.zeros(self._tally.size)
        self._functions: dict[tuple[int, bool], Any] = {}
        self._is_alone = False
        self._is_unrolled = bool(synchronized_layers(model, strategy))
        if self._is_unrolled:
            keep_losses_apart(model)
        self.flops_per_example: float | None = None
        self._slots = None if optimizer is None else state.Slots(optimizer, self.passes.variables, model)

    # What the host calls ---------------------------------------------------------------------

    def run(self, feed: Feed, host: Host) -> None:
        """Trains until the host says that it is enough."""
        for epoch in range(host.epoch, host.epochs):
            host.begin_epoch(epoch)
            begin = time.perf_counter()
            opened = feed.open(epoch, host.first)
            waited = time.perf_counter() - begin
            if not host.first:
                self.start_epoch()
            while steps := host.next_steps():
                begin = time.perf_counter()
                with host.trace_call() as self._is_alone:
                    means = self.train(feed, opened, epoch, host.first, steps, host.step)
                host.end_call(steps, means, time.perf_counter() - begin, waited)
                waited = 0.0
            if not host.end_epoch():
                return

    def trace(self, train: Feed, *others: Feed | None) -> None:
        """Compiles for these feeds without running anything, so that a model's faults show early."""
        arguments = train.open(0, 0), tf.constant(0, tf.int64), tf.constant(0, tf.int64), tf.constant(1, tf.int64)
        graph = self._function(train).get_concrete_function(*arguments).graph
        self.flops_per_example = flops_per_example(graph, self.strategy, train.batching, self._is_unrolled)
        for feed in filter(None, others):
            self._evaluation.trace(feed)

    def start_epoch(self) -> None:
        """Forgets the sums of the epoch before."""
        self._epoch[:] = 0

    def train(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int, done: int) -> Mapping[str, float]:
        """Takes `steps` updates from step `first` of `epoch` on, in one call.

        Args:
            feed: what to train on.
            opened: what `feed.open` gave for this epoch.
            epoch: counted from 0.
            first: the first step's place in its epoch, from 0.
            steps: how many.
            done: updates of the whole run so far, to name a step by.

        Returns:
            The loss and metrics averaged over this epoch's examples so far.

        Raises:
            NotFinite: if the loss of an update was NaN or Inf.
        """
        sums, bad = self._take(feed, opened, epoch, first, steps)
        if bad != NEVER:
            raise NotFinite(done + bad - first + 1)
        self._epoch += sums
        return self._tally.means(self._epoch, min((first + steps) * feed.batching.global_size, feed.examples))

    def evaluate(self, feed: Feed) -> Mapping[str, float]:
        """The loss and metrics over a whole split, every example once."""
        return self._evaluation(feed)

    def read_confusion(self, feed: Feed) -> np.ndarray[Any, Any] | None:
        return self._evaluation.read_confusion(feed)

    def gather_model(self) -> keras.Model:
        """The model with the weights of now, in this process and in one piece."""
        return self.model

    def count_updates(self, done: int) -> int:
        """The optimizer's updates after so many steps were taken."""
        return done

    def read_state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {**state.read_variables(self._variables_by_name()), state.SUMS: self._epoch.copy()}

    def restore(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        state.write_variables(self._variables_by_name(), values)
        self._epoch[:] = values[state.SUMS]

    def restore_model(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        state.write_variables(state.name_model_variables(self.model), values)

    def set_rate_factor(self, factor: float, held: float) -> None:
        if scale_rate(self.optimizer, factor, held):
            self._functions.clear()  # they hold the schedule as it was when they were traced

    def _variables_by_name(self) -> dict[str, list[Any]]:
        """All variables that a run needs to go on."""
        return {**state.name_model_variables(self.model), **(self._slots.by_name() if self._slots else {})}

    @property
    def loss_scale(self) -> float | None:
        return read_loss_scale(self.optimizer)

    @property
    def traces(self) -> int:
        """How often training and evaluation were traced, for tests: each once for each feed."""
        of_training: int = sum(f.experimental_get_tracing_count() for f in self._functions.values())
        return of_training + self._evaluation.traces

    def _take(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int) -> tuple[np.ndarray[Any, Any], int]:
        """Takes steps; gives the sums over their examples, and the first step whose loss was bad."""
        position = (tf.constant(value, tf.int64) for value in (epoch, first, steps))
        sums, bad = self._function(feed)(opened, *position)
        return sums.numpy(), int(bad)

    # What is compiled ------------------------------------------------------------------------

    def _function(self, feed: Feed) -> Any:
        key = id(feed), self._is_alone
        if key not in self._functions:
            self._functions[key] = self._compile_one(feed) if self._is_alone else self._compile(feed)
        return self._functions[key]

    def _compile_one(self, feed: Feed) -> Any:
        """One step to a call, to be traced: what is in no loop is what xprof finds the markers of."""
        read_in_step = ReadInStep(feed)

        @tf.function(autograph=False, reduce_retracing=True)
        def one(opened: Any, epoch: tf.Tensor, step: tf.Tensor, steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.name_scope(STEP_SCOPE):
                with tf.name_scope(READ_SCOPE):
                    fetched = feed.fetch(opened)
                state = *self.strategy.run(self._zero_sums), ()
                sums, first_bad, _ = self.strategy.run(self._step, args=(read_in_step, fetched, epoch, step, *state))
            total = self.strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
            return total, self.strategy.experimental_local_results(first_bad)[0]

        return one

    def _compile(self, feed: Feed) -> Any:
        @tf.function(
            autograph=False, reduce_retracing=True
        )  # converting all that is called below takes longer than tracing it
        def call(opened: Any, epoch: tf.Tensor, first: tf.Tensor, steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            def update(step: tf.Tensor, *state: Any) -> Any:
                return self.strategy.run(self._step, args=(feed, feed.fetch(opened), epoch, step, *state))

            ahead = self.strategy.run(self._batch, args=(feed, opened, epoch, first)) if feed.ahead else ()
            sums, first_bad, _ = repeat_in_graph(update, first, steps, (*self.strategy.run(self._zero_sums), ahead))
            total = self.strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
            return total, self.strategy.experimental_local_results(first_bad)[0]

        return call

    def _zero_sums(self) -> tuple[tf.Tensor, tf.Tensor]:
        """What a replica carries from step to step: sums [count, loss, *metrics], and the first bad step."""
        return tf.zeros([self._tally.size], tf.float64), tf.constant(NEVER, tf.int64)

    def _batch(self, feed: Feed, fetched: Any, epoch: tf.Tensor, step: tf.Tensor) -> Any:
        """The one batch of a step, in a replica: (inputs, targets, mask)."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.name_scope(READ_SCOPE):
            return feed.micro_batch(fetched, epoch, step, replica, tf.constant(0, tf.int64))

    def _step(
        self,
        feed: Feed,
        fetched: Any,
        epoch: tf.Tensor,
        step: tf.Tensor,
        sums: tf.Tensor,
        first_bad: tf.Tensor,
        ahead: Any,
    ) -> tuple[tf.Tensor, tf.Tensor, Any]:
        """One update, in a replica; gives what it carries on."""
        following = self._batch(feed, fetched, epoch, step + 1) if feed.ahead else ()
        weight = 1.0 / tf.cast(self._count_valid(feed, step), tf.float32)
        here, loss = self._update(feed, fetched, epoch, step, weight, ahead)
        bad = tf.where(tf.math.is_finite(loss), tf.constant(NEVER, tf.int64), step)
        return sums + tf.cast(here, sums.dtype), tf.minimum(first_bad, bad), following

    def _update(
        self, feed: Feed, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, weight: tf.Tensor, ahead: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Moves the weights; gives this replica's sums, and the loss of the global batch."""
        if feed.batching.accumulate == 1:
            batch = ahead or self._batch(feed, fetched, epoch, step)
            gradients, here = self._differentiate(feed, batch, weight)
        else:
            gradients, here = self._accumulate(feed, fetched, epoch, step, weight)
        gradients, loss = self._sum_over_replicas(gradients, here[1] * weight)
        if self._clip_norm is not None:
            gradients = self._clip(gradients, self._clip_norm)
        self.optimizer.apply(gradients, self.passes.variables)
        return here, loss

    def _count_valid(self, feed: Feed, step: tf.Tensor) -> tf.Tensor:
        """How many real examples the global batch at `step` holds."""
        size = tf.constant(feed.batching.global_size, tf.int64)
        if feed.examples % feed.batching.global_size == 0:
            return size
        return tf.minimum(size, feed.examples - step * size)

    def _accumulate(
        self, feed: Feed, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, weight: tf.Tensor
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """This replica's part of the gradient, summed over its micro-batches, and its sums."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        unused: set[int] = set()  # filled while `add` is traced

        def add(index: tf.Tensor, sums: tf.Tensor, gradients: list[tf.Tensor]) -> tuple[Any, list[tf.Tensor]]:
            batch = feed.micro_batch(fetched, epoch, step, replica, index)
            more, more_sums = self._differentiate(feed, batch, weight)
            unused.update(i for i, m in enumerate(more) if m is None)
            return sums + more_sums, self._map_on_devices(tf.add, gradients, more)

        zeros = []
        for variable, place in zip(self.passes.variables, self.passes.devices, strict=True):
            with tf.device(place):
                zeros.append(tf.zeros(variable.shape, variable.dtype))
        start = tf.zeros([self._tally.size]), zeros
        rounds = unrolled if self._is_unrolled else looped
        with keep_devices() if any(self.passes.devices) else contextlib.nullcontext():
            sums, gradients = rounds(add, feed.batching.accumulate, *start)
        kept = self._map_on_devices(tf.identity, gradients)  # a loop's results have no device of their own
        return [None if i in unused else g for i, g in enumerate(kept)], sums

    def _map_on_devices(
        self, operation: Callable[..., tf.Tensor], gradients: list[tf.Tensor], *more: list[tf.Tensor | None]
    ) -> list[tf.Tensor]:
        """The operation on each gradient, on its variable's device; the gradient itself where another is None."""
        results = []
        for place, gradient, *others in zip(self.passes.devices, gradients, *more, strict=True):
            with tf.device(place):
                results.append(gradient if any(o is None for o in others) else operation(gradient, *others))
        return results

    def _gradients(self, feed: Feed, batch: Any, weight: tf.Tensor) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """One micro-batch's part of the gradient, and its sums [count, loss, *metrics]."""
        inputs, targets, mask = batch
        parts = feed.batching.accumulate * feed.batching.replicas
        loss, outputs, gradients = self.passes.backward((inputs, targets), mask * weight, parts, self._scale_loss)
        return gradients, self._tally.compute(targets, outputs, loss / weight, mask)

    def _scale_loss(self, value: tf.Tensor) -> tf.Tensor:
        """Times the loss scale, where there is one."""
        is_scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        return self.optimizer.scale_loss(value) if is_scaled else value

    def _sum_over_replicas(
        self, gradients: list[tf.Tensor | None], loss: tf.Tensor
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """All-reduces the gradients and, in the same call, the loss."""
        if self.strategy.num_replicas_in_sync == 1:
            return gradients, loss
        there = [g for g in gradients if g is not None]
        with tf.name_scope(SUM_SCOPE):
            *summed, loss = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, [*there, loss])
        rest = iter(summed)
        return [None if g is None else next(rest) for g in gradients], loss

    def _clip(self, gradients: list[tf.Tensor | None], norm: float) -> list[tf.Tensor | None]:
        """Clips to a global norm; scaled gradients to the scaled norm, which is the same."""
        limit = self._scale_loss(tf.constant(norm, tf.float32))
        clipped: list[tf.Tensor | None] = tf.clip_by_global_norm(gradients, limit)[0]
        return clipped


def looped(add: Callable[..., Any], count: int, sums: tf.Tensor, gradients: list[tf.Tensor]) -> Any:
    """Adds up `count` micro-batches in a loop of the graph, one at a time: there is memory for one only."""
    zero = tf.constant(0, tf.int64)
    return repeat_in_graph(add, zero, tf.constant(count, tf.int64), (sums, gradients))


def unrolled(add: Callable[..., Any], count: int, sums: tf.Tensor, gradients: list[tf.Tensor]) -> Any:
    """The same without a loop, in which replicas cannot meet.

    Reading a micro-batch waits for the gradients of the one before, so that memory is needed for one only.
    """
    for number in range(count):
        with tf.control_dependencies([sums, *gradients]):
            index = tf.identity(tf.constant(number, tf.int64))
        sums, gradients = add(index, sums, gradients)
    return sums, gradients


def read_loss_scale(optimizer: Any) -> float | None:
    """The dynamic loss scale, where there is one."""
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else float(np.asarray(scale.numpy()))


class ReadInStep:
    """A feed of which each step reads its own batch, as a step by itself does."""

    ahead = False

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)
