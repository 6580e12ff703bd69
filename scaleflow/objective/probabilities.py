"""Refuses models that return probabilities where logits are needed, by the operations of the traced model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Objective, label_leaf, name_leaves
from scaleflow.objective.structure import Described

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
        called = operation.graph._get_function(operation.get_attr("f").name)
        return find_activation(called.graph.outputs[tensor.value_index]) if called is not None else None
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
