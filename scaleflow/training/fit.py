"""The engine that trains with Keras's `fit`, on one device or mirrored.

Batches, example weights, metrics and events equal the loop's, so that runs of both engines can be compared. Keras
does the forward and backward pass, the sum over the replicas and the update.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import find_loss_mean
from scaleflow.errors import ConfigError, NotFinite
from scaleflow.interfaces import STEP_SCOPE, Feed, Objective
from scaleflow.training import state
from scaleflow.training.engine import Controller, Engine
from scaleflow.training.evaluation import Evaluation, MetricSums
from scaleflow.training.forward_backward import sum_own_losses
from scaleflow.training.metrics_log import flops_per_example


def choose_steps_per_execution(setting: int | str, epoch: int, total: int) -> int:
    """Converts `training.steps_per_loop` to Keras's `steps_per_execution`; `auto` means 1, Keras's default.

    Args:
        epoch, total: the steps of an epoch and of the run. Executions must divide both.

    Raises ConfigError if they do not. Keras would then count steps of the next epoch to this one.
    """
    if isinstance(setting, str):
        return 1
    divisors = [number for number in range(1, setting + 1) if math.gcd(epoch, total) % number == 0]
    if setting in divisors:
        return setting
    raise ConfigError(
        f"training.steps_per_loop={setting} with training.engine=fit: Keras runs only whole calls, and an epoch has "
        f"{epoch} steps and the run {total}; use {divisors[-1]}, or training.engine=loop"
    )


#: Name of the saved count of steps before the epoch's first loss that was not finite.
GOOD = "training/good"


class FitEngine(Engine):
    """Trains one model under one strategy with `keras.Model.fit`.

    Args:
        strategy: one device or mirrored.
        model, objective: as for `Engine`.
        trained: what steps train: the model, or for an ensemble the model of the same layers that `objective` takes.
        optimizer: sums its gradients over the replicas, as Keras's optimizers do by default.
        steps_per_execution: steps per call of Keras's compiled function.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        trained: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        objective: Objective,
        steps_per_execution: int = 1,
    ) -> None:
        evaluation = Evaluation(strategy, functools.partial(trained, training=False), objective)
        super().__init__(strategy, model, optimizer, objective=objective, evaluation=evaluation)
        self._trained = trained
        self._per_execution = steps_per_execution
        self._restored: dict[str, np.ndarray[Any, Any]] = {}
        self._fitted: FitModel | None = None

    def _train_only(self, variables: Sequence[Any]) -> None:
        if self._fitted is not None:  # `fit` reads the function anew in each step
            with self.strategy.scope():
                self._fitted.make_train_function(force=True)

    def _trace_training(self, feed: Feed) -> None:
        if self._fitted is not None:
            return
        with self.strategy.scope():
            self._sums = EpochSums(self._metric_sums)
        # Made outside the scope: inside it `fit` would rebuild it from the mean of a batch, which text does not have.
        self._fitted = fitted = FitModel(self._trained, self.objective, self._sums)
        with self.strategy.scope():
            fitted.compile(self.optimizer, steps_per_execution=self._per_execution, jit_compile=False)
            batches = self.strategy.experimental_distribute_dataset(add_mask_weights(feed.batches(1, 1)))

            @tf.function(autograph=False)
            def step(batch: Any) -> Any:
                return self.strategy.run(fitted.train_step, args=(batch,))

            graph = step.get_concrete_function(batches.element_spec).graph
            own_variables: list[Any] = []
            for variable in fitted.own_variables:
                own_variables += state.list_variables(variable)
            self._note_state(graph, own_variables)
            self.flops_per_example = flops_per_example(graph, self.strategy, feed.batching)

    def run(self, feed: Feed, controller: Controller) -> None:
        """Trains until the controller ends the run. A resumed epoch takes a separate call of `fit`."""
        first_batch = controller.first
        if not first_batch:
            self._restored = {}  # the sums of an epoch that is over
        if first_batch and not self._fit(feed, controller, controller.epoch + 1, first_batch):
            return
        if controller.epoch < controller.epochs:
            self._fit(feed, controller, controller.epochs, first_batch=0)

    def _fit(self, feed: Feed, controller: Controller, epochs: int, first_batch: int) -> bool:
        """Calls `fit` from a batch of the controller's epoch up to epoch `epochs`; returns whether to go on."""
        assert self._fitted is not None, "training was not traced"
        report = FitCallback(self, feed, controller, first_batch=first_batch)
        if not controller.steps_left:  # only the epoch's validation is left
            self._restored = {}
            controller.begin_epoch(controller.epoch)
            return controller.end_epoch()
        steps_before = controller.epoch * controller.steps_per_epoch + first_batch
        batches = feed.batches(epochs, controller.steps_per_epoch).skip(steps_before)
        with self.strategy.scope():
            self._fitted.fit(
                add_mask_weights(batches),
                initial_epoch=controller.epoch,
                epochs=epochs,
                steps_per_epoch=controller.steps_per_epoch - first_batch,
                callbacks=[report],
                shuffle=False,
                verbose=0,
            )
        return report.wants_more

    def begin_sums(self) -> None:
        """Restores the sums of a resumed epoch, which Keras resets when an epoch begins.

        The first replica gets the sums. An assignment to all would divide them by the number of replicas, and rounds.
        """
        if not self._restored:
            return
        sums = self._metric_sums.restore(self._restored.pop(state.SUMS))
        parts = self.strategy.experimental_local_results(self._sums.sums.value)
        for number, part in enumerate(parts):
            part.assign(sums if number == 0 else np.zeros_like(sums))
        state.write_variables({GOOD: self._sums_by_name()[GOOD]}, self._restored)
        self._restored = {}

    def read_state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        values = state.read_variables({**self.variables_by_name(), **self._sums_by_name()})
        values |= self._restored  # the sums of a resumed epoch that has not begun yet
        if self.freezing is not None:
            values |= self.freezing.read_state()
        return values

    def restore(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self._write_state(values)
        self._restored = {name: values[name] for name in self._sums_by_name() if name in values}

    def set_rate_factor(self, factor: float, restored_factor: float) -> None:
        raise NotImplementedError("training.on_nan=rollback with Keras's fit is refused")

    def _sums_by_name(self) -> dict[str, list[Any]]:
        return {state.SUMS: state.list_variables(self._sums.sums), GOOD: state.list_variables(self._sums.good)}

    def means(self, feed: Feed, steps: int, steps_before: int) -> Mapping[str, float]:
        """Returns the loss and metrics averaged over this epoch's examples so far.

        Args:
            feed: the training split.
            steps: steps of this epoch so far.
            steps_before: steps of the epochs before, for the step number in an error.

        Raises NotFinite if the loss of a step was NaN or Inf.
        """
        good = min(int(value.numpy()) for value in self.strategy.experimental_local_results(self._sums.good.value))
        if good < steps:
            raise NotFinite(steps_before + good + 1)
        return self._metric_sums.means(self._sums.sums.numpy(), min(steps * feed.batching.global_size, feed.examples))


def add_mask_weights(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Replaces the mask and the weights of each global batch by (mask, weights, valid examples), each [b].

    Keras passes them on unchanged. Without weights, the mask is used twice.
    """

    def change(inputs: Any, targets: Any, mask: tf.Tensor, *own: tf.Tensor) -> Any:
        return inputs, targets, (mask, own[0] if own else mask, tf.ones_like(mask) * tf.reduce_sum(mask))

    return batches.map(change)


class FitModel(keras.Model):  # type: ignore[misc]  # keras has no types
    """Wraps the model for `fit`: a weighted sum as the loss, and the metrics in `EpochSums`."""

    def __init__(self, model: keras.Model, objective: Objective, sums: EpochSums) -> None:
        super().__init__()
        self._model = model
        self._loss_of = objective.loss
        self._report = objective.report
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
        """Computes this replica's part of the global batch's mean loss, whose gradients Keras sums.

        The batch is added to the sums here, because the weights have changed in `compute_metrics`.
        """
        mask, weights, counts = sample_weight
        loss = tf.reduce_sum(self._loss_of(y, y_pred) * weights)
        count = counts[0]
        extra = sum_own_losses(self.losses, tf.distribute.get_strategy().num_replicas_in_sync)
        extra = None if extra is None else extra * count
        self._sums.update_state(y, self._report(y_pred, False), loss, mask=mask, weights=weights, extra=extra)
        return (loss if extra is None else loss + extra) / count

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return self.get_metrics_result()

    @property
    def own_variables(self) -> list[Any]:
        """The variables of its metrics, and of Keras's mean of the loss."""
        return [*self._sums.variables, *find_loss_mean(self).variables]

    @property
    def metrics(self) -> list[Any]:
        """The metrics that Keras resets at the start of an epoch and logs. Keras's own mean would count padding."""
        return [self._sums]


class EpochSums(keras.metrics.Metric):  # type: ignore[misc]  # keras has no types
    """The metric sums of the epoch so far; a read sums them over the replicas."""

    def __init__(self, metric_sums: MetricSums) -> None:
        super().__init__(name="sums")
        self._metric_sums = metric_sums
        self.sums = self.add_variable((metric_sums.size,), "zeros", dtype="float64", name="sums")
        self.good = self.add_variable((), "zeros", dtype="float64", name="good")

    def update_state(self, y: Any, y_pred: Any, loss: Any, mask: Any, weights: Any, extra: Any) -> None:
        """Adds a batch in a replica. `good` counts steps while the sum of the losses stays finite."""
        batch = self._metric_sums.compute(y, y_pred, loss, mask=mask, weights=weights, extra=extra)
        sums = self.sums + tf.cast(batch, tf.float64)
        self.sums.assign(sums)
        self.good.assign(self.good + tf.cast(tf.math.is_finite(sums[1] + sums[-1]), tf.float64))

    def result(self) -> dict[str, tf.Tensor]:
        """Returns the loss for Keras's logs. They are not shown, because the session reports the values."""
        sums = tf.convert_to_tensor(self.sums)
        return {"loss": tf.math.divide_no_nan(sums[1], sums[0])}


class FitCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Reports the epochs and batches of `fit` to the controller, and stops `fit` when the controller ends the run."""

    def __init__(self, engine: FitEngine, feed: Feed, controller: Controller, first_batch: int) -> None:
        super().__init__()
        self._engine = engine
        self._feed = feed
        self._controller = controller
        self._first_batch = first_batch
        self._batch_began = 0.0
        self._trace = contextlib.ExitStack()
        self.wants_more = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._controller.begin_epoch(epoch)
        self._engine.begin_sums()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._trace.enter_context(self._controller.trace_call())
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        controller = self._controller
        steps = self._first_batch + batch + 1
        with self._trace:
            means = self._engine.means(self._feed, steps, controller.step - controller.first)
        controller.end_call(steps - controller.first, means, time.perf_counter() - self._batch_began)
        if steps < controller.steps_per_epoch and not controller.next_steps():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.wants_more = self._controller.end_epoch()
        if not self.wants_more:
            self.model.stop_training = True
