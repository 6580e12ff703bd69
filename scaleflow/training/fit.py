"""The second engine: Keras's own `fit`, on one device or mirrored.

The same batches, weights, metrics and events as the loop's, so that a run with the one can be compared with a run
with the other. Forward, backward, the sum over the replicas and the update are Keras's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError, NotFinite
from scaleflow.interfaces import STEP_SCOPE, Feed, Objective
from scaleflow.training import state
from scaleflow.training.engine import Host
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.flops import flops_per_example
from scaleflow.training.forward_backward import TapeForwardBackward, make_loss_step, own_loss
from scaleflow.training.loop import read_loss_scale
from scaleflow.training.metric_sums import MetricSums
from scaleflow.training.synchronized import keep_losses_apart, synchronized_layers


def choose_steps_per_execution(setting: int | str, epoch: int, total: int) -> int:
    """Keras's word for `training.steps_per_loop`; `auto` is one, as it is Keras's.

    Args:
        setting: what the config says.
        epoch, total: the steps of an epoch and of the run, at whose ends an execution has to end.

    Raises:
        ConfigError: if it does not: Keras would take the next epoch's steps for this one's.
    """
    if isinstance(setting, str):
        return 1
    divides = [number for number in range(1, setting + 1) if math.gcd(epoch, total) % number == 0]
    if setting in divides:
        return setting
    raise ConfigError(
        f"training.steps_per_loop={setting} with training.engine=fit: Keras takes whole executions, and an epoch has "
        f"{epoch} steps, the run {total}; use {divides[-1]}, or training.engine=loop"
    )


#: The steps of the epoch so far whose loss was finite.
GOOD = "training/good"


class FitEngine:
    """Trains one model under one strategy with `keras.Model.fit`.

    Args:
        strategy: whose replicas work.
        model: built; returns float32.
        optimizer: sums its gradients over the replicas itself, as Keras's do.
        objective: what is minimised and watched.
        steps_per_execution: steps to one call of Keras's compiled function.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        objective: Objective,
        steps_per_execution: int = 1,
    ) -> None:
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self._evaluation = Evaluation(
            strategy, TapeForwardBackward(model, make_loss_step(objective)).forward, objective
        )
        self._tally = MetricSums(objective)
        self._per_execution = steps_per_execution
        self._slots = state.Slots(optimizer, model.trainable_variables, model)
        if synchronized_layers(model, strategy):
            keep_losses_apart(model)
        self._restored: Mapping[str, np.ndarray[Any, Any]] = {}
        self.flops_per_example: float | None = None

    def trace(self, train: Feed, *others: Feed | None) -> None:
        """Compiles for these feeds without running anything, so that a model's faults show early."""
        with self.strategy.scope():
            self._sums = EpochSums(self._tally)
        # Not made in the scope: there `fit` would build it again, from the mean of a batch, and text has none.
        self._fitted = FitModel(self.model, self.objective, self._sums)
        with self.strategy.scope():
            self._fitted.compile(self.optimizer, steps_per_execution=self._per_execution, jit_compile=False)
            batches = self.strategy.experimental_distribute_dataset(add_weights(train.batches(1, 1)))

            @tf.function(autograph=False)
            def step(batch: Any) -> Any:
                return self.strategy.run(self._fitted.train_step, args=(batch,))

            graph = step.get_concrete_function(batches.element_spec).graph
            self.flops_per_example = flops_per_example(graph, self.strategy, train.batching)
        for feed in filter(None, others):
            self._evaluation.trace(feed)

    def run(self, feed: Feed, host: Host) -> None:
        """Trains until the host says that it is enough; an epoch that was begun is a `fit` of its own."""
        begun = host.step - host.epoch * host.steps_per_epoch
        if begun and not self._fit(feed, host, host.epoch + 1, begun):
            return
        if host.epoch < host.epochs:
            self._fit(feed, host, host.epochs, 0)

    def _fit(self, feed: Feed, host: Host, epochs: int, begun: int) -> bool:
        """Trains up to so many epochs, from a step of the host's epoch on; gives whether to go on."""
        report = FitCallback(self, feed, host, begun)
        steps = host.steps_per_epoch - begun
        if not steps:  # all that was left of the epoch is its validation
            self._restored = {}
            host.begin_epoch(host.epoch)
            return host.end_epoch()
        batches = feed.batches(epochs, host.steps_per_epoch).skip(host.step)
        with self.strategy.scope():
            self._fitted.fit(
                add_weights(batches),
                initial_epoch=host.epoch,
                epochs=epochs,
                steps_per_epoch=steps,
                callbacks=[report],
                shuffle=False,
                verbose=0,
            )
        return report.wants_more

    def begin_sums(self) -> None:
        """Goes on with the sums of an epoch that was begun before; Keras has just reset them."""
        if self._restored:
            state.write_variables(self._sums_by_name(), self._restored)
            self._restored = {}

    def read_state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return state.read_variables({**self._variables_by_name(), **self._sums_by_name()})

    def restore(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        state.write_variables(self._variables_by_name(), values)
        self._restored = {name: values[name] for name in self._sums_by_name() if name in values}

    def restore_model(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        state.write_variables(state.name_model_variables(self.model), values)

    def set_rate_factor(self, factor: float, held: float) -> None:
        raise NotImplementedError("training.on_nan=rollback with Keras's fit is refused")

    def _variables_by_name(self) -> dict[str, list[Any]]:
        return {**state.name_model_variables(self.model), **self._slots.by_name()}

    def _sums_by_name(self) -> dict[str, list[Any]]:
        return {state.SUMS: state.list_variables(self._sums.sums), GOOD: state.list_variables(self._sums.good)}

    def means(self, feed: Feed, taken: int, before: int) -> Mapping[str, float]:
        """The loss and metrics averaged over this epoch's examples so far.

        Args:
            feed: what is trained on.
            taken: this epoch's steps so far.
            before: those of the epochs before, to name a step by.

        Raises:
            NotFinite: if the loss of a step was NaN or Inf.
        """
        good = min(int(each.numpy()) for each in self.strategy.experimental_local_results(self._sums.good.value))
        if good < taken:
            raise NotFinite(before + good + 1)
        return self._tally.means(self._sums.sums.numpy(), min(taken * feed.batching.global_size, feed.examples))

    def evaluate(self, feed: Feed) -> Mapping[str, float]:
        return self._evaluation(feed)

    def read_confusion(self, feed: Feed) -> np.ndarray[Any, Any] | None:
        return self._evaluation.read_confusion(feed)

    def gather_model(self) -> keras.Model:
        return self.model

    def count_updates(self, done: int) -> int:
        return done

    @property
    def loss_scale(self) -> float | None:
        return read_loss_scale(self.optimizer)


def add_weights(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Global batches with each example's weight, 1 / (valid examples), in place of the mask."""
    return batches.map(lambda inputs, targets, mask: (inputs, targets, mask / tf.reduce_sum(mask)))


class FitModel(keras.Model):  # type: ignore[misc]  # keras has no types
    """The model as `fit` trains it: the loss weighted and summed, the metrics in our sums."""

    def __init__(self, model: keras.Model, objective: Objective, sums: EpochSums) -> None:
        super().__init__()
        self._model = model
        self._loss_of = objective.loss
        self._sums = sums
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self._model(inputs, training=training)

    def train_step(self, data: Any) -> Any:
        with tf.name_scope(STEP_SCOPE):
            return super().train_step(data)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> tf.Tensor:
        """This replica's part of the global batch's mean; Keras sums the gradients."""
        loss = tf.reduce_sum(self._loss_of(y, y_pred) * sample_weight)
        return loss + own_loss(self.losses) / tf.distribute.get_strategy().num_replicas_in_sync

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self._sums.update_state(y, y_pred, self._loss_of(y, y_pred), sample_weight)
        return self.get_metrics_result()

    @property
    def metrics(self) -> list[Any]:
        """All that is reset at an epoch's begin and logged; Keras's own mean would count padding."""
        return [self._sums]


class EpochSums(keras.metrics.Metric):  # type: ignore[misc]  # keras has no types
    """The tally of an epoch so far, summed over the replicas when it is read."""

    def __init__(self, metric_sums: MetricSums) -> None:
        super().__init__(name="sums")
        self._tally = metric_sums
        self.sums = self.add_variable((metric_sums.size,), "zeros", dtype="float64", name="sums")
        self.good = self.add_variable((), "zeros", dtype="float64", name="good")

    def update_state(self, y: Any, y_pred: Any, losses: Any, weights: Any) -> None:
        """Adds a batch, in a replica; `good` counts the steps as long as the sum is finite."""
        mask = tf.cast(weights > 0, tf.float32)
        sums = self.sums + tf.cast(self._tally.compute(y, y_pred, tf.reduce_sum(losses * mask), mask), tf.float64)
        self.sums.assign(sums)
        self.good.assign(self.good + tf.cast(tf.math.is_finite(sums[1]), tf.float64))

    def result(self) -> dict[str, tf.Tensor]:
        """The means, for Keras's logs."""
        sums = tf.convert_to_tensor(self.sums)
        return self._tally.finish(
            {name: tf.math.divide_no_nan(sums[i + 1], sums[0]) for i, name in enumerate(self._tally.names)}
        )


class FitCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Tells the host of what `fit` does, and `fit` of what the host says.

    Attributes:
        wants_more: whether the host wants another epoch.
    """

    def __init__(self, engine: FitEngine, feed: Feed, host: Host, begun: int) -> None:
        super().__init__()
        self._engine = engine
        self._feed = feed
        self._host = host
        self._begun = begun
        self._began = 0.0
        self._watched = contextlib.ExitStack()
        self.wants_more = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._host.begin_epoch(epoch)
        self._engine.begin_sums()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._watched.enter_context(self._host.trace_call())
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        host, taken = self._host, self._begun + batch + 1
        with self._watched:
            means = self._engine.means(self._feed, taken, host.step - host.first)
        host.end_call(taken - host.first, means, time.perf_counter() - self._began)
        if taken < host.steps_per_epoch and not host.next_steps():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.wants_more = self._host.end_epoch()
        if not self.wants_more:
            self.model.stop_training = True
