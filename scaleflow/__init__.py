"""scaleflow: one command line, one distributed TensorFlow run, recorded in MLflow.

    from scaleflow import compose, run

    result = run("strategy=mirrored", "precision=mixed", "training.epochs=3")
    result.run_id, result.metrics["test/accuracy"]

Importing the package is fast: each public name is imported at its first use.
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
    from scaleflow.errors import ConfigError as ConfigError
    from scaleflow.features.checks.check import check_data as check_data
    from scaleflow.features.compare.runs import compare_runs as compare_runs
    from scaleflow.features.formats.convert import convert_model as convert_model
    from scaleflow.features.language.generate import generate_text as generate_text
    from scaleflow.features.pipelines.command import PipelineResult as PipelineResult
    from scaleflow.features.pipelines.command import run_pipeline as run_pipeline
    from scaleflow.features.promotion.promote import PromotionResult as PromotionResult
    from scaleflow.features.promotion.promote import promote_model as promote_model
    from scaleflow.features.script.in_process import Record as Record
    from scaleflow.features.script.in_process import fit as fit
    from scaleflow.features.search.refit import refit_run as refit_run
    from scaleflow.features.search.tune import tune_run as tune_run
    from scaleflow.runs.user_metrics import log_metric as log_metric

__version__ = "0.1.0"

#: Module -> its public names, for the core. `interfaces/features.py` finds the public names of features.
_NAMES = {
    "scaleflow.api": ("JobResult", "Result", "RunFailed", "SweepResult", "best_run", "compose", "run", "run_sweep"),
    "scaleflow.errors": ("ConfigError",),
    "scaleflow.runs.user_metrics": ("log_metric",),
}
_PLACES = {}
for _module, _names in _NAMES.items():
    _PLACES.update(dict.fromkeys(_names, _module))


def _list_places() -> dict[str, str]:
    """Returns public name -> module, for the core and all features."""
    from scaleflow.interfaces.features import list_features

    places = dict(_PLACES)
    for feature in list_features().values():
        for name, module in feature.public_names.items():
            places.setdefault(name, module)
    return places


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return ["__version__", *sorted(_list_places())]
    place = _PLACES.get(name)
    if place is None and not name.startswith("_"):
        place = _list_places().get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_list_places()})
