"""The host side of training: decides how long each call is and when a run ends, and validates, saves and reports it."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scaleflow.errors import NotFinite
from scaleflow.interfaces import BySplit, Feed, Snapshot, Training, parse_duration
from scaleflow.interfaces.events import EpochEnded, Note, PhaseBegan, RolledBack
from scaleflow.training.callbacks import to_keras_logs
from scaleflow.training.calls import CallTracing, StepsPerLoop
from scaleflow.training.decisions import Checkpointing, Patience, Rollbacks, TimeLimit, WorkerSync, check_finite
from scaleflow.training.engine import Engine
from scaleflow.training.length import RunPosition
from scaleflow.training.metrics_log import MetricsLog
from scaleflow.training.user_hooks import UserHooks

if TYPE_CHECKING:
    from scaleflow.profiler.tracer import StepTracer


@dataclass(frozen=True)
class SessionResult:
    """The result of a session."""

    steps: int
    stopped: bool  # whether a stop request ended it early
    model_step: int  # the number of updates of the model's weights, which may be from the best checkpoint
    test: Mapping[str, float]
    #: The loss and the metrics of the last epoch's training: `train/loss` and so on
    train: Mapping[str, float] = field(default_factory=dict)


class SessionState(enum.Enum):
    """Whether a session takes further steps."""

    TRAINING = "training"  # until all steps are taken
    STOPPED = "stopped"  # a stop request has ended training; the run can be resumed
    OVER = "over"  # early stopping or a callback has ended training


class ValidationSchedule:
    """Decides when a run validates (`training.validate_every` and `validate_epochs`).

    Attributes:
        judged: the step of the last validation.
    """

    def __init__(self, options: Training) -> None:
        self.judged = 0
        self._every = options.validate_every
        self._epochs = options.validate_epochs

    @property
    def unit(self) -> str:
        """The word for the time between two validations."""
        return "epoch" if self._every is None else "validation"

    def steps_left(self, step: int) -> int | None:
        """Returns the number of steps until the next validation in this epoch; None if no further one is due."""
        if isinstance(self._every, int):
            return self._every - step % self._every
        return None

    def is_due(self, position: RunPosition, is_epoch_end: bool) -> bool:
        """Returns whether to validate at a position."""
        if self._every is None or position.is_at_end:
            return is_epoch_end
        if isinstance(self._every, int):
            return position.step % self._every == 0 and position.step != self.judged
        return is_epoch_end and (position.epoch + 1) % self._epochs == 0


def ignore_epoch(epoch: int, metrics: Mapping[str, float]) -> None:
    """Does nothing after an epoch."""


class Session:
    """The `Controller` of one run from the first step to the test: decides when it ends, and reports the results.

    The states (`SessionState`)::

        new run --> TRAINING --- all steps are taken -----------> last checkpoint, test
                     |  ^  |
                     |  |  +---- early stopping, a callback ----> OVER ----> last checkpoint, test
                     |  |  +---- a stop request ----------------> STOPPED -> last checkpoint, no test
                     v  |
                    NotFinite: `restore` goes back to an earlier checkpoint

    `end_call` notes a stop request. `_judge` stops early, and `end_epoch` asks the callbacks. A resumed run begins with
    `restore`: it is OVER if the snapshot was, unless the run is longer now.

    Args:
        sync: combines the durations and stop signals of the workers.
        checkpointing: saves the state; None for no checkpoints.
        has_new_data: whether the data may differ from the data of the checkpoint that the run continues from.
        after_epoch: is called after the validation of an epoch, with its number from 1 and its metrics.
    """

    def __init__(
        self,
        engine: Engine,
        options: Training,
        feeds: BySplit[Feed],
        log: MetricsLog,
        sync: WorkerSync,
        *,
        checkpointing: Checkpointing | None = None,
        callbacks: Sequence[Any] = (),
        tracer: StepTracer | None = None,
        has_new_data: bool = False,
        after_epoch: Callable[[int, Mapping[str, float]], object] = ignore_epoch,
    ) -> None:
        self._state = SessionState.TRAINING
        self._is_restored = False
        self._engine = engine
        self._feeds = feeds
        self._after_epoch = after_epoch
        self._options = options
        self._log = log
        self._sync = sync
        self._position = RunPosition(options, feeds.train, has_new_data)
        self._steps_per_call = StepsPerLoop(options.steps_per_loop)
        self._validations = ValidationSchedule(options)
        self._patience = Patience(options.early_stopping, engine.objective.modes, self._validations.unit)
        self._rollbacks = Rollbacks(options)
        self._time = make_time_limit(options, feeds, sync)
        self._checkpointing = checkpointing or Checkpointing()
        self._hooks = UserHooks(callbacks, engine, self._position.length, log.emit)
        self._tracing = CallTracing(tracer)
        self._hooks.report_doubts()

    def run(self, before_test: Callable[[], object] = bool) -> SessionResult:
        """Trains, validates after each epoch, and tests the last or the best model at the end.

        `before_test` is called when that model is restored.
        """
        self._call_callbacks("train_begin", is_repeated=self._is_restored)
        if self._rollbacks.is_enabled and not self.step:
            self._save()  # a rollback in the first epoch needs a checkpoint
        self._train()
        if self._checkpointing.checkpoints is not None:
            self._log.emit(PhaseBegan("saving the last checkpoint"))
        self._save()  # before the hook, which may change the weights: a resumed run calls it again
        self._checkpointing.wait()
        self._call_callbacks("train_end", to_keras_logs(self._log.values))
        if self._is_stopped:
            return SessionResult(self._updates, True, self._updates, test={})
        model_step = self._restore_best() if self._checkpointing.ends_as_best else self._updates
        before_test()
        if self._feeds.test is not None:
            self._log.emit(PhaseBegan("evaluating the test split"))
        test = self._log.evaluate("test", self._feeds.test, model_step)
        train = {name: value for name, value in self._log.values.items() if name.startswith("train/")}
        return SessionResult(self._updates, False, model_step, test=test, train=train)

    def finish_checkpoints(self) -> None:
        """Waits until the checkpoints are where they are kept. Call it before the end of the run is reported."""
        self._checkpointing.finish()

    @property
    def _is_stopped(self) -> bool:
        return self._state is SessionState.STOPPED

    @property
    def _is_over(self) -> bool:
        return self._state is SessionState.OVER

    def _train(self) -> None:
        """Trains until the run ends, after rollbacks again."""
        is_through = False
        try:
            while not self._is_over and not is_through:
                is_through = self._train_once()
        except BaseException:
            self._tracing.close(self._log.usual_ms)
            raise
        self._tracing.close(self._log.usual_ms, wait=lambda: self._sync(0.0))
        if not self._is_stopped:
            self._tracing.finish(self.step)

    def _train_once(self) -> bool:
        """Trains to the end. Returns False after a rollback, so that the caller trains again."""
        try:
            self._engine.run(self._feeds.train, self)
            self._read_finite_state()
        except NotFinite as error:
            self._roll_back(error)
            return False
        return True

    def _roll_back(self, error: NotFinite) -> None:
        """Restores the last good checkpoint and lowers the learning rate. All workers do this together."""
        self._tracing.close(self._log.usual_ms)
        snapshot = self._rollbacks.load_snapshot(error, self._checkpointing.checkpoints, self._sync)
        count, factor = self._rollbacks.next_values()
        self.restore(snapshot)
        restored_factor = self._rate_factor
        self._rollbacks.count = count
        self._rollbacks.rate_factor = factor
        self._engine.set_rate_factor(self._rate_factor, restored_factor)
        reason = (
            f"{error.fact}; going back to the checkpoint at step {snapshot.step}, with {factor:g} x the learning rate"
        )
        self._log.emit(RolledBack(count, reason))
        self._log.emit(Note(f"{reason} ({count} of at most {self._rollbacks.limit})"))

    def _read_finite_state(self) -> Mapping[str, Any]:
        """Reads the engine's state; raises NotFinite if weights are not finite. All workers must call it."""
        tensors = self._engine.read_state()
        check_finite(self._engine.model, tensors, self.step)
        return tensors

    def _call_callbacks(self, hook: str, *arguments: Any, is_repeated: bool = False) -> None:
        self._hooks.call(hook, *arguments, updates=lambda: self._updates, is_repeated=is_repeated)

    def log_metric(self, name: str, value: float) -> None:
        """Reports a value from user code at the current step."""
        self._hooks.report_values({name: value}, self._updates)

    def _restore_best(self) -> int:
        """Restores the model of the best checkpoint, if all workers can read it; returns the model's updates."""
        best = self._checkpointing.load_best(self._sync)
        if best is None:
            text = (
                "checkpoint.export=best: there is no usable best checkpoint, so the model of the last step, "
                f"{self.step}, is tested and exported"
            )
            self._log.emit(Note(text))
            return self._updates
        if best.step == self.step:
            return self._updates
        self._engine.restore_model(best.tensors)
        self._log.emit(Note(f"the best checkpoint, at step {best.step}, is tested and exported"))
        if self._feeds.test is None and self._feeds.validation is not None:
            self._engine.evaluate(self._feeds.validation)  # the confusion matrix of the run is of the last evaluation
        return int(best.host["updates"])

    # Snapshots --------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Returns everything that a resumed run needs. All workers must call it.

        Raises NotFinite if weights are not finite.
        """
        callbacks, arrays = self._hooks.read_state()
        plateau = self._engine.plateau
        host = {
            **self._position.read_state(),
            **callbacks,
            "updates": self._updates,
            "values": self._log.values,
            "patience": self._patience.state(),
            "best": self._checkpointing.best.state(),
            "is_over": self._is_over,
            "judged": self._validations.judged,
            "rollbacks": self._rollbacks.count,
            "rate_factor": self._rollbacks.rate_factor,
            "plateau": None if plateau is None else plateau.state(),
        }
        return Snapshot(self.step, {**self._read_finite_state(), **arrays}, host)

    def restore(self, snapshot: Snapshot) -> None:
        """Continues from a snapshot. Raises ConfigError if the snapshot is from other data, or from another model."""
        host = snapshot.host
        self._position.check(host)
        self._engine.restore(snapshot.tensors)
        self._patience.restore(host["patience"])
        self._validations.judged = host["judged"]
        note = self._checkpointing.best.restore(host["best"])
        if note:
            self._log.emit(Note(note))
        self._log.values = dict(host["values"])
        self._restore_rate(host)
        self._position.restore(snapshot)
        self._checkpointing.saved_position = (self.epoch, self.step)
        is_longer = host["total"] != self._position.length.total  # then the earlier reason for the end does not count
        if not self._is_stopped:
            is_over = host["is_over"] and not is_longer
            self._state = SessionState.OVER if is_over else SessionState.TRAINING
        self._hooks.restore({**host, "stops": host["stops"] and not is_longer}, snapshot.tensors)
        self._is_restored = True

    def _restore_rate(self, host: Mapping[str, Any]) -> None:
        """Restores the factors of the learning rate."""
        self._rollbacks.count = host["rollbacks"]
        self._rollbacks.rate_factor = host["rate_factor"]
        if self._engine.plateau is not None:
            self._engine.plateau.restore(host["plateau"])
        factor = self._rate_factor
        if factor != 1.0:
            self._engine.set_rate_factor(factor, factor)

    def _save(self, is_best: bool = False, is_due: bool = True) -> None:
        self._checkpointing.save((self.epoch, self.step), self.snapshot, is_best, is_due=is_due)

    # The `Controller` interface, documented there ----------------------------------------------------

    @property
    def epochs(self) -> int:
        return self._position.length.epochs

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def steps_per_epoch(self) -> int:
        return self._position.length.steps_per_epoch

    @property
    def step(self) -> int:
        return self._position.step

    @property
    def first(self) -> int:
        return self._position.first

    @property
    def steps_left(self) -> int:
        return self._position.steps_left

    @property
    def _updates(self) -> int:
        """The number of optimizer updates so far, the index of metrics."""
        return self._engine.count_updates(self.step)

    @property
    def _rate_factor(self) -> float:
        """The learning rate is this factor times the rate that the config has for the step."""
        plateau = self._engine.plateau
        plateau_factor = 1.0 if plateau is None else plateau.factor
        return self._rollbacks.rate_factor * plateau_factor

    def begin_epoch(self, epoch: int) -> None:
        self._position.epoch = epoch
        phases = self._engine.freezing
        has_changed = self._engine.begin_freeze_phase(epoch, self._feeds.train)
        if has_changed and phases and 0 < epoch in phases.parameters and not self.first:
            self._log.emit(Note(f"model.freeze: {phases.parameters[epoch]:,} parameters train from epoch {epoch} on"))
        self._log.compiles |= has_changed
        self._log.begin_epoch(is_resumed=self.first > 0)
        self._call_callbacks("epoch_begin", epoch, is_repeated=self.first > 0)

    def next_steps(self) -> int:
        remaining = self.steps_left
        if self._is_stopped or remaining <= 0 or self._ends_within():
            return 0
        limits = [
            self._checkpointing.steps_left(self.step),
            self._tracing.steps_left(self.step),
            self._validations.steps_left(self.step),
        ]
        per_call = self._steps_per_call.choose(is_resumed=self.step > 0)
        self._call_callbacks("train_batch_begin", self.first)
        known_limits = [steps for steps in limits if steps is not None]
        return min(per_call, remaining, *known_limits)

    def _ends_within(self) -> bool:
        """Validates within an epoch, if that is due; returns whether it ends the run."""
        if self._validations.is_due(self._position, is_epoch_end=False):
            values = {**self._log.values, **self._log.evaluate("val", self._feeds.validation, self._updates)}
            if self._judge(values, f"step {self.step}"):
                self._save(is_best=True, is_due=False)
        return self._is_over

    def _judge(self, values: dict[str, float], when: str) -> bool:
        """Ends the run early or lowers the rate if the values say so; returns whether they are the best so far."""
        self._validations.judged = self.step
        self._add_own_values(values)
        if self._patience.is_over(values, self.epoch + 1):
            self._log.emit(Note(f"stopped early after {when}: {self._patience.reason}"))
            self._state = SessionState.OVER
        plateau = self._engine.plateau
        if plateau is not None:
            earlier_factor = self._rate_factor
            reason = plateau.lower(values, self.epoch + 1)
            if reason:
                self._engine.set_rate_factor(self._rate_factor, earlier_factor)
                self._log.emit(Note(f"{reason}; from step {self.step} on {self._rate_factor:g} x the learning rate"))
        return self._checkpointing.best.update(values, self.step)

    def _add_own_values(self, values: dict[str, float]) -> None:
        """Adds the values of user code if one of them is monitored. The chief's values count for all workers."""
        monitored = {self._checkpointing.best.state()["monitor"]}
        if self._options.early_stopping is not None:
            monitored.add(self._options.early_stopping.monitor)
        if self._engine.plateau is not None:
            monitored.add(self._engine.plateau.watched.monitor)
        if monitored - {*values, None}:
            values.update(json.loads(self._sync.from_chief(lambda: json.dumps(self._hooks.values))))

    def trace_call(self) -> AbstractContextManager[bool]:
        return self._tracing.trace_call(self.step + 1)

    def end_call(self, steps: int, means: Mapping[str, float], seconds: float, waited: float = 0.0) -> None:
        """Emits one event per call; the last event of an epoch contains the speed."""
        first = self.first
        is_single = self._tracing.is_single
        self._log.report_first_step(self.step + 1)
        if self._steps_per_call.calls and not is_single:  # the first call includes compilation
            self._log.clock.add(self._count_examples(first, steps), steps, seconds, waited=waited)
        self._tracing.count_steps(self.step + steps)
        agreed_seconds, stops = self._sync(seconds)
        if stops:
            self._state = SessionState.STOPPED
        if not is_single:
            self._steps_per_call.record_call(steps, agreed_seconds)
        self._position.step += steps
        self._check_time()
        is_last = first + steps == self.steps_per_epoch or self._position.is_at_end
        self._tracing.end_call(seconds, is_last, self._log.usual_ms)
        values = self._log.report_call(self._updates, means, self._rollbacks.count, is_last=is_last)
        self._call_callbacks("train_batch_end", first + steps - 1, to_keras_logs(values))
        if self._checkpointing.count_call(self.step, agreed_seconds) and not self._is_stopped:
            self._save()

    def _count_examples(self, first: int, steps: int) -> int:
        """Returns the number of examples of a call that begins with step `first` of an epoch."""
        train = self._feeds.train
        size = train.batching.global_size
        return min((first + steps) * size, train.examples) - first * size

    def _check_time(self) -> None:
        """Ends training at this step if `training.max_seconds` asks for it."""
        if self._time.is_over() and not self._is_stopped and not self._position.is_at_end:
            limit = f"training.max_seconds={self._options.max_seconds}"
            total = self._position.length.total
            self._log.emit(Note(f"{limit}: training ends in time, after step {self.step} of {total}"))
            self._position.end_here()

    def end_epoch(self) -> bool:
        """Validates, if that is due and no stop was requested; returns whether another epoch follows."""
        if self._is_stopped or self._is_over:
            return False
        if self._rollbacks.is_enabled:
            self._read_finite_state()  # before validation, whose metrics a rollback does not remove
        done = self.epoch + 1
        is_judged = self._validations.is_due(self._position, is_epoch_end=True)
        validation = self._feeds.validation if is_judged else None
        with self._time.time_validation():
            values = {**self._log.values, **self._log.evaluate("val", validation, self._updates)}
        self._log.emit(EpochEnded(done, self.epochs, self._updates, values=values))
        self._call_callbacks("epoch_end", self.epoch, to_keras_logs(values))
        self._after_epoch(done, values)
        self._log.report_histograms(done, self._updates)
        is_best = is_judged and self._judge(values, f"epoch {done}")
        if not self._is_over and self._hooks.has_callbacks and self._sync.any(self._hooks.want_end):
            self._log.emit(Note(f"a callback ended the run after epoch {done}"))
            self._state = SessionState.OVER
        if self.first == self.steps_per_epoch:  # else the run ends within the epoch
            self._position.epoch = done
        is_due = self._checkpointing.is_due_after(done)
        if is_best or is_due:
            self._save(is_best, is_due)
        return not self._is_over and done < self.epochs


def make_time_limit(options: Training, feeds: BySplit[Feed], sync: WorkerSync) -> TimeLimit:
    """Makes the time limit of a run, which allows for the test."""
    validation_examples = 1 if feeds.validation is None else feeds.validation.examples
    test_examples = 0 if feeds.test is None else feeds.test.examples
    share = 1 + test_examples / validation_examples
    return TimeLimit(parse_duration(options.max_seconds), sync, share)
