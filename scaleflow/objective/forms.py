"""The form in which Keras's losses and metrics take targets and outputs: classes or one-hot, logits or probabilities.

Models return logits, and the targets of classes are integers. What is not of Keras gets them in this form, except that
metrics get probabilities.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Outputs, Target
from scaleflow.objective.positions import is_shares

#: Prefix of the modules of Keras's own classes and functions.
KERAS = "keras."

FROM_LOGITS = "from_logits"


@dataclass(frozen=True)
class Loader:
    """Loads what a `_target_` names.

    Attributes:
        locate: imports it.
        bind: (target, positional arguments that are added later) -> it with its arguments, checked, but not called.
    """

    locate: Callable[[Target], Any]
    bind: Callable[[Target, int], Callable[..., Any]]

    def make(self, target: Target) -> Any:
        """Returns a function that takes (targets, outputs), or the object that a class makes.

        Raises:
            ConfigError: if it cannot be made.
        """
        if not inspect.isclass(self.locate(target)):
            return self.bind(target, 2)
        make = self.bind(target, 0)
        try:
            return make()
        except Exception as error:  # a class may raise anything
            raise ConfigError(f"{target.key}: {target.path}: {read_reason(error)}") from error


def find_keras_name(named: Any) -> str | None:
    """Returns the name of the class or function of Keras that `named` is or derives from, without underscores.

    None if it is none of Keras's, and if it derives from a base class without a form of its own.
    """
    classes = named.__mro__ if inspect.isclass(named) else [named]
    names = [each.__name__ for each in classes if is_of_keras(each)]
    name = plain_name(names[0]) if names else None
    return None if name in ("loss", "lossfunctionwrapper", "metric", "mean", "meanmetricwrapper", "sum") else name


def is_of_keras(named: Any) -> bool:
    """Returns whether a class or function is defined in Keras."""
    return str(getattr(named, "__module__", "")).startswith(KERAS)


def plain_name(name: str) -> str:
    """Returns a name without underscores, in lower case, which is the same for Keras's function and class."""
    return name.replace("_", "").lower()


def plain_names(*names: str) -> frozenset[str]:
    return frozenset(map(plain_name, names))


def takes(named: Any, name: str) -> bool:
    """Returns whether a class or function has a parameter."""
    try:
        return name in inspect.signature(named).parameters
    except ValueError:  # a builtin without a signature
        return False


def add_arguments(target: Target, arguments: Mapping[str, Any]) -> Target:
    return replace(target, arguments={**target.arguments, **arguments})


# ---------------------------------------------------------------------------------------------
# Targets and outputs
# ---------------------------------------------------------------------------------------------


def to_integers(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns integer classes; with mixup's shares the class with the largest share."""
    if is_shares(targets, outputs):
        return tf.argmax(targets, axis=-1, output_type=tf.int32)
    return tf.cast(targets, tf.int32)


def to_one_hot(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns one-hot classes, or mixup's shares as they are, float32."""
    if is_shares(targets, outputs):
        return tf.cast(targets, tf.float32)
    return tf.one_hot(tf.cast(targets, tf.int32), outputs.shape[-1], dtype=tf.float32)


def to_probabilities(described: Outputs, outputs: tf.Tensor) -> tf.Tensor:
    """Returns probabilities for logits; values as they are."""
    if described.kind == "classification":
        return tf.nn.softmax(outputs)
    return outputs if described.kind == "regression" else tf.sigmoid(outputs)


def draw_batch(described: Outputs, shape: tuple[int, ...], count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws targets and outputs [count, *shape] of a kind, to try a loss or a metric on."""
    random = np.random.default_rng(0)
    outputs = random.normal(0, 1, (count, *shape)).astype("float32")
    if described.kind == "classification":
        targets: Any = random.integers(0, shape[-1], (count, *shape[:-1])).astype("int32")
    elif described.kind == "regression":
        targets = random.uniform(0.1, 1, (count, *shape)).astype("float32")
    else:
        targets = random.integers(0, 2, (count, *shape)).astype("float32")
    with tf.device("CPU:0"):
        return tf.constant(targets), tf.constant(outputs)


def has_logits(made: Any) -> bool:
    """Returns whether a loss or a metric of Keras was made with `from_logits=True`, such as by a user's subclass."""
    return any(getattr(made, name, None) is True for name in (FROM_LOGITS, f"_{FROM_LOGITS}"))
