"""The loop under `ParameterServerStrategy`: the coordinator schedules steps on workers that run asynchronously."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from scaleflow.interfaces import CoordinatedFeed, Feed, ForwardBackward, Objective
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.loop import NEVER, Loop
from scaleflow.training.state import list_variables

#: A call's steps are divided into this many portions per worker. So a faster worker can take more of them.
PORTIONS_PER_WORKER = 4


class ParameterServerLoop(Loop):
    """Schedules steps over the workers of a `ParameterServerStrategy`. Construct it in the strategy's scope.

    A step is one worker's batch and one update. With several workers it is not determined which one takes a step, nor
    how old its copy of the variables is. If a worker dies, another one repeats its whole portion of steps, so some
    updates may be applied twice.

    Args:
        strategy, model, optimizer, objective, clip_norm: as for `Loop`.
        passes: the forward and backward pass, for the variables that `list_shards` lists.
        whole: the same model in this process, unpartitioned; it is exported with the servers' weights.
        evaluation: evaluates splits with the variables of `whole`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        objective: Objective,
        clip_norm: float | None,
        passes: ForwardBackward,
        workers: int,
        whole: keras.Model,
        evaluation: Evaluation,
    ) -> None:
        super().__init__(
            strategy, model, optimizer, objective=objective, clip_norm=clip_norm, passes=passes, evaluation=evaluation
        )
        count_every_update(optimizer)
        self._applied = tf.Variable(0, dtype=tf.int64, trainable=False, name="applied")
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._portions = PORTIONS_PER_WORKER * workers
        self._whole = whole

    def _trace_training(self, feed: Feed) -> None:
        # Workers compile their own programs, so this schedules a call of 0 steps.
        self._schedule(feed, feed.open(0, 0), 0, first=0, steps=0)
        self._coordinator.join()

    def evaluate(self, feed: Feed) -> Mapping[str, float]:
        self.finish_model()
        return self._evaluation(feed)

    def gather_model(self) -> keras.Model:
        """Copies the servers' current weights to the model in this process, and returns it."""
        return self._gather({})

    def finish_model(self) -> keras.Model:
        """Returns the same as `gather_model`, with the averaged weights if there are any. Training can continue."""
        averages = {id(averaged.variable): averaged.average for averaged in self._averages}
        return self._gather(averages)

    def _gather(self, replacements: Mapping[int, Any]) -> keras.Model:
        """Copies weights from the servers. `replacements` has other variables to copy, by id(variable)."""
        for local, remote in zip(self._whole.variables, self.model.variables, strict=True):
            shards = []
            for shard in list_variables(remote):
                shards.append(replacements.get(id(shard), shard).read_value())
            local.assign(tf.concat(shards, axis=0) if len(shards) > 1 else shards[0])
        return self._whole

    @property
    def _evaluated_model(self) -> keras.Model:
        return self._whole

    def count_updates(self, done: int) -> int:
        """Returns the applied updates, which may be more than the steps."""
        return int(self._applied.numpy())

    def variables_by_name(self) -> dict[str, list[Any]]:
        return {**super().variables_by_name(), "training/applied": [self._applied]}

    def _take(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int) -> tuple[np.ndarray[Any, Any], int]:
        end = first + steps
        length = max(1, math.ceil(steps / self._portions))
        scheduled = []
        for begin in range(first, end, length):
            scheduled.append(self._schedule(feed, opened, epoch, first=begin, steps=min(length, end - begin)))
        self._coordinator.join()
        total: Any = 0
        first_bad = NEVER
        for remote in scheduled:
            sums, bad, norm = remote.fetch()
            total = total + sums
            first_bad = min(first_bad, int(bad))
            self.gradient_norm = float(norm)
        return total, first_bad

    def _schedule(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int) -> Any:
        """Schedules a portion of steps on a worker; returns its future result."""
        position = [tf.constant(value, tf.int64) for value in (epoch, first, steps)]
        argument = cast(CoordinatedFeed, feed).worker_argument(opened, first, steps)
        return self._coordinator.schedule(self._function(feed), args=(argument, *position))

    def _step(self, *arguments: Any) -> Any:
        following = super()._step(*arguments)
        self._applied.assign_add(1)
        return following


def list_shards(variables: Sequence[Any]) -> list[tf.Variable]:
    """Lists the TensorFlow variables of Keras variables: the shards of partitioned ones, which tapes need."""
    shards = []
    for variable in variables:
        shards += list_variables(variable)
    return shards


def count_every_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the optimizer add to its step counter on the parameter server.

    Keras reads the counter, adds one and writes it back. If two workers do so at the same time, the learning rate
    schedule and Adam's bias correction miss an update.
    """
    counters = [optimizer.iterations]
    if hasattr(optimizer, "inner_optimizer"):
        counters.append(optimizer.inner_optimizer.iterations)
    for counter in counters:
        counter.assign_add = counter.value.assign_add
