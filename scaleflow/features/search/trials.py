"""Trains for a short time to find a setting: the learning rate, or the batch size. `trial_rules.py` has the rules.

A trial is the host of an engine, as a session is, and decides how many steps it takes. It does not validate, save or
export.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from scaleflow.cluster.tasks import count_synchronous_workers
from scaleflow.config.plan import find_batch_multiple, set_values
from scaleflow.errors import ConfigError, NotFinite
from scaleflow.features.search.checks import is_searched, leave_schedule_out
from scaleflow.features.search.events import SettingFound
from scaleflow.features.search.trial_kinds import BatchSearch, RateTest
from scaleflow.features.search.trial_rules import (
    ROUNDS,
    BatchMeasurement,
    Divergence,
    choose_batch_size,
    choose_first_size,
    choose_next_size,
    choose_rate,
    explain_end,
    fits_twice,
    limit_batch_size,
    list_close_sizes,
    smooth_losses,
    take_faster,
)
from scaleflow.interfaces.events import Emit, MetricsLogged, PhaseBegan, RunEnded, ignore_event
from scaleflow.interfaces.formatting import format_csv
from scaleflow.runs import RunSpec
from scaleflow.worker.build import TrainingSetup, build_engine, build_training
from scaleflow.worker.data import prepare_data
from scaleflow.worker.failures import is_out_of_memory
from scaleflow.worker.runtime import StartupTimer

if TYPE_CHECKING:
    from scaleflow.training import Length, Loop, WorkerSync

#: The seconds that a call of the compiled loop should take, as in a run; calls of at least half of that are measured.
CALL_SECONDS = 0.5

#: The seconds and calls for which a batch size is measured, and the longest time.
MIN_SECONDS, MIN_CALLS, MAX_SECONDS = 1.0, 3, 10.0

#: A trial ends before this many epochs.
MANY_EPOCHS = 1_000_000

#: Seconds between two checks of the process's memory.
SAMPLE_SECONDS = 0.01


class TrialHost:
    """The `Host` of one engine in a trial, without an end of its own. `Host` describes the methods."""

    def __init__(self, length: Length, sync: WorkerSync) -> None:
        self.epochs = MANY_EPOCHS
        self.epoch = 0
        self.step = 0
        self.steps_per_epoch = length.steps_per_epoch
        self.stopped = False  # by a request
        self.is_over = False
        self._sync = sync

    @property
    def first(self) -> int:
        return self.step - self.epoch * self.steps_per_epoch

    @property
    def steps_left(self) -> int:
        return 0 if self.is_over else self.steps_per_epoch - self.first

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def next_steps(self) -> int:
        return min(self.steps_left, self.choose_steps())

    def trace_call(self) -> AbstractContextManager[bool]:
        return contextlib.nullcontext(False)

    def end_call(self, steps: int, means: Mapping[str, float], seconds: float, waited: float = 0.0) -> None:
        agreed, self.stopped = self._sync(seconds + waited)
        self.step += steps
        self.is_over = self.stopped or self.record_call(steps, agreed)

    def end_epoch(self) -> bool:
        return not self.is_over

    def choose_steps(self) -> int:
        """Returns the number of steps of the next call."""
        raise NotImplementedError

    def record_call(self, steps: int, seconds: float) -> bool:
        """Records a call; returns whether the trial is over."""
        raise NotImplementedError


class RateTrial(TrialHost):
    """Raises the learning rate from step to step, and records the loss of each.

    Raises ConfigError if the training step has its own optimizers.
    """

    def __init__(
        self, spec: RunSpec, test: RateTest, emit: Emit, should_stop: Callable[[], bool], startup_timer: StartupTimer
    ) -> None:
        from scaleflow import training

        plan = spec.plan
        length = {"training.epochs": test.steps, "training.max_steps": test.steps}  # also of the choice of XLA
        plan = set_values(plan, {"optimizer.learning_rate": test.low, **length})
        self.setup = build_training(plan, emit, startup_timer)
        plan = self.setup.plan
        if self.setup.engine.optimizer is None:
            raise ConfigError(
                f"training.step._target_={plan.training.step and plan.training.step.path}: its update applies its own "
                "optimizers, whose rates the test cannot raise; set the rate by hand"
            )
        self._sync = training.WorkerSync(self.setup.runtime.strategy, count_synchronous_workers(spec.plan), should_stop)
        super().__init__(training.compute_length(plan.training, self.setup.feeds.train), self._sync)
        self._engine: Loop = self.setup.engine  # type: ignore[assignment]  # the only one that is not refused
        self._spec, self._test, self._emit = spec, test, emit
        self._divergence = Divergence()
        self._losses: list[float] = []

    def run(self) -> None:
        """Takes the steps, and reports the rate that is found and the end of the run."""
        self._engine.begin_freeze_phase(0, self.setup.feeds.train)
        with contextlib.suppress(NotFinite):  # the loss has diverged
            self._engine.run(self.setup.feeds.train, self)
        if self.stopped:
            self._emit(RunEnded("KILLED", f"stopped at step {self.step}"))
        else:
            self._report()
        self._sync.leave()

    def choose_steps(self) -> int:
        return 1

    def record_call(self, steps: int, seconds: float) -> bool:
        test, at, loss = self._test, self.step - 1, self._engine.last_loss
        self._losses.append(loss)
        self._emit(MetricsLogged(self.step, {"train/loss": loss, "find/learning_rate": test.rate_at(at)}))
        if self._divergence.add(loss) or self.step == test.steps:
            return True
        self._engine.set_rate_factor(test.rate_at(self.step) / test.low, test.rate_at(at) / test.low)
        return False

    def _report(self) -> None:
        test, losses = self._test, self._losses
        rates = [test.rate_at(step) for step in range(len(losses))]
        found = choose_rate(rates, losses, test.steps)
        if found is None:
            why = f"the loss does not fall at any learning rate from {test.low:g} to {test.high:g}"
            self._emit(RunEnded("FAILED", f"{why}; check the data and the model, or try other bounds (--low, --high)"))
            return
        path = self._spec.folder / test.table
        if self._spec.records:
            columns = {"learning_rate": rates, "loss": losses, "smoothed_loss": smooth_losses(losses, test.steps)}
            path.write_text(format_csv(list(columns), zip(*columns.values(), strict=True)))
        self._emit(SettingFound(test.key, found[0], found[1], path=str(path)))
        self._emit(RunEnded("FINISHED"))


class SpeedHost(TrialHost):
    """Measures the seconds of a step.

    The first call compiles. Calls then grow to half a second, as in a run, unless their steps are `fixed` there, too.
    """

    def __init__(self, length: Length, sync: WorkerSync, fixed: int | None) -> None:
        super().__init__(length, sync)
        self._fixed = fixed
        self._steps = 1
        self._calls = 0
        self._seconds = 0.0
        self._measured: list[float] = []

    @property
    def step_seconds(self) -> float:
        return statistics.median(self._measured)

    def choose_steps(self) -> int:
        return self._fixed or self._steps

    def record_call(self, steps: int, seconds: float) -> bool:
        self._calls += 1
        if self._calls == 1:
            return False
        self._seconds += seconds
        self._steps = max(1, min(int(CALL_SECONDS * steps / max(seconds, 1e-6)), 64 * steps))
        if seconds >= CALL_SECONDS / 2 or steps in (self._fixed, self.steps_per_epoch):
            self._measured.append(seconds / steps)
        if self._seconds >= MAX_SECONDS:
            self._measured = self._measured or [seconds / steps]
            return True
        return len(self._measured) >= MIN_CALLS and self._seconds >= MIN_SECONDS


class BatchSizeTrial:
    """Measures the examples per second of batch sizes that double.

    Each size gets its own engine, on the same devices and examples. The rules choose what is tried and what is found.
    """

    def __init__(self, spec: RunSpec, emit: Emit, should_stop: Callable[[], bool], startup_timer: StartupTimer) -> None:
        from scaleflow import model, training

        if is_searched(spec.plan, RateTest.key):  # its search comes later, with the batch size that is found
            spec = replace(spec, plan=leave_schedule_out(spec.plan))
        self._spec, self._emit, self._timer = spec, emit, startup_timer
        self._emit_built = emit  # the notes of the first engine are those of all
        self._multiple = find_batch_multiple(spec.plan)
        first = set_values(spec.plan, {"training.batch_size": choose_first_size(self._multiple, sys.maxsize)})
        self._data = prepare_data(first, emit, startup_timer)
        parts = self._data.runtime.batching.replicas * spec.plan.training.accumulate
        examples = len(self._data.splits.train)
        self._largest = limit_batch_size(examples, parts, spec.plan.training.steps_per_epoch)
        self._watch = MemoryWatch()
        self._before = self._watch.measure()
        self._size = choose_first_size(self._multiple, self._largest)
        # Keras numbers layers through a whole process, and patterns have to match those of each model.
        self._build: Callable[[], TrainingSetup] = model.keep_names(self._build_engine)
        self._built: TrainingSetup | None = None
        self._stopped = False
        self._has_measured = False
        self.setup = self._build()
        self._sync = training.WorkerSync(self.setup.runtime.strategy, count_synchronous_workers(spec.plan), should_stop)

    def run(self) -> None:
        """Tries the sizes, and reports the one that is found and the end of the run."""
        measurements: list[BatchMeasurement] = []
        self._built, self.setup = self.setup, drop_engine(self.setup)
        self._emit_built = ignore_event
        with self._watch:
            while (
                not self._stopped
                and (size := choose_next_size(measurements, self._multiple, self._largest)) is not None
            ):
                measurements += self._try(size, "trying")
            for number in range(ROUNDS):
                sizes = list_close_sizes(measurements)
                for size in reversed(sizes) if number % 2 else sizes:
                    for again in self._try(size, "measuring again"):
                        measurements = take_faster(measurements, again)
        if self._stopped:
            self._emit(RunEnded("KILLED", f"stopped at training.batch_size={self._size}"))
        else:
            self._report(measurements)
        self._sync.leave()

    def _build_engine(self) -> TrainingSetup:
        plan = set_values(self._spec.plan, {"training.batch_size": self._size})
        data = self._data.divide(plan.training)
        return build_engine(plan, data, self._emit_built, startup_timer=self._timer)

    def _try(self, size: int, verb: str) -> list[BatchMeasurement]:
        """Measures a size, and reports it; returns nothing if the trial is asked to stop."""
        if self._stopped:
            return []
        self._emit(PhaseBegan(f"{verb} training.batch_size={size}"))
        self._size = size
        measurement: BatchMeasurement | None
        try:
            measurement = self._measure_size()
        except ConfigError as problem:  # all workers meet it
            if not self._has_measured:
                raise
            measurement = BatchMeasurement(size, None, problem=str(problem))
        if measurement is None:
            return []
        if measurement.rate is not None:
            self._has_measured = True
            self._emit(
                MetricsLogged(size, {"find/examples_per_second": measurement.rate, "find/host_mb": measurement.host_mb})
            )
        return [measurement]

    def _measure_size(self) -> BatchMeasurement | None:
        """Measures the current size; returns None if the trial is asked to stop. A size that does not fit has no rate.

        Raises ConfigError if nothing can be trained with the size.
        """
        from scaleflow.dataset.batches.preprocessing import available_bytes

        workers = count_synchronous_workers(self._spec.plan)  # all of them are on this machine
        self._watch.start_again()
        rate = None
        try:
            rate = self._measure()
        except Exception as error:
            if not (workers == 1 and is_out_of_memory(error)):  # the others would wait for this worker for ever
                raise
        finally:
            self._built = None
            gc.collect()
        if self._stopped:
            return None
        peak, now = self._watch.peak, self._watch.measure()
        may_double = self._sync.all(fits_twice(self._before, peak, now, available=available_bytes() / workers))
        return BatchMeasurement(self._size, rate, may_double, host_mb=(peak - self._before) / (1 << 20))

    def _measure(self) -> float | None:
        """Returns the examples per second of an epoch with the current size; None if the trial is asked to stop."""
        from scaleflow import training

        built = self._built if self._built is not None else self._build()
        options, feed = built.plan.training, built.feeds.train
        length = training.compute_length(options, feed)
        fixed = None if options.steps_per_loop == "auto" else options.steps_per_loop
        if options.engine == "fit":
            fixed = fixed or 1
        host = SpeedHost(length, self._sync, fixed)
        if built.engine.freezing is not None:  # the most memory is needed then
            built.engine.begin_freeze_phase(built.engine.freezing.largest, feed)
        try:
            built.engine.run(feed, host)
        except NotFinite:
            raise ConfigError(
                "training.batch_size=auto: the loss is not finite after a few steps; use a lower "
                "optimizer.learning_rate"
            ) from None
        self._stopped = host.stopped
        if host.stopped:
            return None
        examples = min(length.steps_per_epoch * feed.batching.global_size, feed.examples)  # without padding
        return examples / (length.steps_per_epoch * host.step_seconds)

    def _report(self, measurements: Sequence[BatchMeasurement]) -> None:
        found = choose_batch_size(measurements)
        if found is None:
            self._emit(RunEnded("FAILED", f"no batch fits, not even training.batch_size={measurements[-1].batch_size}"))
            return
        path = self._spec.folder / BatchSearch.table
        if self._spec.records:
            rows = [
                (measurement.batch_size, measurement.rate or "", measurement.host_mb) for measurement in measurements
            ]
            path.write_text(format_csv(("batch_size", "examples_per_second", "host_mb"), sorted(rows)))
        chosen, reason = found
        reason += explain_end(measurements, chosen, self._largest)
        self._emit(SettingFound(BatchSearch.key, chosen.batch_size, reason, path=str(path)))
        self._emit(RunEnded("FINISHED"))


class MemoryWatch:
    """Watches the resident memory of this process in a thread. TensorFlow keeps no count for a CPU."""

    def __init__(self) -> None:
        self.peak = 0.0  # the most bytes since `start_again`
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def start_again(self) -> None:
        self.peak = self.measure()

    def measure(self) -> float:
        """Returns the bytes of now."""
        return float(self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self.measure())


def drop_engine(setup: TrainingSetup) -> TrainingSetup:
    """Returns what is left of a setup when its engine is no longer needed, whose memory is then free."""
    nothing: Any = None
    return replace(setup, engine=nothing, feeds=nothing, export=nothing, facts=replace(setup.facts, metadata=None))
