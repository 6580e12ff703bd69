"""Makes the objective of a run from the description of its outputs and the config group `objective`.

Losses and metrics have short names, such as `objective.loss=focal` and `objective.metrics=[auc,f1,top5]`. Classes have
weights in the training loss (`objective.class_weight`).
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

#: The most classes that a message lists.
MAX_SHOWN = 10


def find_class_weights(
    outputs: Described,
    option: ClassWeight | Mapping[str, ClassWeight] | None,
    count: Callable[[list[str]], Mapping[str, list[float]]],
) -> dict[str, list[float]]:
    """Finds the weight of each class, by output; "" is the only one.

    Args:
        count: counts the classes of the training split for some outputs, as `count_classes` does.

    Raises ConfigError if an output has no classes, or not these.
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
    """Returns a note on the weights of each output's classes, up to `MAX_SHOWN` of them."""
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
    """Returns the number of each class by its name, and by its number as text."""
    count = 2 if described.kind == "binary" else described.shape[-1]
    return {str(n): n for n in range(count)} | {name: n for n, name in enumerate(described.names or ())}


def list_class_weights(described: Outputs, given: Mapping[str, float]) -> list[float]:
    known = names_of_classes(described)
    weights = [1.0] * (max(known.values()) + 1)
    for name, weight in given.items():
        weights[known[name]] = weight
    return weights


def balance(counts: list[float]) -> list[float]:
    """Returns examples / (classes x examples of the class); 0 for a class without examples, which does not count."""
    occurring = sum(count > 0 for count in counts)
    return [sum(counts) / (occurring * count) if count else 0.0 for count in counts]


def count_classes(outputs: Described, names: Iterable[str], batches: Iterable[Any]) -> dict[str, list[float]]:
    """Counts the targets of each class, or sums their examples' weights, without those that are ignored.

    Args:
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
    """Returns the weight of each target's class [b, ...], and the targets.

    A soft target, such as one of mixup, is a mixture of classes, and its loss is the mixture of their weighted losses.
    A loss that is linear in the target gives it for the weight sum(share * weight) and the shares share * weight / sum.
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


#: Abbreviations that Keras takes for losses and metrics, and their classes.
ABBREVIATIONS = {
    "acc": "Accuracy",
    "bce": "BinaryCrossentropy",
    "kld": "KLDivergence",
    "mae": "MeanAbsoluteError",
    "mse": "MeanSquaredError",
    "mape": "MeanAbsolutePercentageError",
    "msle": "MeanSquaredLogarithmicError",
}

#: Losses of values that have a meaning in any unit. Typed by their names, they get the values of the default loss.
FREE_OF_UNIT = plain_names("MeanAbsoluteError", "MeanSquaredError", "Huber", "LogCosh")

FOCAL = {"classification": "CategoricalFocalCrossentropy"}

SCORES = "scaleflow.objective.scores"
LANGUAGE = "scaleflow.objective.language"

#: Metrics of binary targets by their short names: the class, and its arguments.
OF_BINARY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "auc": ("keras.metrics.AUC", {}),
    "pr_auc": ("keras.metrics.AUC", {"curve": "PR"}),
    "f1": ("keras.metrics.F1Score", {"average": "macro"}),
    "precision": ("keras.metrics.Precision", {}),
    "recall": ("keras.metrics.Recall", {}),
    "mean_iou": ("keras.metrics.MeanIoU", {}),
}

#: Metrics of several classes or labels: macro averages.
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
    """Returns the loss of an output; `loss` may be a name. Raises ConfigError if there is no such loss."""
    if not isinstance(loss, str):
        return loss
    name = loss
    focal = FOCAL.get(described.kind, "BinaryFocalCrossentropy")
    found = focal if name.lower() == "focal" else find_keras_class(keras.losses, keras.losses.Loss, name)
    if found is None:
        raise unknown_name(f"{key}={name}", keras.losses, keras.losses.Loss, name=name, known=["focal"])
    return Target(key, f"keras.losses.{found}", typed=name)


def is_free_of_unit(target: Target | None) -> bool:
    """Returns whether a loss gets scaled targets as they are scaled: the default one, or one typed by its name."""
    return target is None or (bool(target.typed) and plain_name(target.path.rpartition(".")[2]) in FREE_OF_UNIT)


def find_metrics(described: Outputs, parts: Objective, metrics: Sequence[Target | str], key: str) -> list[Target]:
    """Returns the metrics of an output, of which each may be a name. Those in `parts` have no need to be added."""
    default = {name for measure in (*parts.measures, *parts.evaluation_measures) for name in measure.names}
    added = [each for each in metrics if not (isinstance(each, str) and plain_default(each) in default)]
    return [find_metric(described, each, key) if isinstance(each, str) else each for each in added]


def plain_default(name: str) -> str:
    """Returns the name of a metric that each run of its kind has: `accuracy` of `acc`."""
    return "accuracy" if name.lower() == "acc" else name.lower()


def find_metric(described: Outputs, name: str, key: str) -> Target:
    """Returns the metric that a name means for an output.

    Raises ConfigError if there is no such metric, or if it would always be 1.
    """
    short = name.lower()
    named = METRICS[described.kind]
    arguments: dict[str, Any] = {}
    if top := re.fullmatch(r"top([1-9]\d*)", short):
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
    """Returns the class of a module of Keras that a name means in any of Keras's forms; None if there is none."""
    plain = plain_name(ABBREVIATIONS.get(name.lower(), name))
    return next((each for each in list_keras_classes(module, base) if plain_name(each) == plain), None)


def find_loss_class(name: str) -> str | None:
    """Returns the name of Keras's class of a loss that a name means; None if it is none of Keras's."""
    return find_keras_class(keras.losses, keras.losses.Loss, name)


def find_metric_class(name: str) -> str | None:
    """Returns the name of Keras's class of a metric that a name means; None if it is none of Keras's."""
    return find_keras_class(keras.metrics, keras.metrics.Metric, name)


def read_loss_defaults(name: str) -> dict[str, Any]:
    """Returns the default of each argument of a class of a loss of Keras."""
    parameters = inspect.signature(getattr(keras.losses, name)).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


def list_keras_classes(module: Any, base: type) -> list[str]:
    found = inspect.getmembers(module, lambda each: inspect.isclass(each) and issubclass(each, base))
    return [name for name, each in found if each is not base]


def unknown_name(start: str, module: Any, base: type, name: str, known: list[str]) -> ConfigError:
    """Returns the refusal of a name: with the most similar one, the short names, and where Keras's are."""
    classes = list_keras_classes(module, base)
    similar = find_similar(name, known) or find_similar(name, [*known, *ABBREVIATIONS, *classes])
    hint = f"; did you mean {similar}?" if similar else ""
    short = f"{', '.join(known)}, or " if known else ""
    return ConfigError(
        f"{start}: there is no such name{hint} ({short}a class of {module.__name__}); for your own, write "
        "{_target_: module.Class}"
    )


#: Names of other values that are reported under `train/`, `val/` and `test/`.
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
        options: the config group `objective`, whose `class_weight` is not used. None: the defaults.
        loader: loads the classes that the options name; None if they name none.
        class_weights: the weight of each class by output, as `find_class_weights` returns it; None: no weights.

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
    """Returns the losses that are defined for positive values only, by the names of their outputs."""
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
    """Makes the loss of one output, with the metrics of its kind."""
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
    """Returns the loss of each example [b]: the mean over its positions that count, times the weights of classes."""

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
    """Returns the loss of the logits before `Outputs.logit_shift` was added to them."""
    return loss if shift is None else lambda targets, outputs: loss(targets, outputs - tf.constant(shift))


def standardise_loss(loss: Loss, mean: float, deviation: float) -> Loss:
    """Returns the loss of values with mean 0 and deviation 1, from targets and outputs in their unit."""

    def compute(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return loss(
            *(tf.cast((tf.cast(each, tf.float64) - mean) / deviation, tf.float32) for each in (targets, outputs))
        )

    return compute


def drop_metrics(parts: Objective) -> Objective:
    """Returns the objective with the loss alone: no metrics of the kind, no confusion matrix, no baselines of them."""
    modes = {"loss": parts.modes["loss"]}
    dropped = replace(parts, measures=(), evaluation_measures=(), modes=modes, classes=None, decide=None)
    return replace(dropped, replaced=name_measures(parts))


def measure_medians(parts: Objective, described: Outputs) -> Objective:
    """Returns the objective with metrics of the medians, if quantiles are predicted."""
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
    """Adds the metrics that the config names. They replace those of the kind that have the same name."""
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
    """Makes the objective of several outputs, which minimises the weighted sum of their losses."""

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
    """Makes `Objective.answers` for several outputs: an example counts once, however many of its outputs are bad."""

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
    """Makes the mean loss of one of several outputs."""
    measure = mean_measure("loss", lambda targets, outputs: (loss(targets, outputs), None), ignores=False)
    return replace(measure, is_loss=True)


def select_all(output: str, measures: Sequence[Measure]) -> list[Measure]:
    """Returns measures of one of several outputs, with its name."""

    chosen = change_measures(measures, lambda targets, outputs: (targets[output], outputs[output]))
    return [replace(each, names=tuple(f"{output}/{name}" for name in each.names)) for each in chosen]


def change_measures(measures: Sequence[Measure], change: Callable[[Any, Any], tuple[Any, Any]]) -> list[Measure]:
    """Returns measures that get changed targets and outputs."""

    def change_one(measure: Measure) -> Measure:
        scores = measure.scores
        return replace(
            measure,
            sums=lambda targets, outputs, weights: measure.sums(*change(targets, outputs), weights),
            scores=scores and (lambda targets, outputs, weights: scores(*change(targets, outputs), weights)),
        )

    return [change_one(each) for each in measures]
