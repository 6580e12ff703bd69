"""The loop of a coordinator: the same steps, taken by workers that do not wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from scaleflow.interfaces import CoordinatedFeed, Feed, LossStep, Objective
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.forward_backward import TapeForwardBackward, make_loss_step, to_tf_variable
from scaleflow.training.loop import Loop

#: A call's steps are scheduled in so many portions to each worker, so that a faster one takes more of them.
CALLS_A_WORKER = 4


class ParameterServerLoop(Loop):
    """Schedules steps over the workers of a `ParameterServerStrategy`.

    A step is one worker's batch and one update; which worker takes it, and on how old a copy of the
    variables, is not determined but with a single worker. A portion of steps whose worker died is
    taken again by another one, wholly, so some of its updates may be applied twice.

    Make it in the strategy's scope.

    Args:
        strategy, model, optimizer, objective, clip_norm: as for `Loop`.
        loss: the training step's way from a batch to its loss.
        workers: how many there are.
        gather_model: the same model in this process, unpartitioned: evaluated and exported with the servers' weights.
        here: the strategy under which `whole` was made.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        objective: Objective,
        clip_norm: float | None,
        loss: LossStep,
        workers: int,
        whole: keras.Model,
        here: tf.distribute.Strategy,
    ) -> None:
        passes = TapeForwardBackward(model, loss, list_shards(model.trainable_variables))
        evaluation = Evaluation(here, TapeForwardBackward(whole, make_loss_step(objective)).forward, objective)
        super().__init__(strategy, model, optimizer, objective, clip_norm, passes=passes, evaluation=evaluation)
        count_every_update(optimizer)
        self._applied = tf.Variable(0, dtype=tf.int64, trainable=False, name="applied")
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._portions = CALLS_A_WORKER * workers
        self._whole = whole

    def trace(self, train: Feed, *others: Feed | None) -> None:
        """Compiles for these feeds, and has a worker take no step, so that a model's faults show early."""
        self._schedule(cast(CoordinatedFeed, train), train.open(0, 0), 0, 0, 0)
        self._coordinator.join()
        for feed in filter(None, others):
            self._evaluation.trace(feed)

    def evaluate(self, feed: Feed) -> Mapping[str, float]:
        self.gather_model()
        return super().evaluate(feed)

    def gather_model(self) -> keras.Model:
        """The model in this process, with the weights that the servers hold now."""
        for mine, spread in zip(self._whole.variables, self.model.variables, strict=True):
            shards = [shard.read_value() for shard in list_shards([spread])]
            mine.assign(tf.concat(shards, axis=0) if len(shards) > 1 else shards[0])
        return self._whole

    def count_updates(self, done: int) -> int:
        """The updates that were applied, which may be more than the steps that were taken."""
        return int(self._applied.numpy())

    def _variables_by_name(self) -> dict[str, list[Any]]:
        return {**super()._variables_by_name(), "training/applied": [self._applied]}

    def _take(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int) -> tuple[np.ndarray[Any, Any], int]:
        length = max(1, -(-steps // self._portions))
        scheduled = [
            self._schedule(cast(CoordinatedFeed, feed), opened, epoch, begin, min(length, first + steps - begin))
            for begin in range(first, first + steps, length)
        ]
        self._coordinator.join()
        found = [remote.fetch() for remote in scheduled]
        return sum(sums for sums, _ in found), min(int(bad) for _, bad in found)

    def _schedule(self, feed: CoordinatedFeed, opened: Any, epoch: int, first: int, steps: int) -> Any:
        position = tuple(tf.constant(value, tf.int64) for value in (epoch, first, steps))
        return self._coordinator.schedule(
            self._function(feed), args=(feed.worker_argument(opened, first, steps), *position)
        )

    def _step(self, *arguments: Any) -> Any:
        following = super()._step(*arguments)
        self._applied.assign_add(1)
        return following


def list_shards(variables: Sequence[Any]) -> list[tf.Variable]:
    """TensorFlow's variables behind Keras's; of a partitioned one its shards, which tapes and optimizers take."""
    values = [to_tf_variable(v) for v in variables]
    return [shard for value in values for shard in getattr(value, "variables", [value])]


def count_every_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Has the optimizer's counter added to on its server.

    Keras reads it, adds one and writes it back: of two workers that do so at once, one's update is lost to
    the learning rate's schedule and to Adam's correction of its first steps.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for counter in {id(o): o.iterations for o in (optimizer, inner)}.values():
        counter.assign_add = counter.value.assign_add
