"""Ensembles: a model whose members predict apart, and whose prediction is their average.

A model says so by the names of layers: the layer `members` (`members_NAME` with several outputs) returns what each of
k members predicts, [b, k, *Outputs.shape], and what follows averages it. Each member then trains on a loss of its own.

If the members share no weights, each can leave out one of several folds of the training split. What those members
predict that did not train on an example is an honest validation, and no example is lost to it.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from scaleflow.interfaces import (
    FOLD,
    HELD_OUT,
    MEMBERS,
    PREDICTION,
    SHARES,
    Outputs,
    OutputStructure,
    map_named,
    name_leaves,
)
from scaleflow.model.layers import label_leaves
from scaleflow.model.make import find_graph, scale_output

#: The logarithm of the weight of a member that does not count.
NOTHING = -1e9


def name_members(outputs: OutputStructure) -> dict[str, str]:
    """Returns the name of the layer that returns the members' predictions, by the name of the output."""
    return {name: f"{MEMBERS}_{label}" if name else MEMBERS for name, label in label_leaves(outputs).items()}


def average_members(members: Any, described: Outputs, shares: Any = None) -> Any:
    """Averages predictions [b, k, *shape] over the members: values, or probabilities, which become logits again.

    Args:
        shares: 1 for the members that count for an example, else 0, [b, k]; None: all count.
    """
    if shares is not None:
        shares = ops.reshape(ops.cast(shares, members.dtype), (-1, members.shape[1], *[1] * (len(members.shape) - 2)))
    if described.kind == "regression":
        if shares is None:
            return ops.mean(members, axis=1)
        return ops.sum(members * shares, axis=1) / ops.sum(shares, axis=1)
    weights = 0.0 if shares is None else (1 - shares) * NOTHING
    if described.kind == "classification":
        return ops.logsumexp(ops.log_softmax(members) + weights, axis=(1,))
    true, false = (ops.logsumexp(ops.log_sigmoid(x) + weights, axis=(1,)) for x in (members, -members))
    return true - false


def limit_values(values: Any, described: Outputs, is_scaled: bool = False) -> Any:
    """Keeps values within the range of the training targets, if that is known.

    `is_scaled` says that they are not in the unit of the targets yet (`Outputs.scaling`).
    """
    if described.limits is None:
        return values
    mean, deviation = described.scaling if is_scaled and described.scaling else (0.0, 1.0)
    return ops.clip(values, *((limit - mean) / deviation for limit in described.limits))


def expose_members(model: keras.Model, outputs: OutputStructure, folds: int = 0) -> keras.Model | None:
    """Returns a model of the same layers that returns the members' predictions, too; None if the model has no members.

    Args:
        model: as `make_model` returns it.
        folds: of the training split; 0: none. Member number m leaves out the fold m modulo `folds`.

    Returns:
        A model from the same inputs to {PREDICTION: the outputs, MEMBERS: [b, k, *shape] in their unit}. With folds it
        also takes `FOLD`, and returns {SHARES: [b, k], HELD_OUT: the outputs of the members that left out an example,
        or of all if it is in no fold}.
    """
    graph = find_graph(model)
    layers = {layer.name: layer for layer in getattr(model, "layers", ())}
    labels = name_members(outputs)
    if graph is None or any(label not in layers for label in labels.values()):
        return None
    members = map_named(lambda name, each: scale_output(name, layers[labels[name]].output, each), outputs)
    returned = {PREDICTION: graph[1], MEMBERS: members}
    if not folds:
        return keras.Model(graph[0], returned, name=model.name)
    described = name_leaves(outputs)
    count = next(iter(name_leaves(members).values())).shape[1]
    fold = keras.Input((), dtype="int32")
    is_out = ops.equal(ops.expand_dims(fold, -1), np.arange(count, dtype="int32") % folds)
    is_in_none = ops.expand_dims(fold < 0, -1)

    def hold_out(name: str, each: Any) -> Any:
        average = average_members(each, described[name], ops.logical_or(is_out, is_in_none))
        return limit_values(average, described[name])

    returned[SHARES] = ops.cast(ops.logical_not(is_out), "float32") * (folds / (folds - 1))
    returned[HELD_OUT] = map_named(hold_out, members)
    return keras.Model({**graph[0], FOLD: fold}, returned, name=model.name)
