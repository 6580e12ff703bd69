"""The baselines: gradient boosting and a linear model of scikit-learn, on the features that the model gets.

They are fitted in a process of their own, so this module imports no TensorFlow.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: The baselines, as metrics name them: `baseline/boosting/rmse`.
BOOSTING = "boosting"
LINEAR = "linear"

#: Of the logistic regression. Most need less than 100, because numbers are standardised.
MAX_ITERATIONS = 300

#: Boosting has a place for each bin of each feature, and passes over all places for each leaf. With many features of
#: few rows, this takes most of its time. So all trees of an iteration have at most `MAX_PLACES` places together, unless
#: that leaves fewer bins than `MIN_BINS`.
MAX_PLACES = 500_000
MIN_BINS = 31
MAX_BINS = 255

#: A smaller probability has the logarithm of this one in the logits.
MIN_PROBABILITY = 1e-9


@dataclass(frozen=True)
class BaselineData:
    """The rows that baselines are fitted to, and those that they are compared on.

    Attributes:
        features: of training rows, [n, features] float32.
        targets: of them, [n]: classes as integers from 0, or values.
        test_features, test_targets: the same of the test split, or without one of the validation split.
        classes: the number of classes; 0 for values.
        unit: what values are divided by in the loss; NaN if the run has another loss.
        is_sample: whether the training split has more rows.
        keeps_outputs: whether the outputs of the baselines for the test rows are kept, for further metrics.
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
        known = {name: value for name, value in asdict(self).items() if value is not None}
        with part.open("wb") as file:
            np.savez(file, **known)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> BaselineData:
        """Reads the data that `save` wrote."""
        values: dict[str, Any] = {}
        with np.load(path) as arrays:
            for name, array in arrays.items():
                values[name] = array if array.ndim else array.item()
        return cls(**values)


def fit_baselines(data: BaselineData, outputs: dict[str, Array]) -> dict[str, float]:
    """Fits the baselines on one processor core, and returns their metrics on the test rows, such as `boosting/rmse`.

    The loss is the one of the kind of target. If the training rows lack a class of the test rows, it is infinite, and
    left out. If the data are a sample, the metrics include the number of its `rows`.

    Args:
        outputs: receives the logits or values of each baseline for the test rows, by its name.
    """
    from threadpoolctl import threadpool_limits

    models = make_models(data.classes, data.features.shape[1])  # it loads the libraries that the limit is for
    values: dict[str, float] = {}
    with threadpool_limits(1):
        for name, model in models.items():
            for metric, value in score_baseline(model, data, name, outputs).items():
                if np.isfinite(value):
                    values[f"{name}/{metric}"] = value
    if data.is_sample:
        values["rows"] = len(data.targets)
    return values


def make_models(classes: int, features: int) -> dict[str, Any]:
    """Makes the models with scikit-learn's defaults, except for the iterations of the linear model, and for the bins of
    many features.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge

    bins = choose_bins(classes, features)
    if classes:
        return {
            LINEAR: LogisticRegression(max_iter=MAX_ITERATIONS),
            BOOSTING: HistGradientBoostingClassifier(random_state=0, max_bins=bins),
        }
    return {LINEAR: Ridge(), BOOSTING: HistGradientBoostingRegressor(random_state=0, max_bins=bins)}


def choose_bins(classes: int, features: int) -> int:
    """Returns the number of bins of each feature, at most `MAX_BINS`."""
    fitting = MAX_PLACES // (max(features, 1) * count_trees(classes))
    return min(MAX_BINS, max(MIN_BINS, fitting))


def count_trees(classes: int) -> int:
    """Returns how many trees boosting grows in each iteration: one for each class if there are more than two."""
    return classes if classes > 2 else 1


def score_baseline(model: Any, data: BaselineData, name: str, outputs: dict[str, Array]) -> dict[str, float]:
    """Fits a model, and returns its metrics by the names that a run gives them; adds its outputs by its name."""
    if data.classes:
        fit(model, data, data.targets)
        return score_classes(model, data, name, outputs)
    center = data.targets.mean()  # the linear model rounds targets to the dtype of the features
    fit(model, data, data.targets - center)
    predicted = model.predict(data.test_features) + center
    outputs[name] = predicted.astype(np.float32)[:, None]
    return score_values(predicted, data)


def fit(model: Any, data: BaselineData, targets: Array) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of a fit that has not converged after its iterations
        model.fit(data.features, targets, sample_weight=data.weights)


def score_values(predicted: Array, data: BaselineData) -> dict[str, float]:
    """Returns the metrics of predicted values [n] for the test rows."""
    from sklearn import metrics

    true = data.test_targets
    weights = data.test_weights
    squared = float(metrics.mean_squared_error(true, predicted, sample_weight=weights))
    return {
        "loss": squared / data.unit**2,
        "mae": float(metrics.mean_absolute_error(true, predicted, sample_weight=weights)),
        "rmse": squared**0.5,
        "r2": float(metrics.r2_score(true, predicted, sample_weight=weights)),
    }


def score_classes(model: Any, data: BaselineData, name: str, outputs: dict[str, Array]) -> dict[str, float]:
    """Returns the metrics of a classifier on the test rows, and adds its logits to the outputs."""
    from sklearn import metrics

    true = data.test_targets
    weights = data.test_weights
    probabilities = np.zeros((len(true), data.classes))
    probabilities[:, model.classes_] = model.predict_proba(data.test_features)  # training rows may lack a class
    logits = np.log(np.maximum(probabilities, MIN_PROBABILITY)).astype(np.float32)
    if data.classes == 2:
        logits = logits[:, 1:] - logits[:, :1]
    outputs[name] = logits
    with np.errstate(divide="ignore"):
        losses = -np.log(probabilities[np.arange(len(true)), true])
    predicted = probabilities.argmax(axis=1)
    return {
        "loss": float(np.average(losses, weights=weights)),
        "accuracy": float(metrics.accuracy_score(true, predicted, sample_weight=weights)),
        "balanced_accuracy": float(metrics.balanced_accuracy_score(true, predicted, sample_weight=weights)),
    }
