"""Estimates what the calls of a model's graph cost in a training step, to divide it into stages of equal cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

#: Operations of a multiply-add: forward, for the gradient of the layer's input, and for that of its weight.
OPERATIONS = 2

#: Operations of a product of matrices that take as long as the update of one parameter. The update waits for memory:
#: 460 for Adam on one core of a CPU (measured); about as many follow from the bandwidth of a GPU in float32.
UPDATE = 500

#: Layers that use their weights at each position of their input. Others use them at each position of their output.
BY_INPUT = (
    *(keras.layers.RNN, keras.layers.Bidirectional),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
)


def estimate_costs(layers: Sequence[Any], positions: Sequence[int], examples: int) -> list[int]:
    """Estimates the operations of each call in a training step, its update included.

    Counted are products with weights, forward and backward, and the updates of weights. Frozen weights have no gradient
    and no update, and what is before all trained weights has no backward pass. Operations without weights, such as
    activations and the products inside attention, are not counted.

    Args:
        layers: what each call runs; a function costs nothing.
        positions: how often each call uses its weights for one example.
        examples: examples of a step.
    """
    costs = []
    has_trained = False  # an earlier call has trained weights
    for layer, count, updated in zip(layers, positions, count_parameters(layers, only_trained=True), strict=True):
        products = sum(math.prod(w.shape) * (1 + has_trained + w.trainable) for w in list_matrices(layer))
        costs.append(OPERATIONS * examples * count * products + UPDATE * updated)
        has_trained = has_trained or any(w.trainable for w in list_weights(layer))
    return costs


def list_weights(layer: Any) -> list[Any]:
    """Returns the weights of a layer; none of a function."""
    return list(layer.weights) if isinstance(layer, keras.layers.Layer) else []


def list_matrices(layer: Any) -> list[Any]:
    """Returns the weights that a layer multiplies something with: all matrices but the tables of embeddings."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    tables = (part for part in layer._flatten_layers() if isinstance(part, keras.layers.Embedding))
    looked_up = {id(weight) for table in tables for weight in table.weights}
    return [w for w in layer.weights if len(w.shape) > 1 and id(w) not in looked_up]


def count_parameters(layers: Sequence[Any], only_trained: bool = False) -> list[int]:
    """Returns for each call the number of parameters that no earlier call uses."""
    seen: set[int] = set()
    counts = []
    for layer in layers:
        weights = [w for w in list_weights(layer) if w.trainable or not only_trained]
        new = {id(w): w for w in weights if id(w) not in seen}
        seen |= set(new)
        counts.append(sum(w.shape.num_elements() for w in new.values()))
    return counts


def count_positions(layer: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts how often a layer uses its weights for one example; an unknown dimension counts as 1.

    Args:
        layer: the layer.
        inputs, outputs: the symbolic tensors of one call, [batch, ...positions, channels].
    """
    tensors = inputs if isinstance(layer, BY_INPUT) and inputs else outputs
    shape = tensors[0].shape
    is_first = getattr(layer, "data_format", None) == "channels_first"
    return math.prod(size or 1 for size in (shape[2:] if is_first else shape[1:-1]))
