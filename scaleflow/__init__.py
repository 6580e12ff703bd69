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
    from scaleflow.api import JobResult as JobResult
    from scaleflow.api import Result as Result
    from scaleflow.api import RunFailed as RunFailed
    from scaleflow.api import SweepResult as SweepResult
    from scaleflow.api import best_run as best_run
    from scaleflow.api import compose as compose
    from scaleflow.api import run as run
    from scaleflow.api import run_sweep as run_sweep
    from scaleflow.check import check_data as check_data
    from scaleflow.comparison.runs import compare_runs as compare_runs
    from scaleflow.convert import convert_model as convert_model
    from scaleflow.errors import ConfigError as ConfigError
    from scaleflow.generate import generate_text as generate_text
    from scaleflow.pipeline.command import PipelineResult as PipelineResult
    from scaleflow.pipeline.command import run_pipeline as run_pipeline
    from scaleflow.promote import PromotionResult as PromotionResult
    from scaleflow.promote import promote_model as promote_model
    from scaleflow.refit import refit_run as refit_run
    from scaleflow.runs.user_metrics import log_metric as log_metric
    from scaleflow.tune import tune_run as tune_run

__version__ = "0.1.0"

#: The public names, by the module that defines them.
_NAMES = {
    "scaleflow.api": ("JobResult", "Result", "RunFailed", "SweepResult", "best_run", "compose", "run", "run_sweep"),
    "scaleflow.check": ("check_data",),
    "scaleflow.comparison.runs": ("compare_runs",),
    "scaleflow.convert": ("convert_model",),
    "scaleflow.errors": ("ConfigError",),
    "scaleflow.generate": ("generate_text",),
    "scaleflow.pipeline.command": ("PipelineResult", "run_pipeline"),
    "scaleflow.promote": ("PromotionResult", "promote_model"),
    "scaleflow.refit": ("refit_run",),
    "scaleflow.tune": ("tune_run",),
    "scaleflow.runs.user_metrics": ("log_metric",),
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *sorted(_PLACES)]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
