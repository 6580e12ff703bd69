"""Functions that change an objective: for ensembles, for unknown classes, and to reject models with probabilities.

- `average_losses`: each member of an ensemble minimises its own loss.
- `add_unknown_count`: counts targets whose class the model does not know. `count_as_wrong` treats them as errors.
- `refuse_probabilities`: rejects models that return probabilities instead of logits. It reads the traced graph.
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
    """Returns a note if a model's outputs have a Keras mask, since losses and metrics do not use it; else None.

    Some strategies lose a mask. `Outputs.ignore` works with all of them.
    """
    described = list(outputs.values()) if isinstance(outputs, Mapping) else [outputs]
    has_positions = any(len(output.shape) > 1 and output.ignore is None for output in described)
    masked = any(read_mask(tensor) is not None for tensor in getattr(model, "outputs", None) or ())
    if not (has_positions and masked):
        return None
    return (
        "model: its outputs have a Keras mask, but the loss and the metrics also count the masked positions; to "
        "leave them out, give their targets a separate value and set Outputs.ignore to it"
    )


def by_output(outputs: Described, option: Any, key: str, is_one: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns an option's values by output. The key is "" if the dataset has one output without a name.

    Args:
        option: the value of `key`; None if it is not set.
        key: the config key, for messages.
        is_one: returns whether a value is for one output, rather than a mapping from outputs to values.

    Raises ConfigError if the option names an output that does not exist, or has one value for several outputs.
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
    unknown = [name for name in option if name not in outputs]
    if unknown:
        raise ConfigError(f"{key}: names {', '.join(map(str, unknown))}; the dataset has the outputs {known}")
    return dict(option)


#: Names of measures: the share of examples whose class the model knows, and the number of examples of unknown classes.
KNOWN_SHARE = "known_share"
UNKNOWN_CLASSES = "unknown_classes"


def add_unknown_count(objective: Objective, outputs: Mapping[str, Outputs]) -> Objective:
    """Adds `KNOWN_SHARE` and `UNKNOWN_CLASSES` for outputs whose `Outputs.ignore` marks unknown classes."""
    measures = [make_unknown_measure(name, described) for name, described in outputs.items()]
    return replace(objective, measures=[*objective.measures, *measures])


def make_unknown_measure(output: str, described: Outputs) -> Measure:
    """Makes the measure of both values for one output; its name is "" if it is the only one."""

    def sums(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
        counted = find_counted(described, name_leaves(targets)[output])
        is_known = tf.reshape(counted, [-1])
        is_unknown = tf.cast(weights > 0, tf.float32) * (1 - is_known)
        return tf.stack([tf.reduce_sum(is_known * weights), tf.reduce_sum(is_unknown)])

    def finish(values: np.ndarray[Any, Any], total: float) -> Sequence[float]:
        return [divide(values[0], total), float(values[1])]

    return Measure((name_metric(output, KNOWN_SHARE), name_metric(output, UNKNOWN_CLASSES)), sums, finish, size=2)


def count_as_wrong(values: Mapping[str, float], loss_weights: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics that count examples of unknown classes as errors, and removes `KNOWN_SHARE`.

    - Accuracies (names that end in `accuracy`, except balanced accuracy) become accuracies over all examples.
    - The loss becomes the mean over examples of known classes. Before, unknown ones count with a loss of 0.
    - All other values stay as they are: metrics of the known classes.

    Args:
        values: metrics by name, with the values of `add_unknown_count`.
        loss_weights: the weights of several outputs in the loss.
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


def average_losses(objective: Objective) -> Objective:
    """Returns an objective that minimises the mean loss of the members, and reports metrics of their average.

    Its loss takes the outputs of an ensemble in training: {PREDICTION: outputs, MEMBERS: outputs [b, k, ...]}. With
    folds, the outputs also have SHARES, the weight of each member's loss [b, k], and evaluations use HELD_OUT.
    """

    def loss(targets: Any, outputs: Any) -> tf.Tensor:
        count = tf.nest.flatten(outputs[MEMBERS])[0].shape[1]
        apart = tf.nest.map_structure(lambda values: tf.reshape(values, [-1, *values.shape[2:]]), outputs[MEMBERS])
        repeated = tf.nest.map_structure(lambda values: tf.repeat(values, count, axis=0), targets)
        losses = tf.reshape(objective.loss(repeated, apart), [-1, count])
        return tf.reduce_mean(losses * outputs[SHARES] if SHARES in outputs else losses, axis=1)

    def report(outputs: Any, evaluates: bool) -> Any:
        return outputs[HELD_OUT if evaluates and HELD_OUT in outputs else PREDICTION]

    return replace(objective, loss=loss, reported_loss=objective.reported_loss or objective.loss, report=report)


ACTIVATIONS = ("Softmax", "Sigmoid")

#: The results of `FIRST` are probabilities if the first input is. Those of `SCALED` are, if all inputs that are not
#: constants are.
FIRST = (
    *("Cast", "EnsureShape", "ExpandDims", "Identity", "Max", "Mean", "Reshape", "Squeeze", "StopGradient"),
    *("StridedSlice", "Sum", "Transpose"),
)
SCALED = ("ClipByValue", "Maximum", "Minimum", "Mul", "RealDiv")

#: Operations whose results are probabilities, or sums of probabilities, if all inputs are.
JOINED = ("AddN", "AddV2", "BatchMatMulV2", "ConcatV2", "Einsum", "MatMul", "Pack")

#: Operations that call a `tf.function` inside the model.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def refuse_probabilities(objective: Objective, outputs: Described) -> Objective:
    """Returns the objective with a loss that raises ConfigError if the outputs come from softmax or sigmoid.

    The loss and the metrics would apply softmax or sigmoid a second time.
    """

    def loss(targets: Any, returned: Any) -> tf.Tensor:
        named = name_leaves(returned)
        for name, described in name_leaves(outputs).items():
            if described.kind == "regression" or name not in named:
                continue
            activation = find_activation(named[name])
            if activation is not None:
                _, _, path = activation.name.rpartition("while/body/")
                layers = path.split("/")[:-1]
                raise ConfigError(
                    f"model: {label_leaf('outputs', name)} end in {activation.type.lower()}"
                    f"{f' ({layers[-1]})' if layers else ''}, but the losses and metrics expect logits; remove that "
                    f"activation (activation='{activation.type.lower()}'); predictions give the probabilities"
                )
        return objective.loss(targets, returned)

    return replace(objective, loss=loss)


def find_activation(tensor: Any) -> tf.Operation | None:
    """Returns the softmax or sigmoid operation that a tensor comes from, directly or through averages and reshapes.

    Returns None if there is no such operation, or for an eager tensor.
    """
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
        inputs = [tensor for tensor in inputs if tensor.op.type != "Const"]
    elif operation.type not in JOINED:
        return None
    activations = [find_activation(tensor) for tensor in inputs if tensor.dtype.is_floating]
    if not activations or None in activations:
        return None
    return activations[0]
