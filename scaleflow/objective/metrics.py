"""Metrics for `objective.metrics`: turns `keras.metrics.Metric` objects into sums over examples.

Each batch adds (state after the batch - initial state) to a sum over batches, replicas and workers. The metric of the
whole split is computed from this sum. That works only if the state is additive, so `check_sums` tries it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import DIRECTION
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Measure, Mode, Outputs, Target, find_direction
from scaleflow.objective.kinds import find_counted, replace_ignored, spread_weights
from scaleflow.objective.losses import (
    CLASS_METRICS,
    CLASS_OR_LABEL_METRICS,
    HINGES,
    INTEGER_METRICS,
    VALUE_METRICS,
    Loader,
    add_arguments,
    draw_batch,
    find_keras_name,
    has_logits,
    is_of_keras,
    plain_name,
    plain_names,
    takes,
    to_integers,
    to_probabilities,
)
from scaleflow.objective.ranking import find_exact_form
from scaleflow.objective.score_tables import ScoreCollector

Array = np.ndarray[Any, Any]

#: Metrics that do not change for a label or value with target 0 and output 0. Ignored targets are set to that.
ZEROED = plain_names(
    *("F1Score", "FBetaScore", "Precision", "Recall", "TruePositives", "FalsePositives", "FalseNegatives"),
    *("CosineSimilarity", "KLDivergence"),
)

#: Metrics that treat each label or value like an example. Ignored targets are left out.
FLATTENED = plain_names(
    *("MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "LogCoshError"),
    *("MeanSquaredLogarithmicError", "Poisson", "BinaryAccuracy", "BinaryCrossentropy", "Hinge", "SquaredHinge"),
    *("TrueNegatives", "AUC", "SensitivityAtSpecificity", "SpecificityAtSensitivity", "PrecisionAtRecall"),
    *("RecallAtPrecision",),
)

#: Metrics that compare the values of one example with each other.
WITHIN_EXAMPLES = plain_names("CosineSimilarity", "PearsonCorrelation", "ConcordanceCorrelation")

#: Metrics that predict only the largest output if they have no threshold.
F_SCORES = plain_names("F1Score", "FBetaScore")


#: Keras base classes. Their names say nothing about the direction of a subclass.
BASES = ("Metric", "Mean", "MeanMetricWrapper", "Sum", "object")

#: The sizes of the two batches on which a metric is tried.
TRIED = 7, 5


def make_measure(
    described: Outputs, target: Target, loader: Loader, is_weighted: bool
) -> tuple[Measure, Mapping[str, Mode]]:
    """Makes a measure from a Keras metric for one output.

    Returns:
        The measure, and the direction (`max` or `min`) of each of its values whose direction is known.

    Raises ConfigError if the metric does not fit the output, or is not a sum over examples.
    """
    start = f"{target.describe()}: "
    named = loader.locate(target)
    keras_name = find_keras_name(named)
    check_metric_kind(described, start, named, keras_name=keras_name)
    if takes(named, "num_classes") and "num_classes" not in target.arguments:
        if described.kind == "binary":
            count = 2
        else:
            count = described.shape[-1] if described.shape else 1
        target = add_arguments(target, {"num_classes": count})
    has_threshold = target.arguments.get("threshold") is not None
    if needs_threshold(described, keras_name) and takes(named, "threshold") and not has_threshold:
        target = add_arguments(target, {"threshold": 0.5})
    if described.kind == "regression" and keras_name is not None and takes(named, "dtype"):
        target = add_arguments(target, {"dtype": "float64", **target.arguments})
    metric = loader.make(target)
    check_metric(described, start, metric, keras_name=keras_name)
    rows = MetricRows(described, metric, keras_name, from_logits=has_logits(metric), is_weighted=is_weighted)
    try:
        state = State(metric, *rows.draw(sum(TRIED)))
        check_sums(start, state, rows, is_weighted=is_weighted)
    except ConfigError:
        raise
    except Exception as error:  # a user's class may raise anything
        form = f"{described.kind} targets and outputs of shape (n, {rows.columns})"
        if choose_missing_form(described, metric, keras_name) == "weighted":
            raise ConfigError(
                f"{start}cannot leave single targets out, and those with the value {described.ignore} do not count "
                "(Outputs.ignore): it would need a weight for each label or value of an example; leave it out, or use "
                "a metric such as " + ("mse" if described.kind == "regression" else "f1")
            ) from error
        raise ConfigError(f"{start}fails on {form}: {read_reason(error)}") from error
    name = choose_name(target, metric, start)
    names = name_results(described, start, name, results=state.results)
    modes = find_modes(metric, name, names, start)

    def sums(targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return state.add_up(*rows(targets, outputs, weights))

    measure = Measure(names, sums, state.finish, size=state.size)
    return add_exact_form(measure, metric, target, rows), modes


def add_exact_form(measure: Measure, metric: Any, target: Target, rows: MetricRows) -> Measure:
    """Makes evaluations compute the measure exactly from all scores, if `find_exact_form` knows how."""
    exact = find_exact_form(metric, target)
    if exact is None:
        return measure
    finish_tables, is_by_column = exact
    chosen = getattr(metric, "class_id", None)

    def scores(targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return rows.rank(targets, outputs, weights, is_by_column, chosen)

    def finish_scores(collector: ScoreCollector) -> Sequence[float]:
        return finish_tables(collector.to_tables())

    return replace(measure, scores=scores, make_collector=ScoreCollector, finish_scores=finish_scores)


# The form of the targets and outputs ---------------------------------------------------------


class MetricRows:
    """Converts targets, outputs and weights to the form that a metric needs: a row for each position.

    Args:
        described: the output.
        metric: the metric.
        keras_name: the result of `find_keras_name`.
        from_logits: whether the metric was made with `from_logits=True`.
        is_weighted: whether examples have weights.
    """

    def __init__(
        self, described: Outputs, metric: Any, keras_name: str | None, from_logits: bool, is_weighted: bool
    ) -> None:
        self.columns = described.shape[-1] if described.shape else 1
        self._described = described
        self._form = choose_missing_form(described, metric, keras_name)
        if self._form == "flattened":
            self.columns = 1
        self._takes_logits = from_logits or keras_name in HINGES
        self._takes_integers = getattr(metric, "sparse_y_true", keras_name is None or keras_name in INTEGER_METRICS)
        self._takes_decisions = getattr(metric, "sparse_y_pred", keras_name == "accuracy")
        if keras_name == "binaryiou":
            self._takes_integers = self._takes_decisions = False
        # R2Score sums squares, which loses precision if values are far from 0. Shifting them does not change R2.
        self._center = described.scaling[0] if keras_name == "r2score" and described.scaling is not None else None
        is_counted = "int" in str(metric.dtype) and not is_weighted
        self._weights_dtype = tf.as_dtype(metric.dtype) if is_counted else tf.float32

    def __call__(self, targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
        described = self._described
        counted = find_counted(described, targets)
        targets = replace_ignored(targets, counted)
        if described.kind == "classification":
            targets = to_integers(targets, outputs)
        elif targets.shape.rank == 1:
            targets = targets[:, None]
            counted = None if counted is None else counted[:, None]
        weights = spread_weights(weights, targets)
        if counted is not None:
            weights *= counted
        outputs = tf.reshape(outputs, [-1, self.columns])
        if described.kind != "classification":
            targets = tf.reshape(targets, [-1, self.columns])
            weights = tf.reshape(weights, [-1, self.columns])
            if self._form == "zeroed" and counted is not None:
                has_target = tf.reshape(counted, [-1, self.columns]) > 0
                weights = tf.reduce_max(weights, axis=1)  # 0 if no label or value of the example has a target
                return self._to_form(targets, outputs, weights, has_target)
            if counted is None or self.columns == 1:
                weights = weights[:, 0]
        return self._to_form(targets, outputs, weights)

    def rank(
        self, targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor, is_by_column: bool, chosen: int | None
    ) -> tuple[tf.Tensor, ...]:
        """Implements `Measure.scores`.

        Scores are logits, float64. For several classes they are probabilities, unless the metric takes logits.

        Args:
            is_by_column: whether to keep one column for each class or label, instead of joining them into one.
            chosen: the only class or label to return; None: all.
        """
        described = self._described
        columns = described.shape[-1] if described.shape else 1
        counted = find_counted(described, targets)
        valid = replace_ignored(targets, counted)
        scores = tf.cast(tf.reshape(outputs, [-1, columns]), tf.float64)
        weights = spread_weights(weights, valid)
        if counted is not None:
            weights *= counted
        if described.kind == "classification":
            scores = scores if self._takes_logits else tf.nn.softmax(scores)
            classes = tf.reshape(to_integers(valid, outputs), [-1])
            positive = tf.one_hot(classes, columns, dtype=tf.float32)
            weights = tf.repeat(tf.reshape(weights, [-1, 1]), columns, axis=1)
        else:
            positive = tf.reshape(tf.cast(tf.cast(valid, tf.float32) > 0.5, tf.float32), [-1, columns])
            weights = tf.reshape(weights, [-1, columns])
        table = (scores, positive, weights)  # a column for each class or label
        if chosen is not None:
            return tuple(values[:, chosen : chosen + 1] for values in table)
        return table if is_by_column else tuple(tf.reshape(values, [-1, 1]) for values in table)

    def draw(self, count: int) -> tuple[tf.Tensor, ...]:
        """Returns random rows in the form that the metric needs."""
        weights = tf.ones([count, self.columns] if self._form == "weighted" else [count])
        return self._to_form(*draw_batch(self._described, (self.columns,), count), weights)

    def _to_form(
        self, targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor, has_target: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, ...]:
        kind = self._described.kind
        predicted = outputs if self._takes_logits else to_probabilities(self._described, outputs)
        if has_target is not None:
            predicted = tf.where(has_target, predicted, tf.zeros_like(predicted))
        if self._takes_decisions and kind != "regression":
            is_class = kind == "classification"
            predicted = (
                tf.argmax(outputs, -1, output_type=tf.int32) if is_class else tf.cast(outputs[:, 0] > 0, tf.int32)
            )
        if kind == "classification":
            targets = tf.reshape(targets, [-1])
            weights = tf.reshape(weights, [-1])
            if not self._takes_integers:
                targets = tf.one_hot(targets, self.columns, dtype=tf.float32)
        elif kind == "regression":
            targets = tf.cast(targets, tf.float64)
            if self._center is not None:
                targets = targets - self._center
                predicted = tf.cast(predicted, tf.float64) - self._center
        else:
            targets = tf.cast(tf.cast(targets, tf.float32) > 0.5, tf.float32)
            if self._takes_decisions:
                targets = tf.cast(targets[:, 0], tf.int32)
        return targets, predicted, tf.cast(weights, self._weights_dtype)


def choose_missing_form(described: Outputs, metric: Any, keras_name: str | None) -> str:
    """Chooses how a metric of several labels or values leaves out ignored targets.

    Returns:
        "" if no target can be ignored; `zeroed`: target and output become 0; `flattened`: each label or value becomes
        an example; `weighted`: each label or value has a weight, [n, columns].
    """
    if described.ignore is None or described.kind == "classification" or described.shape[-1:] in ((), (1,)):
        return ""
    if keras_name in ZEROED:
        return "zeroed"
    has_columns = getattr(metric, "multi_label", False) or getattr(metric, "class_id", None) is not None
    return "flattened" if keras_name in FLATTENED and not has_columns else "weighted"


# The state of a metric -----------------------------------------------------------------------


class State:
    """The variables of a metric as one flat vector: their values minus their initial values.

    Args:
        batch: targets, outputs and weights in the metric's form. Many metrics create their variables at the first
            batch.

    Attributes:
        size: the length of the vector.
        results: the shapes of the results by name. The name is "" if the metric does not return a dict.
    """

    def __init__(self, metric: Any, *batch: tf.Tensor) -> None:
        self._metric = metric
        metric.update_state(batch[0], batch[1], sample_weight=batch[2])
        metric.reset_state()
        self._initial = [np.array(variable) for variable in metric.variables]
        self.size = sum(value.size for value in self._initial)

        def compute_results(variables: list[tf.Tensor]) -> dict[str, tf.Tensor]:
            result = metric.stateless_result(variables)
            return result if isinstance(result, dict) else {"": tf.convert_to_tensor(result)}

        specs = [tf.TensorSpec(value.shape, value.dtype) for value in self._initial]
        self._compute = tf.function(compute_results, autograph=False).get_concrete_function(specs)
        self.results = {name: tuple(spec.shape) for name, spec in self._compute.structured_outputs.items()}

    def update(self, variables: Sequence[Any], *batch: tf.Tensor) -> list[Any]:
        """Returns the variables after a batch."""
        targets, outputs, weights = batch
        return list(self._metric.stateless_update_state(variables, targets, outputs, sample_weight=weights))

    def add_up(self, *batch: tf.Tensor) -> tf.Tensor:
        """Returns the change of the state by one batch: [size] float64, or a float32 scalar if `size` is 1."""
        added = self.flatten(self.update([tf.constant(value) for value in self._initial], *batch))
        return tf.cast(added[0], tf.float32) if self.size == 1 else added

    def add_up_both(self, first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the change of the state by two batches in a row, [size] float64."""
        return self.flatten(self.update(self.update([tf.constant(v) for v in self._initial], *first), *second))

    def flatten(self, variables: Sequence[Any]) -> tf.Tensor:
        pairs = zip(variables, self._initial, strict=True)
        return tf.concat([tf.reshape(tf.cast(v, tf.float64) - value, [-1]) for v, value in pairs], axis=0)

    def compute(self, sums: Array) -> dict[str, Array]:
        """Computes the results from the sum over all batches, [size]."""
        variables = []
        first = 0
        for value in self._initial:
            part = value + np.reshape(sums[first : first + value.size], value.shape)
            is_whole = np.issubdtype(value.dtype, np.integer)
            variables.append(tf.constant((np.rint(part) if is_whole else part).astype(value.dtype)))
            first += value.size
        return {name: np.asarray(result) for name, result in self._compute(variables).items()}

    def finish(self, sums: Array, total: float) -> Sequence[float]:
        """Implements `Measure.finish`."""
        values: list[float] = []
        for result in self.compute(sums).values():
            values += map(float, np.ravel(result))
        return values


# Checks --------------------------------------------------------------------------------------


def check_metric_kind(described: Outputs, start: str, named: Any, keras_name: str | None) -> None:
    """Rejects a Keras metric that does not fit the kind of target."""
    if named in (keras.metrics.Mean, keras.metrics.Sum):
        raise ConfigError(f"{start}takes values, not targets and outputs; remove it, since the loss is always reported")
    unsuited: Mapping[str, bool] = {
        "classification": False,
        "binary": keras_name in CLASS_METRICS,
        "multi_label": keras_name in CLASS_OR_LABEL_METRICS,
        "regression": keras_name is not None and keras_name not in VALUE_METRICS,
    }
    if unsuited[described.kind]:
        examples = {"regression": "mape", "binary": "auc", "multi_label": "auc"}
        raise ConfigError(
            f"{start}has no meaning for {described.kind} targets; use a metric such as {examples[described.kind]}"
        )
    if keras_name in WITHIN_EXAMPLES and described.shape[-1:] in ((), (1,)):
        advice = "r2 is always recorded" if described.kind == "regression" else "use auc"
        raise ConfigError(
            f"{start}compares the values of one example with each other, and the dataset's targets are single values; "
            f"leave it out: {advice}"
        )


def needs_threshold(described: Outputs, keras_name: str | None) -> bool:
    """Returns whether a metric needs a threshold: with it, several labels or none can be predicted."""
    return keras_name in F_SCORES and described.kind != "classification"


def check_metric(described: Outputs, start: str, metric: Any, keras_name: str | None) -> None:
    """Rejects objects that are not metrics, and metrics without the sample weights that leave out examples."""
    if not isinstance(metric, keras.metrics.Metric):
        raise ConfigError(f"{start}this returned a {type(metric).__name__}, expected a keras.metrics.Metric")
    if not (takes(metric.update_state, "sample_weight") or takes(metric.update_state, "kwargs")):
        raise ConfigError(
            f"{start}its update_state has no parameter sample_weight, which excludes the examples that fill up a "
            "batch; write update_state(self, y_true, y_pred, sample_weight=None)"
        )
    if needs_threshold(described, keras_name) and metric.threshold is None:
        raise ConfigError(f"{start}predicts the largest output, and no other; make it with threshold=0.5")


def check_sums(start: str, state: State, rows: MetricRows, is_weighted: bool) -> None:
    """Tries a metric on random rows.

    Raises ConfigError if its state is not additive, or if it ignores the examples' weights.
    """
    whole = rows.draw(sum(TRIED))
    first = [values[: TRIED[0]] for values in whole]
    second = [values[TRIED[0] :] for values in whole]
    parts = np.asarray(state.add_up(*first), np.float64) + np.asarray(state.add_up(*second), np.float64)
    if not is_close(state.add_up_both(first, second), parts):
        raise ConfigError(
            f"{start}its state after two batches is not the sum of the states after each, so the parts that replicas "
            "compute cannot be combined; keep sums over examples in it"
        )

    def results(*batch: tf.Tensor) -> Array:
        return np.array(state.finish(np.reshape(state.add_up(*batch), [-1]), 0.0))

    targets, outputs, weights = whole
    is_real = tf.cast(tf.range(sum(TRIED)) < TRIED[0], weights.dtype)
    padded = weights * (is_real if weights.shape.rank == 1 else is_real[:, None])
    if not is_close(results(targets, outputs, padded), results(*first)):
        raise ConfigError(
            f"{start}counts examples of weight 0, which fill up a batch; multiply by sample_weight in its update_state"
        )
    twice = [tf.concat([values, values], axis=0) for values in first]
    if is_weighted and not is_close(results(*twice[:2], twice[2] / 2), results(*first)):
        raise ConfigError(
            f"{start}an example of weight 0.5 does not count half, and the examples of the dataset have weights; if "
            "the metric counts in whole numbers, set dtype: float32"
        )


def is_close(computed: Any, wanted: Any) -> bool:
    """Returns whether sums in float32 are equal except for rounding."""
    return np.allclose(computed, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


# Names and directions ------------------------------------------------------------------------


def choose_name(target: Target, metric: Any, start: str) -> str:
    """Returns the name of a metric, by default its class name in Keras's form (`top_k`)."""
    name = str(metric.name)
    cls = type(metric)
    plain = re.sub(r"_\d+$", "", name)  # Keras appends a number if a class is used twice
    inherits_name = not is_of_keras(cls) and is_of_keras(cls.__init__)  # a subclass of Mean is not called `mean`
    if "name" in target.arguments:
        pass
    elif inherits_name:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    elif plain_name(plain) == plain_name(cls.__name__):
        name = plain
    if not name or "/" in name:
        raise ConfigError(
            f"{start}has the name {name!r}, in which / would separate a split or an output; give it another name"
        )
    return name


def name_results(described: Outputs, start: str, name: str, results: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Returns the names of a metric's results: `name`, or `name/part` for each class, threshold or key."""
    names: list[str] = []
    for key, shape in results.items():
        prefix = f"{name}/{key}" if key else name
        if len(shape) > 1:
            raise ConfigError(f"{start}its result has shape {shape}; expected one number, or one for each class")
        size = math.prod(shape)
        is_named = described.names is not None and len(described.names) == size > 1
        if size == 1:
            names.append(prefix)
            continue
        parts = described.names if is_named and described.names else list(map(str, range(size)))
        names += [f"{prefix}/{part}" for part in parts]
    return tuple(names)


def find_modes(metric: Any, name: str, names: Sequence[str], start: str) -> dict[str, Mode]:
    """Returns the direction of each result by name: `max` if larger is better, else `min`. Omits unknown directions.

    Raises ConfigError if the metric's name suggests the opposite of Keras's direction. Code that sees only the name
    would choose the wrong direction.
    """
    known = find_keras_direction(metric)
    named = find_direction(name)
    if known is None:
        by_name = {name: named or find_direction(name) for name in names}
        return {name: mode for name, mode in by_name.items() if mode is not None}
    if named is not None and named != known:
        larger, smaller = ("smaller", "larger") if known == "max" else ("larger", "smaller")
        raise ConfigError(
            f"{start}the name {name} says that {larger} values are better, and for {type(metric).__name__} {smaller} "
            "ones are; give it another name"
        )
    return dict.fromkeys(names, known)


def find_keras_direction(metric: Any) -> Mode | None:
    """Returns the direction of a Keras metric; None if it is unknown or a user's subclass changes the result."""
    for cls in type(metric).__mro__:
        if is_of_keras(cls):
            break
        if "result" in vars(cls):
            return None
    direction = getattr(metric, DIRECTION, None)
    if direction in ("up", "down"):
        return "max" if direction == "up" else "min"
    return None if cls.__name__ in BASES else find_direction(cls.__name__)
