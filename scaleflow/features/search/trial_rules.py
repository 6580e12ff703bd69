"""Rules for choosing batch sizes and learning rates in trials. No TensorFlow."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Minimum number of examples in the first micro-batch tried, unless it does not fit.
FIRST_BATCH_SIZE = 8

#: Minimum number of steps per epoch. With fewer updates, a model learns less from the same examples.
STEPS_PER_EPOCH = 8

#: The search ends after this many doublings in a row without a faster measurement.
DOUBLINGS_WITHOUT_GAIN = 3

#: Sizes with at least this share of the fastest rate are measured again, because other work slows some measurements.
CLOSE = 0.85

#: How many times they are measured again.
ROUNDS = 3

#: The smallest size with at least this share of the fastest rate is chosen.
FAST_ENOUGH = 0.99

#: The next size is tried only if twice this one's memory is within this share of the available memory.
MEMORY_SHARE = 0.8

#: The rate test ends when the smoothed loss is this many times its minimum.
DIVERGENCE = 4.0

#: Weight of the past in the smoothed loss that ends the test.
MOMENTUM = 0.9

#: The chosen rate is the rate with the lowest loss, divided by this.
MARGIN = 10.0

#: The smoothed loss has to fall by at least this share, and by this many standard errors of a smoothed loss.
MIN_FALL = 0.01
MIN_ERRORS = 4.0


# The batch size ------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchMeasurement:
    """The measurement of one batch size."""

    batch_size: int  # examples in a micro-batch on one replica
    rate: float | None  # examples per second; None: does not fit into memory
    may_double: bool = True  # whether twice the size is expected to fit into memory
    host_mb: float = 0.0  # growth of the process's memory in MiB
    problem: str = ""  # why the size cannot be used, if not for memory


def choose_first_size(multiple: int, most: int) -> int:
    """Returns the first size to try: `multiple` times a power of two, at least 8 unless `most` is less."""
    size = multiple
    while size < FIRST_BATCH_SIZE and 2 * size <= most:
        size *= 2
    return size


def limit_batch_size(examples: int, parts: int, steps_per_epoch: int | None) -> int:
    """Returns the largest size to try, so that an epoch of `examples` has enough steps.

    Args:
        parts: replicas x `training.accumulate`.
        steps_per_epoch: the configured number; None: the whole split.
    """
    return max(1, examples // (parts * max(STEPS_PER_EPOCH, steps_per_epoch or 1)))


def choose_next_size(measurements: Sequence[BatchMeasurement], multiple: int, most: int) -> int | None:
    """Returns the next size to try, or None to end the search. `measurements` are in the order of their making.

    Sizes double. If the first one does not fit, they are halved.
    """
    if not measurements:
        return choose_first_size(multiple, most)
    last = measurements[-1]
    rates = [measurement.rate for measurement in measurements if measurement.rate is not None]
    if last.rate is None:
        can_halve = not rates and last.batch_size > multiple
        return last.batch_size // 2 if can_halve else None
    earlier = rates[:-DOUBLINGS_WITHOUT_GAIN]
    latest = rates[-DOUBLINGS_WITHOUT_GAIN:]
    is_no_faster = bool(earlier) and max(latest) <= max(earlier)
    is_halved = len(rates) < len(measurements)  # larger sizes did not fit
    if is_no_faster or is_halved or not last.may_double or 2 * last.batch_size > most:
        return None
    return 2 * last.batch_size


def list_close_sizes(measurements: Sequence[BatchMeasurement]) -> list[int]:
    """Returns the sizes to measure again, the largest first; empty if only one is close to the fastest."""
    best = max((measurement.rate or 0.0 for measurement in measurements), default=0.0)
    close = []
    for measurement in measurements:
        if measurement.rate is not None and measurement.rate >= CLOSE * best:
            close.append(measurement.batch_size)
    return sorted(close, reverse=True) if len(close) > 1 else []


def take_faster(measurements: Sequence[BatchMeasurement], again: BatchMeasurement) -> list[BatchMeasurement]:
    """Replaces a size's measurement if the new one is faster: disturbances only make measurements slower."""
    faster = []
    for measurement in measurements:
        is_same_size = measurement.batch_size == again.batch_size
        if is_same_size and (again.rate or 0.0) > (measurement.rate or 0.0):
            faster.append(again)
        else:
            faster.append(measurement)
    return faster


def fits_twice(before: float, peak: float, now: float, available: float) -> bool:
    """Returns whether twice the batch will fit into the host's memory, if it needs twice the memory of this one.

    Args:
        before: bytes of the process before the first measurement.
        peak, now: maximum of its bytes during this measurement, and its bytes afterwards.
        available: bytes that it may still allocate.
    """
    return 2 * (peak - before) - (now - before) <= MEMORY_SHARE * available


def explain_end(measurements: Sequence[BatchMeasurement], chosen: BatchMeasurement, most: int) -> str:
    """Returns why no larger batch was tried, if the chosen one is the largest that fits; empty otherwise."""
    larger = [measurement for measurement in measurements if measurement.batch_size > chosen.batch_size]
    if any(measurement.rate is not None for measurement in larger):
        return ""
    if larger and larger[0].problem:
        return f"; training.batch_size={larger[0].batch_size} cannot be used: {larger[0].problem}"
    if larger or not chosen.may_double:
        return "; twice that does not fit into the memory"
    if 2 * chosen.batch_size > most:
        return "; with twice that, an epoch would have too few steps"
    return ""


def choose_batch_size(measurements: Sequence[BatchMeasurement]) -> tuple[BatchMeasurement, str] | None:
    """Returns the smallest batch size that is fast enough, and why; None if no batch fits."""
    measured = [(measurement, measurement.rate) for measurement in measurements if measurement.rate is not None]
    if not measured:
        return None
    fastest, best = max(measured, key=lambda pair: pair[1])
    fast_enough = [(measurement, rate) for measurement, rate in measured if rate >= FAST_ENOUGH * best]
    chosen, rate = min(fast_enough, key=lambda pair: pair[0].batch_size)
    if chosen is fastest:
        return chosen, f"the fastest of {len(measured)}, {rate:,.0f} examples/s"
    share = f"{rate / best:.0%} of the fastest, {fastest.batch_size}"
    return chosen, f"the smallest of {len(measured)} that is fast enough: {rate:,.0f} examples/s, {share}"


# The learning rate ---------------------------------------------------------------------------


class Divergence:
    """Detects when the loss of a rate test has diverged."""

    def __init__(self) -> None:
        self._average = 0.0
        self._steps = 0
        self._least = math.inf

    def add(self, loss: float) -> bool:
        """Adds the loss of a step. Returns whether the smoothed loss is far above its minimum, or not finite."""
        self._steps += 1
        self._average = MOMENTUM * self._average + (1 - MOMENTUM) * loss
        smoothed = self._average / (1 - MOMENTUM**self._steps)
        self._least = min(self._least, smoothed)
        is_small = smoothed <= DIVERGENCE * self._least
        has_no_scale = -math.inf < self._least <= 0  # multiples mean nothing for a loss that is not positive
        return not (is_small or has_no_scale)


def smooth_losses(losses: Sequence[float], steps: int) -> list[float]:
    """Returns the mean of each loss and its neighbours: together a twentieth of the test's `steps`.

    Unlike an average over past losses, these means do not lag.
    """
    reach = find_reach(steps)
    means = []
    for at in range(len(losses)):
        near = min(reach, at, len(losses) - 1 - at)
        means.append(math.fsum(losses[at - near : at + near + 1]) / (2 * near + 1))
    return means


def find_reach(steps: int) -> int:
    """Returns how many neighbours on each side are averaged with a loss."""
    return steps // 40


def choose_rate(rates: Sequence[float], losses: Sequence[float], steps: int) -> tuple[float, str] | None:
    """Chooses a learning rate: a tenth of the rate with the lowest smoothed loss.

    Args:
        rates: the rate of each step, rising.
        steps: number of steps of the test if it does not end early.

    Returns:
        The rate with two digits, and why it was chosen; None if the loss does not fall.
    """
    smoothed = smooth_losses(losses, steps)
    reach = find_reach(steps)
    inner = range(reach, len(losses) - reach)  # the ends have fewer neighbours
    lowest = min(inner, key=smoothed.__getitem__, default=0)  # the step with the lowest smoothed loss
    if lowest <= reach:
        return None
    early = losses[: max(1, min(lowest, steps // 4))]  # at these rates the loss hardly changes
    start = math.fsum(early) / len(early)
    error = estimate_error(losses[: lowest + 1], reach)
    if start - smoothed[lowest] < max(MIN_FALL * abs(start), MIN_ERRORS * error):
        return None
    rate = float(f"{rates[lowest] / MARGIN:.1e}")
    reason = f"a tenth of the rate with the lowest smoothed loss, {rates[lowest]:.2g}"
    if len(rates) == steps and lowest == inner[-1]:
        reason += "; the loss still fell at the highest rate, so --high may be higher"
    return rate, reason


def estimate_error(losses: Sequence[float], reach: int) -> float:
    """Returns the standard error of a smoothed loss, estimated from differences of consecutive losses."""
    squares = [(after - before) ** 2 for before, after in itertools.pairwise(losses)]
    deviation = math.sqrt(math.fsum(squares) / len(squares) / 2)
    return deviation / math.sqrt(2 * reach + 1)
