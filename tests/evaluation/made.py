"""Predictions that tests make without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.evaluation.analysis import METRICS, Analysis, analyse_predictions, write_metrics
from scaleflow.evaluation.collector import PredictionCollector
from scaleflow.evaluation.predictions import Predictions, load_predictions, make_predictions_table, save_predictions
from scaleflow.interfaces import EvaluationOptions, Outputs, OutputStructure, name_leaves

Array = np.ndarray[Any, Any]

CLASSES = Outputs("classification", (4,), names=("ant", "bee", "cat", "dog"))
BINARY = Outputs("binary", (1,), names=("no", "yes"))
LABELS = Outputs("multi_label", (3,), names=("a", "b", "c"))
PRICE = Outputs("regression", (1,))
TWO = Outputs("regression", (2,), names=("width", "height"))


def draw_values(outputs: Outputs, count: int, seed: int = 0, skill: float = 1.5) -> dict[str, Array]:
    """What a model that is right now and then returns: `target` and `output`, as the collector takes them."""
    random = np.random.default_rng(seed)
    if outputs.kind == "classification":
        targets = random.integers(outputs.shape[-1], size=count).astype(np.int32)
        logits = random.normal(size=(count, outputs.shape[-1])).astype(np.float32)
        logits[np.arange(count), targets] += skill
        return {"target": targets, "output": logits}
    signal = random.normal(size=(count, *outputs.shape)).astype(np.float32)
    noise = random.normal(size=signal.shape).astype(np.float32)
    if outputs.kind == "regression":
        return {"target": 5 * signal + 100, "output": 5 * signal + 100 + noise}
    return {"target": (signal > 0.2).astype(np.float32), "output": skill * signal + noise}


def make_predictions(
    outputs: OutputStructure, values: Mapping[str, Mapping[str, Array]], weights: Array | None = None
) -> Predictions:
    """Predictions of the values of each output, by its name."""
    count = len(next(iter(next(iter(values.values())).values())))
    collector = PredictionCollector(outputs, count)
    batch = {f"{name}/{key}": each for name, own in values.items() for key, each in own.items()}
    collector.add(np.arange(count), batch if weights is None else {**batch, "weight": weights})
    return Predictions(make_predictions_table(outputs, collector), outputs, "test", count)


def draw_predictions(outputs: OutputStructure, count: int, seed: int = 0, weighted: bool = False) -> Predictions:
    values = {name: draw_values(each, count, seed) for name, each in name_leaves(outputs).items()}
    weights = np.random.default_rng(seed).uniform(0.5, 2, count) if weighted else None
    return make_predictions(outputs, values, weights)


def analyse_in(folder: Path, predictions: Predictions, metrics: Any = None, **options: Any) -> Analysis:
    """The figures of predictions that were written and read again; `metrics.json` is in the folder."""
    save_predictions(folder / "predictions.parquet", predictions)
    kept = load_predictions(folder / "predictions.parquet")
    analysis = analyse_predictions(kept, EvaluationOptions(**options), metrics or {})
    (folder / METRICS).write_text(write_metrics(kept, analysis))
    return analysis
