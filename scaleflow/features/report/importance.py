"""Measures how much a model uses each column of a table (permutation importance), within `evaluation.seconds`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scaleflow.features.report.feature import ReportOptions
from scaleflow.interfaces import Inputs, Outputs, map_named, name_leaves
from scaleflow.interfaces.hooks import KeptPredictions
from scaleflow.interfaces.quantiles import weighted_quantiles

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

#: Number of permutations of each column, if time allows.
REPEATS = 5

#: A column is unused if the interval of its importance is within this share of a constant's loss.
USELESS_SHARE = 0.01

#: A column predicts the target if it alone beats a constant by this much, and by this share.
MIN_ACCURACY_GAIN = 0.01
MIN_GAIN_SHARE = 0.03


@dataclass(frozen=True)
class TableColumn:
    """The position of a table's column in the inputs."""

    input: str  # name of the input
    place: int | None  # index in the input's last axis; None: the input is the column

    def read(self, inputs: Any) -> Array:
        """Returns the values of the column, [n]."""
        values: Array = name_leaves(inputs)[self.input]
        return values if self.place is None else values[:, self.place]

    def permute(self, inputs: Any, order: Array) -> Any:
        """Returns the inputs with this column reordered."""

        def change(name: str, values: Any) -> Any:
            if name != self.input:
                return values
            if self.place is None:
                return values[order]
            changed = values.copy()
            changed[:, self.place] = values[order, self.place]
            return changed

        return map_named(change, inputs)


@dataclass(frozen=True)
class Sample:
    """The examples for permuting columns, [n]. Each has a target."""

    rows: Array  # indices in the table of predictions
    raw: Any  # inputs before preprocessing
    target: Array
    has_target: Array  # which labels or values have a target, [n, k]


def list_columns(inputs: Any) -> dict[str, TableColumn]:
    """Returns the columns of a table by name; empty if the inputs are not a table."""
    from scaleflow.dataset.column_kinds import list_input_columns

    named: Mapping[str, Inputs] = name_leaves(inputs)
    if len(named) > 1:
        if any(described.shape for described in named.values()):
            return {}
        return {name: TableColumn(name, None) for name in named}
    columns: dict[str, TableColumn] = {}
    for name, described in named.items():
        for column, place in list_input_columns(name, described).items():
            if place is not None:
                columns[column] = TableColumn(name, place)
    return columns


def measure_columns(kept: KeptPredictions) -> list[dict[str, Any]]:
    """Measures the importance of each column of a table; empty for other inputs.

    Uses `evaluation.importance` examples. After `evaluation.seconds` it permutes no further column.

    Returns:
        Rows, the most important first, with `column`, its `importance`, the importance's `measure`, whether it
        `is_useless`, how good a model of the column `alone` is, and whether the column alone `tells` anything.
    """
    import numpy as np

    from scaleflow.evaluation.collector import choose_form
    from scaleflow.interfaces.estimate import Estimate

    assert kept.predict is not None
    columns = list_columns(kept.reader.inputs)
    name, described = next(iter(name_leaves(kept.predictions.outputs).items()))
    if not columns or choose_form(described) == "positions":
        return []
    sample = draw_sample(kept, name, described)
    if sample is None:
        return []
    losses = measure_losses(kept, columns, sample, name, described)
    intervals = kept.predictions.make_intervals(sample.rows)
    measure, constant_loss = measure_constant(described, sample.target, intervals.weights, sample.has_target)
    has_one_value = described.is_one_class or sample.target.size == len(sample.target)
    rows = []
    for column, position in columns.items():
        importance = Estimate(np.nan)
        if losses[column]:  # empty if there was no time for the column
            importance = intervals.mean(np.mean(losses[column], axis=0))
        largest_effect = max(-importance.low, importance.high)
        row: dict[str, Any] = {
            "column": column,
            "importance": importance,
            "measure": measure,
            "is_useless": largest_effect < USELESS_SHARE * constant_loss,
        }
        if has_one_value:
            row |= score_alone(position.read(sample.raw), sample.target, described, intervals.weights)
        rows.append(row)
    return sorted(rows, key=lambda row: -np.nan_to_num(row["importance"].value, nan=-np.inf))


def draw_sample(kept: KeptPredictions, name: str, described: Outputs) -> Sample | None:
    """Reads `evaluation.importance` examples with a target of output `name`. Returns None without such examples."""
    import numpy as np

    from scaleflow.evaluation.collector import EXAMPLE

    most = kept.plan.of(ReportOptions).importance
    count = len(kept.predictions.table)
    rows = np.sort(np.random.default_rng(0).choice(count, min(count, most), replace=False))
    raw, targets = kept.reader.read_examples(kept.predictions.column(EXAMPLE)[rows])
    target = name_leaves(targets)[name]
    flat = target.reshape(len(target), -1)
    if described.ignore is None:
        return Sample(rows, raw, target, np.ones(flat.shape, bool))
    has_target = flat != described.ignore
    places = np.flatnonzero(has_target.any(axis=1))
    if not len(places):
        return None
    known = map_named(lambda _, values: values[places], raw)
    return Sample(rows[places], known, target[places], has_target[places])


def measure_losses(
    kept: KeptPredictions, columns: Mapping[str, TableColumn], sample: Sample, name: str, described: Outputs
) -> dict[str, list[Array]]:
    """Returns the loss of output `name` from permuting each column: per permutation the losses of all examples, [n].

    When the time is over, the remaining permutations are left out.
    """
    import numpy as np

    predict = kept.predict
    assert predict is not None
    inputs = kept.reader.preprocess(sample.raw)
    deadline = time.monotonic() + kept.plan.evaluation.seconds

    def score(changed: Any) -> Array:
        return score_outputs(described, sample.target, name_leaves(predict(changed))[name], sample.has_target)

    unchanged = score(inputs)
    random = np.random.default_rng(1)
    losses: dict[str, list[Array]] = {column: [] for column in columns}
    for _ in range(REPEATS):
        for column, position in columns.items():
            if time.monotonic() < deadline:
                order = random.permutation(len(sample.target))
                losses[column].append(unchanged - score(position.permute(inputs, order)))
    return losses


def score_alone(values: Array, target: Array, described: Outputs, weights: Array) -> dict[str, Any]:
    """Returns how good a model of a column `alone` is, and whether that `tells` anything about the target."""
    import numpy as np

    from scaleflow.evaluation.single_column import score_column

    is_class = described.is_one_class
    answers = target.reshape(len(target)).astype(np.int64 if is_class else np.float64)
    alone, constant = score_column(values, answers, is_class, weights=weights)
    gain = alone - constant if is_class else constant - alone
    needed = max(MIN_ACCURACY_GAIN if is_class else 0.0, MIN_GAIN_SHARE * abs(constant))
    return {"alone": alone, "tells": bool(gain > needed)}


def score_outputs(described: Outputs, target: Array, outputs: Array, has_target: Array | None = None) -> Array:
    """Returns a score of each example's outputs, [n]: minus the log loss (mean over labels), or minus the absolute
    error.

    Accuracy would not do: with a rare class, a useful model may always predict the other one.

    Args:
        has_target: which labels or values of each example have a target, [n, k], at least one each; None: all.
    """
    import numpy as np

    from scaleflow.evaluation.calibration import compute_losses
    from scaleflow.serving.prediction_columns import take_prediction

    outputs = take_prediction(described, outputs.astype(np.float64))
    flat = outputs.reshape(len(target), -1)
    wanted = target.reshape(len(target), -1)
    if described.kind == "classification":
        return -compute_losses(wanted[:, 0].astype(np.int64), flat)
    if described.kind == "regression":
        losses = np.abs(flat - wanted)
    else:
        losses = np.logaddexp(0, np.where(wanted > 0.5, -flat, flat))
    return np.asarray(-np.average(losses, axis=1, weights=has_target))


def measure_constant(
    described: Outputs, target: Array, weights: Array, has_target: Array | None = None
) -> tuple[str, float]:
    """Returns the measure of importance, and the weighted loss of the best constant in this measure.

    `has_target` is as for `score_outputs`. `weights` are [n].
    """
    import numpy as np

    flat = target.reshape(len(target), -1)
    used = np.ones(flat.shape, bool) if has_target is None else has_target
    if described.kind == "regression":
        return "mae", lose_with_median(flat, used, weights)
    if described.kind == "classification":
        return "log loss", lose_with_class_shares(flat, weights)
    return "log loss", lose_with_label_shares(flat, used, weights)


def lose_with_median(target: Array, used: Array, weights: Array) -> float:
    """Returns the mean absolute error of predicting the median of each value, [n, k]."""
    import numpy as np

    middle = np.zeros(target.shape[1])
    for n in range(target.shape[1]):
        is_used = used[:, n]
        if weights[is_used].any():
            middle[n] = weighted_quantiles(target[is_used, n], [0.5], weights[is_used])[0]
    errors = np.average(np.abs(target - middle), axis=1, weights=used)
    return float(np.average(errors, weights=weights))


def lose_with_class_shares(target: Array, weights: Array) -> float:
    """Returns the log loss of predicting the share of each class, [n, 1]."""
    import numpy as np

    _, classes = np.unique(target, return_inverse=True)
    sums = np.bincount(classes.ravel(), weights)
    shares = sums[sums > 0] / sums.sum()
    return float(-(shares * np.log(shares)).sum())


def lose_with_label_shares(target: Array, used: Array, weights: Array) -> float:
    """Returns the mean log loss of predicting the share of each label, [n, k]."""
    import numpy as np

    weights_of = weights[:, None] * used
    totals = weights_of.sum(axis=0)
    is_known = totals > 0
    positives = ((target > 0.5) * weights_of).sum(axis=0)
    shares = np.clip(positives[is_known] / totals[is_known], 1e-12, 1 - 1e-12)
    losses = -(shares * np.log(shares) + (1 - shares) * np.log(1 - shares))
    return float(np.average(losses, weights=totals[is_known]))
