"""The host's half of training: epochs, stretches of steps, validation, early stopping, events."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from scaleflow.errors import ConfigError, NotFinite, RunError
from scaleflow.interfaces import Best, Checkpoints, EarlyStopping, Emit, Feed, Snapshot, Tracer, Training
from scaleflow.training.callbacks import Callbacks, to_keras_logs
from scaleflow.training.engine import Engine
from scaleflow.training.histograms import compute_histograms
from scaleflow.training.memory import measure_peaks
from scaleflow.training.steps_per_loop import StepsPerLoop

#: Seconds of training after a traced window until its profile is reported, if the epoch does not end before: so long
#: that what was read ahead while the trace was written no longer counts.
SECONDS_TO_COMPARE = 30.0

ADVICE = "try a lower optimizer.learning_rate, or training.clip_norm=1.0"


@dataclass(frozen=True)
class SessionResult:
    """How a session went.

    Attributes:
        steps: updates that were made.
        stopped: whether it was told to stop before it was through.
        model_step: the updates after which the model was as it is now: those of the best checkpoint, if that was taken.
        test: `test/loss` and the metrics on the test split.
    """

    steps: int
    stopped: bool
    model_step: int
    test: Mapping[str, float]


@dataclass(frozen=True)
class Length:
    """How long a run is, in steps (updates)."""

    epochs: int
    steps_per_epoch: int
    total: int


def compute_length(options: Training, feed: Feed) -> Length:
    """How many steps an epoch and the run have.

    Raises:
        ConfigError: if an epoch is asked to be longer than the data is.
    """
    there = feed.batching.steps(feed.examples)
    per_epoch = options.steps_per_epoch or there
    if per_epoch > there:
        raise ConfigError(
            f"training.steps_per_epoch={per_epoch}: the training split's {feed.examples} examples make {there} steps "
            f"of {feed.batching.global_size}; use at most {there}"
        )
    total = min(options.epochs * per_epoch, options.max_steps or options.epochs * per_epoch)
    return Length(math.ceil(total / per_epoch), per_epoch, total)


def check_monitor(key: str, options: EarlyStopping | Best | None, metrics: Collection[str], validates: bool) -> None:
    """Refuses to watch a value that there will not be."""
    if options is None:
        return
    splits = ["train", "val"] if validates else ["train"]
    there = [f"{split}/{name}" for split in splits for name in ("loss", *metrics)]
    if options.monitor not in there:
        raise ConfigError(f"{key}.monitor={options.monitor}: there is no such value; there is {', '.join(there)}")


class FirstStep(Protocol):
    """Measures the parts of the time to the first step."""

    def end_part(self, part: str) -> None: ...

    def values(self) -> dict[str, float]:
        """As metrics."""


class Session:
    """One run, from the first step to the test: it tells of what the engine does, and when it is enough.

    Args:
        engine: takes the steps.
        options: how long, and in what portions.
        train, validation, test: the splits.
        emit: takes the metrics.
        started: when the command began, in seconds since the epoch.
        agree: called after each call of the engine with its duration in seconds; gives the duration
            that the next one's length follows from, and whether to stop.
        checkpoints: keeps what the run needs to go on.
        best: by what the best of them is known; None where none is sought.
        ends_as_best: test the model of the best one, which is then the model that the run has made.
        callbacks: Keras's, told of the same as `emit`.
        any_worker: whether any of the workers says so; called by all of them.
        tracer: traces some of the steps.
        startup_timer: tells what the time to the first step was spent on; None where nobody has measured it.
        peak_flops: operations a second that the devices can compute at most, where that is known.
        histograms_every: after so many epochs each tells how its weights are distributed; None for never.
        is_drawn_as_read: whether the validation split is drawn from a stream as its records are read.
    """

    def __init__(
        self,
        engine: Engine,
        options: Training,
        train: Feed,
        validation: Feed | None,
        test: Feed | None,
        *,
        emit: Emit,
        started: float,
        agree: Callable[[float], tuple[float, bool]],
        checkpoints: Checkpoints | None = None,
        best: Best | None = None,
        ends_as_best: bool = False,
        callbacks: Sequence[Any] = (),
        any_worker: Callable[[bool], bool] = bool,
        tracer: Tracer | None = None,
        startup_timer: FirstStep | None = None,
        peak_flops: float | None = None,
        histograms_every: int | None = None,
        is_drawn_as_read: bool = False,
    ) -> None:
        self._engine = engine
        self._options = options
        self._train = train
        self._validation = validation
        self._test = test
        self._emit = emit
        self._started = started
        self._worker_sync = agree
        self._length = compute_length(options, train)
        self._pace = StepsPerLoop(options.steps_per_loop)
        self._patience = Patience(options.early_stopping)
        self._best = BestValue(best)
        self._ends_as_best = ends_as_best
        self._any_worker = any_worker
        self._tracer = tracer
        self._is_single = False
        self._startup_timer = startup_timer
        self._peak_flops = peak_flops
        self._histograms_every = histograms_every
        self._is_drawn_as_read = is_drawn_as_read
        self._checkpoints = checkpoints
        self._clock = EpochClock(train)
        self._step_ms: float | None = None
        self._untraced_seconds = 0.0
        self._values: dict[str, float] = {}
        self._calls = 0
        self._singles = 0
        self._unsaved_seconds = 0.0
        self._saved: tuple[int, int] | None = None
        self._stopped = False
        self._rate_factor = 1.0
        self.rollbacks = 0
        self.epoch = 0
        self.step = 0
        self.epochs = self._length.epochs
        self.steps_per_epoch = self._length.steps_per_epoch
        self._callbacks = Callbacks(callbacks, engine, self.epochs, self.steps_per_epoch) if callbacks else None

    def run(self) -> SessionResult:
        """Trains, validates after each epoch, and tests at the end: the best checkpoint, if that is asked for."""
        self._call_callbacks("train_begin")
        if self._rolls_back and not self.step:
            self._save()  # there has to be something to go back to
        try:
            while not self._is_through():
                pass
        except BaseException:
            self._end_trace()
            raise
        self._end_trace(all_are_there=True)
        self._call_callbacks("train_end", to_keras_logs(self._values))
        self._save()
        model_step = self._updates
        if self._checkpoints is not None:
            self._checkpoints.wait()
            if self._ends_as_best and not self._stopped:
                model_step = self._take_best(self._checkpoints)
        test = {} if self._stopped else self._score("test", self._test, model_step)
        return SessionResult(self._updates, self._stopped, model_step, test)

    # What becomes of numbers that are not finite ----------------------------------------------

    def _is_through(self) -> bool:
        """Trains to the end; False where the run has gone back and has to be trained on."""
        try:
            self._engine.run(self._train, self)
            self._check(self._engine.read_state())
        except NotFinite as error:
            self._roll_back(error)
            return False
        return True

    @property
    def _rolls_back(self) -> bool:
        return self._options.on_nan == "rollback"

    def _roll_back(self, error: NotFinite) -> None:
        """Goes back to the last good checkpoint, with a lower rate; all workers have to, and do.

        Raises:
            NotFinite: what came, where that is not to be, or there was enough of it.
        """
        most = self._options.nan_rollbacks
        self._end_trace()
        if self._checkpoints is not None:
            self._checkpoints.wait()
        if not self._rolls_back or self._checkpoints is None or not error.last_cause:
            raise error
        if self.rollbacks >= most:
            raise RunError(f"{error.fact}, after training.nan_rollbacks={most} rollbacks; {ADVICE}") from error
        self._worker_sync(0.0)  # nobody reads before the one that writes is through
        snapshot = self._checkpoints.load_newest(before=error.last_cause)
        if snapshot is None:
            raise RunError(f"{error.fact}, and there is no checkpoint from before; {ADVICE}") from error
        self._worker_sync(0.0)  # nothing is dropped while others look
        self._checkpoints.drop_from(snapshot.step + 1)
        rollbacks, factor = self.rollbacks + 1, self._rate_factor * self._options.nan_rate_factor
        self.restore(snapshot)
        self._engine.set_rate_factor(factor, self._rate_factor)
        self.rollbacks, self._rate_factor = rollbacks, factor
        why = f"{error.fact}; back to the checkpoint at step {snapshot.step}, with {factor:g} x the learning rate"
        self._emit("rollback", number=rollbacks, reason=why)
        self._emit("note", text=f"{why} ({rollbacks} of at most {most})")

    def _check(self, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """What is saved or exported has to be finite: what is trained, and what the optimizer holds."""
        trained = {f"model/{index}" for index, v in enumerate(self._engine.model.variables) if v.trainable}
        for name, value in tensors.items():
            is_looked_at = name in trained or name.startswith("optimizer/")
            if is_looked_at and value.dtype.kind not in "iub" and not np.isfinite(value).all():
                raise NotFinite(self.step, "the weights are")

    def _call_callbacks(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of the callbacks, and reports what they add to its logs."""
        if self._callbacks is not None and (added := self._callbacks.call_hook(hook, *arguments)):
            self._emit("metrics", step=self._updates, values=added)

    def log_metric(self, name: str, value: float) -> None:
        """Reports a value of the user's own at the current step."""
        self._emit("metrics", step=self._updates, values={name: value})

    def _take_best(self, checkpoints: Checkpoints) -> int:
        """Restores the model of the best checkpoint, if it can be read; returns the number of updates that made it."""
        self._worker_sync(0.0)  # nobody reads before the one that writes is through
        best = checkpoints.load_best()
        if self._any_worker(best is None) or best is None:
            text = f"checkpoint.export=best: what is tested and exported is the model of the last step, {self.step}"
            self._emit("note", text=text)
            return self._updates
        if best.step == self.step:
            return self._updates
        self._engine.restore_model(best.tensors)
        self._emit("note", text=f"what is tested and exported is the best checkpoint, at step {best.step}")
        if self._test is None and self._validation is not None:
            self._engine.evaluate(self._validation)  # the confusion matrix is that of the last evaluation
        return int(best.host["updates"])

    # What is kept, so that the run can go on --------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All that is needed to go on from here. All workers have to call it."""
        host = {
            **self._position_inputs(),
            "updates": self._updates,
            "epoch": self.epoch,
            "values": self._values,
            "patience": self._patience.state(),
            "best": self._best.state(),
            "callbacks": self._callbacks.state() if self._callbacks else [],
            "rollbacks": self.rollbacks,
            "rate_factor": self._rate_factor,
            "is_drawn_as_read": self._is_drawn_as_read,
        }
        return Snapshot(self.step, self._engine.read_state(), host)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes on from a snapshot.

        Raises:
            ConfigError: if it is of other data, or of another model.
        """
        for name, now in self._position_inputs().items():
            if snapshot.host[name] != now:
                raise ConfigError(
                    f"resume: the run had {snapshot.host[name]} {name.replace('_', ' ')}, and now has {now}; "
                    "go on with the same data and global batch"
                )
        if snapshot.host.get("is_drawn_as_read", False) != self._is_drawn_as_read:
            raise ConfigError(
                "resume: the run held out the first examples of its stream, and this version of scaleflow draws the "
                "validation split at random; go on with the version that began the run, or start a new one"
            )
        self._engine.restore(snapshot.tensors)
        self._patience.restore(snapshot.host["patience"])
        self._best.restore(snapshot.host["best"])
        if self._callbacks is not None:
            self._callbacks.restore(snapshot.host["callbacks"])
        self._values = dict(snapshot.host["values"])
        self.rollbacks, self._rate_factor = snapshot.host.get("rollbacks", 0), snapshot.host.get("rate_factor", 1.0)
        if self._rate_factor != 1.0:
            self._engine.set_rate_factor(self._rate_factor, self._rate_factor)
        self.epoch, self.step = snapshot.host["epoch"], snapshot.step
        self._saved = self.epoch, self.step

    def _position_inputs(self) -> dict[str, int]:
        """What a position in a run means nothing without."""
        return {
            "steps_per_epoch": self.steps_per_epoch,
            "training_examples": self._train.examples,
            "examples_a_step": self._train.batching.global_size,
        }

    def _save(self, is_best: bool = False) -> None:
        """Saves, unless nothing has happened since the last time.

        A step that turns out to be the best one is saved again: the checkpoint that was made before its evaluation
        does not say so.
        """
        is_saved = self._saved == (self.epoch, self.step)
        if self._checkpoints is None or (is_saved and not is_best):
            return
        snapshot = self.snapshot()
        self._check(snapshot.tensors)
        self._saved = self.epoch, self.step
        self._unsaved_seconds = 0.0
        self._checkpoints.save(snapshot, is_best)

    def _make_start_metrics(self) -> dict[str, float]:
        """What is known once the first step is taken."""
        flops = self._engine.flops_per_example
        known = {} if flops is None else {"perf/flops_per_example": flops}
        if self._startup_timer is None:
            return {"perf/seconds_to_first_step": time.time() - self._started, **known}
        self._startup_timer.end_part("compile")
        return {**self._startup_timer.values(), **known}

    def _make_speed_metrics(self) -> dict[str, float]:
        """The epoch's; with the share of the devices' peak that the model's operations are."""
        speed, flops = self._clock.speed(), self._engine.flops_per_example
        if speed and flops is not None and self._peak_flops is not None:
            speed["perf/mfu"] = speed["perf/examples_per_second"] * flops / self._peak_flops
        return speed

    @property
    def _usual_ms(self) -> float | None:
        """`perf/step_ms` of this epoch so far; of an earlier one if all steps of this one are traced."""
        return self._clock.step_ms or self._step_ms

    @property
    def _updates(self) -> int:
        """The optimizer's updates so far, by which what is reported is placed."""
        return self._engine.count_updates(self.step)

    # What the engine tells and asks ----------------------------------------------------------

    @property
    def first(self) -> int:
        return self.step - self.epoch * self.steps_per_epoch

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._step_ms = self._usual_ms
        self._clock = EpochClock(self._train)
        self._values = self._values if self.first else {}
        self._call_callbacks("epoch_begin", epoch)

    def next_steps(self) -> int:
        left = min(self.steps_per_epoch - self.first, self._length.total - self.step)
        if self._stopped or left <= 0:
            return 0
        until_saved = self._checkpoints.steps_left(self.step) if self._checkpoints is not None else None
        until_traced = self._tracer.steps_left(self.step) if self._tracer is not None else None
        wanted = self._pace.choose() if self._is_warm else 1
        self._call_callbacks("train_batch_begin", self.first)
        return min(wanted, left, *(steps for steps in (until_saved, until_traced) if steps is not None))

    @contextlib.contextmanager
    def trace_call(self) -> Iterator[bool]:
        if self._tracer is None:
            yield False
            return
        with self._tracer.trace_call(self.step + 1) as self._is_single:
            yield self._is_single

    def _end_trace(self, all_are_there: bool = False) -> None:
        """Keeps what there is of a window that has begun."""
        if self._tracer is None:
            return
        self._tracer.close()
        if all_are_there:
            self._worker_sync(0.0)  # every worker has written its own
        self._tracer.report(self._usual_ms)
        if all_are_there and not self._stopped:
            self._tracer.finish(self.step)

    @property
    def _is_warm(self) -> bool:
        """Whether this process has taken a step, which compiles; calls of a fixed length stay where they were."""
        return self._calls > 0 or (self.step > 0 and self._pace.is_fixed)

    def end_call(self, steps: int, means: Mapping[str, float], seconds: float, waited: float = 0.0) -> None:
        """One event to a call; the epoch's last one has the speed."""
        if not self._calls and not self._singles:
            self._emit("metrics", step=self._engine.count_updates(self.step + 1), values=self._make_start_metrics())
        if self._calls and not self._is_single:  # the first call makes ready what later ones find
            self._clock.add(self.first, steps, seconds, waited)
        if self._tracer is not None:
            self._tracer.count_steps(self.step + steps)
        agreed, self._stopped = self._worker_sync(seconds)
        if self._is_single:
            self._singles += 1
        else:
            self._calls += 1
            self._pace.record_call(steps, agreed)
        self.step += steps
        scale = self._engine.loss_scale
        values = add_prefix("train", means) | ({} if scale is None else {"train/loss_scale": scale})
        values |= {"train/rollbacks": float(self.rollbacks)} if self.rollbacks else {}
        is_last = self.first == self.steps_per_epoch or self.step == self._length.total
        self._report_profile(seconds, is_last)
        self._values = values | ({**self._make_speed_metrics(), **measure_peaks()} if is_last else {})
        self._emit("metrics", step=self._updates, values=self._values, rate=self._clock.examples_per_second)
        self._call_callbacks("train_batch_end", self.first - 1, to_keras_logs(values))
        self._unsaved_seconds += agreed
        is_due = self._checkpoints is not None and self._checkpoints.is_due(self.step, self._unsaved_seconds)
        if is_due and not self._stopped:
            self._save()

    def _report_profile(self, seconds: float, is_last: bool) -> None:
        """Reports a traced window once it is known what the steps outside take: at the epoch's end, or earlier."""
        self._untraced_seconds = 0.0 if self._is_single else self._untraced_seconds + seconds
        if self._tracer is not None and (is_last or self._untraced_seconds >= SECONDS_TO_COMPARE):
            self._tracer.report(self._usual_ms)

    def end_epoch(self) -> bool:
        """Validates, unless the run was told to stop, and looks whether it is enough."""
        if self._stopped:
            return False
        if self._rolls_back:
            self._check(self._engine.read_state())  # the values of weights that are not kept would stay recorded
        done = self.epoch + 1
        values = {**self._values, **self._score("val", self._validation, self._updates)}
        self._emit("epoch", epoch=done, epochs=self.epochs, step=self._updates, values=values)
        self._call_callbacks("epoch_end", self.epoch, to_keras_logs(values))
        if self._histograms_every is not None and done % self._histograms_every == 0:
            self._emit("weights", step=self._updates, values=compute_histograms(self._engine.gather_model()))
        is_over = self._patience.is_over(values)
        is_best = self._best.update(values, self.step)
        if self.first == self.steps_per_epoch:  # else the run has ended within the epoch
            self.epoch = done
        if is_best or (self._checkpoints is not None and self._checkpoints.is_due_after(done)):
            self._save(is_best)
        if is_over:
            self._emit("note", text=f"stopped early after epoch {done}: {self._patience.reason}")
            return False
        if self._callbacks is not None and self._any_worker(self._callbacks.wants_end):
            self._emit("note", text=f"a callback ended the run after epoch {done}")
            return False
        return done < self.epochs

    # -----------------------------------------------------------------------------------------

    def _score(self, prefix: str, feed: Feed | None, step: int) -> dict[str, float]:
        """Evaluates a split, if there is one, and reports the values at a step."""
        if feed is None:
            return {}
        values = add_prefix(prefix, self._engine.evaluate(feed))
        self._emit("metrics", step=step, values=values)
        return values


class EpochClock:
    """Measures an epoch's training calls, waiting for input included.

    It leaves out the run's first call, which compiles, and calls of single steps, which are traced.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._steps = 0
        self._examples = 0
        self._seconds = 0.0
        self._calls: list[tuple[float, int]] = []

    def add(self, first: int, steps: int, seconds: float, waited: float = 0.0) -> None:
        """Counts a call that took `steps` from the epoch's step `first` on.

        Args:
            waited: seconds before the call in which the epoch's input was started; in the means alone.
        """
        size = self._feed.batching.global_size
        self._examples += min((first + steps) * size, self._feed.examples) - first * size
        self._steps += steps
        self._seconds += seconds + waited
        self._calls.append((seconds / steps, steps))

    @property
    def examples_per_second(self) -> float | None:
        return self._examples / self._seconds if self._seconds else None

    @property
    def step_ms(self) -> float | None:
        """The mean."""
        return 1000 * self._seconds / self._steps if self._steps else None

    def speed(self) -> dict[str, float]:
        """What an epoch's end is reported with; the means are of all steps that count."""
        if not self._seconds:
            return {}
        found = {
            "perf/examples_per_second": self._examples / self._seconds,
            "perf/step_ms": self.step_ms,
            "perf/step_ms_p50": percentile_ms(self._calls, 50),
            "perf/step_ms_p95": percentile_ms(self._calls, 95),
        }
        return {name: value for name, value in found.items() if value is not None}


def percentile_ms(calls: Collection[tuple[float, int]], percent: float) -> float | None:
    """What so many percent of the steps took at most, in milliseconds; each counts as its call's mean step.

    Args:
        calls: (seconds a step, steps) of each.
        percent: of the steps.
    """
    behind = sum(steps for _, steps in calls) * percent / 100
    for each, steps in sorted(calls):
        behind -= steps
        if behind <= 0:
            return 1000 * each
    return None


class BestValue:
    """The best that a monitored value has been.

    Args:
        options: which value; None for none.
    """

    def __init__(self, options: EarlyStopping | Best | None) -> None:
        self._options = options
        self._value: float | None = None
        self._step: int | None = None

    def update(self, values: Mapping[str, float], step: int) -> bool:
        """Looks at an epoch's values; whether they are better than all before."""
        if self._options is None:
            return False
        monitor, mode = self._options.monitor, self._options.mode
        down = mode == "min" if mode != "auto" else not monitor.endswith(("accuracy", "exact_match"))
        value = values[monitor]
        if math.isnan(value):
            return False
        if self._value is not None and not (value < self._value if down else value > self._value):
            return False
        self._value, self._step = value, step
        return True

    def state(self) -> dict[str, Any]:
        return {"value": self._value, "step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._value, self._step = state["value"], state["step"]


class Patience:
    """Early stopping: over when the monitored value has not improved for a number of epochs."""

    def __init__(self, options: EarlyStopping | None) -> None:
        self._options = options
        self._record = BestValue(options)
        self._waited = 0
        self.reason = ""

    def is_over(self, values: Mapping[str, float]) -> bool:
        """Looks at an epoch's values."""
        if self._options is None:
            return False
        self._waited = 0 if self._record.update(values, 0) else self._waited + 1
        times = f"{self._waited} epoch{'s' if self._waited > 1 else ''}"
        self.reason = f"{self._options.monitor} has not improved for {times}"
        return self._waited >= self._options.patience

    def state(self) -> dict[str, Any]:
        return {"waited": self._waited, "record": self._record.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._waited = state["waited"]
        self._record.restore(state["record"])


def add_prefix(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
