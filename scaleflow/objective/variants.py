"""Objectives made of another one: of an ensemble's members, with unknown classes, and with a check for probabilities.

- Each member of an ensemble minimises a loss of its own.
- Targets of classes that the model does not know are counted, and taken for wrong answers.
- Models that return probabilities where logits are needed are refused, by the operations of the traced model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import read_mask
from scaleflow.compat.tensorflow import find_called_graph
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    HELD_OUT,
    MEMBERS,
    PREDICTION,
    SHARES,
    Measure,
    Objective,
    Outputs,
    label_leaf,
    name_leaves,
    name_metric,
)
from scaleflow.objective.kinds import divide, find_counted

#: The outputs of a dataset: one, or several by name.
Described = Outputs | Mapping[str, Outputs]


def find_mask_note(model: Any, outputs: Described) -> str | None:
    """Returns a note if a model's outputs have a Keras mask, which the loss of each position does not use; else None.

    A mask does not pass through every strategy. `Outputs.ignore` does.
    """
    described = list(outputs.values()) if isinstance(outputs, Mapping) else [outputs]
    has_positions = any(len(each.shape) > 1 and each.ignore is None for each in described)
    masked = any(read_mask(each) is not None for each in getattr(model, "outputs", None) or ())
    if not (has_positions and masked):
        return None
    return (
        "model: its outputs have a Keras mask, but the loss and the metrics also count the masked positions; to "
        "leave them out, give their targets a separate value and set Outputs.ignore to it"
    )


def by_output(outputs: Described, option: Any, key: str, is_one: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns an option's value for each output that it names; "" is the name of the only output.

    Args:
        option: the value of `key`; None for none.
        key: the config key, for messages.
        is_one: returns whether a value is that of one output, and not a mapping from outputs.

    Raises ConfigError if it names an output that does not exist, or does not say which of several it is for.
    """
    if option is None:
        return {}
    if isinstance(outputs, Outputs):
        if not is_one(option):
            raise ConfigError(
                f"{key}: names the outputs {', '.join(option)}, but the dataset has a single output without a name; "
                "give its value alone, or leave it null"
            )
        return {"": option}
    known = ", ".join(outputs)
    if is_one(option):
        raise ConfigError(f"{key}: the dataset has the outputs {known}; write {key}={{{next(iter(outputs))}: ...}}")
    if unknown := [name for name in option if name not in outputs]:
        raise ConfigError(f"{key}: names {', '.join(map(str, unknown))}; the dataset has the outputs {known}")
    return dict(option)


#: The names of two values: the share of the examples whose class is known, and the number of the others.
KNOWN_SHARE = "known_share"
UNKNOWN_CLASSES = "unknown_classes"


def add_unknown_count(goal: Objective, outputs: Mapping[str, Outputs]) -> Objective:
    """Adds the two values for outputs, by name, whose `ignore` is the target of unknown classes."""
    measures = [make_unknown_measure(name, each) for name, each in outputs.items()]
    return replace(goal, measures=[*goal.measures, *measures])


def make_unknown_measure(output: str, described: Outputs) -> Measure:
    """Makes the two values of one output; its name is "" if it is the only one."""

    def sums(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        counted = find_counted(described, name_leaves(targets)[output])
        is_known = tf.reshape(counted, [-1])
        is_unknown = tf.cast(weights > 0, tf.float32) * (1 - is_known)
        return tf.stack([tf.reduce_sum(is_known * weights), tf.reduce_sum(is_unknown)])

    def finish(values: np.ndarray[Any, Any], total: float) -> Sequence[float]:
        return [divide(values[0], total), float(values[1])]

    return Measure((name_metric(output, KNOWN_SHARE), name_metric(output, UNKNOWN_CLASSES)), sums, finish, size=2)


def count_as_wrong(values: Mapping[str, float], loss_weights: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics in which examples of unknown classes are wrong answers, without their share.

    The loss, which is 0 for them, becomes the mean over the known ones. Accuracies, all values whose name ends in
    `accuracy`, but not balanced ones, become those over all examples. Other values are of the known ones.

    Args:
        values: metrics by name, with the values of `add_unknown_count`.
        loss_weights: of several outputs, their weights in the loss.
    """
    result = dict(values)
    for key in [key for key in values if key.rpartition("/")[2] == KNOWN_SHARE]:
        output = key.rpartition("/")[0]
        share = result.pop(key)
        loss = values[name_metric(output, "loss")]
        if share:
            result["loss"] += loss_weights.get(output, 1.0) * loss * (1 / share - 1)
        result[name_metric(output, "loss")] = divide(loss, share)
        for name, value in values.items():
            metric = name.removeprefix(name_metric(output, ""))
            if metric.endswith("accuracy") and metric != "balanced_accuracy" and "/" not in metric:
                result[name] = value * share if share else 0.0
    return result


def average_losses(goal: Objective) -> Objective:
    """Returns an objective that minimises the mean of the members' losses, and reports those of their average.

    Its loss takes {PREDICTION: outputs, MEMBERS: outputs [b, k, ...]}, as the model returns them in training, and with
    folds also SHARES: the weight of each member's loss [b, k]. Evaluations then are of HELD_OUT.
    """

    def loss(targets: Any, outputs: Any) -> tf.Tensor:
        count = tf.nest.flatten(outputs[MEMBERS])[0].shape[1]
        apart = tf.nest.map_structure(lambda each: tf.reshape(each, [-1, *each.shape[2:]]), outputs[MEMBERS])
        repeated = tf.nest.map_structure(lambda each: tf.repeat(each, count, axis=0), targets)
        losses = tf.reshape(goal.loss(repeated, apart), [-1, count])
        return tf.reduce_mean(losses * outputs[SHARES] if SHARES in outputs else losses, axis=1)

    def report(outputs: Any, evaluates: bool) -> Any:
        return outputs[HELD_OUT if evaluates and HELD_OUT in outputs else PREDICTION]

    return replace(goal, loss=loss, reported_loss=goal.reported_loss or goal.loss, report=report)


ACTIVATIONS = ("Softmax", "Sigmoid")

#: Operations whose results are probabilities if their first input is, and if all inputs are that are no constants.
FIRST = (
    *("Cast", "EnsureShape", "ExpandDims", "Identity", "Max", "Mean", "Reshape", "Squeeze", "StopGradient"),
    *("StridedSlice", "Sum", "Transpose"),
)
SCALED = ("ClipByValue", "Maximum", "Minimum", "Mul", "RealDiv")

#: Operations whose results are probabilities, or sums of some, if all inputs are.
JOINED = ("AddN", "AddV2", "BatchMatMulV2", "ConcatV2", "Einsum", "MatMul", "Pack")

#: Calls of a model's own `tf.function`.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def refuse_probabilities(goal: Objective, outputs: Described) -> Objective:
    """Returns the objective with a loss that is not traced for outputs of softmax or sigmoid.

    The loss and the metrics would apply softmax or sigmoid to them again.
    """

    def loss(targets: Any, returned: Any) -> tf.Tensor:
        named = name_leaves(returned)
        for name, each in name_leaves(outputs).items():
            found = find_activation(named[name]) if each.kind != "regression" and name in named else None
            if found is not None:
                _, _, path = found.name.rpartition("while/body/")
                layers = path.split("/")[:-1]
                raise ConfigError(
                    f"model: {label_leaf('outputs', name)} end in {found.type.lower()}"
                    f"{f' ({layers[-1]})' if layers else ''}, but the losses and metrics expect logits; remove that "
                    f"activation (activation='{found.type.lower()}'); predictions give the probabilities"
                )
        return goal.loss(targets, returned)

    return replace(goal, loss=loss)


def find_activation(tensor: Any) -> tf.Operation | None:
    """Returns the softmax or sigmoid whose values a tensor has, or averages; None if there is none, or it is eager."""
    if not isinstance(tensor, tf.Tensor) or not hasattr(tensor, "graph"):
        return None
    operation = tensor.op
    if operation.type in ACTIVATIONS:
        return operation
    inputs = list(operation.inputs)
    if operation.type in CALLS:
        called = find_called_graph(operation.graph, operation.get_attr("f").name)
        return find_activation(called.outputs[tensor.value_index]) if called is not None else None
    if operation.type == "IdentityN":
        return find_activation(inputs[tensor.value_index])
    if operation.type in FIRST:
        return find_activation(inputs[0])
    if operation.type in SCALED:
        inputs = [each for each in inputs if each.op.type != "Const"]
    elif operation.type not in JOINED:
        return None
    found = [find_activation(each) for each in inputs if each.dtype.is_floating]
    return found[0] if found and all(each is not None for each in found) else None
