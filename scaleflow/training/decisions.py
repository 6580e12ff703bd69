"""The decisions of a session: when it saves its state, ends early, or goes back after values that are not finite.

All workers must decide alike, from values that differ between them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError, NotFinite, RunError
from scaleflow.interfaces import (
    NOT_FINITE,
    Best,
    EarlyStopping,
    Objective,
    Optimizer,
    Plateau,
    Snapshot,
    Training,
    find_direction,
)
from scaleflow.training.evaluation import MetricSums, gather_bytes

if TYPE_CHECKING:
    from scaleflow.checkpoint import CheckpointManager


class WorkerSync:
    """Combines the workers' durations and stop signals. All workers must make the same calls, in the same order.

    The next call's number of steps depends on the last call's duration, and a stop ends the loop. Workers that decide
    alone would wait for each other in different collectives forever.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        workers: int,
        should_stop: Callable[[], bool],
        read_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self.read_seconds = read_seconds  # since the command began
        self._strategy = strategy
        self._workers = workers
        self._should_stop = should_stop

    def __call__(self, seconds: float) -> tuple[float, bool]:
        """Returns (the mean duration in seconds, whether any worker received a stop signal)."""
        stop = self._should_stop()
        if self._workers == 1:
            return seconds, stop
        mean, stops = self._sum(tf.constant([seconds, float(stop)])).numpy() / self._strategy.num_replicas_in_sync
        return float(mean), stops > 0

    def any(self, value: bool) -> bool:
        """Returns whether the argument is true on any worker."""
        return not self.all(not value)

    def is_same(self, text: str) -> bool:
        """Returns whether all workers gave the same text; all get the same answer."""
        return self.all(self.from_chief(lambda: text) == text)

    def all(self, value: bool) -> bool:
        """Returns whether the argument is true on all workers."""
        if self._workers == 1:
            return value
        return int(self._sum(tf.constant(int(not value), tf.int64))) == 0

    def from_chief(self, make: Callable[[], str]) -> str:
        """Returns the text that the chief makes, on every worker."""
        if self._workers == 1:
            return make()
        data = make().encode() if self._strategy.extended.should_save_summary else b""
        local_replicas = self._strategy.num_replicas_in_sync // self._workers
        length = int(self._sum(tf.constant(len(data), tf.int64))) // local_replicas
        if not length:  # three workers that sum an empty tensor crash
            return ""
        numbers = np.zeros(length, np.float32)  # one byte per number, so that sums over the replicas are exact
        numbers[: len(data)] = np.frombuffer(data, np.uint8)
        summed = self._sum(tf.constant(numbers)).numpy() / local_replicas
        return bytes(summed.astype(np.uint8)).decode()

    def gather(self, content: bytes, worker: int) -> list[bytes]:
        """Returns the content of each worker on worker 0, the chief; an empty list on the others.

        `worker` is the number of this worker.
        """
        if self._workers == 1:
            return [content]
        local_replicas = self._strategy.num_replicas_in_sync // self._workers
        return gather_bytes(self._sum, content, worker, self._workers, local_replicas, is_kept=worker == 0)

    def leave(self) -> None:
        """Makes it safe for the process to end; the last call of all workers.

        A worker that ends right after a collective may cut off a slower worker's result of it. After this call, every
        worker has the result of the collective before. Its own result may be lost, so errors are ignored.
        """
        with contextlib.suppress(tf.errors.OpError):
            self(0.0)

    @tf.function(autograph=False, reduce_retracing=True)
    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        of_replicas = self._strategy.run(tf.identity, args=(values,))
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, of_replicas, axis=None)


def check_monitor(
    key: str, options: Plateau | Best | None, objective: Objective, validates: bool, has_callbacks: bool = False
) -> None:
    """Checks that the monitored value is one that the run reports, or that a callback may report.

    Args:
        key: the config key of `options`, for the message.
        options: names the monitored value; None for no check.

    Raises ConfigError if the run does not report the value.
    """
    if options is None:
        return
    names = [f"train/{name}" for name in MetricSums(objective).names]
    if validates:
        names += [f"val/{name}" for name in MetricSums(objective, evaluates=True).names]
    if options.monitor not in names and not has_callbacks:
        raise ConfigError(f"{key}.monitor={options.monitor}: there is no such value; the values are {', '.join(names)}")
    if find_monitor_mode(options, objective.modes) is None:
        raise ConfigError(
            f"{key}.mode=auto with {key}.monitor={options.monitor}: scaleflow does not know whether larger values are "
            f"better; set {key}.mode=max or min"
        )


def find_monitor_mode(options: Plateau | Best, modes: Mapping[str, str]) -> str | None:
    """Returns whether larger (`max`) or smaller (`min`) values are better; None if that is not known."""
    return find_direction(options.monitor, modes) if options.mode == "auto" else options.mode


class BestValue:
    """The best value so far of a monitored metric.

    Args:
        options: the metric; None for no monitoring.
    """

    def __init__(self, options: Plateau | Best | None, modes: Mapping[str, str]) -> None:
        self._options = options
        self.mode = options and find_monitor_mode(options, modes)
        self._value: float | None = None
        self._step: int | None = None

    def update(self, values: Mapping[str, float], step: int) -> bool:
        """Records an epoch's values; returns whether the monitored one is the best so far. NaN never is."""
        if self._options is None:
            return False
        lower_is_better = self.mode == "min"
        value = values.get(self._options.monitor)
        if value is None:
            raise RunError(
                f"{self._options.monitor} is monitored, but no callback has reported it in this epoch; the values are "
                f"{', '.join(name for name in values if not name.startswith('perf/'))}"
            )
        if math.isnan(value):
            return False
        margin = getattr(self._options, "min_delta", 0.0)  # early stopping has one
        if self._value is not None:
            gain = self._value - value if lower_is_better else value - self._value
            if not gain > margin:
                return False
        self._value = value
        self._step = step
        return True

    @property
    def step(self) -> int | None:
        """The step of the best value; None before the first."""
        return self._step

    def state(self) -> dict[str, Any]:
        monitor = self._options and self._options.monitor
        return {"value": self._value, "step": self._step, "monitor": monitor, "mode": self.mode}

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Continues from a state, unless that is of another metric or mode; then it returns a note."""
        now = self.state()
        before = {name: state[name] for name in ("monitor", "mode")}
        if before.items() <= now.items():
            self._value = state["value"]
            self._step = state["step"]
            return None
        self._value = self._step = None
        if self._options is None or state["value"] is None:
            return None
        return (
            f"checkpoint.best: was chosen by {before['monitor']} ({before['mode']}), and now by {now['monitor']} "
            f"({now['mode']}): the best checkpoint is one of those from here on"
        )


class Patience:
    """Early stopping: ends the run if the monitored value has not improved for a number of validations.

    `unit` is the word for what passes between two of them.
    """

    def __init__(self, options: EarlyStopping | None, modes: Mapping[str, str], unit: str = "epoch") -> None:
        self._unit = unit
        self._options = options
        self._record = BestValue(options, modes)
        self._waited = 0
        self.reason = ""

    def is_over(self, values: Mapping[str, float], epoch: int) -> bool:
        """Records the values of an epoch, counted from 1; returns whether to end the run."""
        options = self._options
        if options is None or epoch <= options.start_epoch:
            return False
        is_better = self._record.update(values, 0)
        self._waited = 0 if is_better else self._waited + 1
        value = values[options.monitor]
        threshold = options.threshold
        if threshold is not None:
            has_reached = value <= threshold if self._record.mode == "min" else value >= threshold
            if has_reached:
                self.reason = f"{options.monitor}={value:g} has reached {threshold:g}"
                return True
        times = f"{self._waited} {self._unit}{'s' if self._waited > 1 else ''}"
        self.reason = f"{options.monitor} has not improved for {times}"
        if math.isnan(value):
            self.reason = f"{options.monitor} is not a number, and has not improved for {times}"
            split = options.monitor.partition("/")[0]
            count = values.get(f"{split}/{NOT_FINITE}")
            if count:
                self.reason += f": the model's outputs for {count:,.0f} examples are NaN or infinite"
        return self._waited >= options.patience

    def start_again(self) -> None:
        """Forgets for how long the value has not improved; the best value stays."""
        self._waited = 0

    def state(self) -> dict[str, Any]:
        return {"waited": self._waited, "record": self._record.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._waited = state["waited"]
        self._record.restore(state["record"])


class PlateauRate:
    """`optimizer.schedule=plateau`: lowers the rate if a value has not improved for a number of validations.

    Args:
        options: the options of the optimizer; `watched` is not None.

    Attributes:
        watched: names the value.
        factor: the rate is this factor times the configured one.
    """

    def __init__(self, options: Optimizer, modes: Mapping[str, str]) -> None:
        assert options.watched is not None
        self.watched = options.watched
        self.factor = 1.0
        self._step_factor = options.step_factor
        self._min_factor = options.final_rate
        self._patience = Patience(EarlyStopping(**vars(self.watched)), modes, "validation")

    def lower(self, values: Mapping[str, float], epoch: int) -> str:
        """Records the values of a validation; returns why the rate falls, empty if it does not."""
        if not self._patience.is_over(values, epoch):
            return ""
        self._patience.start_again()
        before = self.factor
        self.factor = max(before * self._step_factor, self._min_factor)
        return self._patience.reason if self.factor < before else ""

    def state(self) -> dict[str, Any]:
        return {"factor": self.factor, "patience": self._patience.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.factor = state["factor"]
        self._patience.restore(state["patience"])


class TimeLimit:
    """`training.max_seconds`: when training must end, so that the run is finished in time.

    What follows is estimated: its start-up took as long as the export will, and the test split takes as long for each
    example as the slowest validation did. At most half of the limit is kept for it.
    """

    def __init__(self, limit: float | None, sync: WorkerSync, share: float) -> None:
        self.limit = limit
        self._sync = sync
        self._share = share  # the examples of the validation and test splits, for each one of the validation split
        self._startup: float | None = None
        self._validation = 0.0

    @contextlib.contextmanager
    def time_validation(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._validation = max(self._validation, time.monotonic() - begin)

    def is_over(self) -> bool:
        """Returns whether training must end now. All workers must call it, after each call of the loop."""
        if self.limit is None:
            return False
        now = self._sync.read_seconds()
        self._startup = now if self._startup is None else self._startup
        rest = min(self._startup + self._validation * self._share, self.limit / 2)
        return self._sync.any(now >= self.limit - rest)


class Checkpointing:
    """Saves the snapshots of one run when they are due.

    Args:
        checkpoints: stores the snapshots; None for no checkpoints.
        best: the value that selects the best checkpoint; None for no best checkpoint.
        ends_as_best: whether the model of the best checkpoint is tested and exported at the end.
        modes: `Objective.modes`, for `best`; None: nothing is known besides the names.

    Attributes:
        best: the best value so far.
        saved_position: (epoch, step) of the last checkpoint, or of the one that the session continues from.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager | None = None,
        best: Best | None = None,
        ends_as_best: bool = False,
        modes: Mapping[str, str] | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self.best = BestValue(best, modes or {})
        self.ends_as_best = ends_as_best and checkpoints is not None
        self.saved_position: tuple[int, int] | None = None
        self._unsaved_seconds = 0.0

    def steps_left(self, step: int) -> int | None:
        """Returns the number of steps until the next checkpoint is due; None if that is not known beforehand."""
        return None if self.checkpoints is None else self.checkpoints.steps_left(step)

    def count_call(self, step: int, seconds: float) -> bool:
        """Records the duration of a call that ended at `step`; returns whether a checkpoint is due."""
        self._unsaved_seconds += seconds
        return self.checkpoints is not None and self.checkpoints.is_due(step, self._unsaved_seconds)

    def is_due_after(self, epoch: int) -> bool:
        """Returns whether a checkpoint is due at the end of an epoch, counted from 1."""
        return self.checkpoints is not None and self.checkpoints.is_due_after(epoch)

    def save(
        self,
        position: tuple[int, int],
        make_snapshot: Callable[[], Snapshot],
        is_best: bool = False,
        is_due: bool = True,
    ) -> None:
        """Saves a checkpoint of a position (epoch, step), unless there is one already.

        A position that is the best is saved again: a checkpoint from before its evaluation does not contain that. If it
        `is_due` for no other reason, it may be kept in memory until the next one.
        """
        if self.checkpoints is None or (self.saved_position == position and not is_best):
            return
        snapshot = make_snapshot()
        if not is_due:
            self.checkpoints.hold(snapshot)
            return
        self.saved_position = position
        self._unsaved_seconds = 0.0
        self.checkpoints.save(snapshot, is_best)

    def wait(self) -> None:
        """Waits until everything is written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def finish(self) -> None:
        """Waits until the checkpoints are where they are kept; for the end of the run. It raises nothing."""
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def load_best(self, sync: WorkerSync) -> Snapshot | None:
        """Loads the best checkpoint, if all workers can read it. All workers must call it."""
        assert self.checkpoints is not None
        self.checkpoints.publish()
        sync(0.0)  # no worker reads before the writing worker is done
        has_best = self.best.step is not None  # the stored one may be of a metric that the run no longer monitors
        best = self.checkpoints.load_best() if has_best else None
        return None if sync.any(best is None) else best


ADVICE = "try a lower optimizer.learning_rate, or training.clip_norm=1.0"


def check_finite(model: keras.Model, tensors: Mapping[str, np.ndarray[Any, Any]], step: int) -> None:
    """Checks that the trainable weights and the optimizer's state are finite, before they are saved or exported.

    Args:
        tensors: what `Engine.read_state` returned.

    Raises NotFinite if they are not.
    """
    trained = {f"model/{index}" for index, v in enumerate(model.variables) if v.trainable}
    for name, value in tensors.items():
        is_checked = name in trained or name.startswith("optimizer/")
        if is_checked and value.dtype.kind not in "iub" and not np.isfinite(value).all():
            raise NotFinite(step, "the weights are")


class Rollbacks:
    """The rollbacks of one run. Each lowers the learning rate.

    Attributes:
        count: rollbacks so far.
        rate_factor: the learning rate is this factor times the configured one.
    """

    def __init__(self, options: Training) -> None:
        self.count = 0
        self.rate_factor = 1.0
        self.limit = options.nan_rollbacks
        self._options = options

    @property
    def is_enabled(self) -> bool:
        return self._options.on_nan == "rollback"

    def next_values(self) -> tuple[int, float]:
        """Returns `count` and `rate_factor` after one more rollback."""
        return self.count + 1, self.rate_factor * self._options.nan_rate_factor

    def load_snapshot(self, error: NotFinite, checkpoints: CheckpointManager | None, sync: WorkerSync) -> Snapshot:
        """Loads the newest checkpoint from before an error, and deletes later ones. All workers must call it.

        Raises:
            NotFinite: `error`, if `training.on_nan` is `stop`, there are no checkpoints, or no update caused it.
            RunError: after `training.nan_rollbacks` rollbacks, or if no checkpoint is old enough.
        """
        if checkpoints is not None:
            checkpoints.wait()
        if not self.is_enabled or checkpoints is None or not error.last_cause:
            raise error
        if self.count >= self.limit:
            raise RunError(f"{error.fact}, after training.nan_rollbacks={self.limit} rollbacks; {ADVICE}") from error
        checkpoints.publish()
        sync(0.0)  # no worker reads before the writing worker is done
        snapshot = checkpoints.load_newest(before=error.last_cause)
        if not sync.is_same(str(snapshot and snapshot.step)):
            raise RunError(f"{error.fact}, and the workers do not see the same checkpoints to go back to") from error
        if snapshot is None:
            raise RunError(f"{error.fact}, and there is no checkpoint from before; {ADVICE}") from error
        sync(0.0)  # no worker deletes while others read
        checkpoints.drop_from(snapshot.step + 1)
        return snapshot
