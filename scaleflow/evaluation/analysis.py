"""Analyses the kept predictions of a split: the metrics of all outputs and the user's own metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleflow.evaluation.outputs import OutputAnalysis, analyse_output
from scaleflow.evaluation.own_metrics import Metrics, measure_own
from scaleflow.evaluation.predictions import Predictions
from scaleflow.interfaces import EvaluationOptions, name_leaves, name_metric
from scaleflow.interfaces.estimate import Estimate
from scaleflow.interfaces.formatting import to_json

#: The file with all metrics.
METRICS = "metrics.json"

#: Metrics of the analysis with these suffixes are also logged for the run.
RUN_METRICS = ("_at_threshold", "coverage", "set_size", "pinball")

#: Metrics that are also logged for the run if one of two classes is rare.
RARE_CLASS_METRICS = ("roc_auc", "average_precision")

#: The facts of an output that are written to the file.
WRITTEN_FACTS = ("quantiles", "confused", "thresholds")

#: scikit-learn functions that compute the same as a metric.
SAME_FIGURES = {
    "accuracy_score": "accuracy",
    "balanced_accuracy_score": "balanced_accuracy",
    "roc_auc_score": "roc_auc",
    "average_precision_score": "average_precision",
    "precision_score": "precision",
    "recall_score": "recall",
    "f1_score": "f1",
    "log_loss": "log_loss",
    "mean_absolute_error": "mae",
    "root_mean_squared_error": "rmse",
    "r2_score": "r2",
}


@dataclass(frozen=True)
class Analysis:
    """The metrics of a split's kept predictions."""

    outputs: Sequence[OutputAnalysis]
    #: the metrics of all examples, by name: `accuracy`, or `price/mae` with several outputs
    estimates: Mapping[str, Estimate]
    own: Sequence[str]  # the names of metrics that are logged for the run, though training does not compute them
    missing: Mapping[str, str]  # why some of the user's metrics are missing, by name


def analyse_predictions(predictions: Predictions, options: EvaluationOptions, metrics: Metrics) -> Analysis:
    """Computes all metrics of kept predictions.

    Args:
        metrics: the functions of `evaluation.metrics`, by name.
    """
    outputs: list[OutputAnalysis] = []
    own: list[str] = []
    missing: dict[str, str] = {}
    for name, described in name_leaves(predictions.outputs).items():
        output = analyse_output(predictions, name, described, interval_count=options.intervals, costs=options.costs)
        outputs.append(output)
        if metrics:
            measured, faults = measure_own(predictions, name, described, metrics=metrics, seconds=options.seconds)
            faults |= add_own_metrics(output, measured, metrics)
            own += [name_metric(name, metric) for metric in measured if metric not in faults]
            missing |= {name_metric(name, metric): why for metric, why in faults.items()}
    estimates: dict[str, Estimate] = {}
    for output in outputs:
        for metric, estimate in output.estimates.items():
            estimates[name_metric(output.name, metric)] = estimate
    own += [name for name in estimates if name.endswith(RUN_METRICS) and name not in own]
    for output in outputs:
        if output.facts.get("is_rare"):
            own += [name_metric(output.name, metric) for metric in RARE_CLASS_METRICS]
    return Analysis(outputs, estimates, own, missing)


def add_own_metrics(output: OutputAnalysis, measured: Mapping[str, Estimate], metrics: Metrics) -> dict[str, str]:
    """Adds the user's metrics to an output. Returns the reason for each that is not added, by name."""
    faults: dict[str, str] = {}
    added: dict[str, Estimate] = {}
    for name, estimate in measured.items():
        if name in output.estimates:
            faults[name] = "the report has a figure of this name; use another"
        else:
            added[name] = find_same(metrics[name], estimate, output) or estimate
    output.estimates.update(added)
    return faults


def find_same(metric: Callable[..., Any], own: Estimate, output: OutputAnalysis) -> Estimate | None:
    """Returns the output's own metric if a scikit-learn metric computes it again, so that it has only one interval."""
    function = getattr(metric, "func", metric)
    if not str(getattr(function, "__module__", "")).startswith("sklearn."):
        return None
    name = SAME_FIGURES.get(str(getattr(function, "__name__", "")), "")
    estimates = [output.estimates.get(name), output.estimates.get(f"{name}_at_threshold")]
    if len(output.classes) == 2:
        estimates.append(output.classes[1].get(name))
    for estimate in estimates:
        if estimate is not None and math.isclose(estimate.value, own.value, rel_tol=1e-6, abs_tol=1e-9):
            return estimate
    return None


def write_metrics(predictions: Predictions, analysis: Analysis) -> str:
    """Returns the content of `metrics.json`."""
    outputs = {}
    for output in analysis.outputs:
        outputs[output.name] = {
            "examples": len(output.rows),
            "metrics": {name: estimate._asdict() for name, estimate in output.estimates.items()},
            **{name: value for name, value in output.facts.items() if name in WRITTEN_FACTS},
        }
    content = {
        "split": predictions.split,
        "examples": predictions.examples,
        "kept": len(predictions.table),
        "intervals_over": predictions.units.describe() if predictions.units else "examples",
        "outputs": outputs,
    }
    return json.dumps(to_json(content), indent=1) + "\n"
