"""The loop under `ParameterServerStrategy`: the coordinator schedules steps on workers that run asynchronously."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from scaleflow.interfaces import CoordinatedFeed, Feed, ForwardBackward, Objective
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.loop import Loop
from scaleflow.training.state import list_variables

#: Portions per worker that a call's steps are divided into. With several, a faster worker takes more of them.
CALLS_A_WORKER = 4


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
        self._portions = CALLS_A_WORKER * workers
        self._whole = whole

    def _trace_training(self, feed: Feed) -> None:
        # Workers compile what they run, so this schedules a call of 0 steps.
        self._schedule(feed, feed.open(0, 0), 0, first=0, steps=0)
        self._coordinator.join()

    def evaluate(self, feed: Feed) -> Mapping[str, float]:
        self.finish_model()
        return self._evaluation(feed)

    def gather_model(self) -> keras.Model:
        """Copies the servers' current weights to the model in this process, and returns it."""
        return self._gather({})

    def finish_model(self) -> keras.Model:
        """As `gather_model`, with the averaged weights if there are any. Training can continue after it."""
        return self._gather({id(each.variable): each.average for each in self._averages})

    def _gather(self, replacements: Mapping[int, Any]) -> keras.Model:
        """Copies weights from the servers. `replacements` has other variables to copy, by id(variable)."""
        for local, remote in zip(self._whole.variables, self.model.variables, strict=True):
            shards = [replacements.get(id(shard), shard).read_value() for shard in list_variables(remote)]
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
        length = max(1, -(-steps // self._portions))
        scheduled = [
            self._schedule(feed, opened, epoch, first=begin, steps=min(length, first + steps - begin))
            for begin in range(first, first + steps, length)
        ]
        self._coordinator.join()
        results = [remote.fetch() for remote in scheduled]
        self.gradient_norm = float(results[-1][2])
        return sum(sums for sums, *_ in results), min(int(bad) for _, bad, _ in results)

    def _schedule(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int) -> Any:
        position = tuple(tf.constant(value, tf.int64) for value in (epoch, first, steps))
        argument = cast(CoordinatedFeed, feed).worker_argument(opened, first, steps)
        return self._coordinator.schedule(self._function(feed), args=(argument, *position))

    def _step(self, *arguments: Any) -> Any:
        following = super()._step(*arguments)
        self._applied.assign_add(1)
        return following


def list_shards(variables: Sequence[Any]) -> list[tf.Variable]:
    """Lists the TensorFlow variables of Keras variables: the shards of partitioned ones, which tapes need."""
    return [shard for variable in variables for shard in list_variables(variable)]


def count_every_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the optimizer add to its step counter on the parameter server.

    Keras reads the counter, adds one and writes it back. If two workers do so at the same time, the learning rate
    schedule and Adam's bias correction miss an update.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for counter in {id(o): o.iterations for o in (optimizer, inner)}.values():
        counter.assign_add = counter.value.assign_add
