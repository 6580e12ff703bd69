"""Logs metrics from user code during training, and guards MLflow's fluent API in workers.

A worker has no access to the store: it reports metrics to the launcher, which records them. MLflow's fluent API would
start a separate run in a worker, so it raises an error there that names `log_metric`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

#: MLflow's module with the fluent API, and its function that finds or starts a run.
FLUENT = "mlflow.tracking.fluent"
BEGIN = "_get_or_start_run"

#: The function that `log_metric` calls; None outside of `user_metrics`.
_log: Callable[[str, float], None] | None = None


def log_metric(name: str, value: Any) -> None:
    """Logs a metric at the current step of the run that this process trains.

    Call it in the hooks of a callback, or in other Python code that runs during training. With several workers, only
    the chief's values are recorded.

    Args:
        name: the metric's name, such as `gradients/norm`.
        value: a number, or an array or tensor that contains one.

    Raises:
        RuntimeError: if no run trains in this process.
        TypeError: if the value is not a number.
    """
    number = number_of(value)
    if number is None or not isinstance(name, str) or not name:
        raise TypeError(f"scaleflow.log_metric({name!r}, {type(value).__name__}): expected a name and a number")
    (_log or log_nowhere)(name, number)


def log_nowhere(name: str, value: float) -> None:
    """Raises RuntimeError: before and after training there is no step to log a metric at."""
    raise RuntimeError(
        f"scaleflow.log_metric({name!r}): no run trains in this process; call it in the methods of a callback"
    )


def number_of(value: Any) -> float | None:
    """Converts a value to a float; None for other types and symbolic tensors."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def user_metrics(log: Callable[[str, float], None] = log_nowhere) -> Iterator[None]:
    """Makes `log_metric` call `log` while the context is open, and stops MLflow's fluent API from starting a run."""
    import wrapt

    global _log
    before = _log
    _log = log
    wrapt.register_post_import_hook(refuse_runs, FLUENT)  # if MLflow is already imported, this calls the hook now
    try:
        yield
    finally:
        _log = before


def refuse_runs(fluent: ModuleType) -> None:
    """Makes the fluent API raise an error instead of starting a run in a worker."""
    begin = getattr(fluent, BEGIN, None)
    if begin is None or hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def begin_unless_in_worker() -> Any:
        if _log is not None and fluent.active_run() is None:
            raise RuntimeError(
                "MLflow's fluent API (mlflow.log_metric and so on) would start another run, because the launcher "
                "records this one; use scaleflow.log_metric(name, value) in the methods of a callback"
            )
        return begin()

    setattr(fluent, BEGIN, begin_unless_in_worker)
