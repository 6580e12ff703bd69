"""`objective.class_weight`: the weight of each class in the training loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import ClassWeight, Outputs
from scaleflow.objective.positions import is_shares
from scaleflow.objective.structure import Described, by_output

Array = np.ndarray[Any, Any]

KEY = "objective.class_weight"

#: The most classes that a message lists.
MOST_SHOWN = 10


def find_class_weights(
    outputs: Described,
    option: ClassWeight | Mapping[str, ClassWeight] | None,
    count: Callable[[list[str]], Mapping[str, list[int]]],
) -> dict[str, list[float]]:
    """Finds the weight of each class, by output; "" is the only one.

    Args:
        outputs: the outputs of the dataset.
        option: `objective.class_weight`.
        count: counts the classes of the training split for some outputs, as `count_classes` does.

    Raises:
        ConfigError: if an output has no classes, or not these.
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
    """Returns a note on the weights of each output's classes, up to `MOST_SHOWN` of them."""
    notes = []
    for name, each in weights.items():
        described = outputs[name] if isinstance(outputs, Mapping) else outputs
        names = described.names or [str(number) for number in range(len(each))]
        shown = ", ".join(
            f"{weight:.4g} for {known}" for known, weight in list(zip(names, each, strict=True))[:MOST_SHOWN]
        )
        more = f" and {len(each) - MOST_SHOWN} more" if len(each) > MOST_SHOWN else ""
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
    if given == "balanced":
        return
    known = names_of_classes(described)
    for name in given:
        if name not in known:
            some = ", ".join(list(known)[:MOST_SHOWN]) + (", ..." if len(known) > MOST_SHOWN else "")
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


def balance(counts: list[int]) -> list[float]:
    """Returns examples / (classes x examples of the class); 0 for a class without examples, which does not count."""
    occurring = sum(count > 0 for count in counts)
    return [sum(counts) / (occurring * count) if count else 0.0 for count in counts]


def count_classes(outputs: Described, names: Iterable[str], batches: Iterable[Any]) -> dict[str, list[int]]:
    """Counts the targets of each class, without those that are ignored.

    Args:
        outputs: the outputs of the dataset.
        names: the outputs to count.
        batches: batches of all targets of a split: arrays [b, ...], or dicts of them.
    """
    named = outputs if isinstance(outputs, Mapping) else {"": outputs}
    totals = {name: np.zeros(max(names_of_classes(named[name]).values()) + 1, np.int64) for name in names}
    for batch in batches:
        for name, total in totals.items():
            targets = np.ravel(batch[name] if name else batch)
            if named[name].ignore is not None:
                targets = targets[targets != named[name].ignore]
            total += np.bincount(
                (targets > 0.5 if named[name].kind == "binary" else targets).astype(np.int64), minlength=len(total)
            )
    return {name: total.tolist() for name, total in totals.items()}


def weigh_classes(described: Outputs, weights: list[float], targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns the weight of each target's class [b, ...]; of mixup's shares the mean by these shares."""
    table = tf.constant(weights, tf.float32)
    if described.kind == "binary":
        share = tf.cast(targets, tf.float32)
        return table[0] * (1 - share) + table[1] * share
    if is_shares(targets, outputs):
        return tf.linalg.matvec(tf.cast(targets, tf.float32), table)
    return tf.gather(table, tf.cast(targets, tf.int32))
