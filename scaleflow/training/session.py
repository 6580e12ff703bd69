"""The host's half of training: epochs, stretches of steps, validation, early stopping, events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from scaleflow.errors import Refusal
from scaleflow.interfaces import EarlyStopping, Emit, Feed, Training
from scaleflow.training.loop import Loop
from scaleflow.training.stretch import StepsPerLoop


@dataclass(frozen=True)
class Result:
    """How a session went.

    Attributes:
        steps: updates that were made.
        stopped: whether it was told to stop before it was through.
        test: `test/loss` and the metrics on the test split.
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


class Session:
    """One run of the loop, from the first step to the test.

    Args:
        loop: the compiled half.
        options: how long, and in what portions.
        train, validation, test: the splits.
        emit: takes the metrics.
        started: when the command began, in seconds since the epoch.
        agree: called after each call of the compiled loop with its duration in seconds; gives the duration
            that the next one's length follows from, and whether to stop.
    """

    def __init__(
        self,
        loop: Loop,
        options: Training,
        train: Feed,
        validation: Feed | None,
        test: Feed | None,
        *,
        emit: Emit,
        started: float,
        agree: Callable[[float], tuple[float, bool]],
    ) -> None:
        self._loop = loop
        self._train = train
        self._validation = validation
        self._test = test
        self._emit = emit
        self._started = started
        self._agree = agree
        self._length = length(options, train)
        self._pace = StepsPerLoop(options.steps_per_loop)
        self._patience = Patience(options.early_stopping)
        self._step = 0
        self._stopped = False

    def run(self) -> Result:
        """Trains, validates after each epoch, and tests at the end."""
        for epoch in range(self._length.epochs):
            values = self._train_epoch(epoch)
            if self._stopped:
                return Result(self._updates, True, {})
            values = {**values, **self._score("val", self._validation)}
            self._emit("epoch", epoch=epoch + 1, epochs=self._length.epochs, step=self._updates, values=values)
            if self._patience.is_over(values):
                self._emit("note", text=f"stopped early after epoch {epoch + 1}: {self._patience.reason}")
                break
        return Result(self._updates, False, self._score("test", self._test))

    @property
    def _updates(self) -> int:
        """The optimizer's updates so far, by which what is reported is placed."""
        return self._loop.updates(self._step)

    def _train_epoch(self, epoch: int) -> dict[str, float]:
        """Trains to the epoch's end, or the run's, one event to a call; gives the epoch's values."""
        begin = epoch * self._length.steps_per_epoch
        end = min(begin + self._length.steps_per_epoch, self._length.total)
        opened = self._train.open(epoch, self._step - begin)
        self._loop.start_epoch()
        clock = Clock(self._train)
        values: dict[str, float] = {}
        while self._step < end and not self._stopped:
            first = self._step - begin
            steps = min(self._pace.next(), end - self._step) if self._step else 1
            means, seconds = self._call(opened, epoch, first, steps)
            if self._step:  # the first call makes ready what later ones find
                clock.add(first, steps, seconds)
            self._step += steps
            speed = clock.speed() if self._step == end else {}
            values = {**means, **speed}
            self._emit("metrics", step=self._updates, values=values, rate=clock.examples_per_second)
        return values

    def _call(self, opened: Any, epoch: int, first: int, steps: int) -> tuple[dict[str, float], float]:
        """One call of the compiled loop: its values, and its duration in seconds."""
        begin = time.perf_counter()
        values = prefixed("train", self._loop.train(self._train, opened, epoch, first, steps, self._step))
        seconds = time.perf_counter() - begin
        if not self._step:
            self._emit("metrics", step=1, values={"perf/seconds_to_first_step": time.time() - self._started})
        if self._loop.loss_scale is not None:
            values["train/loss_scale"] = self._loop.loss_scale
        agreed, self._stopped = self._agree(seconds)
        self._pace.took(steps, agreed)
        return values, seconds

    def _score(self, prefix: str, feed: Feed | None) -> dict[str, float]:
        """Evaluates a split, if there is one, and tells of it."""
        if feed is None:
            return {}
        values = prefixed(prefix, self._loop.evaluate(feed))
        self._emit("metrics", step=self._updates, values=values)
        return values


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
        self.reason = f"{monitor} has not improved for {self._waited} epoch{'s' if self._waited > 1 else ''}"
        return self._waited >= self._options.patience

    def _smaller_is_better(self, monitor: str) -> bool:
        assert self._options is not None
        if self._options.mode != "auto":
            return self._options.mode == "min"
        return not monitor.endswith("accuracy")


def prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
