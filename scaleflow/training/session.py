"""The host's half of training: epochs, stretches of steps, validation, early stopping, events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from scaleflow.errors import Refusal
from scaleflow.interfaces import EarlyStopping, Emit, Feed, Training
from scaleflow.training.engine import Engine
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
    """One run, from the first step to the test: it tells of what the engine does, and when it is enough.

    Args:
        engine: takes the steps.
        options: how long, and in what portions.
        train, validation, test: the splits.
        emit: takes the metrics.
        started: when the command began, in seconds since the epoch.
        agree: called after each call of the engine with its duration in seconds; gives the duration
            that the next one's length follows from, and whether to stop.
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
    ) -> None:
        self._engine = engine
        self._train = train
        self._validation = validation
        self._test = test
        self._emit = emit
        self._started = started
        self._agree = agree
        self._length = length(options, train)
        self._pace = StepsPerLoop(options.steps_per_loop)
        self._patience = Patience(options.early_stopping)
        self._clock = Clock(train)
        self._epoch = 0
        self._values: dict[str, float] = {}
        self._stopped = False
        self.step = 0
        self.epochs = self._length.epochs
        self.steps_per_epoch = self._length.steps_per_epoch

    def run(self) -> Result:
        """Trains, validates after each epoch, and tests at the end."""
        self._engine.run(self._train, self)
        return Result(self._updates, self._stopped, {} if self._stopped else self._score("test", self._test))

    @property
    def _updates(self) -> int:
        """The optimizer's updates so far, by which what is reported is placed."""
        return self._engine.updates(self.step)

    # What the engine tells and asks ----------------------------------------------------------

    @property
    def first(self) -> int:
        return self.step - self._epoch * self.steps_per_epoch

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._clock = Clock(self._train)
        self._values = {}

    def next_steps(self) -> int:
        left = min(self.steps_per_epoch - self.first, self._length.total - self.step)
        if self._stopped or left <= 0:
            return 0
        return min(self._pace.next(), left) if self.step else 1

    def called(self, steps: int, means: Mapping[str, float], seconds: float) -> None:
        """One event to a call; the epoch's last one has the speed."""
        if self.step:  # the first call makes ready what later ones find
            self._clock.add(self.first, steps, seconds)
        else:
            self._emit("metrics", step=1, values={"perf/seconds_to_first_step": time.time() - self._started})
        agreed, self._stopped = self._agree(seconds)
        self._pace.took(steps, agreed)
        self.step += steps
        scale = self._engine.loss_scale
        values = prefixed("train", means) | ({} if scale is None else {"train/loss_scale": scale})
        is_last = self.first == self.steps_per_epoch or self.step == self._length.total
        self._values = values | (self._clock.speed() if is_last else {})
        self._emit("metrics", step=self._updates, values=self._values, rate=self._clock.examples_per_second)

    def end_epoch(self) -> bool:
        """Validates, unless the run was told to stop, and looks whether it is enough."""
        if self._stopped:
            return False
        done = self._epoch + 1
        values = {**self._values, **self._score("val", self._validation)}
        self._emit("epoch", epoch=done, epochs=self.epochs, step=self._updates, values=values)
        if self._patience.is_over(values):
            self._emit("note", text=f"stopped early after epoch {done}: {self._patience.reason}")
            return False
        return done < self.epochs

    # -----------------------------------------------------------------------------------------

    def _score(self, prefix: str, feed: Feed | None) -> dict[str, float]:
        """Evaluates a split, if there is one, and tells of it."""
        if feed is None:
            return {}
        values = prefixed(prefix, self._engine.evaluate(feed))
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
        return not monitor.endswith(("accuracy", "exact_match"))


def prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
