"""The base class of engines, which run compiled steps, and the interface of their controller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import find_rate
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Feed, Objective, OutputKeeper
from scaleflow.training import state
from scaleflow.training.decisions import PlateauRate
from scaleflow.training.evaluation import Evaluation, MetricSums
from scaleflow.training.forward_backward import FreezePhases
from scaleflow.training.graph import CAPTURED, check_copies, check_random, draw_by_replica, list_captured
from scaleflow.training.xla import XlaChoice, keep_losses_apart, list_synchronized_layers


class Controller(Protocol):
    """Decides how many steps each call takes, and records each call and epoch. `Session` implements it."""

    @property
    def epochs(self) -> int:
        """Epochs of the run, unless something ends it earlier."""

    @property
    def epoch(self) -> int:
        """The epoch of the next step, counted from 0; not 0 at the start of a resumed run."""

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def step(self) -> int:
        """Steps of the whole run so far."""

    @property
    def first(self) -> int:
        """The next step's index in its epoch, from 0."""

    @property
    def steps_left(self) -> int:
        """Steps that the run still takes in this epoch."""

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch, counted from 0."""

    def next_steps(self) -> int:
        """Returns how many steps the next call takes; 0 if the epoch or the run is over."""

    def trace_call(self) -> AbstractContextManager[bool]:
        """Wraps a call, whose result must be available before the exit. Yields whether it must take a single step."""

    def end_call(self, steps: int, means: Mapping[str, float], seconds: float, waited: float = 0.0) -> None:
        """Records a call.

        Args:
            means: the loss and metrics, averaged over the epoch so far.
            waited: seconds spent before the call to open the epoch's input.
        """

    def end_epoch(self) -> bool:
        """Ends an epoch; returns whether another one follows."""


class Engine(ABC):
    """Trains and evaluates one model under one strategy.

    Args:
        strategy: its replicas share each global batch.
        model: built; returns float32.
        optimizer: not built yet; None if the training step has its own.
        variables: the variables to update, or the shards of partitioned ones; None for the model's variables.

    Attributes:
        remat: which parts the backward pass computes again, such as `12 segments`; `false` if none.
        flops_per_example: operations of a training step per example; None before `trace`, or if they cannot be counted.
        freezing: the phases of `model.freeze`; None if the same variables train in all epochs.
        plateau: lowers the rate (`optimizer.schedule=plateau`); None for other schedules.
        gradient_norm: the global norm of the gradients of the last step, summed over the replicas, before clipping and
            without the loss scale; NaN if it is not known.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None,
        objective: Objective,
        evaluation: Evaluation,
        variables: Sequence[Any] | None = None,
    ) -> None:
        self.strategy = strategy
        self.model = model
        self.optimizer: Any = optimizer
        self.objective = objective
        self.xla = XlaChoice("none", "only the default loop is compiled as a whole")
        self.remat = "false"
        self.flops_per_example: float | None = None
        self.freezing: FreezePhases | None = None
        self.plateau: PlateauRate | None = None
        self.gradient_norm = float("nan")
        self._evaluation = evaluation
        self._evaluation.check_graph = self._check_evaluation
        self._captured: list[Any] = []
        draw_by_replica()
        self._metric_sums = MetricSums(objective)
        trained = model.trainable_variables if variables is None else variables
        self._slots = None if optimizer is None else state.Slots(optimizer, trained, model)
        self._averages = self._slots.list_averages() if self._slots else []
        self._reset_averages()  # so that there is one before the first update
        self._synchronized = list_synchronized_layers(model, strategy)
        if self._synchronized:
            keep_losses_apart(model)

    @property
    def loss_scale(self) -> float | None:
        """The dynamic loss scale; None if the optimizer has none."""
        scale = getattr(self.optimizer, "dynamic_scale", None)
        return None if scale is None else float(np.asarray(scale.numpy()))

    @property
    def learning_rate(self) -> float | None:
        """The rate of the last update; None if the training step has its own optimizers."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if inner is None:
            return None
        rate = find_rate(inner)
        if callable(rate):
            last_update = max(0, int(inner.iterations.numpy()) - 1)
            return float(rate(last_update))
        return float(np.asarray(rate.numpy()))

    @abstractmethod
    def run(self, feed: Feed, controller: Controller) -> None:
        """Trains until the controller ends the run."""

    def begin_freeze_phase(self, epoch: int, train: Feed, *others: Feed) -> bool:
        """Makes the variables of an epoch trainable, and traces these feeds again if the variables have changed.

        Returns:
            Whether they have changed (`model.freeze` by epochs).
        """
        if self.freezing is None or not self.freezing.begin(epoch, int(self.optimizer.iterations.numpy())):
            return False
        self._train_only([variable for variable in self.freezing.variables if variable.trainable])
        self.trace(train, *others)
        return True

    def end_freeze_phase(self) -> None:
        """Makes the variables of all epochs trainable."""
        if self.freezing is not None:
            self.freezing.end()

    def _train_only(self, variables: Sequence[Any]) -> None:
        """Trains only these variables from now on. Earlier traces are dropped."""
        raise NotImplementedError

    def trace(self, train: Feed, *others: Feed) -> None:
        """Compiles for these feeds without taking a step, so that errors of the model show early."""
        self._trace_training(train)
        with self._compile_ahead(train):
            for feed in others:
                self._evaluation.trace(feed)

    def _compile_ahead(self, feed: Feed) -> AbstractContextManager[Any]:
        """Compiles the traced training during the block, if that is possible before the first step."""
        return nullcontext()

    @abstractmethod
    def _trace_training(self, feed: Feed) -> None: ...

    def evaluate(self, feed: Feed) -> Mapping[str, float]:
        """Computes the loss and metrics over a whole split, every example once, with the averaged weights if any."""
        with self._averaged_weights():
            return self._evaluation(feed)

    def predict(self, inputs: Any) -> Any:
        """Returns the outputs for inputs [n, ...], as `Evaluation.predict` does, with the averaged weights if any."""
        with self._averaged_weights():
            return self._evaluation.predict(inputs)

    def keep_outputs(self, feed: Feed, keeper: OutputKeeper) -> None:
        """Makes each evaluation of a feed pass the model's outputs to `keeper`. Call it before `trace`."""
        self._evaluation.keep_outputs(feed, keeper)

    def adjust_outputs(self, adjust: Callable[[Any], Any]) -> None:
        """Makes `evaluate` and `predict` use `adjust` of the model's outputs, traced."""
        self._evaluation.adjust_outputs(adjust)

    def read_confusion(self, feed: Feed) -> np.ndarray[Any, Any] | None:
        """Returns the confusion matrix of a split's last evaluation, as `Evaluation.read_confusion` does."""
        return self._evaluation.read_confusion(feed)

    def gather_model(self) -> keras.Model:
        """Returns the model with its current weights, unpartitioned and in this process."""
        return self.model

    def finish_model(self) -> keras.Model:
        """Returns the model to export, as `gather_model`, with the averaged weights if there are any (`optimizer.ema`).

        Training cannot continue after it.
        """
        self.end_freeze_phase()
        for averaged in self._averages:
            averaged.variable.assign(averaged.read_value())
        return self.gather_model()

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Returns the weights that `evaluate` and `finish_model` use, in the order of Keras's `get_weights`."""
        with self._averaged_weights():
            return list(self.gather_model().get_weights())

    def set_weights(self, weights: Sequence[np.ndarray[Any, Any]]) -> None:
        """Sets the weights, in the order of Keras's `set_weights`, and their averages to the same values."""
        model = self.gather_model()
        model.set_weights(weights)
        if model is not self.model:
            values = state.read_variables(state.name_model_variables(model))
            state.write_variables(state.name_model_variables(self.model), values)
        self._reset_averages()

    def _reset_averages(self) -> None:
        for averaged in self._averages:
            averaged.average.assign(averaged.variable.read_value())

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Gives the model the averaged weights within the context."""
        weights = [averaged.variable.read_value() for averaged in self._averages]
        for averaged in self._averages:
            averaged.variable.assign(averaged.read_value())
        try:
            yield
        finally:
            for averaged, value in zip(self._averages, weights, strict=True):
                averaged.variable.assign(value)

    def count_updates(self, done: int) -> int:
        """Returns the number of optimizer updates after `done` steps."""
        return done

    @abstractmethod
    def read_state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Copies all variables, and the sums of the epoch so far. All workers must call it."""

    @abstractmethod
    def restore(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores what `read_state` returned, under any strategy."""

    def restore_model(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores the variables of the model and the averaged weights, for `evaluate` and `finish_model`."""
        slots = self._slots.by_name() if self._averages and self._slots else {}
        averages = {name: shards for name, shards in slots.items() if name.startswith(state.AVERAGES)}
        state.write_variables({**state.name_model_variables(self.model), **averages}, values)

    @abstractmethod
    def set_rate_factor(self, factor: float, restored_factor: float) -> None:
        """Sets the learning rate to `factor` times the configured one.

        Args:
            factor: multiplies the configured rate.
            restored_factor: the factor that the restored state already contains. It matters if the rate is part of
                that state.
        """

    def _note_state(self, graph: Any, own: Sequence[Any] = ()) -> None:
        """Checks the state that the traced training has outside of the model, and notes the user's variables.

        `own` lists variables of the engine that no checkpoint needs.
        """
        check_random(graph)
        self._captured = []
        self._captured = list_captured(graph, {**self.variables_by_name(), "own": own})
        if self.strategy.num_replicas_in_sync > 1:
            check_copies(self._captured)

    def _check_evaluation(self, graph: Any) -> None:
        """Raises ConfigError if the model uses a variable that Keras does not track."""
        known = state.name_model_variables(self._evaluated_model)
        unknown = list_captured(graph, known)
        if unknown:
            raise ConfigError(
                f"model: it uses the variable {unknown[0].name}, which Keras does not track: the exported model would "
                "not have it; make it in a layer: with self.add_weight(...), or as a keras.random.SeedGenerator"
            )

    @property
    def _evaluated_model(self) -> keras.Model:
        return self.model

    def _write_state(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Assigns values to all variables."""
        state.write_variables(self.variables_by_name(), values)
        if self.freezing is not None:
            self.freezing.restore(values)

    def variables_by_name(self) -> dict[str, list[Any]]:
        """Returns the variables that a checkpoint needs."""
        named = state.name_model_variables(self.model)
        if self._slots:
            named.update(self._slots.by_name())
        for index, variable in enumerate(self._captured):
            named[f"{CAPTURED}{index}"] = [variable]
        return named
