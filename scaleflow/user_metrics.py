"""Metrics that a user's own code logs while a run trains, and what MLflow's fluent API does there.

A worker knows no store: it reports to the launcher, which records. So MLflow's fluent API would begin a run of its own
in a worker. There it raises an error that names `log_metric`.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

#: The module that holds MLflow's fluent API, and the function in it that finds or begins a run.
FLUENT, BEGIN = "mlflow.tracking.fluent", "_get_or_start_run"

#: What `log_metric` calls; None in a process that works on no run.
_log: Callable[[str, float], None] | None = None


def log_metric(name: str, value: Any) -> None:
    """Logs a metric of the run that this process trains, at the current step.

    It may be called in the hooks of a callback and in other code of yours that runs in Python while the run trains. Of
    several workers only the chief's values are recorded.

    Args:
        name: such as `gradients/norm`.
        value: a number, or an array or tensor that holds one.

    Raises:
        RuntimeError: if no run trains in this process.
        TypeError: if the value is not a number.
    """
    number = number_of(value)
    if number is None or not isinstance(name, str) or not name:
        raise TypeError(f"scaleflow.log_metric({name!r}, {type(value).__name__}): expected a name and a number")
    (_log or log_nowhere)(name, number)


def log_nowhere(name: str, value: float) -> None:
    """Raises: before and after the training there is no step to log a metric at."""
    raise RuntimeError(
        f"scaleflow.log_metric({name!r}): no run trains in this process; call it in the hooks of a callback"
    )


def number_of(value: Any) -> float | None:
    """A value as a number; None if it is not a number, or if only a running graph knows it."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def user_metrics(log: Callable[[str, float], None] = log_nowhere) -> Iterator[None]:
    """While it lasts `log_metric` calls `log`, and MLflow's fluent API begins no run of its own."""
    global _log
    before, _log = _log, log
    guard_mlflow()
    try:
        yield
    finally:
        _log = before


def guard_mlflow() -> None:
    """Guards MLflow's fluent API, now or when a user's code imports it."""
    if FLUENT in sys.modules:
        guard(sys.modules[FLUENT])
    elif not any(isinstance(finder, FluentFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FluentFinder())


def guard(fluent: ModuleType) -> None:
    """Has the fluent API raise an error instead of beginning a run in a worker."""
    begin = getattr(fluent, BEGIN, None)
    if begin is None or hasattr(begin, "__wrapped__"):
        return

    def begin_unless_in_worker() -> Any:
        if _log is not None and fluent.active_run() is None:
            raise RuntimeError(
                "MLflow's fluent API (mlflow.log_metric and so on) would begin another run, since the launcher records "
                "this one; use scaleflow.log_metric(name, value) in the hooks of a callback"
            )
        return begin()

    begin_unless_in_worker.__wrapped__ = begin  # type: ignore[attr-defined]
    setattr(fluent, BEGIN, begin_unless_in_worker)


class FluentFinder(importlib.abc.MetaPathFinder):
    """Guards MLflow's fluent API once it is imported.

    It stays in `sys.meta_path`: another thread that imports would skip a finder if this one were removed.
    """

    def __init__(self) -> None:
        self._is_searching = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Called by Python's import."""
        if name != FLUENT or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_guard(module: ModuleType) -> None:
            execute(module)
            guard(module)

        spec.loader.exec_module = execute_and_guard  # type: ignore[method-assign]
        return spec
