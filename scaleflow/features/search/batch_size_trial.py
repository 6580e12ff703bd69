"""Finds the batch size with short trainings. `trial_rules.py` has the rules.

The trial does not validate, save or export.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from scaleflow.cluster.tasks import count_synchronous_workers
from scaleflow.config.plan import find_batch_multiple, set_values
from scaleflow.errors import ConfigError, NotFinite
from scaleflow.features.search.checks import is_searched, leave_schedule_out
from scaleflow.features.search.events import SettingFound
from scaleflow.features.search.trial_controller import TrialController
from scaleflow.features.search.trial_kinds import BatchSearch, RateTest
from scaleflow.features.search.trial_rules import (
    ROUNDS,
    BatchMeasurement,
    choose_batch_size,
    choose_first_size,
    choose_next_size,
    explain_end,
    fits_twice,
    limit_batch_size,
    list_close_sizes,
    take_faster,
)
from scaleflow.interfaces.events import Emit, MetricsLogged, PhaseBegan, RunEnded, ignore_event
from scaleflow.interfaces.formatting import format_csv
from scaleflow.runs import RunSpec
from scaleflow.worker.build import TrainingSetup, build_engine
from scaleflow.worker.data import prepare_data
from scaleflow.worker.failures import is_out_of_memory
from scaleflow.worker.runtime import StartupTimer

if TYPE_CHECKING:
    from scaleflow.training import Length, WorkerSync

#: A call of the compiled loop should take this many seconds, as in a run. Calls of at least half that time are
#: measured.
CALL_SECONDS = 0.5

#: A call takes at most this many times the steps of the previous call.
MAX_GROWTH = 64

#: Minimum seconds and calls for measuring a batch size, and maximum seconds.
MIN_SECONDS = 1.0
MIN_CALLS = 3
MAX_SECONDS = 10.0

#: Seconds between two checks of the process's memory.
SAMPLE_SECONDS = 0.01

BYTES_PER_MB = 1 << 20


class SpeedController(TrialController):
    """Measures the seconds per step.

    The first call compiles and is not measured. Later calls grow to half a second, as in a run, unless the run takes a
    `fixed` number of steps per call.
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
        wanted = int(CALL_SECONDS * steps / max(seconds, 1e-6))
        self._steps = max(1, min(wanted, MAX_GROWTH * steps))
        is_long_enough = seconds >= CALL_SECONDS / 2 or steps in (self._fixed, self.steps_per_epoch)
        if is_long_enough:
            self._measured.append(seconds / steps)
        if self._seconds >= MAX_SECONDS:
            if not self._measured:
                self._measured = [seconds / steps]
            return True
        return len(self._measured) >= MIN_CALLS and self._seconds >= MIN_SECONDS


class BatchSizeTrial:
    """Measures the examples per second of batch sizes that double.

    Each size gets its own engine, on the same devices and examples. `trial_rules` decides which sizes to try and which
    to choose.
    """

    def __init__(self, spec: RunSpec, emit: Emit, should_stop: Callable[[], bool], startup_timer: StartupTimer) -> None:
        from scaleflow import model, training

        if is_searched(spec.plan, RateTest.key):  # the rate is searched later, with the chosen batch size
            spec = replace(spec, plan=leave_schedule_out(spec.plan))
        self._spec = spec
        self._emit = emit
        self._timer = startup_timer
        self._emit_built = emit  # only the first engine's notes are shown: the others repeat them
        self._multiple = find_batch_multiple(spec.plan)
        first = set_values(spec.plan, {BatchSearch.key: choose_first_size(self._multiple, sys.maxsize)})
        self._data = prepare_data(first, emit, startup_timer)
        parts = self._data.runtime.batching.replicas * spec.plan.training.accumulate
        examples = len(self._data.splits.train)
        self._largest = limit_batch_size(examples, parts, spec.plan.training.steps_per_epoch)
        self._watch = MemoryWatch()
        self._before = self._watch.measure()
        self._size = choose_first_size(self._multiple, self._largest)
        # Keras numbers layers throughout a process. Patterns of layer names have to match in each model.
        self._build: Callable[[], TrainingSetup] = model.keep_names(self._build_engine)
        self._built: TrainingSetup | None = None  # the first size's engine, until it is measured
        self._stopped = False
        self._has_measured = False
        self.setup = self._build()
        self._sync = training.WorkerSync(self.setup.runtime.strategy, count_synchronous_workers(spec.plan), should_stop)

    def run(self) -> None:
        """Tries the sizes, then reports the chosen one and the end of the run."""
        self._built = self.setup
        self.setup = drop_engine(self.setup)
        self._emit_built = ignore_event
        with self._watch:
            measurements = self._measure_doubling_sizes()
            measurements = self._measure_close_sizes_again(measurements)
        if self._stopped:
            self._emit(RunEnded("KILLED", f"stopped at training.batch_size={self._size}"))
        else:
            self._report(measurements)
        self._sync.leave()

    def _measure_doubling_sizes(self) -> list[BatchMeasurement]:
        measurements: list[BatchMeasurement] = []
        while not self._stopped:
            size = choose_next_size(measurements, self._multiple, self._largest)
            if size is None:
                break
            measurements += self._try(size, "trying")
        return measurements

    def _measure_close_sizes_again(self, measurements: list[BatchMeasurement]) -> list[BatchMeasurement]:
        for number in range(ROUNDS):
            sizes = list_close_sizes(measurements)
            if number % 2:
                sizes.reverse()
            for size in sizes:
                for again in self._try(size, "measuring again"):
                    measurements = take_faster(measurements, again)
        return measurements

    def _build_engine(self) -> TrainingSetup:
        plan = set_values(self._spec.plan, {BatchSearch.key: self._size})
        data = self._data.divide(plan.training)
        return build_engine(plan, data, self._emit_built, startup_timer=self._timer)

    def _try(self, size: int, verb: str) -> list[BatchMeasurement]:
        """Measures a size and reports it. Returns an empty list if the trial was asked to stop."""
        if self._stopped:
            return []
        self._emit(PhaseBegan(f"{verb} training.batch_size={size}"))
        self._size = size
        measurement: BatchMeasurement | None
        try:
            measurement = self._measure_size()
        except ConfigError as problem:  # it occurs on all workers
            if not self._has_measured:
                raise
            measurement = BatchMeasurement(size, None, problem=str(problem))
        if measurement is None:
            return []
        if measurement.rate is not None:
            self._has_measured = True
            values = {"find/examples_per_second": measurement.rate, "find/host_mb": measurement.host_mb}
            self._emit(MetricsLogged(size, values))
        return [measurement]

    def _measure_size(self) -> BatchMeasurement | None:
        """Measures the current size. Returns None if the trial was asked to stop.

        A size that does not fit into memory has no rate. Raises ConfigError if the size cannot be trained with.
        """
        from scaleflow.dataset.batches.preprocessing import available_bytes

        workers = count_synchronous_workers(self._spec.plan)  # all run on this machine
        self._watch.start_again()
        rate = None
        try:
            rate = self._measure()
        except Exception as error:
            if workers > 1 or not is_out_of_memory(error):  # other workers would wait for this one forever
                raise
        finally:
            self._built = None
            gc.collect()
        if self._stopped:
            return None
        peak = self._watch.peak
        now = self._watch.measure()
        may_double = fits_twice(self._before, peak, now, available=available_bytes() / workers)
        may_double = self._sync.all(may_double)
        return BatchMeasurement(self._size, rate, may_double, host_mb=(peak - self._before) / BYTES_PER_MB)

    def _measure(self) -> float | None:
        """Returns the examples per second of an epoch with the current size, or None if the trial was asked to stop."""
        from scaleflow import training

        built = self._built if self._built is not None else self._build()
        options = built.plan.training
        feed = built.feeds.train
        length = training.compute_length(options, feed)
        controller = SpeedController(length, self._sync, fixed=find_fixed_steps(built))
        if built.engine.freezing is not None:  # this phase needs the largest memory
            built.engine.begin_freeze_phase(built.engine.freezing.largest, feed)
        try:
            built.engine.run(feed, controller)
        except NotFinite:
            raise ConfigError(
                "training.batch_size=auto: the loss is not finite after a few steps; use a lower "
                "optimizer.learning_rate"
            ) from None
        self._stopped = controller.stopped
        if controller.stopped:
            return None
        examples = min(length.steps_per_epoch * feed.batching.global_size, feed.examples)  # without padding
        return examples / (length.steps_per_epoch * controller.step_seconds)

    def _report(self, measurements: Sequence[BatchMeasurement]) -> None:
        choice = choose_batch_size(measurements)
        if choice is None:
            self._emit(RunEnded("FAILED", f"no batch fits, not even training.batch_size={measurements[-1].batch_size}"))
            return
        path = self._spec.folder / BatchSearch.table
        if self._spec.records:
            rows = []
            for measurement in measurements:
                rows.append((measurement.batch_size, measurement.rate or "", measurement.host_mb))
            path.write_text(format_csv(("batch_size", "examples_per_second", "host_mb"), sorted(rows)))
        chosen, reason = choice
        reason += explain_end(measurements, chosen, self._largest)
        self._emit(SettingFound(BatchSearch.key, chosen.batch_size, reason, path=str(path)))
        self._emit(RunEnded("FINISHED"))


class MemoryWatch:
    """Tracks the peak of this process's resident memory in a thread, because TensorFlow does not count CPU memory."""

    def __init__(self) -> None:
        self.peak = 0.0  # peak bytes since `start_again`
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
        """Returns the process's resident memory in bytes."""
        return float(self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self.measure())


def find_fixed_steps(setup: TrainingSetup) -> int | None:
    """Returns the number of steps that each call of the run takes, or None if the run adapts it."""
    options = setup.plan.training
    if options.steps_per_loop != "auto":
        return options.steps_per_loop
    return 1 if options.engine == "fit" else None


def drop_engine(setup: TrainingSetup) -> TrainingSetup:
    """Returns a setup without its engine, feeds and export, so that their memory can be freed."""
    nothing: Any = None
    return replace(setup, engine=nothing, feeds=nothing, export=nothing, facts=replace(setup.facts, metadata=None))
