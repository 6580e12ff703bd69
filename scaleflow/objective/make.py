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
    for name, given in options.items():
        check_classes(named[name], f"{KEY}.{name}" if name else KEY, given)
    balanced = [name for name, given in options.items() if given == "balanced"]
    counts = count(balanced) if balanced else {}
    return {
        name: balance(counts[name]) if given == "balanced" else list_class_weights(named[name], given)
        for name, given in options.items()
    }


def describe_class_weights(outputs: Described, weights: Mapping[str, list[float]]) -> list[str]:
    """Returns a note for each output with the weights of its first `MAX_SHOWN` classes."""
    notes = []
    for name, each in weights.items():
        described = outputs[name] if isinstance(outputs, Mapping) else outputs
        names = described.names or [str(number) for number in range(len(each))]
        shown = ", ".join(
            f"{weight:.4g} for {known}" for known, weight in list(zip(names, each, strict=True))[:MAX_SHOWN]
        )
        more = f" and {len(each) - MAX_SHOWN} more" if len(each) > MAX_SHOWN else ""
        notes.append(f"{KEY}{'.' if name else ''}{name}: {shown}{more}, in the training loss only")
    return notes


def is_of_one_output(option: Any) -> bool:
    return option == "balanced" or not any(isinstance(each, Mapping | str) for each in option.values())


def check_classes(described: Outputs, key: str, given: Any) -> None:
    if described.kind not in ("classification", "binary"):
        raise ConfigError(
            f"{key}: works only with classification and binary targets, and the dataset's are {described.kind}; "
            "leave it null"
        )
    if isinstance(given, str):
        return
    known = names_of_classes(described)
    for name in given:
        if name not in known:
            some = ", ".join(list(known)[:MAX_SHOWN]) + (", ..." if len(known) > MAX_SHOWN else "")
            raise ConfigError(f"{key}.{name}: there is no such class; the classes are {some}")
    numbers = [known[name] for name in given]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{key}={dict(given)}: names a class twice, by its name and by its number")


def names_of_classes(described: Outputs) -> dict[str, int]:
    """Returns the number of each class. The keys are its name and its number as text."""
    count = 2 if described.kind == "binary" else described.shape[-1]
    return {str(n): n for n in range(count)} | {name: n for n, name in enumerate(described.names or ())}


def list_class_weights(described: Outputs, given: Mapping[str, float]) -> list[float]:
    known = names_of_classes(described)
    weights = [1.0] * (max(known.values()) + 1)
    for name, weight in given.items():
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
    totals = {name: np.zeros(max(names_of_classes(named[name]).values()) + 1) for name in names}
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

METRICS: Mapping[Kind, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "classification": OF_SEVERAL,
    "multi_label": OF_SEVERAL,
    "binary": OF_BINARY,
    "regression": {short: (f"keras.metrics.{ABBREVIATIONS[short]}", {}) for short in ("mse", "mape", "msle")},
}


def find_loss(described: Outputs, loss: Target | str | None, key: str) -> Target | None:
    """Resolves the loss of one output, if it is a short name. Raises ConfigError if there is no such loss."""
    if not isinstance(loss, str):
        return loss
    name = loss
    focal = FOCAL.get(described.kind, "BinaryFocalCrossentropy")
    found = focal if name.lower() == "focal" else find_keras_class(keras.losses, keras.losses.Loss, name)
    if found is None:
        raise unknown_name(f"{key}={name}", keras.losses, keras.losses.Loss, name=name, known=["focal"])
    return Target(key, f"keras.losses.{found}", typed=name)


def is_free_of_unit(target: Target | None) -> bool:
    """Returns whether a loss works on standardised values: the default loss, or a `FREE_OF_UNIT` short name."""
    return target is None or (bool(target.typed) and plain_name(target.path.rpartition(".")[2]) in FREE_OF_UNIT)


def find_metrics(described: Outputs, parts: Objective, metrics: Sequence[Target | str], key: str) -> list[Target]:
    """Resolves the metrics of one output, which may be short names. Leaves out those that `parts` already has."""
    default = {name for measure in (*parts.measures, *parts.evaluation_measures) for name in measure.names}
    added = [each for each in metrics if not (isinstance(each, str) and plain_default(each) in default)]
    return [find_metric(described, each, key) if isinstance(each, str) else each for each in added]


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
    elif found := find_keras_class(keras.metrics, keras.metrics.Metric, name):
        return Target(key, f"keras.metrics.{found}", typed=name)
    else:
        known = [*named, *(["top5"] if described.kind == "classification" else [])]
        raise unknown_name(f"{key}={name}", keras.metrics, keras.metrics.Metric, name=name, known=known)
    return Target(key, path, {**arguments, "name": short}, typed=name)


def find_keras_class(module: Any, base: type, name: str) -> str | None:
    """Returns the Keras class for a name in any of Keras's forms (`mse`, `mean_squared_error`); None if none fits."""
    plain = plain_name(ABBREVIATIONS.get(name.lower(), name))
    return next((each for each in list_keras_classes(module, base) if plain_name(each) == plain), None)


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
    found = inspect.getmembers(module, lambda each: inspect.isclass(each) and issubclass(each, base))
    return [name for name, each in found if each is not base]


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
    losses = by_output(outputs, options.loss, "objective.loss", is_one=lambda each: isinstance(each, Target | str))
    metrics = by_output(outputs, options.metrics, "objective.metrics", is_one=lambda each: isinstance(each, list))
    factors = by_output(outputs, options.loss_weights, "objective.loss_weights", is_one=lambda each: False)

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
    named = {name: make_one(name, each) for name, each in outputs.items()}
    return replace(join_outputs(named, {name: factors.get(name, 1.0) for name in named}), is_weighted=is_weighted)


def find_positive_losses(outputs: Described, options: ObjectiveOptions, loader: Loader) -> dict[str, Target]:
    """Returns the losses that need positive outputs, by the names of their outputs."""
    losses = by_output(outputs, options.loss, "objective.loss", is_one=lambda each: isinstance(each, Target | str))
    found: dict[str, Target] = {}
    for name, described in ({"": outputs} if isinstance(outputs, Outputs) else outputs).items():
        target = find_loss(described, losses.get(name), f"objective.loss{'.' if name else ''}{name}")
        if target is not None and needs_positive_outputs(described, loader.locate(target)):
            found[name] = target
    return found


def check_smoothing(outputs: Described, smoothing: float) -> None:
    named = outputs if isinstance(outputs, Mapping) else {"": outputs}
    if smoothing and all(each.kind == "regression" for each in named.values()):
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
            values *= (
                tf.reshape(factors, tf.shape(values)) if values.shape.rank > 1 or factors.shape.rank > 1 else factors
            )
        return average_positions(values, counted)

    return losses


def unshift_loss(loss: Loss, shift: Sequence[float] | None) -> Loss:
    """Returns a loss that subtracts `Outputs.logit_shift` from the logits first."""
    return loss if shift is None else lambda targets, outputs: loss(targets, outputs - tf.constant(shift))


def standardise_loss(loss: Loss, mean: float, deviation: float) -> Loss:
    """Returns a loss that first standardises targets and outputs to mean 0 and deviation 1."""

    def compute(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return loss(
            *(tf.cast((tf.cast(each, tf.float64) - mean) / deviation, tf.float32) for each in (targets, outputs))
        )

    return compute


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
    measures, others = (
        change_measures(each, lambda targets, outputs: (targets, outputs[..., middle]))
        for each in (parts.measures, parts.evaluation_measures)
    )
    return replace(parts, measures=measures, evaluation_measures=others)


def name_measures(parts: Objective) -> set[str]:
    return {name for measure in (*parts.measures, *parts.evaluation_measures) for name in measure.names}


def add_metrics(
    parts: Objective, described: Outputs, targets: Sequence[Target], loader: Loader | None, is_weighted: bool
) -> Objective:
    """Adds the metrics from the config. They replace default metrics with the same names."""
    if not targets:
        return parts
    assert loader is not None
    made = [make_measure(described, target, loader, is_weighted=is_weighted) for target in targets]
    own = [name for measure, _ in made for name in measure.names]
    for name, count in Counter([*own, *RESERVED]).items():
        if count > 1:
            raise ConfigError(
                f"{targets[0].key}: two values would have the name {name}; give a metric another name: {{_target_: "
                f"{targets[0].path}, name: my_{name}}}"
            )
    modes = {name: mode for name, mode in parts.modes.items() if name not in own}
    modes |= {name: mode for _, of_measure in made for name, mode in of_measure.items()}
    kept, of_evaluations = (
        [measure for measure in measures if not set(measure.names) & set(own)]
        for measures in (parts.measures, parts.evaluation_measures)
    )
    return replace(
        parts,
        measures=[*kept, *(measure for measure, _ in made)],
        evaluation_measures=of_evaluations,
        modes=modes,
        replaced=name_measures(parts) & set(own),
    )


# Several outputs -----------------------------------------------------------------------------


def join_outputs(named: Mapping[str, Objective], factors: Mapping[str, float]) -> Objective:
    """Joins the objectives of several outputs. The loss is the weighted sum of their losses."""

    def add_losses(losses: Mapping[str, Loss]) -> Any:
        def loss(targets: Any, outputs: Any) -> tf.Tensor:
            return tf.add_n([factors[name] * each(targets[name], outputs[name]) for name, each in losses.items()])

        return loss

    reported = {name: part.reported_loss or part.loss for name, part in named.items()}
    has_class_weights = any(part.reported_loss is not None for part in named.values())
    measures: list[Measure] = []
    for name, part in named.items():
        measures += select_all(name, [loss_measure(reported[name]), *part.measures])
    modes: dict[str, Mode] = {f"{name}/{key}": mode for name, part in named.items() for key, mode in part.modes.items()}
    return Objective(
        add_losses({name: part.loss for name, part in named.items()}),
        measures,
        [m for name, part in named.items() for m in select_all(name, part.evaluation_measures)],
        reported_loss=add_losses(reported) if has_class_weights else None,
        answers=join_answers(named),
        modes={"loss": "min", **modes},
        replaced={f"{name}/{key}" for name, part in named.items() for key in part.replaced},
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

    chosen = change_measures(measures, lambda targets, outputs: (targets[output], outputs[output]))
    return [replace(each, names=tuple(f"{output}/{name}" for name in each.names)) for each in chosen]


def change_measures(measures: Sequence[Measure], change: Callable[[Any, Any], tuple[Any, Any]]) -> list[Measure]:
    """Returns the measures, computed from `change(targets, outputs)`."""

    def change_one(measure: Measure) -> Measure:
        scores = measure.scores
        return replace(
            measure,
            sums=lambda targets, outputs, weights: measure.sums(*change(targets, outputs), weights),
            scores=scores and (lambda targets, outputs, weights: scores(*change(targets, outputs), weights)),
        )

    return [change_one(each) for each in measures]
