"""scaleflow: one command line, one distributed TensorFlow run, recorded in MLflow.

    from scaleflow import compose, run

    result = run("strategy=mirrored", "precision=mixed", "training.epochs=3")
    result.run_id, result.metrics["test/accuracy"]

Importing the package imports nothing heavy: each public name is imported when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaleflow.api import Result, RunFailed, compose, run
    from scaleflow.check import check_data
    from scaleflow.comparison.runs import compare_runs
    from scaleflow.convert import convert_model
    from scaleflow.errors import ConfigError
    from scaleflow.pipeline.command import PipelineResult, run_pipeline
    from scaleflow.predict.texts import generate_text
    from scaleflow.promote import PromotionResult, promote_model
    from scaleflow.runs.user_metrics import log_metric
    from scaleflow.sweeps import JobResult, SweepResult, best_run, run_sweep

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "JobResult",
    "PipelineResult",
    "PromotionResult",
    "Result",
    "RunFailed",
    "SweepResult",
    "__version__",
    "best_run",
    "check_data",
    "compare_runs",
    "compose",
    "convert_model",
    "generate_text",
    "log_metric",
    "promote_model",
    "run",
    "run_pipeline",
    "run_sweep",
]

_PLACES = {
    "ConfigError": "scaleflow.errors",
    "JobResult": "scaleflow.sweeps",
    "PipelineResult": "scaleflow.pipeline.command",
    "PromotionResult": "scaleflow.promote",
    "Result": "scaleflow.api",
    "RunFailed": "scaleflow.api",
    "SweepResult": "scaleflow.sweeps",
    "best_run": "scaleflow.sweeps",
    "check_data": "scaleflow.check",
    "compare_runs": "scaleflow.comparison.runs",
    "compose": "scaleflow.api",
    "generate_text": "scaleflow.predict.texts",
    "convert_model": "scaleflow.convert",
    "log_metric": "scaleflow.runs.user_metrics",
    "promote_model": "scaleflow.promote",
    "run": "scaleflow.api",
    "run_pipeline": "scaleflow.pipeline.command",
    "run_sweep": "scaleflow.sweeps",
}


def __getattr__(name: str) -> Any:
    if name == "Refusal":  # the former name, kept for one release
        name = "ConfigError"
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
