"""Monitored metrics: the best value so far, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import Best, EarlyStopping, Objective
from scaleflow.training.metric_sums import MetricSums


def check_monitor(
    key: str, options: EarlyStopping | Best | None, objective: Objective, validates: bool, has_callbacks: bool = False
) -> None:
    """Checks that the monitored value is one that the run reports, or that a callback may report.

    Args:
        key: the config key of `options`, for the message.
        options: names the monitored value; None for no check.
        objective: what is reported.
        validates: whether there is a validation split.
        has_callbacks: whether there are callbacks of the user's.

    Raises:
        ConfigError: if the run does not report the value.
    """
    if options is None:
        return
    names = [f"train/{name}" for name in MetricSums(objective).names]
    if validates:
        names += [f"val/{name}" for name in MetricSums(objective, evaluates=True).names]
    if options.monitor not in names and not has_callbacks:
        raise ConfigError(f"{key}.monitor={options.monitor}: there is no such value; the values are {', '.join(names)}")
    if find_monitor_mode(options, objective.modes) is None:
        raise ConfigError(
            f"{key}.mode=auto with {key}.monitor={options.monitor}: scaleflow does not know whether larger values are "
            f"better; set {key}.mode=max or min"
        )


def find_monitor_mode(options: EarlyStopping | Best, modes: Mapping[str, str]) -> str | None:
    """Returns whether larger (`max`) or smaller (`min`) values are better; None if that is not known.

    Args:
        options: names the value.
        modes: `Objective.modes`.
    """
    return modes.get(options.monitor.partition("/")[2]) if options.mode == "auto" else options.mode


class BestValue:
    """The best value so far of a monitored metric.

    Args:
        options: the metric; None for no monitoring.
        modes: `Objective.modes`.
    """

    def __init__(self, options: EarlyStopping | Best | None, modes: Mapping[str, str]) -> None:
        self._options = options
        self._mode = options and find_monitor_mode(options, modes)
        self._value: float | None = None
        self._step: int | None = None

    def update(self, values: Mapping[str, float], step: int) -> bool:
        """Records an epoch's values; returns whether the monitored one is the best so far. NaN never is."""
        if self._options is None:
            return False
        lower_is_better = self._mode == "min"
        value = values.get(self._options.monitor)
        if value is None:
            raise RunError(
                f"{self._options.monitor} is monitored, but no callback has reported it in this epoch; the values are "
                f"{', '.join(name for name in values if not name.startswith('perf/'))}"
            )
        if math.isnan(value):
            return False
        if self._value is not None and not (value < self._value if lower_is_better else value > self._value):
            return False
        self._value, self._step = value, step
        return True

    @property
    def step(self) -> int | None:
        """The step of the best value; None before the first."""
        return self._step

    def state(self) -> dict[str, Any]:
        monitor = self._options and self._options.monitor
        return {"value": self._value, "step": self._step, "monitor": monitor, "mode": self._mode}

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Continues from a state, unless that is of another metric or mode; then it returns a note."""
        now = self.state()
        before = {name: state.get(name, now[name]) for name in ("monitor", "mode")}  # old checkpoints have no names
        if before.items() <= now.items():
            self._value, self._step = state["value"], state["step"]
            return None
        self._value = self._step = None
        if self._options is None or state["value"] is None:
            return None
        return (
            f"checkpoint.best: was chosen by {before['monitor']} ({before['mode']}), and now by {now['monitor']} "
            f"({now['mode']}): the best checkpoint is one of those from here on"
        )


class Patience:
    """Early stopping: ends the run if the monitored value has not improved for a number of epochs."""

    def __init__(self, options: EarlyStopping | None, modes: Mapping[str, str]) -> None:
        self._options = options
        self._record = BestValue(options, modes)
        self._waited = 0
        self.reason = ""

    def is_over(self, values: Mapping[str, float]) -> bool:
        """Records an epoch's values; returns whether to end the run."""
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
