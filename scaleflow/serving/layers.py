"""Finds a layer of a trained Keras model by name, and computes its result for the model's inputs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

#: A message names at most this number of layers.
MAX_NAMED = 20


def walk_named_layers(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, layer) for each layer of a Keras model except inputs: `mlp`, `mlp/dense_1`."""
    for layer in getattr(model, "layers", ()):
        if type(layer).__name__ != "InputLayer":
            yield prefix + layer.name, layer
        yield from walk_named_layers(layer, f"{prefix}{layer.name}/")


def choose_layer(model: Any, name: str) -> Any:
    """Returns the layer with this path or last part of a path.

    Raises ValueError if there is no such layer, or several. The message lists the most similar layers first.
    """
    layers = dict(walk_named_layers(model))
    matching = [name] if name in layers else [path for path in layers if path.endswith(f"/{name}")]
    if len(matching) == 1:
        return layers[matching[0]]
    compare = difflib.SequenceMatcher(None, b=name.lower())

    def differ(path: str) -> float:
        compare.set_seq1(path.rpartition("/")[2].lower())
        return -compare.ratio()

    paths = matching or sorted(layers, key=differ)
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    why = "several layers have this name" if matching else "there is no such layer"
    raise ValueError(f"{why}; the model has {', '.join(paths[:MAX_NAMED])}{more}")


def compute_layer(model: Any, layer: Any, inputs: Any) -> tuple[Any, tf.Tensor]:
    """Returns the outputs of a model, and the result of a layer's last call, [batch, ...] float32.

    Raises ValueError if the layer's result is not a tensor of numbers with a row for each example.
    """
    call = layer.call
    results = list[Any]()

    def keep(*arguments: Any, **options: Any) -> Any:
        results.append(call(*arguments, **options))
        return results[-1]

    layer.call = keep  # works for every kind of model
    try:
        outputs = model(inputs, training=False)
    finally:
        layer.call = call
    if not results:
        raise ValueError("the model does not use this layer")
    (values, *others) = tf.nest.flatten(results[-1])
    rows = tf.nest.flatten(inputs)[0].shape[0]
    if others or not isinstance(values, tf.Tensor) or values.dtype == tf.string:
        raise ValueError("this layer does not return numbers, one tensor of them")
    if not values.shape.rank or values.shape[0] != rows or None in values.shape[1:]:
        raise ValueError(f"this layer returns {values.shape}, without a row of one size for each example")
    return outputs, tf.cast(values, tf.float32)


def read_specs(endpoint: Any) -> Any:
    """Returns the `tf.TensorSpec` of an endpoint's argument, or a dict of them."""
    ((specs,), _) = endpoint.concrete_functions[0].structured_input_signature
    return specs
