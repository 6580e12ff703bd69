"""Short names of losses and metrics, such as `objective.loss=focal` and `objective.metrics=[auc,f1,top5]`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from scaleflow.errors import ConfigError, find_similar
from scaleflow.interfaces import Kind, Objective, Outputs, Target
from scaleflow.objective.forms import plain_name, plain_names

#: Abbreviations that Keras takes for losses and metrics, and their classes.
ABBREVIATIONS = {
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

SCORES, LANGUAGE = "scaleflow.objective.scores", "scaleflow.objective.language"

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
    """Returns the loss of an output; `loss` may be a name.

    Raises:
        ConfigError: if there is no such loss.
    """
    if not isinstance(loss, str):
        return loss
    name = loss
    focal = FOCAL.get(described.kind, "BinaryFocalCrossentropy")
    found = focal if name.lower() == "focal" else find_keras_class(keras.losses, keras.losses.Loss, name)
    if found is None:
        raise unknown_name(f"{key}={name}", keras.losses, keras.losses.Loss, name, ["focal"])
    return Target(key, f"keras.losses.{found}", typed=name)


def is_free_of_unit(target: Target | None) -> bool:
    """Returns whether a loss gets scaled targets as they are scaled: the default one, or one typed by its name."""
    return target is None or (bool(target.typed) and plain_name(target.path.rpartition(".")[2]) in FREE_OF_UNIT)


def find_metrics(described: Outputs, parts: Objective, metrics: Sequence[Target | str], key: str) -> list[Target]:
    """Returns the metrics of an output, of which each may be a name. Those in `parts` have no need to be added."""
    default = {name for measure in (*parts.measures, *parts.evaluation_measures) for name in measure.names}
    added = [each for each in metrics if not (isinstance(each, str) and each.lower() in default)]
    return [find_metric(described, each, key) if isinstance(each, str) else each for each in added]


def find_metric(described: Outputs, name: str, key: str) -> Target:
    """Returns the metric that a name means for an output.

    Raises:
        ConfigError: if there is no such metric, or if it would always be 1.
    """
    short, named = name.lower(), METRICS[described.kind]
    arguments: dict[str, Any] = {}
    if top := re.fullmatch(r"top([1-9]\d*)", short):
        if described.kind == "classification" and int(top[1]) >= described.shape[-1]:
            raise ConfigError(f"{key}={name}: is always 1, since there are {described.shape[-1]} classes; leave it out")
        path, arguments = "keras.metrics.SparseTopKCategoricalAccuracy", {"k": int(top[1])}
    elif short in named:
        path, arguments = named[short][0], dict(named[short][1])
        if described.kind == "multi_label" and "score" in arguments:
            arguments["threshold"] = 0.5
    elif found := find_keras_class(keras.metrics, keras.metrics.Metric, name):
        return Target(key, f"keras.metrics.{found}", typed=name)
    else:
        known = [*named, *(["top5"] if described.kind == "classification" else [])]
        raise unknown_name(f"{key}={name}", keras.metrics, keras.metrics.Metric, name, known)
    return Target(key, path, {**arguments, "name": short}, typed=name)


def find_keras_class(module: Any, base: type, name: str) -> str | None:
    """Returns the class of a module of Keras that a name means in any of Keras's forms; None if there is none."""
    plain = plain_name(ABBREVIATIONS.get(name.lower(), name))
    return next((each for each in list_keras_classes(module, base) if plain_name(each) == plain), None)


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
