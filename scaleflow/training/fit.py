"""The host's half of training: epochs, stretches of steps, validation, early stopping, events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from scaleflow.errors import Refusal
from scaleflow.interfaces import EarlyStopping, Emit, Feed, Training
from scaleflow.training.loop import Loop
from scaleflow.training.stretch import StepsPerLoop


@dataclass(frozen=True)
class Fit:
    """How training went.

    Attributes:
        steps: updates that were made.
        stopped: whether it was told to stop before it was through.
        test: loss and metrics on the test split.
    """

    steps: int
    stopped: bool
    test: Mapping[str, float]


@dataclass(frozen=True)
class Length:
    """How long a run is, in steps (updates)."""

    epochs: int
    steps_per_epoch: int
    total: int


def length(options: Training, feed: Feed) -> Length:
    """How many steps an epoch and the run have.

    Raises:
        Refusal: if an epoch is asked to be longer than the data is.
    """
    there = feed.batching.steps(feed.examples)
    per_epoch = options.steps_per_epoch or there
    if per_epoch > there:
        raise Refusal(
            f"training.steps_per_epoch={per_epoch}: the training split's {feed.examples} examples make {there} steps "
            f"of {feed.batching.global_size}; use at most {there}"
        )
    total = min(options.epochs * per_epoch, options.max_steps or options.epochs * per_epoch)
    return Length(math.ceil(total / per_epoch), per_epoch, total)


def check_monitor(options: Training, metrics: Collection[str], validates: bool) -> None:
    """Refuses to watch a value that there will not be."""
    if options.early_stopping is None:
        return
    splits = ["train", "val"] if validates else ["train"]
    there = [f"{split}/{name}" for split in splits for name in ("loss", *metrics)]
    if options.early_stopping.monitor not in there:
        raise Refusal(
            f"training.early_stopping.monitor={options.early_stopping.monitor}: there is no such value; "
            f"there is {', '.join(there)}"
        )


def fit(
    loop: Loop,
    options: Training,
    train: Feed,
    validation: Feed | None,
    test: Feed | None,
    *,
    emit: Emit,
    started: float,
    told_to_stop: Callable[[], bool],
) -> Fit:
    """Trains, validates after each epoch, and tests at the end.

    Args:
        loop: the compiled half.
        options: how long, and in what portions.
        train, validation, test: the splits.
        emit: takes the metrics.
        started: when the command began, in seconds since the epoch.
        told_to_stop: asked after each call of the compiled loop.
    """
    run = length(options, train)
    pace = StepsPerLoop(options.steps_per_loop)
    patience = Patience(options.early_stopping)
    step = 0
    for epoch in range(run.epochs):
        end = min(run.total, (epoch + 1) * run.steps_per_epoch)
        values, step = train_epoch(
            loop, train, epoch, run.steps_per_epoch, end, step, pace, emit, started, told_to_stop
        )
        if told_to_stop():
            return Fit(step, True, {})
        if validation is not None:
            scores = prefixed("val", loop.evaluate(validation))
            emit("metrics", step=step, values=scores)
            values = {**values, **scores}
        emit("epoch", epoch=epoch + 1, epochs=run.epochs, step=step, values=values)
        if patience.is_over(values):
            emit("note", text=f"stopped early after epoch {epoch + 1}: {patience.reason}")
            break
    tested = loop.evaluate(test) if test is not None else {}
    if tested:
        emit("metrics", step=step, values=prefixed("test", tested))
    return Fit(step, False, tested)


def train_epoch(
    loop: Loop,
    feed: Feed,
    epoch: int,
    steps_per_epoch: int,
    end: int,
    step: int,
    pace: StepsPerLoop,
    emit: Emit,
    started: float,
    told_to_stop: Callable[[], bool],
) -> tuple[dict[str, float], int]:
    """Trains up to step `end`, one event to a call; gives the epoch's values and the step reached."""
    first_of_epoch = epoch * steps_per_epoch
    opened = feed.open(epoch, step - first_of_epoch)
    loop.start_epoch()
    clock = Clock(feed)
    values: dict[str, float] = {}
    while step < end and not told_to_stop():
        steps = min(pace.next(), end - step) if step else 1
        begin = time.perf_counter()
        means = loop.train(feed, opened, epoch, step - first_of_epoch, steps, step)
        seconds = time.perf_counter() - begin
        pace.took(steps, seconds)
        values = prefixed("train", means)
        if loop.loss_scale is not None:
            values["train/loss_scale"] = loop.loss_scale
        if step == 0:
            emit("metrics", step=1, values={"perf/seconds_to_first_step": time.time() - started})
        else:
            clock.add(step - first_of_epoch, steps, seconds)
        step += steps
        speed = clock.speed() if step == end else {}
        emit("metrics", step=step, values={**values, **speed}, rate=clock.examples_per_second)
        values.update(speed)
    return values, step


class Clock:
    """Measures an epoch's training calls; the run's first call, which compiles, is left out."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._steps = 0
        self._examples = 0
        self._seconds = 0.0

    def add(self, first: int, steps: int, seconds: float) -> None:
        """Counts a call that took `steps` from the epoch's step `first` on."""
        size = self._feed.batching.global_size
        self._examples += min((first + steps) * size, self._feed.examples) - first * size
        self._steps += steps
        self._seconds += seconds

    @property
    def examples_per_second(self) -> float | None:
        return self._examples / self._seconds if self._seconds else None

    def speed(self) -> dict[str, float]:
        if not self._seconds:
            return {}
        return {
            "perf/examples_per_second": self._examples / self._seconds,
            "perf/step_ms": 1000 * self._seconds / self._steps,
        }


class Patience:
    """Early stopping: over when the monitored value has not improved for a number of epochs."""

    def __init__(self, options: EarlyStopping | None) -> None:
        self._options = options
        self._best = math.inf
        self._waited = 0
        self.reason = ""

    def is_over(self, values: Mapping[str, float]) -> bool:
        """Looks at an epoch's values."""
        if self._options is None:
            return False
        monitor = self._options.monitor
        value = values[monitor] if self._smaller_is_better(monitor) else -values[monitor]
        self._waited = 0 if value < self._best else self._waited + 1
        self._best = min(self._best, value)
        self.reason = f"{monitor} has not improved for {self._waited} epochs"
        return self._waited >= self._options.patience

    def _smaller_is_better(self, monitor: str) -> bool:
        assert self._options is not None
        if self._options.mode != "auto":
            return self._options.mode == "min"
        return not monitor.endswith("accuracy")


def prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
