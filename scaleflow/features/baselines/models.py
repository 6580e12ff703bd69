"""The baselines: gradient boosting and a linear model from scikit-learn, on the same features as the model.

They are fitted in a separate process, so this module does not import TensorFlow.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Names of the baselines in metrics: `baseline/boosting/rmse`.
BOOSTING = "boosting"
LINEAR = "linear"

#: Maximum number of iterations of the logistic regression. Most fits need fewer than 100: numbers are standardised.
MAX_ITERATIONS = 300

#: Boosting has a histogram place for each bin of each feature, and passes over all places for each leaf. With many
#: features and few rows this takes most of its time. So the trees of an iteration have at most `MAX_PLACES` places
#: together, unless that would leave fewer than `MIN_BINS` bins.
MAX_PLACES = 500_000
MIN_BINS = 31
MAX_BINS = 255

#: Minimum probability: smaller ones are raised to this before their logarithm becomes a logit.
MIN_PROBABILITY = 1e-9


@dataclass(frozen=True)
class BaselineData:
    """The rows for fitting the baselines, and the rows for comparing them.

    Attributes:
        features: features of the training rows, [n, features] float32.
        targets: their targets, [n]: classes as integers from 0, or values.
        test_features, test_targets: the same for the test split, or for the validation split without a test split.
        classes: number of classes; 0 for values.
        unit: divisor of values in the loss; NaN if the run has another loss.
        is_sample: whether the training split has more rows.
        keeps_outputs: whether to keep the baselines' outputs for the test rows, for further metrics.
        weights, test_weights: weights of the rows; None: all rows count equally.
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
        """Writes the data to a file, which only appears when complete. Raises OSError if it cannot be written."""
        part = path.with_suffix(".part")
        known = {name: value for name, value in asdict(self).items() if value is not None}
        with part.open("wb") as file:
            np.savez(file, **known)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> BaselineData:
        """Reads data written by `save`."""
        values: dict[str, Any] = {}
        with np.load(path) as arrays:
            for name, array in arrays.items():
                values[name] = array if array.ndim else array.item()
        return cls(**values)


def fit_baselines(data: BaselineData, outputs: dict[str, Array]) -> dict[str, float]:
    """Fits the baselines on one CPU core and returns their metrics on the test rows, such as `boosting/rmse`.

    The loss fits the kind of target. It is infinite, and left out, if the training rows lack a class of the test rows.
    If the data are a sample, the metrics include the number of `rows`.

    Args:
        outputs: receives each baseline's logits or values for the test rows, by the baseline's name.
    """
    from threadpoolctl import threadpool_limits

    models = make_models(data.classes, data.features.shape[1])  # loads the libraries that the limit applies to
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
    """Returns the models with scikit-learn's defaults, except the linear model's iterations and boosting's bins."""
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
    """Returns the number of bins per feature, at most `MAX_BINS`."""
    fitting = MAX_PLACES // (max(features, 1) * count_trees(classes))
    return min(MAX_BINS, max(MIN_BINS, fitting))


def count_trees(classes: int) -> int:
    """Returns how many trees boosting grows per iteration: one, or one per class if there are more than two."""
    return classes if classes > 2 else 1


def score_baseline(model: Any, data: BaselineData, name: str, outputs: dict[str, Array]) -> dict[str, float]:
    """Fits a model, adds its outputs to `outputs`, and returns its metrics by the names that a run uses."""
    if data.classes:
        fit(model, data, data.targets)
        return score_classes(model, data, name, outputs)
    center = data.targets.mean()  # the linear model rounds targets to the features' dtype
    fit(model, data, data.targets - center)
    predicted = model.predict(data.test_features) + center
    outputs[name] = predicted.astype(np.float32)[:, None]
    return score_values(predicted, data)


def fit(model: Any, data: BaselineData, targets: Array) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example, a fit that has not converged
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
    """Returns a classifier's metrics on the test rows, and adds its logits to `outputs`."""
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
