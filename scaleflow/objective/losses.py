"""Losses for `objective.loss`: Keras's own, or the user's functions and classes.

Models return logits, and class targets are integers. A loss of the user's gets exactly these; a metric of the user's
gets probabilities. Keras's losses and metrics get the form that they need: integer or one-hot classes, logits or
probabilities.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Outputs, Target
from scaleflow.objective.kinds import Defaults, Loss, is_shares

#: Prefix of the modules of Keras's own classes and functions.
KERAS = "keras."

FROM_LOGITS = "from_logits"


@dataclass(frozen=True)
class Loader:
    """Loads the class or function that a `_target_` names.

    Attributes:
        locate: target -> the class or function.
        bind: (target, number of positional arguments to come) -> the class or function with its arguments bound and
            checked, not yet called.
    """

    locate: Callable[[Target], Any]
    bind: Callable[[Target, int], Callable[..., Any]]

    def make(self, target: Target) -> Any:
        """Returns an instance of the target if it is a class, else the function with its arguments bound.

        Raises ConfigError if the class raises an error.
        """
        if not inspect.isclass(self.locate(target)):
            return self.bind(target, 2)
        make = self.bind(target, 0)
        try:
            return make()
        except Exception as error:  # a class may raise anything
            raise ConfigError(f"{target.key}: {target.path}: {read_reason(error)}") from error


def find_keras_name(named: Any) -> str | None:
    """Returns the plain name of the Keras class or function that `named` is or derives from.

    Returns None if `named` does not come from Keras, or derives only from a base class that fixes no form of targets
    and outputs (such as `Loss` or `Mean`).
    """
    classes = named.__mro__ if inspect.isclass(named) else [named]
    names = [class_.__name__ for class_ in classes if is_of_keras(class_)]
    name = plain_name(names[0]) if names else None
    return None if name in ("loss", "lossfunctionwrapper", "metric", "mean", "meanmetricwrapper", "sum") else name


def is_of_keras(named: Any) -> bool:
    """Returns whether a class or function is defined in Keras."""
    return str(getattr(named, "__module__", "")).startswith(KERAS)


def plain_name(name: str) -> str:
    """Returns a name in lower case without underscores: the same for a Keras function and its class."""
    return name.replace("_", "").lower()


def plain_names(*names: str) -> frozenset[str]:
    return frozenset(map(plain_name, names))


def takes(named: Any, name: str) -> bool:
    """Returns whether a class or function has a parameter called `name`."""
    try:
        return name in inspect.signature(named).parameters
    except ValueError:  # a builtin without a signature
        return False


def add_arguments(target: Target, arguments: Mapping[str, Any]) -> Target:
    return replace(target, arguments={**target.arguments, **arguments})


# Targets and outputs -------------------------------------------------------------------------


def to_integers(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns integer classes. For soft targets of mixup that is the class with the largest share."""
    if is_shares(targets, outputs):
        return tf.argmax(targets, axis=-1, output_type=tf.int32)
    return tf.cast(targets, tf.int32)


def to_one_hot(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns one-hot classes, float32. Soft targets of mixup stay as they are."""
    if is_shares(targets, outputs):
        return tf.cast(targets, tf.float32)
    return tf.one_hot(tf.cast(targets, tf.int32), outputs.shape[-1], dtype=tf.float32)


def to_probabilities(described: Outputs, outputs: tf.Tensor) -> tf.Tensor:
    """Converts logits to probabilities. Regression outputs stay as they are."""
    if described.kind == "classification":
        return tf.nn.softmax(outputs)
    return outputs if described.kind == "regression" else tf.sigmoid(outputs)


def draw_batch(described: Outputs, shape: tuple[int, ...], count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns random targets and outputs of one kind, to try a loss or a metric on. Outputs are [count, *shape]."""
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


def has_logits(loss_or_metric: Any) -> bool:
    """Returns whether a Keras loss or metric was made with `from_logits=True`, for example by a user's subclass."""
    return any(getattr(loss_or_metric, name, None) is True for name in (FROM_LOGITS, f"_{FROM_LOGITS}"))


#: Keras losses that take integer classes. The others take targets in the shape of the outputs.
INTEGER_LOSSES = plain_names("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy")

#: Losses and metrics that take unbounded outputs instead of probabilities.
HINGES = plain_names("Hinge", "SquaredHinge", "CategoricalHinge")

#: Losses that need classification targets.
CLASS_LOSSES = INTEGER_LOSSES | plain_names(
    "CategoricalCrossentropy", "CategoricalFocalCrossentropy", "CategoricalHinge"
)

#: Losses that do not fit regression targets.
LOSSES_NOT_FOR_VALUES = (
    CLASS_LOSSES | HINGES | plain_names("BinaryCrossentropy", "BinaryFocalCrossentropy", "Dice", "Tversky")
)

#: Regression losses that take a logarithm of the outputs or clip them at 0. An output of 0 or less gives NaN or no
#: gradient.
LOSSES_OF_POSITIVE_VALUES = plain_names("Poisson", "MeanSquaredLogarithmicError", "KLDivergence")

#: Advice for a loss that cannot be `objective.loss`. A training step together with `objective.loss` is an error.
WRITE_STEP = "compute it in a training step: training.step={_target_: my_code.my_step}, without objective.loss"

#: Losses that fit no kind of target.
LOSSES_FOR_NO_KIND = plain_names("CTC", "Circle")

#: Keras metrics that take integer classes.
INTEGER_METRICS = plain_names(
    "SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy", "SparseCategoricalCrossentropy", "Accuracy"
)

#: Metrics that need classification targets.
CLASS_METRICS = (INTEGER_METRICS - plain_names("Accuracy")) | plain_names(
    *("CategoricalAccuracy", "TopKCategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge"),
    *("OneHotIoU", "OneHotMeanIoU"),
)

#: Metrics that do not fit multi-label targets.
CLASS_OR_LABEL_METRICS = CLASS_METRICS | plain_names("Accuracy", "IoU", "MeanIoU")

#: Metrics that fit regression targets.
VALUE_METRICS = plain_names(
    *("MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "LogCoshError"),
    *("MeanSquaredLogarithmicError", "CosineSimilarity", "R2Score", "PearsonCorrelation", "ConcordanceCorrelation"),
    *("Poisson", "KLDivergence"),
)


REDUCTION = "reduction"
SMOOTHING = "label_smoothing"


def choose_loss(
    described: Outputs,
    defaults: Defaults,
    target: Target | None,
    smoothing: float,
    loader: Loader | None,
    class_weights: Sequence[float] | None,
) -> Loss:
    """Returns the loss function of one output, (targets, outputs) -> the loss of each target [b, ...].

    Args:
        target: `objective.loss`; None for the default loss of the kind.
        class_weights: `objective.class_weight`, which needs a loss with one value per target; None: no weights.

    Raises ConfigError if the loss does not fit the output.
    """
    if target is None:
        return smooth_labels(described, defaults.loss, smoothing) if smoothing else defaults.loss
    assert loader is not None
    named = loader.locate(target)
    loss = make_loss(described, target, named, smoothing=smoothing, loader=loader)
    check_loss(described, target, named, loss=loss, has_class_weights=class_weights is not None)
    return loss


def smooth_labels(described: Outputs, loss: Loss, smoothing: float) -> Loss:
    """Returns a loss with label smoothing, as in Keras: a share of each target is spread over all classes."""

    def compute_smoothed(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        if described.kind == "classification":
            classes = described.shape[-1]
            targets = to_one_hot(targets, outputs)
        else:
            classes = 2
            targets = tf.cast(targets, tf.float32)
        return loss(targets * (1 - smoothing) + smoothing / classes, outputs)

    return compute_smoothed


def make_loss(described: Outputs, target: Target, named: Any, smoothing: float, loader: Loader) -> Loss:
    """Makes the loss that a target names, and converts targets and outputs to the form that it needs."""
    keras_name = find_keras_name(named)
    check_loss_kind(described, target, keras_name)
    target = complete_arguments(target, named, smoothing, has_classes=described.kind != "regression")
    own_loss = loader.make(target)
    call: Callable[..., Any] = own_loss.call if isinstance(own_loss, keras.losses.Loss) else own_loss
    if not callable(call):
        raise ConfigError(
            f"{target.describe()}: this returned a {type(own_loss).__name__}, expected a "
            "keras.losses.Loss or a function (targets, outputs) -> a loss for each example"
        )
    takes_logits = takes(named, FROM_LOGITS) or keras_name in HINGES or has_logits(own_loss)
    needs_probabilities = keras_name is not None and not takes_logits

    def loss(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        if described.kind != "classification":
            targets = tf.cast(targets, outputs.dtype)
        elif keras_name is not None and keras_name not in INTEGER_LOSSES:
            targets = to_one_hot(targets, outputs)
        elif is_shares(targets, outputs):
            raise ConfigError(
                f"{target.describe()}: needs integer classes, but dataset.augment.mixup (or cutmix) turns them "
                "into shares of classes; use a loss such as categorical_crossentropy, or remove one of "
                "the two"
            )
        if described.shape == ():  # Keras averages over the last axis
            targets = targets[:, None]
            outputs = outputs[:, None]
        if needs_probabilities:
            outputs = to_probabilities(described, outputs)
        return tf.cast(call(targets, outputs), tf.float32)

    return loss


def check_loss_kind(described: Outputs, target: Target, keras_name: str | None) -> None:
    """Rejects a Keras loss that does not fit the kind of target."""
    if keras_name in LOSSES_FOR_NO_KIND:
        raise ConfigError(f"{target.describe()}: does not fit {described.kind} targets; {WRITE_STEP}")
    suited = {"regression": LOSSES_NOT_FOR_VALUES, "binary": CLASS_LOSSES, "multi_label": CLASS_LOSSES}
    if keras_name in suited.get(described.kind, ()):
        kinds = "classes or labels" if described.kind == "regression" else "one of several classes"
        examples = {"regression": "huber", "binary": "focal", "multi_label": "focal"}
        raise ConfigError(
            f"{target.describe()}: is for {kinds}, and the dataset's targets are {described.kind}; use "
            f"a loss such as {examples[described.kind]}, or leave it null"
        )


def needs_positive_outputs(described: Outputs, named: Any) -> bool:
    """Returns whether a loss needs positive outputs, that is, a model that ends in a positive activation."""
    return described.kind == "regression" and find_keras_name(named) in LOSSES_OF_POSITIVE_VALUES


def complete_arguments(target: Target, named: Any, smoothing: float, has_classes: bool) -> Target:
    """Adds `from_logits` and `label_smoothing`, and rejects arguments that contradict the training loop."""
    key = target.key
    arguments = target.arguments
    if REDUCTION in arguments:
        raise ConfigError(
            f"{key}.{REDUCTION}={arguments[REDUCTION]}: the loop averages over the examples of the global batch, on "
            "any number of replicas; remove this key"
        )
    added: dict[str, Any] = {}
    if takes(named, FROM_LOGITS):
        if arguments.get(FROM_LOGITS) is False:
            raise ConfigError(
                f"{key}.{FROM_LOGITS}=false: models return logits, without softmax or sigmoid; remove this key"
            )
        added[FROM_LOGITS] = True
    if smoothing and has_classes:
        if not takes(named, SMOOTHING):
            raise ConfigError(
                f"objective.label_smoothing={smoothing:g}: {target.describe()} has no label smoothing; leave "
                "it 0, or use a loss such as categorical_crossentropy"
            )
        if SMOOTHING in arguments:
            raise ConfigError(
                f"objective.label_smoothing={smoothing:g} with {key}.{SMOOTHING}={arguments[SMOOTHING]}: both smooth "
                "the targets; remove one of the two"
            )
        added[SMOOTHING] = smoothing
    return add_arguments(target, added)


def check_loss(described: Outputs, target: Target, named: Any, loss: Loss, has_class_weights: bool) -> None:
    """Tries a loss on two random examples.

    Raises ConfigError if the loss fails, if it does not return a value for each example or position, or if an
    example's value depends on the other examples. The result would then depend on how replicas divide a batch. Also
    raises it if the loss averages over targets although `Outputs.ignore` or class weights need a value for each.
    """
    targets, outputs = draw_batch(described, described.shape, 2)
    start = f"{target.describe()}: "
    form = f"{described.kind} targets of shape {tuple(targets.shape)} and outputs of shape {tuple(outputs.shape)}"
    try:
        both, first = (loss(targets[:n], outputs[:n]) for n in (2, 1))
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{start}fails on {form}: {read_reason(error)}") from error
    shape = tuple(both.shape)
    if shape[:1] != (2,) or shape != tuple(outputs.shape)[: len(shape)]:
        axes = tuple(range(1, len(described.shape) + 1))
        hint = f"; set its axis to {list(axes)}" if takes(named, "axis") and shape == () else ""
        raise ConfigError(
            f"{start}returns shape {shape} for {form}; expected one value for each example, shape (2,), or for each "
            f"of its positions{hint}"
        )
    if not np.allclose(both[:1], first, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise ConfigError(
            f"{start}the loss of an example depends on the other examples of its batch, so it would depend on how the "
            f"batch is divided; {WRITE_STEP}"
        )
    if both.shape.num_elements() == targets.shape.num_elements():
        return
    if described.ignore is not None:
        raise ConfigError(
            f"{start}returns shape {shape} for {form}, so single targets with the value {described.ignore} cannot be "
            "left out (Outputs.ignore); remove Outputs.ignore if the loss itself leaves them out, or set it to null"
        )
    if has_class_weights:
        raise ConfigError(
            f"{start}returns shape {shape} for {form}, so single targets cannot have the weights of their classes "
            "(objective.class_weight); remove one of the two"
        )
