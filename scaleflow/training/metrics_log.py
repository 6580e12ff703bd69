"""Reports a session's metrics, and measures its speed."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from scaleflow.interfaces import Feed
from scaleflow.interfaces.events import Emit, MetricsLogged, WeightHistograms
from scaleflow.interfaces.quantiles import weighted_quantiles
from scaleflow.training.engine import Engine

#: `ru_maxrss` counts bytes on macOS and KiB elsewhere (getrusage(2)).
RSS_UNIT = 1 if sys.platform == "darwin" else 1 << 10
MIB = 1 << 20


def measure_peaks() -> dict[str, float]:
    """Returns the peaks since the process began, in MiB: resident host memory, and the largest of the GPUs.

    TensorFlow keeps no such count for CPU and TPU devices.
    """
    host = {"perf/peak_host_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / MIB}
    device_peaks = [peak for peak in map(measure_device_peak, list_gpu_names()) if peak is not None]
    return host | ({"perf/peak_device_mb": max(device_peaks) / MIB} if device_peaks else {})


def measure_device_peak(device: str) -> int | None:
    """Returns the peak of a device in bytes; None if TensorFlow does not count it."""
    try:
        return int(tf.config.experimental.get_memory_info(device)["peak"])
    except ValueError:
        return None


def list_gpu_names() -> list[str]:
    return [f"GPU:{number}" for number, _ in enumerate(tf.config.list_logical_devices("GPU"))]


BUCKETS = 30


def compute_histograms(model: keras.Model) -> Mapping[str, Mapping[str, Any]]:
    """Computes a histogram of each finite trainable variable, as JSON values, under `weights/<path>`."""
    weights = {f"weights/{v.path}": np.asarray(v.numpy(), np.float64) for v in model.trainable_variables}
    return {name: compute_histogram(values) for name, values in weights.items() if np.isfinite(values).all()}


def compute_histogram(values: np.ndarray[Any, Any]) -> Mapping[str, Any]:
    """Computes the histogram of finite values; `limits` are the upper ends of the buckets."""
    counts, edges = np.histogram(values, BUCKETS)
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "sum": float(values.sum()),
        "sum_squares": float(np.square(values).sum()),
        "limits": [float(edge) for edge in edges[1:]],
        "counts": [int(count) for count in counts],
    }


class FirstStep(Protocol):
    """Measures the time to the first step, in parts."""

    def end_part(self, part: str) -> None: ...

    def values(self) -> dict[str, float]:
        """Returns the measured times as metrics."""


class MetricsLog:
    """Reports the metrics of one run.

    Args:
        engine: the engine that trains.
        emit: receives the events.
        startup_timer: measures the parts of the time to the first step; None: they are not reported.
        peak_flops: the devices' peak, in floating-point operations per second, if known.
        histograms_every: epochs between histograms of the weights; None for no histograms.

    Attributes:
        clock: measures the speed of the epoch.
        values: the values of the epoch's last call.
        compiles: whether the next call compiles the training step.
    """

    def __init__(
        self,
        engine: Engine,
        emit: Emit,
        startup_timer: FirstStep | None = None,
        peak_flops: float | None = None,
        histograms_every: int | None = None,
    ) -> None:
        self.emit = emit
        self.values: dict[str, float] = {}
        self.compiles = True
        self._engine = engine
        self._startup_timer = startup_timer
        self._peak_flops = peak_flops
        self._histograms_every = histograms_every
        self.clock = EpochClock()
        self._earlier_step_ms: float | None = None
        self._has_started = False

    @property
    def usual_ms(self) -> float | None:
        """Mean milliseconds of an untraced step in this epoch; of an earlier epoch if this one has none yet."""
        return self.clock.step_ms or self._earlier_step_ms

    def begin_epoch(self, is_resumed: bool) -> None:
        self._earlier_step_ms = self.usual_ms
        self.clock = EpochClock()
        if not is_resumed:
            self.values = {}

    def report_first_step(self, step: int) -> None:
        """Reports what is known after the first step of this process, once; `step` is that step."""
        if self._has_started:
            return
        self._has_started = True
        flops = self._engine.flops_per_example
        values = {} if flops is None else {"perf/flops_per_example": flops}
        if self._startup_timer is not None:
            self._startup_timer.end_part("compile")
            values |= self._startup_timer.values()
        self.emit(MetricsLogged(self._engine.count_updates(step), values))

    def report_call(self, step: int, means: Mapping[str, float], rollbacks: int, is_last: bool) -> dict[str, float]:
        """Reports one call.

        Args:
            step: the updates so far.
            means: the loss and metrics, averaged over the epoch so far.
            rollbacks: rollbacks of the run so far.
            is_last: whether the call is the epoch's last one, which also reports the speed.

        Returns:
            The reported values, without the speed.
        """
        scale = self._engine.loss_scale
        values = add_prefix("train", means) | ({} if scale is None else {"train/loss_scale": scale})
        values |= {"train/rollbacks": float(rollbacks)} if rollbacks else {}
        self.values = values | ({**self._make_speed_metrics(), **measure_peaks()} if is_last else {})
        compiled, self.compiles = self.compiles or None, False
        self.emit(MetricsLogged(step, self.values, rate=self.clock.examples_per_second, compiled=compiled))
        return values

    def _make_speed_metrics(self) -> dict[str, float]:
        """Returns the epoch's speed metrics; `perf/mfu` is the used share of the devices' peak."""
        speed, flops = self.clock.speed(), self._engine.flops_per_example
        if speed and flops is not None and self._peak_flops is not None:
            speed["perf/mfu"] = speed["perf/examples_per_second"] * flops / self._peak_flops
        return speed

    def evaluate(self, prefix: str, feed: Feed | None, step: int) -> dict[str, float]:
        """Evaluates a split, if it exists, and reports the values at a step."""
        if feed is None:
            return {}
        values = add_prefix(prefix, self._engine.evaluate(feed))
        self.emit(MetricsLogged(step, values))
        return values

    def report_histograms(self, epochs: int, step: int) -> None:
        """Reports the histograms of the weights, if they are due after so many epochs."""
        if self._histograms_every is not None and epochs % self._histograms_every == 0:
            self.emit(WeightHistograms(step, compute_histograms(self._engine.gather_model())))


class EpochClock:
    """Measures the speed of an epoch's training calls, including the wait for input.

    The session does not add the first call of a process, which compiles, nor traced calls of single steps.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._examples = 0
        self._seconds = 0.0
        self._calls: list[tuple[float, int]] = []

    def add(self, examples: int, steps: int, seconds: float, waited: float) -> None:
        """Adds a call.

        Args:
            examples: examples of the call, without padding.
            steps: steps of the call.
            seconds: duration of the call.
            waited: seconds spent before the call to open the epoch's input; they count in the means only.
        """
        self._examples += examples
        self._steps += steps
        self._seconds += seconds + waited
        self._calls.append((seconds / steps, steps))

    @property
    def examples_per_second(self) -> float | None:
        return self._examples / self._seconds if self._seconds else None

    @property
    def step_ms(self) -> float | None:
        """Mean milliseconds of a step."""
        return 1000 * self._seconds / self._steps if self._steps else None

    def speed(self) -> dict[str, float]:
        """Returns the speed metrics of the epoch; none if no call was added. Each step counts with its call's mean."""
        if not self._seconds:
            return {}
        step_seconds, steps = zip(*self._calls, strict=True)
        p50, p95 = weighted_quantiles(np.array(step_seconds), [0.5, 0.95], np.array(steps))
        return {
            "perf/examples_per_second": self._examples / self._seconds,
            "perf/step_ms": 1000 * self._seconds / self._steps,
            "perf/step_ms_p50": 1000 * float(p50),
            "perf/step_ms_p95": 1000 * float(p95),
        }


def add_prefix(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
