"""Ensembles: a model whose members predict apart, and whose prediction is their average.

A model says so by the names of layers: the layer `members` (`members_NAME` with several outputs) returns what each of
k members predicts, [b, k, *Outputs.shape], and what follows averages it. Each member then trains on a loss of its own.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from scaleflow.interfaces import MEMBERS, PREDICTION, Outputs, OutputStructure, map_named, name_leaves
from scaleflow.model.layers import to_label
from scaleflow.model.make import find_graph, scale_output


def name_members(output: str) -> str:
    """Returns the name of the layer that returns the members' predictions of an output."""
    return to_label(f"{MEMBERS}_{output}") if output else MEMBERS


def average_members(members: Any, described: Outputs) -> Any:
    """Averages predictions [b, k, *shape] over the members: values, or probabilities, which become logits again."""
    if described.kind == "regression":
        return ops.mean(members, axis=1)
    shift = math.log(members.shape[1])
    if described.kind == "classification":
        return ops.logsumexp(ops.log_softmax(members), axis=1) - shift
    return ops.logsumexp(ops.log_sigmoid(members), axis=1) - ops.logsumexp(ops.log_sigmoid(-members), axis=1)


def expose_members(model: keras.Model, outputs: OutputStructure) -> keras.Model | None:
    """Returns a model of the same layers that returns the members' predictions, too; None if the model has no members.

    Args:
        model: as `make_model` returns it.
        outputs: of the dataset.

    Returns:
        A model from the same inputs to {PREDICTION: the outputs, MEMBERS: [b, k, *shape] in their unit}.
    """
    graph = find_graph(model)
    layers = {layer.name: layer for layer in getattr(model, "layers", ())}
    if graph is None or any(name_members(name) not in layers for name in name_leaves(outputs)):
        return None
    members = map_named(lambda name, each: scale_output(name, layers[name_members(name)].output, each), outputs)
    return keras.Model(graph[0], {PREDICTION: graph[1], MEMBERS: members}, name=model.name)
