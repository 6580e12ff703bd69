"""The default engine: a compiled function that takes many training steps per call.

It is traced once per feed. The position and the number of steps are tensors, so that other values do not retrace it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import find_rate, to_tf_variable
from scaleflow.errors import NotFinite
from scaleflow.interfaces import READ_SCOPE, STEP_SCOPE, SUM_SCOPE, Feed, ForwardBackward, Objective
from scaleflow.training import state
from scaleflow.training.engine import Controller, Engine
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.forward_backward import Gradient, RowStore, TapeForwardBackward, make_loss_step, sum_rows
from scaleflow.training.graph import has_convolution, keep_devices, repeat_in_graph
from scaleflow.training.metrics_log import flops_per_example
from scaleflow.training.xla import with_xla

NEVER = np.iinfo(np.int64).max

#: The result of a call: the sums [count, loss, *metrics], the first step with a bad loss or `NEVER`, and the norm of
#: the last step's gradients.
CallResult: TypeAlias = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
LoopState: TypeAlias = tuple[tf.Tensor, tf.Tensor, tf.Tensor, Any]


class Loop(Engine):
    """The default engine. Construct it in the strategy's scope.

    Each example has the weight 1 / (valid examples in its global batch). Gradients are summed over micro-batches and
    replicas. So an update uses the mean over the global batch, however the batch is divided, also for a partial one.

    Args:
        strategy, model, objective: as for `Engine`.
        optimizer: takes gradients that are summed over the replicas; None if a subclass's `_update` needs none.
        clip_norm: the largest global norm of the global batch's gradient; None for no clipping.
        xla: compile the model's forward and backward pass with XLA.
        passes: the forward and backward pass; None for a gradient tape around the whole model.
        evaluation: evaluates splits; None for the forward pass under the strategy.

    Attributes:
        last_loss: the mean loss of the examples of the last call; NaN before the first.
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
        self.passes = passes or TapeForwardBackward(model, make_loss_step(objective))
        forward = with_xla(self.passes.forward) if xla else self.passes.forward
        evaluation = evaluation or Evaluation(strategy, forward, objective)
        variables = self.passes.variables
        super().__init__(strategy, model, optimizer, objective=objective, evaluation=evaluation, variables=variables)
        self._clip_norm = clip_norm
        self._has_xla_passes = xla
        self._differentiate = with_xla(self._gradients) if xla else self._gradients
        self._epoch = np.zeros(self._metric_sums.size)
        self._functions: dict[tuple[int, bool], Any] = {}
        self._is_alone = False
        self.last_loss = float("nan")

    def _train_only(self, variables: Sequence[Any]) -> None:
        assert isinstance(self.passes, TapeForwardBackward), "the rules refuse it in stages"
        self.passes.set_variables(variables)
        self._functions.clear()

    def run(self, feed: Feed, controller: Controller) -> None:
        opened = None
        for epoch in range(controller.epoch, controller.epochs):
            controller.begin_epoch(epoch)
            begin = time.perf_counter()
            if opened is None or not feed.continues:
                opened = feed.open(epoch, controller.first)
            waited = time.perf_counter() - begin
            if not controller.first:
                self.start_epoch()
            while steps := controller.next_steps():
                begin = time.perf_counter()
                with controller.trace_call() as self._is_alone:
                    means = self.train(feed, opened, epoch, first=controller.first, steps=steps, done=controller.step)
                controller.end_call(steps, means, seconds=time.perf_counter() - begin, waited=waited)
                waited = 0.0
            if not controller.end_epoch():
                return

    def _trace_training(self, feed: Feed) -> None:
        zero = tf.constant(0, tf.int64)
        one = tf.constant(1, tf.int64)
        graph = self._function(feed).get_concrete_function(feed.open(0, 0), zero, zero, one).graph
        self._note_state(graph)
        is_unrolled = bool(self._synchronized)
        self.flops_per_example = flops_per_example(graph, self.strategy, feed.batching, is_unrolled=is_unrolled)
        self._evaluation.overlaps &= not has_convolution(graph)

    @contextlib.contextmanager
    def _compile_ahead(self, feed: Feed) -> Iterator[None]:
        """TensorFlow compiles a call of 0 steps in a thread, on one device and for examples that are in memory."""
        is_simple = feed.is_indexed and isinstance(self.strategy, tf.distribute.OneDeviceStrategy)
        if not is_simple or tf.config.functions_run_eagerly():
            yield
            return
        zero = tf.constant(0, tf.int64)
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(self._function(feed), feed.open(0, 0), zero, zero, zero)
            yield
        compiled.result()

    def start_epoch(self) -> None:
        """Resets the sums of the epoch."""
        self._epoch[:] = 0

    def train(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int, done: int) -> Mapping[str, float]:
        """Takes `steps` steps from step `first` of `epoch` on, in one call.

        Args:
            opened: the result of `feed.open` for this epoch.
            epoch: counted from 0.
            first: index of the first step in its epoch, from 0.
            done: steps of the whole run so far, for the step number in an error.

        Returns:
            The loss and metrics averaged over this epoch's examples so far.

        Raises NotFinite if the loss of a step was NaN or Inf.
        """
        sums, bad = self._take(feed, opened, epoch, first=first, steps=steps)
        if bad != NEVER:
            raise NotFinite(done + bad - first + 1)
        self.last_loss = self._metric_sums.compute_mean_loss(sums)
        self._epoch += sums
        return self._metric_sums.means(self._epoch, min((first + steps) * feed.batching.global_size, feed.examples))

    def read_state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        values = {**state.read_variables(self.variables_by_name()), state.SUMS: self._epoch.copy()}
        if self.freezing is not None:
            values.update(self.freezing.read_state())
        return values

    def restore(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self._write_state(values)
        self._epoch = self._metric_sums.restore(values[state.SUMS])

    def set_rate_factor(self, factor: float, restored_factor: float) -> None:
        rate = to_tf_variable(find_rate(self.optimizer))
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate.factor = factor  # `scaleflow.optimizer`'s schedule multiplies its result by it
            self._functions.clear()  # traced functions contain the old factor
        else:  # a constant rate is a variable of the run's state
            rate.assign(float(rate.read_value().numpy()) * factor / restored_factor)

    @property
    def traces(self) -> int:
        """How often training and evaluation were traced (for tests): once per feed each."""
        count: int = self._evaluation.traces
        for function in self._functions.values():
            count += function.experimental_get_tracing_count()
        return count

    def _take(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int) -> tuple[np.ndarray[Any, Any], int]:
        """Takes steps; returns the sums over their examples, and the first step with a bad loss, or `NEVER`."""
        position = [tf.constant(value, tf.int64) for value in (epoch, first, steps)]
        sums, bad, norm = self._function(feed)(opened, *position)
        self.gradient_norm = float(norm)
        return sums.numpy(), int(bad)

    # Compiled functions ----------------------------------------------------------------------

    def _function(self, feed: Feed) -> Any:
        key = (id(feed), self._is_alone)
        if key not in self._functions:
            self._functions[key] = self._compile_one(feed) if self._is_alone else self._compile(feed)
        return self._functions[key]

    def _compile_one(self, feed: Feed) -> Any:
        """Compiles one step per call, to be traced: xprof finds the name scopes of operations outside loops only."""

        @tf.function(autograph=False, reduce_retracing=True)
        def one(opened: Any, epoch: tf.Tensor, step: tf.Tensor, steps: tf.Tensor) -> CallResult:
            with tf.name_scope(STEP_SCOPE):
                with tf.name_scope(READ_SCOPE):
                    fetched = feed.fetch(opened)
                state = (*self.strategy.run(self._zero_state), ())
                arguments = (feed, fetched, (epoch, step, step + 1), state)
                return self._end_call(*self.strategy.run(self._step, args=arguments))

        return one

    def _compile(self, feed: Feed) -> Any:
        # No autograph: converting all functions called below takes longer than tracing them.
        @tf.function(autograph=False, reduce_retracing=True)
        def call(opened: Any, epoch: tf.Tensor, first: tf.Tensor, steps: tf.Tensor) -> CallResult:
            def update(step: tf.Tensor, *state: Any) -> Any:
                arguments = (feed, feed.fetch(opened), (epoch, step, first + steps), state, feed.ahead)
                return self.strategy.run(self._step, args=arguments)

            ahead: Any = ()
            if feed.ahead:
                ahead = self.strategy.run(self._batch, args=(feed, opened, (epoch, first)))
            state = (*self.strategy.run(self._zero_state), ahead)
            return self._end_call(*repeat_in_graph(update, first, steps, state=state))

        return call

    def _end_call(self, sums: Any, first_bad: Any, norm: Any, ahead: Any) -> CallResult:
        """Returns the result of a call, from the last state of the replicas."""
        total = self.strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
        own_first_bad = self.strategy.experimental_local_results(first_bad)[0]
        own_norm = self.strategy.experimental_local_results(norm)[0]
        return total, own_first_bad, own_norm

    def _zero_state(self) -> CallResult:
        """Returns a replica's initial loop state."""
        return tf.zeros([self._metric_sums.size], tf.float64), tf.constant(NEVER, tf.int64), tf.zeros([])

    def _batch(self, feed: Feed, fetched: Any, position: tuple[tf.Tensor, tf.Tensor], index: Any = 0) -> Any:
        """Reads a micro-batch at (epoch, step) in a replica, (inputs, targets, mask)."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.name_scope(READ_SCOPE):
            return feed.micro_batch(fetched, *position, replica=replica, index=tf.convert_to_tensor(index, tf.int64))

    def _step(
        self, feed: Feed, fetched: Any, position: tuple[tf.Tensor, ...], state: LoopState, reads_ahead: bool = False
    ) -> LoopState:
        """Takes the step at (epoch, step, end) in a replica; returns the new state.

        If it `reads_ahead`, the new state has the next batch. Only the last step before the end computes the norm of
        the gradients, so it takes no time.
        """
        epoch, step, end = position
        sums, first_bad, _, ahead = state

        def read(*index: tf.Tensor) -> Any:
            return ahead or self._batch(feed, fetched, (epoch, step), *index)

        next_batch = self._batch(feed, fetched, (epoch, step + 1)) if reads_ahead else ()
        weight = 1.0 / tf.cast(self._count_valid(feed, step), tf.float32)
        is_last = tf.equal(step + 1, end)
        step_sums, loss, norm = self._update(feed, read, weight, is_last=is_last)
        bad = tf.where(tf.math.is_finite(loss), tf.constant(NEVER, tf.int64), step)
        return sums + tf.cast(step_sums, sums.dtype), tf.minimum(first_bad, bad), norm, next_batch

    def _update(self, feed: Feed, read: Callable[..., Any], weight: tf.Tensor, is_last: tf.Tensor) -> CallResult:
        """Updates the weights; returns this replica's sums, the loss of the global batch, and the gradients' norm.

        `read` takes the index of a micro-batch and reads it. Without an index it reads the first one.
        """
        if feed.batching.accumulate == 1:
            gradients, sums = self._differentiate(feed, read(), weight)
        else:
            gradients, sums = self._accumulate(feed, read, weight)
        minimised = tf.cast(sums[1] + sums[-1], weight.dtype) * weight
        gradients, loss = self._sum_over_replicas(gradients, minimised)
        gradients = [sum_rows(gradient) for gradient in gradients]
        norm = tf.cond(is_last, lambda: self._measure_norm(gradients), lambda: tf.zeros([]))
        if self._clip_norm is not None:
            gradients = self._clip(gradients, self._clip_norm)
        self.optimizer.apply(gradients, self.passes.variables)
        return sums, loss, norm

    def _measure_norm(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        """Returns the global norm of gradients, without the loss scale."""
        halves = [tf.zeros([])]
        for device, gradient in zip(self.passes.devices, gradients, strict=True):
            with tf.device(device):
                values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                if values is not None:
                    halves.append(tf.cast(tf.nn.l2_loss(values), tf.float32))
        return tf.sqrt(2.0 * tf.add_n(halves)) / self._scale_loss(tf.ones([]))

    def _count_valid(self, feed: Feed, step: tf.Tensor) -> tf.Tensor:
        """Counts the examples of the global batch at `step`, without padding."""
        size = tf.constant(feed.batching.global_size, tf.int64)
        if feed.examples % feed.batching.global_size == 0:
            return size
        return tf.minimum(size, feed.examples - step * size)

    def _accumulate(self, feed: Feed, read: Callable[..., Any], weight: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
        """Returns this replica's gradients, summed over its micro-batches, and its metric sums."""
        unused: set[int] = set()  # filled while `add` is traced

        def differentiate(index: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
            gradients, sums = self._differentiate(feed, read(index), weight)
            return list(gradients), sums

        stores = self._make_row_stores(lambda: differentiate(tf.constant(0, tf.int64)), feed.batching.accumulate)

        def add(index: tf.Tensor, sums: tf.Tensor, gradients: list[Any]) -> tuple[Any, list[Any]]:
            new_gradients, new_sums = differentiate(index)
            dense: list[Any] = []
            for i, gradient in enumerate(new_gradients):
                if gradient is None:
                    unused.add(i)
                dense.append(None if i in stores else gradient)
            added = self._map_on_devices(tf.add, gradients, dense)
            for i, store in stores.items():
                added[i] = store.add(gradients[i], index, new_gradients[i])
            return sums + new_sums, added

        start: list[Any] = []
        for i, (variable, device) in enumerate(zip(self.passes.variables, self.passes.devices, strict=True)):
            with tf.device(device):
                start.append(stores[i].start if i in stores else tf.zeros(variable.shape, variable.dtype))
        zero_sums = tf.zeros([self._metric_sums.size], self._metric_sums.dtype)
        repeat = unroll if self._synchronized else repeat_in_loop
        with keep_devices() if any(self.passes.devices) else contextlib.nullcontext():
            sums, gradients = repeat(add, feed.batching.accumulate, zero_sums, gradients=start)
        for i, store in stores.items():
            gradients[i] = store.finish(gradients[i])
        placed = self._map_on_devices(tf.identity, gradients)  # the results of a loop have no device
        return [None if i in unused else gradient for i, gradient in enumerate(placed)], sums

    def _make_row_stores(self, differentiate: Callable[[], Any], count: int) -> dict[int, RowStore]:
        """Makes a store for each gradient that comes by rows, by its index.

        A loop in the graph needs them before its body is traced, so a micro-batch is traced in another graph. That is
        not possible with BatchNorm over all replicas: then these gradients are made dense.
        """
        if not self.passes.keeps_rows or self._synchronized:
            return {}
        gradients, _ = tf.function(differentiate, autograph=False).get_concrete_function().structured_outputs
        stores = {}
        for i, (gradient, variable) in enumerate(zip(gradients, self.passes.variables, strict=True)):
            if isinstance(gradient, tf.IndexedSlices | tf.IndexedSlicesSpec):
                stores[i] = RowStore(gradient, variable, count)
        return stores

    def _map_on_devices(
        self, operation: Callable[..., tf.Tensor], gradients: list[tf.Tensor], *more: list[tf.Tensor | None]
    ) -> list[tf.Tensor]:
        """Applies the operation to each gradient on its variable's device; keeps the gradient if another is None."""
        results = []
        for device, gradient, *others in zip(self.passes.devices, gradients, *more, strict=True):
            with tf.device(device):
                has_others = all(other is not None for other in others)
                results.append(operation(gradient, *others) if has_others else gradient)
        return results

    def _gradients(self, feed: Feed, batch: Any, weight: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
        """Returns one micro-batch's part of the gradients, and its sums, as `MetricSums` computes them."""
        inputs, targets, mask, *own = batch
        weights = own[0] if own else mask
        parts = feed.batching.accumulate * feed.batching.replicas
        loss, extra, outputs, gradients = self.passes.backward(
            (inputs, targets), weights * weight, parts, scale=self._scale_loss
        )
        extra = None if extra is None else extra / weight
        reported = self.objective.report(outputs, False)
        sums = self._metric_sums.compute(targets, reported, loss / weight, mask=mask, weights=weights, extra=extra)
        return gradients, sums

    def _scale_loss(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies by the loss scale, if there is one."""
        is_scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        return self.optimizer.scale_loss(value) if is_scaled else value

    def _sum_over_replicas(self, gradients: list[Gradient], loss: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
        """All-reduces the gradients and, in the same call, the loss."""
        if self.strategy.num_replicas_in_sync == 1:
            return gradients, loss
        present = [gradient for gradient in gradients if gradient is not None]
        with tf.name_scope(SUM_SCOPE):
            *summed, loss = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, [*present, loss])
        remaining = iter(summed)
        return [None if gradient is None else next(remaining) for gradient in gradients], loss

    def _clip(self, gradients: list[Gradient], norm: float) -> list[Gradient]:
        """Clips to a global norm. Scaled gradients are clipped to the scaled norm, which is equivalent."""
        limit = self._scale_loss(tf.constant(norm, tf.float32))
        clipped: list[Gradient] = tf.clip_by_global_norm(gradients, limit)[0]
        return clipped


def repeat_in_loop(add: Callable[..., Any], count: int, sums: tf.Tensor, gradients: list[tf.Tensor]) -> Any:
    """Sums `count` micro-batches in a loop of the graph, one at a time, to hold only one in memory."""
    zero = tf.constant(0, tf.int64)
    return repeat_in_graph(add, zero, tf.constant(count, tf.int64), state=(sums, gradients))


def unroll(add: Callable[..., Any], count: int, sums: tf.Tensor, gradients: list[tf.Tensor]) -> Any:
    """Sums `count` micro-batches without a loop: TensorFlow does not allow synchronized layers in a loop.

    Each micro-batch is read after the gradients of the one before are computed, to hold only one in memory.
    """
    for number in range(count):
        tensors = [gradient for gradient in gradients if isinstance(gradient, tf.Tensor)]
        with tf.control_dependencies([sums, *tensors]):
            index = tf.identity(tf.constant(number, tf.int64))
        sums, gradients = add(index, sums, gradients)
    return sums, gradients
