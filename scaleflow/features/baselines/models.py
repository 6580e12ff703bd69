"""Baselines that learn: gradient boosting and a linear model of scikit-learn, on the features that the model gets.

They are fitted beside the training, in a process of their own, so this module imports no TensorFlow.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.interfaces import BOOSTING, LINEAR

Array = np.ndarray[Any, Any]

#: Of the logistic regression. Most need less than 100, because numbers are standardised.
MOST_ITERATIONS = 300

#: Boosting has a place for each bin of each feature, and passes over all of them for each leaf. With many features of
#: few rows that takes most of its time. So there are at most `MOST_PLACES` for all trees of an iteration, unless that
#: leaves fewer bins than `FEWEST_BINS`.
MOST_PLACES, FEWEST_BINS, MOST_BINS = 500_000, 31, 255


@dataclass(frozen=True)
class BaselineData:
    """What baselines are fitted to and compared on.

    Attributes:
        features: of training rows, [n, features] float32.
        targets: of them, [n]: classes as integers from 0, or values.
        test_features, test_targets: the same of the test split, or without one of the validation split.
        classes: the number of classes; 0 for values.
        unit: what values are divided by in the loss; NaN if the run has another loss.
        is_sample: whether the training split has more rows.
        keeps_outputs: whether their outputs for the test rows are kept, for further metrics.
        weights, test_weights: of the rows; None: all count the same.
    """

    features: Array
    targets: Array
    test_features: Array
    test_targets: Array
    classes: int
    unit: float = 1.0
    is_sample: bool = False
    keeps_outputs: bool = False
    weights: Array | None = None
    test_weights: Array | None = None

    def save(self, path: Path) -> None:
        """Writes the data into a file. A reader never sees a part of it. Raises OSError if it cannot be written."""
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **{name: each for name, each in asdict(self).items() if each is not None})
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> BaselineData:
        """Reads what `save` wrote."""
        with np.load(path) as arrays:
            values = dict(arrays)
        return cls(**{name: each if each.ndim else each.item() for name, each in values.items()})


def fit_baselines(data: BaselineData, outputs: dict[str, Array] | None = None) -> dict[str, float]:
    """Fits the models on one processor core, and returns their metrics on the test rows, `boosting/rmse`.

    Of a sample it also returns the number of its `rows`. The loss is the one of the kind of target; a class that no
    training row has makes it infinite, and leaves it out. `outputs` receives their logits or values for the test rows.
    """
    from threadpoolctl import threadpool_limits

    models = make_models(
        data.classes, data.features.shape[1]
    )  # before the limit, which knows the libraries that are loaded
    with threadpool_limits(1):
        found = [
            (name, score_baseline(model, data, name, outputs={} if outputs is None else outputs))
            for name, model in models.items()
        ]
    values = {f"{name}/{key}": value for name, each in found for key, value in each.items() if np.isfinite(value)}
    return {**values, "rows": len(data.targets)} if data.is_sample else values


def make_models(classes: int, features: int) -> dict[str, Any]:
    """Makes the models, with scikit-learn's defaults, but more iterations of the linear model, and fewer bins of many
    features.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge

    trees = classes if classes > 2 else 1
    bins = min(MOST_BINS, max(FEWEST_BINS, MOST_PLACES // (max(features, 1) * trees)))
    if classes:
        linear = LogisticRegression(max_iter=MOST_ITERATIONS)
        return {LINEAR: linear, BOOSTING: HistGradientBoostingClassifier(random_state=0, max_bins=bins)}
    return {LINEAR: Ridge(), BOOSTING: HistGradientBoostingRegressor(random_state=0, max_bins=bins)}


def score_baseline(model: Any, data: BaselineData, name: str, outputs: dict[str, Array]) -> dict[str, float]:
    """Fits a model, and returns its metrics by the names that a run gives them; adds its outputs by its name."""
    import warnings

    from sklearn import metrics

    true, weights = data.test_targets, data.test_weights
    center = 0 if data.classes else data.targets.mean()  # the linear model rounds targets to the dtype of the features
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of a fit that has not converged after its most iterations
        model.fit(data.features, data.targets - center, sample_weight=data.weights)
    if not data.classes:
        predicted = model.predict(data.test_features) + center
        outputs[name] = predicted.astype(np.float32)[:, None]
        measures = metrics.mean_squared_error, metrics.mean_absolute_error, metrics.r2_score
        squared, mae, r2 = (float(each(true, predicted, sample_weight=weights)) for each in measures)
        return {"loss": squared / data.unit**2, "mae": mae, "rmse": squared**0.5, "r2": r2}
    shares = np.zeros((len(true), data.classes))
    shares[:, model.classes_] = model.predict_proba(data.test_features)
    logits = np.log(np.maximum(shares, 1e-9)).astype(np.float32)
    outputs[name] = logits[:, 1:] - logits[:, :1] if data.classes == 2 else logits
    with np.errstate(divide="ignore"):
        found = {"loss": float(np.average(-np.log(shares[np.arange(len(true)), true]), weights=weights))}
    best = shares.argmax(axis=1)
    for measure in (metrics.accuracy_score, metrics.balanced_accuracy_score):
        found[measure.__name__.removesuffix("_score")] = float(measure(true, best, sample_weight=weights))
    return found
