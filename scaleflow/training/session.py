"""The host side of training: decides how long a run and each call is, and validates, saves and reports it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from scaleflow.errors import ConfigError, NotFinite
from scaleflow.interfaces import BY_SIZE, BySplit, Feed, Snapshot, Training, parse_duration
from scaleflow.interfaces.events import EpochEnded, MetricsLogged, Note, PhaseBegan, RolledBack
from scaleflow.training.callbacks import Callbacks, to_keras_logs
from scaleflow.training.decisions import Checkpointing, Patience, Rollbacks, TimeLimit, WorkerSync, check_finite
from scaleflow.training.engine import Engine
from scaleflow.training.metrics_log import MetricsLog

if TYPE_CHECKING:
    from scaleflow.profiler.tracer import StepTracer

TARGET_SECONDS = 0.5
LARGEST_GROWTH = 64


class StepsPerLoop:
    """Chooses the next call's number of steps from the last call's duration.

    A call should take about `TARGET_SECONDS`: long enough to make the cost of starting it negligible, short enough to
    answer a stop soon. The first call is not counted, because it compiles.

    Args:
        setting: `auto`, or a fixed number of steps.

    Attributes:
        calls: the calls so far, without those of single, traced steps.
    """

    def __init__(self, setting: int | Literal["auto"]) -> None:
        self.calls = 0
        self._is_fixed = setting != "auto"
        self._steps = 8 if setting == "auto" else setting

    def choose(self, is_resumed: bool) -> int:
        """Returns the number of steps of the next call.

        The first call takes a single step, because it compiles. In a resumed run a fixed number is used from the start,
        so that its calls begin where the calls of the uninterrupted run do.
        """
        is_warm = self.calls > 0 or (is_resumed and self._is_fixed)
        return self._steps if is_warm else 1

    def record_call(self, steps: int, seconds: float) -> None:
        """Adapts the number of steps to the duration of a call."""
        self.calls += 1
        if self._is_fixed or self.calls == 1:
            return
        target = int(TARGET_SECONDS * steps / max(seconds, 1e-6))
        self._steps = max(1, min(target, steps * LARGEST_GROWTH))


#: Seconds of training between a traced window and its report, if the epoch does not end earlier. The report compares
#: with untraced steps: these seconds outweigh the input that was prefetched while the trace was written.
SECONDS_TO_COMPARE = 30.0


class CallTracing:
    """The calls that a tracer wraps; without one, it does nothing.

    Attributes:
        is_single: whether the current call takes a single, traced step.
    """

    def __init__(self, tracer: StepTracer | None) -> None:
        self.is_single = False
        self._tracer = tracer
        self._untraced_seconds = 0.0

    def steps_left(self, step: int) -> int | None:
        """Returns how many steps the call after `step` may take; None for any number."""
        return None if self._tracer is None else self._tracer.steps_left(step)

    @contextlib.contextmanager
    def trace_call(self, step: int) -> Iterator[bool]:
        """Wraps the call that begins with `step`; yields whether it must take that step only."""
        if self._tracer is None:
            yield False
            return
        with self._tracer.trace_call(step) as self.is_single:
            yield self.is_single

    def count_steps(self, step: int) -> None:
        """Records that `step` steps were taken."""
        if self._tracer is not None:
            self._tracer.count_steps(step)

    def end_call(self, seconds: float, is_last: bool, usual_ms: float | None) -> None:
        """Reports a traced window after enough untraced steps to compare with, or after the last call of an epoch."""
        self._untraced_seconds = 0.0 if self.is_single else self._untraced_seconds + seconds
        if self._tracer is not None and (is_last or self._untraced_seconds >= SECONDS_TO_COMPARE):
            self._tracer.report(usual_ms)

    def close(self, usual_ms: float | None, wait: Callable[[], object] = lambda: None) -> None:
        """Writes and reports a window that has begun; `wait` returns when every worker has written its trace."""
        if self._tracer is not None:
            self._tracer.close()
            wait()
            self._tracer.report(usual_ms)

    def finish(self, step: int) -> None:
        """Reports the windows after the run's last step."""
        if self._tracer is not None:
            self._tracer.finish(step)


#: The inputs of a position that follow from the data.
OF_DATA = ("steps_per_epoch", "training_examples")


@dataclass(frozen=True)
class SessionResult:
    """The result of a session."""

    steps: int
    stopped: bool  # whether a stop request ended it early
    model_step: int  # the update that the model's weights are from; that of the best checkpoint if it was restored
    test: Mapping[str, float]
    #: The loss and the metrics of the last epoch's training, `train/loss` and so on
    train: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Length:
    """The length of a run; `total` is in steps."""

    epochs: int
    steps_per_epoch: int
    total: int
    surplus: int = 0  # by how many steps the epochs before a change of the data were longer than those after it


def compute_length(options: Training, feed: Feed, surplus: int = 0) -> Length:
    """Computes the steps of an epoch and of the run.

    Raises ConfigError if `training.steps_per_epoch` is more than the training split has.
    """
    available = feed.batching.steps(feed.examples)
    per_epoch = options.steps_per_epoch or available
    if per_epoch > available:
        raise ConfigError(
            f"training.steps_per_epoch={per_epoch}: the training split's {feed.examples} examples make {available} "
            f"steps of {feed.batching.global_size}; use at most {available}"
        )
    assert options.epochs != BY_SIZE, "the worker fills it in"
    total = options.epochs * per_epoch + surplus
    total = min(total, options.max_steps or total)
    return Length(math.ceil((total - surplus) / per_epoch), per_epoch, total, surplus=surplus)


def ignore_epoch(epoch: int, metrics: Mapping[str, float]) -> None:
    """Does nothing after an epoch."""


class Session:
    """The `Host` of one run, from the first step to the test: decides when it ends, and reports what the engine does.

    Args:
        sync: combines the durations and stop signals of the workers.
        checkpointing: saves the state; None for no checkpoints.
        has_new_data: whether the data may differ from that of the checkpoint that the run continues from.
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
        self.epoch = 0
        self.step = 0
        self._engine = engine
        self._feeds = feeds
        self._has_new_data = has_new_data
        self._after_epoch = after_epoch
        self._options = options
        self._log = log
        self._sync = sync
        self._length = compute_length(options, feeds.train)
        self._steps_per_call = StepsPerLoop(options.steps_per_loop)
        unit = "epoch" if options.validate_every is None else "validation"
        self._patience = Patience(options.early_stopping, engine.objective.modes, unit)
        self._judged = 0  # the step of the last validation
        self._rollbacks = Rollbacks(options)
        judged = 1 if feeds.validation is None else feeds.validation.examples
        share = 1 + (0 if feeds.test is None else feeds.test.examples) / judged
        self._time = TimeLimit(parse_duration(options.max_seconds), sync, share)
        self._checkpointing = checkpointing or Checkpointing()
        self._callbacks = Callbacks(callbacks, engine, self.epochs, steps=self.steps_per_epoch)
        self._tracing = CallTracing(tracer)
        self._stopped = False
        self._own_values: dict[str, float] = {}  # of callbacks and user code, by name
        self._is_over = False  # whether early stopping or a callback has ended the run
        self._is_restored = False
        self._doubts: list[str] = []
        self._report_doubts()

    def run(self, before_test: Callable[[], object] = bool) -> SessionResult:
        """Trains, validates after each epoch, and tests the last or the best model at the end.

        `before_test` is called once it is known which model that is.
        """
        self._call_callbacks("train_begin", is_repeated=self._is_restored)
        if self._rollbacks.is_enabled and not self.step:
            self._save()  # a rollback in the first epoch needs a checkpoint
        try:
            while not self._is_over and not self._is_through():
                pass
        except BaseException:
            self._tracing.close(self._log.usual_ms)
            raise
        self._tracing.close(self._log.usual_ms, wait=lambda: self._sync(0.0))
        if not self._stopped:
            self._tracing.finish(self.step)
        if self._checkpointing.checkpoints is not None:
            self._log.emit(PhaseBegan("saving the last checkpoint"))
        self._save()  # before the hook, which may change the weights: a resumed run calls it again
        self._checkpointing.wait()
        self._call_callbacks("train_end", to_keras_logs(self._log.values))
        if self._stopped:
            return SessionResult(self._updates, True, self._updates, test={})
        model_step = self._restore_best() if self._checkpointing.ends_as_best else self._updates
        before_test()
        if self._feeds.test is not None:
            self._log.emit(PhaseBegan("evaluating the test split"))
        test = self._log.evaluate("test", self._feeds.test, model_step)
        train = {name: value for name, value in self._log.values.items() if name.startswith("train/")}
        return SessionResult(self._updates, False, model_step, test=test, train=train)

    def finish_checkpoints(self) -> None:
        """Waits until the checkpoints are where they are kept; before the end of the run is reported."""
        self._checkpointing.finish()

    def _is_through(self) -> bool:
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
        held = self._rate_factor
        self._rollbacks.count, self._rollbacks.rate_factor = count, factor
        self._engine.set_rate_factor(self._rate_factor, held)
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
        """Calls a hook of all callbacks, and reports the values that they add to its logs.

        What a hook changes that `is_repeated`, the restored state contains already: it is restored again.
        """
        if not self._callbacks:
            return
        before = (self._engine.read_state(), self._callbacks.read_state()) if is_repeated else None
        if added := self._callbacks.call_hook(hook, *arguments):
            self._report_own(added)
        if before is not None:
            self._engine.restore(before[0])
            self._callbacks.restore(*before[1])

    def _report_doubts(self) -> None:
        """Emits a note about what a checkpoint does not hold of the callbacks, once for each attribute."""
        if doubts := [each for each in self._callbacks.list_doubts() if each not in self._doubts]:
            self._doubts += doubts
            self._log.emit(
                Note(
                    f"training.callbacks: checkpoints do not hold {', '.join(doubts)}: a resumed run has what the "
                    "constructor makes; give the class get_state and set_state"
                )
            )

    def log_metric(self, name: str, value: float) -> None:
        """Reports a value from user code at the current step."""
        self._report_own({name: value})

    def _report_own(self, values: Mapping[str, float]) -> None:
        self._own_values.update(values)
        self._log.emit(MetricsLogged(self._updates, dict(values)))

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
            self._engine.evaluate(self._feeds.validation)  # the confusion matrix is that of the last evaluation
        return int(best.host["updates"])

    # Snapshots --------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Returns everything that a resumed run needs. All workers must call it.

        Raises NotFinite if weights are not finite.
        """
        callbacks, arrays = self._callbacks.read_state()
        self._report_doubts()
        host = {
            **self._position_inputs(),
            **callbacks,
            "updates": self._updates,
            "epoch": self.epoch,
            "values": self._log.values,
            "own_values": self._own_values,
            "patience": self._patience.state(),
            "best": self._checkpointing.best.state(),
            "is_over": self._is_over,
            "judged": self._judged,
            "total": self._length.total,
            "rollbacks": self._rollbacks.count,
            "rate_factor": self._rollbacks.rate_factor,
            "plateau": self._engine.plateau and self._engine.plateau.state(),
            "surplus": self._length.surplus,
        }
        return Snapshot(self.step, {**self._read_finite_state(), **arrays}, host)

    def restore(self, snapshot: Snapshot) -> None:
        """Continues from a snapshot. Raises ConfigError if the snapshot is from other data, or from another model."""
        for name, value in self._position_inputs().items():
            if snapshot.host[name] != value and not (self._has_new_data and name in OF_DATA):
                advice = ", or add resume_data=changed to continue with other data" if name in OF_DATA else ""
                raise ConfigError(
                    f"resume: the run had {snapshot.host[name]} {name.replace('_', ' ')}, and now has {value}; resume "
                    f"it with the same data and global batch{advice}"
                )
        self._engine.restore(snapshot.tensors)
        self._patience.restore(snapshot.host["patience"])
        self._judged = snapshot.host["judged"]
        if note := self._checkpointing.best.restore(snapshot.host["best"]):
            self._log.emit(Note(note))
        self._log.values = dict(snapshot.host["values"])
        self._own_values = dict(snapshot.host["own_values"])
        self._rollbacks.count = snapshot.host["rollbacks"]
        self._rollbacks.rate_factor = snapshot.host["rate_factor"]
        if self._engine.plateau is not None:
            self._engine.plateau.restore(snapshot.host["plateau"])
        if (factor := self._rate_factor) != 1.0:
            self._engine.set_rate_factor(factor, factor)
        self.epoch, self.step = snapshot.host["epoch"], snapshot.step
        self._length = compute_length(self._options, self._feeds.train, self._find_surplus(snapshot))
        self._checkpointing.saved_position = self.epoch, self.step
        is_longer = snapshot.host["total"] != self._length.total  # then what ended it does not count
        self._is_over = snapshot.host["is_over"] and not is_longer
        stops = snapshot.host["stops"] and not is_longer
        self._callbacks.restore({**snapshot.host, "stops": stops}, snapshot.tensors)
        self._is_restored = True

    def _find_surplus(self, snapshot: Snapshot) -> int:
        """Returns the surplus with which the snapshot's epoch and step hold in epochs of this length."""
        before, per_epoch = snapshot.host["steps_per_epoch"], self._length.steps_per_epoch
        begun = snapshot.step - snapshot.host["surplus"] - self.epoch * before
        begun = per_epoch if begun == before else min(begun, per_epoch)
        return self.step - begun - self.epoch * per_epoch

    def _position_inputs(self) -> dict[str, int]:
        """Returns the inputs that must match for a saved position to be valid."""
        return {
            "steps_per_epoch": self.steps_per_epoch,
            "training_examples": self._feeds.train.examples,
            "examples_a_step": self._feeds.train.batching.global_size,
        }

    def _save(self, is_best: bool = False, is_due: bool = True) -> None:
        self._checkpointing.save((self.epoch, self.step), self.snapshot, is_best, is_due=is_due)

    # The Host interface, documented there ----------------------------------------------------

    @property
    def epochs(self) -> int:
        return self._length.epochs

    @property
    def steps_per_epoch(self) -> int:
        return self._length.steps_per_epoch

    @property
    def first(self) -> int:
        return self.step - self._length.surplus - self.epoch * self._length.steps_per_epoch

    @property
    def _updates(self) -> int:
        """The optimizer updates so far, which metrics are indexed by."""
        return self._engine.count_updates(self.step)

    @property
    def _rate_factor(self) -> float:
        """The learning rate is this factor times that of the config and its step."""
        plateau = self._engine.plateau
        return self._rollbacks.rate_factor * (1.0 if plateau is None else plateau.factor)

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        phases, has_changed = self._engine.freezing, self._engine.begin_freeze_phase(epoch, self._feeds.train)
        if has_changed and phases and 0 < epoch in phases.parameters and not self.first:
            self._log.emit(Note(f"model.freeze: {phases.parameters[epoch]:,} parameters train from epoch {epoch} on"))
        self._log.compiles |= has_changed
        self._log.begin_epoch(is_resumed=self.first > 0)
        self._call_callbacks("epoch_begin", epoch, is_repeated=self.first > 0)

    @property
    def steps_left(self) -> int:
        return min(self._length.steps_per_epoch - self.first, self._length.total - self.step)

    def next_steps(self) -> int:
        first, remaining = self.first, self.steps_left
        if self._stopped or remaining <= 0 or self._ends_within():
            return 0
        until_saved, until_traced = self._checkpointing.steps_left(self.step), self._tracing.steps_left(self.step)
        per_call = self._steps_per_call.choose(is_resumed=self.step > 0)
        self._call_callbacks("train_batch_begin", first)
        every = self._options.validate_every
        until_validated = every - self.step % every if isinstance(every, int) else None
        limits = until_saved, until_traced, until_validated
        return min(per_call, remaining, *(steps for steps in limits if steps is not None))

    def _ends_within(self) -> bool:
        """Validates within an epoch, if that is due; returns whether it ends the run."""
        if self._is_due(is_end=False):
            values = {**self._log.values, **self._log.evaluate("val", self._feeds.validation, self._updates)}
            if self._judge(values, f"step {self.step}"):
                self._save(is_best=True, is_due=False)
        return self._is_over

    def _is_due(self, is_end: bool) -> bool:
        """Returns whether to validate now; `is_end` says whether an epoch ends."""
        every = self._options.validate_every
        if every is None or self.step == self._length.total:
            return is_end
        if isinstance(every, int):
            return self.step % every == 0 and self.step != self._judged
        return is_end and (self.epoch + 1) % self._options.validate_epochs == 0

    def _judge(self, values: dict[str, float], when: str) -> bool:
        """Ends the run if its values say so; returns whether they are the best so far."""
        self._judged = self.step
        plateau, held = self._engine.plateau, self._rate_factor
        watched = self._options.early_stopping, None if plateau is None else plateau.watched
        monitored = {each.monitor for each in watched if each is not None}
        if {*monitored, self._checkpointing.best.state()["monitor"]} - {*values, None}:  # the chief's decide for all
            values.update(json.loads(self._sync.from_chief(lambda: json.dumps(self._own_values))))
        if self._patience.is_over(values, self.epoch + 1):
            self._log.emit(Note(f"stopped early after {when}: {self._patience.reason}"))
            self._is_over = True
        if plateau is not None and (reason := plateau.lower(values, self.epoch + 1)):
            self._engine.set_rate_factor(self._rate_factor, held)
            self._log.emit(Note(f"{reason}; from step {self.step} on {self._rate_factor:g} x the learning rate"))
        return self._checkpointing.best.update(values, self.step)

    def trace_call(self) -> AbstractContextManager[bool]:
        return self._tracing.trace_call(self.step + 1)

    def end_call(self, steps: int, means: Mapping[str, float], seconds: float, waited: float = 0.0) -> None:
        """Emits one event per call; the last one of an epoch contains the speed."""
        first, train, is_single = self.first, self._feeds.train, self._tracing.is_single
        self._log.report_first_step(self.step + 1)
        if self._steps_per_call.calls and not is_single:  # the first call includes compilation
            size = train.batching.global_size
            examples = min((first + steps) * size, train.examples) - first * size
            self._log.clock.add(examples, steps, seconds, waited=waited)
        self._tracing.count_steps(self.step + steps)
        agreed, self._stopped = self._sync(seconds)
        if not is_single:
            self._steps_per_call.record_call(steps, agreed)
        self.step += steps
        if self._time.is_over() and not self._stopped and self.step < self._length.total:
            limit, at = f"training.max_seconds={self._options.max_seconds}", f"{self.step} of {self._length.total}"
            self._log.emit(Note(f"{limit}: training ends in time, after step {at}"))
            self._length = replace(self._length, epochs=self.epoch + 1, total=self.step)
        is_last = first + steps == self._length.steps_per_epoch or self.step == self._length.total
        self._tracing.end_call(seconds, is_last, self._log.usual_ms)
        values = self._log.report_call(self._updates, means, self._rollbacks.count, is_last=is_last)
        self._call_callbacks("train_batch_end", first + steps - 1, to_keras_logs(values))
        if self._checkpointing.count_call(self.step, agreed) and not self._stopped:
            self._save()

    def end_epoch(self) -> bool:
        """Validates, if that is due and no stop was requested; returns whether another epoch follows."""
        if self._stopped or self._is_over:
            return False
        if self._rollbacks.is_enabled:
            self._read_finite_state()  # before validation, whose metrics a rollback does not remove
        done, is_judged = self.epoch + 1, self._is_due(is_end=True)
        validation = self._feeds.validation if is_judged else None
        with self._time.time_validation():
            values = {**self._log.values, **self._log.evaluate("val", validation, self._updates)}
        self._log.emit(EpochEnded(done, self.epochs, self._updates, values=values))
        self._call_callbacks("epoch_end", self.epoch, to_keras_logs(values))
        self._after_epoch(done, values)
        self._log.report_histograms(done, self._updates)
        is_best = is_judged and self._judge(values, f"epoch {done}")
        if not self._is_over and self._callbacks and self._sync.any(self._callbacks.wants_end):
            self._log.emit(Note(f"a callback ended the run after epoch {done}"))
            self._is_over = True
        if self.first == self.steps_per_epoch:  # else the run ends within the epoch
            self.epoch = done
        is_due = self._checkpointing.is_due_after(done)
        if is_best or is_due:
            self._save(is_best, is_due)
        return not self._is_over and done < self.epochs


#: The least and the largest global batch. Larger ones take fewer steps, which learn less from as many examples.
LEAST_BATCH, MOST_BATCH = 32, 256

#: An epoch has about so many steps, as far as the batch is within its limits.
STEPS_PER_EPOCH = 16

#: The epochs of up to `ENOUGH` examples. Ten times as many examples are seen 1.8 times as often in all.
EPOCHS, FEWEST_EPOCHS, ENOUGH = 64, 3, 10_000


def choose_length_by_size(options: Training, examples: int, parts: int) -> Training:
    """Returns options with numbers in place of `by_size`.

    Args:
        parts: the number of equal parts that a global batch is divided into.
    """
    if options.epochs == BY_SIZE:
        epochs = round(EPOCHS * min(1.0, (ENOUGH / max(examples, 1)) ** 0.75))
        options = replace(options, epochs=max(epochs, FEWEST_EPOCHS))
    if options.batch_size == BY_SIZE and options.global_batch_size is None:
        size = min(max(2 ** round(math.log2(max(examples / STEPS_PER_EPOCH, 1))), LEAST_BATCH), MOST_BATCH)
        options = replace(options, global_batch_size=-(-size // parts) * parts)
    return options
