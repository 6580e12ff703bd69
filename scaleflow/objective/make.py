"""Makes the objective of a run from the dataset's outputs and the config group `objective`.

Resolves short names of losses and metrics (`objective.loss=focal`, `objective.metrics=[auc,f1,top5]`), and applies
class weights to the training loss (`objective.class_weight`).
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError, find_similar
from scaleflow.interfaces import (
    NOT_FINITE,
    ClassWeight,
    Kind,
    Measure,
    Mode,
    Objective,
    ObjectiveOptions,
    Outputs,
    Target,
)
from scaleflow.objective.kinds import (
    Answers,
    Loss,
    average_positions,
    defaults_for,
    find_counted,
    is_shares,
    make_answers,
    mean_measure,
    replace_ignored,
)
from scaleflow.objective.losses import Loader, choose_loss, needs_positive_outputs, plain_name, plain_names
from scaleflow.objective.metrics import make_measure
from scaleflow.objective.variants import Described, by_output

Array = np.ndarray[Any, Any]

KEY = "objective.class_weight"

#: A message lists at most this number of classes.
MAX_SHOWN = 10


def find_class_weights(
    outputs: Described,
    option: ClassWeight | Mapping[str, ClassWeight] | None,
    count: Callable[[list[str]], Mapping[str, list[float]]],
) -> dict[str, list[float]]:
    """Returns the weight of each class, by output. The key is "" if the dataset has one output without a name.

    Args:
        option: the config value `objective.class_weight`.
        count: takes names of outputs and counts the classes of the training split, like `count_classes`.

    Raises ConfigError if an output has no classes, or lacks a class that the option names.
    """
    named = outputs if isinstance(outputs, Mapping) else {"": outputs}
    options = by_output(outputs, option, KEY, is_one=is_of_one_output)
    for name, weights in options.items():
        check_classes(named[name], f"{KEY}.{name}" if name else KEY, weights)
    balanced = [name for name, weights in options.items() if weights == "balanced"]
    counts = count(balanced) if balanced else {}
    class_weights = {}
    for name, weights in options.items():
        if weights == "balanced":
            class_weights[name] = balance(counts[name])
        else:
            class_weights[name] = list_class_weights(named[name], weights)
    return class_weights


def describe_class_weights(outputs: Described, weights: Mapping[str, list[float]]) -> list[str]:
    """Returns a note for each output with the weights of its first `MAX_SHOWN` classes."""
    notes = []
    for name, of_classes in weights.items():
        described = outputs[name] if isinstance(outputs, Mapping) else outputs
        names = described.names or list(map(str, range(len(of_classes))))
        pairs = list(zip(names, of_classes, strict=True))
        shown = ", ".join(f"{weight:.4g} for {class_name}" for class_name, weight in pairs[:MAX_SHOWN])
        more = f" and {len(pairs) - MAX_SHOWN} more" if len(pairs) > MAX_SHOWN else ""
        key = f"{KEY}.{name}" if name else KEY
        notes.append(f"{key}: {shown}{more}, in the training loss only")
    return notes


def is_of_one_output(option: Any) -> bool:
    """Returns whether `objective.class_weight` has the weights of classes, rather than a value for each output."""
    return option == "balanced" or not any(isinstance(value, Mapping | str) for value in option.values())


def check_classes(described: Outputs, key: str, weights: Any) -> None:
    """Raises ConfigError if an output has no classes, or lacks a class that `weights` names."""
    if described.kind not in ("classification", "binary"):
        raise ConfigError(
            f"{key}: works only with classification and binary targets, and the dataset's are {described.kind}; "
            "leave it null"
        )
    if isinstance(weights, str):
        return
    known = number_classes(described)
    for name in weights:
        if name not in known:
            shown = list(known)[:MAX_SHOWN]
            if len(known) > MAX_SHOWN:
                shown.append("...")
            raise ConfigError(f"{key}.{name}: there is no such class; the classes are {', '.join(shown)}")
    numbers = [known[name] for name in weights]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{key}={dict(weights)}: names a class twice, by its name and by its number")


def number_classes(described: Outputs) -> dict[str, int]:
    """Returns the number of each class. The keys are its name and its number as text."""
    count = 2 if described.kind == "binary" else described.shape[-1]
    numbers = {str(n): n for n in range(count)}
    for n, name in enumerate(described.names or ()):
        numbers[name] = n
    return numbers


def list_class_weights(described: Outputs, by_name: Mapping[str, float]) -> list[float]:
    """Returns the weight of each class, from weights by name or number. Other classes have the weight 1."""
    known = number_classes(described)
    weights = [1.0] * (max(known.values()) + 1)
    for name, weight in by_name.items():
        weights[known[name]] = weight
    return weights


def balance(counts: list[float]) -> list[float]:
    """Returns the balanced weight of each class: examples / (occurring classes x examples of the class).

    A class without examples gets the weight 0.
    """
    occurring = sum(count > 0 for count in counts)
    return [sum(counts) / (occurring * count) if count else 0.0 for count in counts]


def count_classes(outputs: Described, names: Iterable[str], batches: Iterable[Any]) -> dict[str, list[float]]:
    """Counts the targets of each class, weighted by their examples' weights if there are any. Skips ignored targets.

    Args:
        names: the outputs to count.
        batches: batches (targets,) or (targets, weights) of a whole split: arrays [b, ...], or dicts of them.
    """
    named = outputs if isinstance(outputs, Mapping) else {"": outputs}
    totals = {name: np.zeros(max(number_classes(named[name]).values()) + 1) for name in names}
    for batch, *weights in batches:
        for name, total in totals.items():
            targets = np.asarray(batch[name] if name else batch)
            shares = np.ones(targets.T.shape) * (weights[0] if weights else 1)  # the axis of examples is the last one
            if named[name].ignore is not None:
                is_counted = targets != named[name].ignore
                targets = targets * is_counted
                shares = shares * is_counted.T
            classes = (targets > 0.5 if named[name].kind == "binary" else targets).astype(np.int64)
            total += np.bincount(np.ravel(classes), np.ravel(shares.T), len(total))
    return {name: total.tolist() for name, total in totals.items()}


def weigh_classes(
    described: Outputs, weights: list[float], targets: tf.Tensor, outputs: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weight of each target [b, ...], and the targets to compute its loss with.

    The loss of a soft target (mixup) should be sum(share * weight * loss of the class). A loss that is linear in the
    target gives this for the shares share * weight / total, multiplied by the weight total = sum(share * weight).
    """
    table = tf.constant(weights, tf.float32)
    if described.kind == "binary":
        share = tf.cast(targets, tf.float32)
        weighted = table[1] * share
        total = table[0] * (1 - share) + weighted
        return total, tf.where(total > 0, tf.math.divide_no_nan(weighted, total), share)
    if is_shares(targets, outputs):
        shares = tf.cast(targets, tf.float32)
        weighted = shares * table
        total = tf.reduce_sum(weighted, axis=-1, keepdims=True)
        return total[..., 0], tf.where(total > 0, tf.math.divide_no_nan(weighted, total), shares)
    return tf.gather(table, tf.cast(targets, tf.int32)), targets


#: Keras's abbreviations of losses and metrics -> class names.
ABBREVIATIONS = {
    "acc": "Accuracy",
    "bce": "BinaryCrossentropy",
    "kld": "KLDivergence",
    "mae": "MeanAbsoluteError",
    "mse": "MeanSquaredError",
    "mape": "MeanAbsolutePercentageError",
    "msle": "MeanSquaredLogarithmicError",
}

#: Regression losses that make sense in any unit. Selected by a short name, they get standardised values, like the
#: default loss.
FREE_OF_UNIT = plain_names("MeanAbsoluteError", "MeanSquaredError", "Huber", "LogCosh")

FOCAL = {"classification": "CategoricalFocalCrossentropy"}

SCORES = "scaleflow.objective.scores"
LANGUAGE = "scaleflow.objective.language"

#: Short names of metrics for binary targets -> (class, arguments).
OF_BINARY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "auc": ("keras.metrics.AUC", {}),
    "pr_auc": ("keras.metrics.AUC", {"curve": "PR"}),
    "f1": ("keras.metrics.F1Score", {"average": "macro"}),
    "precision": ("keras.metrics.Precision", {}),
    "recall": ("keras.metrics.Recall", {}),
    "mean_iou": ("keras.metrics.MeanIoU", {}),
}

#: Short names of metrics for several classes or labels, most of them macro averages -> (class, arguments).
OF_SEVERAL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "auc": (f"{SCORES}.MacroAUC", {}),
    "pr_auc": (f"{SCORES}.MacroAUC", {"curve": "PR"}),
    "f1": (f"{SCORES}.MacroScore", {"score": "f1"}),
    "precision": (f"{SCORES}.MacroScore", {"score": "precision"}),
    "recall": (f"{SCORES}.MacroScore", {"score": "recall"}),
    "mean_iou": ("keras.metrics.MeanIoU", {}),
    "perplexity": (f"{LANGUAGE}.Perplexity", {"from_logits": True}),
    "bits_per_token": (f"{LANGUAGE}.BitsPerToken", {"from_logits": True}),
}

#: Short names of metrics for values -> (class, arguments).
OF_VALUES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mse": ("keras.metrics.MeanSquaredError", {}),
    "mape": ("keras.metrics.MeanAbsolutePercentageError", {}),
    "msle": ("keras.metrics.MeanSquaredLogarithmicError", {}),
}

METRICS: Mapping[Kind, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "classification": OF_SEVERAL,
    "multi_label": OF_SEVERAL,
    "binary": OF_BINARY,
    "regression": OF_VALUES,
}


def find_loss(described: Outputs, loss: Target | str | None, key: str) -> Target | None:
    """Resolves the loss of one output, if it is a short name. Raises ConfigError if there is no such loss."""
    if not isinstance(loss, str):
        return loss
    if loss.lower() == "focal":
        keras_class: str | None = FOCAL.get(described.kind, "BinaryFocalCrossentropy")
    else:
        keras_class = find_loss_class(loss)
    if keras_class is None:
        raise unknown_name(f"{key}={loss}", keras.losses, keras.losses.Loss, name=loss, known=["focal"])
    return Target(key, f"keras.losses.{keras_class}", typed=loss)


def is_free_of_unit(target: Target | None) -> bool:
    """Returns whether a loss works on standardised values: the default loss, or a `FREE_OF_UNIT` short name."""
    return target is None or (bool(target.typed) and plain_name(target.path.rpartition(".")[2]) in FREE_OF_UNIT)


def find_metrics(described: Outputs, parts: Objective, metrics: Sequence[Target | str], key: str) -> list[Target]:
    """Resolves the metrics of one output, which may be short names. Leaves out those that `parts` already has."""
    default = name_measures(parts)
    targets = []
    for metric in metrics:
        if isinstance(metric, Target):
            targets.append(metric)
        elif plain_default(metric) not in default:
            targets.append(find_metric(described, metric, key))
    return targets


def plain_default(name: str) -> str:
    """Returns the name that default metrics use for a short name: `accuracy` for `acc`."""
    return "accuracy" if name.lower() == "acc" else name.lower()


def find_metric(described: Outputs, name: str, key: str) -> Target:
    """Resolves the short name of a metric for one output.

    Raises ConfigError if there is no such metric, or if it would always be 1 (top5 of five classes).
    """
    short = name.lower()
    named = METRICS[described.kind]
    arguments: dict[str, Any] = {}
    top = re.fullmatch(r"top([1-9]\d*)", short)
    if top:
        if described.kind == "classification" and int(top[1]) >= described.shape[-1]:
            raise ConfigError(f"{key}={name}: is always 1, since there are {described.shape[-1]} classes; leave it out")
        path = "keras.metrics.SparseTopKCategoricalAccuracy"
        arguments = {"k": int(top[1])}
    elif short in named:
        path = named[short][0]
        arguments = dict(named[short][1])
        if described.kind == "multi_label" and "score" in arguments:
            arguments["threshold"] = 0.5
    else:
        keras_class = find_metric_class(name)
        if keras_class is not None:
            return Target(key, f"keras.metrics.{keras_class}", typed=name)
        known = list(named)
        if described.kind == "classification":
            known.append("top5")
        raise unknown_name(f"{key}={name}", keras.metrics, keras.metrics.Metric, name=name, known=known)
    return Target(key, path, {**arguments, "name": short}, typed=name)


def find_keras_class(module: Any, base: type, name: str) -> str | None:
    """Returns the Keras class for a name in any of Keras's forms (`mse`, `mean_squared_error`); None if none fits."""
    plain = plain_name(ABBREVIATIONS.get(name.lower(), name))
    for class_name in list_keras_classes(module, base):
        if plain_name(class_name) == plain:
            return class_name
    return None


def find_loss_class(name: str) -> str | None:
    """Returns the name of the Keras loss class for a name; None if Keras has no such loss."""
    return find_keras_class(keras.losses, keras.losses.Loss, name)


def find_metric_class(name: str) -> str | None:
    """Returns the name of the Keras metric class for a name; None if Keras has no such metric."""
    return find_keras_class(keras.metrics, keras.metrics.Metric, name)


def read_loss_defaults(name: str) -> dict[str, Any]:
    """Returns the default of each argument of a Keras loss class."""
    parameters = inspect.signature(getattr(keras.losses, name)).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


def list_keras_classes(module: Any, base: type) -> list[str]:
    """Returns the names of a module's classes that inherit from `base`."""
    classes = inspect.getmembers(module, inspect.isclass)
    return [name for name, class_ in classes if issubclass(class_, base) and class_ is not base]


def unknown_name(start: str, module: Any, base: type, name: str, known: list[str]) -> ConfigError:
    """Returns the error for an unknown name. It suggests a similar name and lists the short names."""
    classes = list_keras_classes(module, base)
    similar = find_similar(name, known) or find_similar(name, [*known, *ABBREVIATIONS, *classes])
    hint = f"; did you mean {similar}?" if similar else ""
    short = f"{', '.join(known)}, or " if known else ""
    return ConfigError(
        f"{start}: there is no such name{hint} ({short}a class of {module.__name__}); for your own, write "
        "{_target_: module.Class}"
    )


#: Names that a metric cannot have: other values under `train/`, `val/` and `test/` have them.
RESERVED = ("loss", "extra_loss", "loss_scale", "learning_rate", "gradient_norm", "rollbacks", "lr", NOT_FINITE)


def make_objective(
    outputs: Described,
    options: ObjectiveOptions | None = None,
    *,
    loader: Loader | None = None,
    class_weights: Mapping[str, Sequence[float]] | None = None,
    is_weighted: bool = False,
) -> Objective:
    """Makes the loss and the metrics.

    Args:
        outputs: the outputs of the dataset: one, or several by name.
        options: the config group `objective`, without its `class_weight`. None: the defaults.
        loader: loads the classes that the options name; None if they name no class.
        class_weights: the result of `find_class_weights`; None: no weights.
        is_weighted: whether the examples have weights.

    Raises ConfigError if a loss or metric does not fit the outputs.
    """
    options = options or ObjectiveOptions()
    check_smoothing(outputs, options.label_smoothing)
    losses = by_output(outputs, options.loss, "objective.loss", is_one=lambda value: isinstance(value, Target | str))
    metrics = by_output(outputs, options.metrics, "objective.metrics", is_one=lambda value: isinstance(value, list))
    factors = by_output(outputs, options.loss_weights, "objective.loss_weights", is_one=lambda value: False)

    def make_one(name: str, described: Outputs) -> Objective:
        weights = (class_weights or {}).get(name)
        smoothing = 0.0 if described.kind == "regression" else options.label_smoothing
        dot = "." if name else ""
        target = find_loss(described, losses.get(name), f"objective.loss{dot}{name}")
        parts = make_output_objective(described, target, smoothing, weights=weights, loader=loader)
        if metrics.get(name) == []:
            return drop_metrics(parts)
        targets = find_metrics(described, parts, metrics.get(name, ()), key=f"objective.metrics{dot}{name}")
        parts = add_metrics(parts, described, targets, loader=loader, is_weighted=is_weighted)
        return measure_medians(parts, described)

    if isinstance(outputs, Outputs):
        return replace(make_one("", outputs), is_weighted=is_weighted)
    named = {name: make_one(name, described) for name, described in outputs.items()}
    joined = join_outputs(named, {name: factors.get(name, 1.0) for name in named})
    return replace(joined, is_weighted=is_weighted)


def find_positive_losses(outputs: Described, options: ObjectiveOptions, loader: Loader) -> dict[str, Target]:
    """Returns the losses that need positive outputs, by the names of their outputs."""
    losses = by_output(outputs, options.loss, "objective.loss", is_one=lambda value: isinstance(value, Target | str))
    named = {"": outputs} if isinstance(outputs, Outputs) else outputs
    positive: dict[str, Target] = {}
    for name, described in named.items():
        key = f"objective.loss.{name}" if name else "objective.loss"
        target = find_loss(described, losses.get(name), key)
        if target is not None and needs_positive_outputs(described, loader.locate(target)):
            positive[name] = target
    return positive


def check_smoothing(outputs: Described, smoothing: float) -> None:
    """Raises ConfigError for `objective.label_smoothing` if all outputs are values."""
    named = outputs if isinstance(outputs, Mapping) else {"": outputs}
    if smoothing and all(described.kind == "regression" for described in named.values()):
        raise ConfigError(f"objective.label_smoothing={smoothing:g}: the targets are values, not classes; leave it 0")


# One output ----------------------------------------------------------------------------------


def make_output_objective(
    described: Outputs, target: Target | None, smoothing: float, weights: Sequence[float] | None, loader: Loader | None
) -> Objective:
    """Makes the loss of one output, with the default metrics of its kind."""
    parts = defaults_for(described)
    loss = choose_loss(described, parts, target, smoothing=smoothing, loader=loader, class_weights=weights)
    if described.scaling is not None and is_free_of_unit(target):
        loss = standardise_loss(loss, *described.scaling)
    plain = minimised = example_loss(described, loss)
    if weights is not None or described.logit_shift is not None:
        minimised = example_loss(described, unshift_loss(loss, described.logit_shift), weights)
    return Objective(
        minimised,
        parts.measures,
        parts.evaluation_measures,
        reported_loss=None if minimised is plain else plain,
        answers=make_answers(described),
        modes={"loss": "min", **parts.modes},
        classes=parts.classes,
        decide=parts.decide,
    )


def example_loss(described: Outputs, loss: Loss, weights: Sequence[float] | None = None) -> Loss:
    """Returns a function that computes the loss of each example [b].

    It is the mean over the positions that count. Each position's loss is multiplied by the weight of its class.
    """

    def losses(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        counted = find_counted(described, targets)
        valid = replace_ignored(targets, counted)
        factors = None
        if weights is not None:
            factors, valid = weigh_classes(described, list(weights), valid, outputs=outputs)
        values = loss(valid, outputs)
        if factors is not None:
            if values.shape.rank > 1 or factors.shape.rank > 1:
                factors = tf.reshape(factors, tf.shape(values))
            values *= factors
        return average_positions(values, counted)

    return losses


def unshift_loss(loss: Loss, shift: Sequence[float] | None) -> Loss:
    """Returns a loss that subtracts `Outputs.logit_shift` from the logits first."""
    if shift is None:
        return loss
    return lambda targets, outputs: loss(targets, outputs - tf.constant(shift))


def standardise_loss(loss: Loss, mean: float, deviation: float) -> Loss:
    """Returns a loss that first standardises targets and outputs to mean 0 and deviation 1."""

    def standardise(values: tf.Tensor) -> tf.Tensor:
        return tf.cast((tf.cast(values, tf.float64) - mean) / deviation, tf.float32)

    return lambda targets, outputs: loss(standardise(targets), standardise(outputs))


def drop_metrics(parts: Objective) -> Objective:
    """Returns the objective with its loss only: no default metrics, confusion matrix or baselines."""
    modes = {"loss": parts.modes["loss"]}
    dropped = replace(parts, measures=(), evaluation_measures=(), modes=modes, classes=None, decide=None)
    return replace(dropped, replaced=name_measures(parts))


def measure_medians(parts: Objective, described: Outputs) -> Objective:
    """Returns the objective with metrics of the predicted medians, if the model predicts quantiles."""
    if described.levels is None:
        return parts
    middle = described.levels.index(0.5)

    def take_median(targets: Any, outputs: Any) -> tuple[Any, Any]:
        return targets, outputs[..., middle]

    measures = change_measures(parts.measures, take_median)
    evaluation_measures = change_measures(parts.evaluation_measures, take_median)
    return replace(parts, measures=measures, evaluation_measures=evaluation_measures)


def name_measures(parts: Objective) -> set[str]:
    """Returns the names of all metrics of an objective."""
    names: set[str] = set()
    for measure in (*parts.measures, *parts.evaluation_measures):
        names |= set(measure.names)
    return names


def add_metrics(
    parts: Objective, described: Outputs, targets: Sequence[Target], loader: Loader | None, is_weighted: bool
) -> Objective:
    """Adds the metrics from the config. They replace default metrics with the same names."""
    if not targets:
        return parts
    assert loader is not None
    measures: list[Measure] = []
    modes: dict[str, Mode] = {}
    own: list[str] = []
    for target in targets:
        measure, measure_modes = make_measure(described, target, loader, is_weighted=is_weighted)
        measures.append(measure)
        modes |= measure_modes
        own += measure.names
    for name, count in Counter([*own, *RESERVED]).items():
        if count > 1:
            raise ConfigError(
                f"{targets[0].key}: two values would have the name {name}; give a metric another name: {{_target_: "
                f"{targets[0].path}, name: my_{name}}}"
            )
    kept_modes = {name: mode for name, mode in parts.modes.items() if name not in own}
    return replace(
        parts,
        measures=[*drop_measures(parts.measures, own), *measures],
        evaluation_measures=drop_measures(parts.evaluation_measures, own),
        modes={**kept_modes, **modes},
        replaced=name_measures(parts) & set(own),
    )


def drop_measures(measures: Sequence[Measure], names: Sequence[str]) -> list[Measure]:
    """Returns the measures that have none of these names."""
    return [measure for measure in measures if not set(measure.names) & set(names)]


# Several outputs -----------------------------------------------------------------------------


def join_outputs(named: Mapping[str, Objective], factors: Mapping[str, float]) -> Objective:
    """Joins the objectives of several outputs. The loss is the weighted sum of their losses."""

    def add_losses(losses: Mapping[str, Loss]) -> Any:
        def compute(targets: Any, outputs: Any) -> tf.Tensor:
            terms = [factors[name] * loss(targets[name], outputs[name]) for name, loss in losses.items()]
            return tf.add_n(terms)

        return compute

    losses = {name: part.loss for name, part in named.items()}
    reported_losses = {name: part.reported_loss or part.loss for name, part in named.items()}
    has_class_weights = any(part.reported_loss is not None for part in named.values())
    measures: list[Measure] = []
    evaluation_measures: list[Measure] = []
    modes: dict[str, Mode] = {"loss": "min"}
    replaced = set()
    for name, part in named.items():
        measures += select_all(name, [loss_measure(reported_losses[name]), *part.measures])
        evaluation_measures += select_all(name, part.evaluation_measures)
        for metric, mode in part.modes.items():
            modes[f"{name}/{metric}"] = mode
        for metric in part.replaced:
            replaced.add(f"{name}/{metric}")
    return Objective(
        add_losses(losses),
        measures,
        evaluation_measures,
        reported_loss=add_losses(reported_losses) if has_class_weights else None,
        answers=join_answers(named),
        modes=modes,
        replaced=replaced,
    )


def join_answers(named: Mapping[str, Objective]) -> Answers:
    """Returns `Objective.answers` for several outputs. An example with several bad outputs counts once."""

    def answers(targets: Any, outputs: Any, weights: tf.Tensor) -> tuple[Any, Any, tf.Tensor]:
        usable: dict[str, tf.Tensor] = {}
        measured: dict[str, tf.Tensor] = {}
        is_bad = []
        for name, part in named.items():
            assert part.answers is not None
            usable[name], measured[name], is_bad_here = part.answers(targets[name], outputs[name], weights)
            is_bad.append(is_bad_here)
        return usable, measured, tf.reduce_any(tf.stack(is_bad), axis=0)

    return answers


def loss_measure(loss: Loss) -> Measure:
    """Returns the mean loss of one of several outputs, as a measure."""
    measure = mean_measure("loss", lambda targets, outputs: (loss(targets, outputs), None), ignores=False)
    return replace(measure, is_loss=True)


def select_all(output: str, measures: Sequence[Measure]) -> list[Measure]:
    """Returns measures that read one of several outputs, with the output's name before theirs."""

    selected = []
    for measure in change_measures(measures, lambda targets, outputs: (targets[output], outputs[output])):
        names = tuple(f"{output}/{name}" for name in measure.names)
        selected.append(replace(measure, names=names))
    return selected


def change_measures(measures: Sequence[Measure], change: Callable[[Any, Any], tuple[Any, Any]]) -> list[Measure]:
    """Returns the measures, computed from `change(targets, outputs)`."""

    def change_one(measure: Measure) -> Measure:
        scores = measure.scores
        return replace(
            measure,
            sums=lambda targets, outputs, weights: measure.sums(*change(targets, outputs), weights),
            scores=scores and (lambda targets, outputs, weights: scores(*change(targets, outputs), weights)),
        )

    return list(map(change_one, measures))
