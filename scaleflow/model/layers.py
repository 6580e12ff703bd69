"""Building blocks of the built-in model factories. Users' factories may use them too."""

from __future__ import annotations

import keyword
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import keras
import numpy as np
from keras import ops

from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Inputs,
    InputStructure,
    Outputs,
    OutputStructure,
    describe_keys,
    label_leaf,
    map_leaves,
    map_named,
    name_leaves,
)
from scaleflow.interfaces.options import to_list


def make_inputs(inputs: InputStructure) -> Any:
    """Creates a `keras.Input` for each tensor. Inputs in a dict get no names, since the keys name them."""

    def make_input(name: str, description: Inputs) -> keras.KerasTensor:
        return keras.Input(description.shape, dtype=description.dtype, name=None if name else "inputs")

    return map_named(make_input, inputs)


def entry(inputs: InputStructure) -> tuple[Any, Any]:
    """Creates the model's inputs, and multiplies each by its `Inputs.scale` (to about [0, 1]) if it has one.

    Returns:
        (raw [batch, *shape] in the dataset's dtype, scaled [batch, *shape] in the layers' dtype), with the keys of
        `inputs`. Without a scale, both are the same tensor.
    """
    raw = make_inputs(inputs)

    def scale(description: Inputs, x: Any) -> Any:
        return x if description.scale is None else keras.layers.Rescaling(description.scale)(x)

    scaled = map_leaves(scale, inputs, raw)
    return raw, scaled


def flatten(x: Any) -> keras.KerasTensor:
    """Flattens [batch, ...] to [batch, numbers]. Concatenates the tensors of a dict in the order of their names."""
    parts = [keras.layers.Flatten()(tensor) for tensor in name_leaves(x).values()]
    return parts[0] if len(parts) == 1 else keras.layers.Concatenate()(parts)


def head(
    x: keras.KerasTensor, outputs: OutputStructure, regularizer: keras.regularizers.Regularizer | None = None
) -> Any:
    """Adds a dense layer that returns logits or values [batch, *outputs.shape], float32 under every dtype policy.

    For a dict of outputs it adds a layer `outputs_NAME` for each, and returns a dict.
    """

    def add(name: str, description: Outputs) -> keras.KerasTensor:
        label = f"outputs_{labels[name]}" if name else "outputs"
        units = math.prod(description.shape)
        dense = keras.layers.Dense(units, dtype="float32", name=label, kernel_regularizer=regularizer)
        if len(description.shape) == 1:
            return dense(x)
        return keras.layers.Reshape(description.shape, dtype="float32")(dense(x))

    labels = label_leaves(outputs)
    return map_named(add, outputs)


def order_levels(values: Any, levels: Sequence[float], name: str | None = None) -> Any:
    """Converts [batch, ..., n * levels] to quantiles [batch, ..., n, levels] in ascending order, float32.

    The lowest quantile is a free value, and each next one adds a positive step (softplus). For zeros, the result is the
    quantiles of the normal distribution with deviation 1. Sorting would also avoid crossings, but the quantiles would
    meet where two values change places.
    """
    x = keras.layers.Reshape((*values.shape[1:-1], -1, len(levels)), dtype="float32")(values)
    starts = np.array([NormalDist().inv_cdf(level) for level in levels], np.float32)
    steps = ops.softplus(x[..., 1:]) * (np.diff(starts) / np.log(2)).astype(np.float32)
    ordered = [x[..., :1] + starts[:1]]
    for n in range(len(levels) - 1):
        ordered.append(ordered[-1] + steps[..., n : n + 1])
    return keras.layers.Concatenate(dtype="float32", name=name)(ordered)


def label_leaves(structure: Any) -> dict[str, str]:
    """Returns a valid layer and tensor name (label) for each leaf of a structure, by the leaf's name.

    TensorFlow and Python accept only ASCII letters, digits and _, and no Python keywords. Labels must also differ in
    lower case. Other symbols become _. If the result is still not valid, the label is a hash of the name, such as
    `column_1a2b3c4d`. A hash does not depend on the dataset's other columns, so the layers of the column keep their
    names.
    """
    labels: dict[str, str] = {}
    used_labels: set[str] = set()
    plain = {name: re.sub(r"\W", "_", name, flags=re.ASCII) for name in name_leaves(structure)}
    for name in sorted(plain, key=lambda name: (name != plain[name], name)):
        label = plain[name] or "inputs"
        if label.lower() in used_labels or label[0] == "_" or keyword.iskeyword(label) or label == "self":
            label = f"column_{zlib.crc32(name.encode()):08x}"
        labels[name] = label
        used_labels.add(label.lower())
    return labels


def average(x: keras.KerasTensor, tokens: keras.KerasTensor) -> keras.KerasTensor:
    """Averages over the words except padding: [batch, tokens, width] -> [batch, width] float32.

    A text without words gives zeros. Keras's GlobalAveragePooling1D with a mask would give NaN.

    Args:
        x: a vector for each token.
        tokens: [batch, tokens] integers; 0 is padding.
    """
    counts = ops.expand_dims(ops.cast(ops.not_equal(tokens, 0), "float32"), axis=-1)
    return ops.sum(ops.cast(x, "float32") * counts, axis=1) / ops.maximum(ops.sum(counts, axis=1), 1.0)


def check_numbers(inputs: InputStructure, name: str) -> None:
    """Rejects text, both strings and word ids, because word ids are not quantities."""
    for key, description in name_leaves(inputs).items():
        label = f"the dataset's {label_leaf('inputs', key)} are"
        if description.dtype == "string":
            raise ConfigError(f"model={name}: needs numbers, but {label} text; {WAY_TO_TEXT}")
        if description.vocabulary is not None:
            raise ConfigError(
                f"model={name}: needs quantities, but {label} words, as numbers below {description.vocabulary}; use "
                "model=text or model=transformer"
            )


def check_one_tensor(inputs: InputStructure, name: str) -> None:
    """Rejects a dict of inputs."""
    if isinstance(inputs, Mapping):
        raise ConfigError(
            f"model={name}: needs one tensor, but the dataset's inputs {describe_keys(inputs)}; use model=mlp for "
            "numbers, or a model of your own"
        )


def check_one_output(outputs: OutputStructure, name: str) -> None:
    """Rejects a dict of outputs."""
    if isinstance(outputs, Mapping):
        raise ConfigError(
            f"model={name}: returns one tensor, but the dataset's outputs {describe_keys(outputs)}; use a model of "
            "your own"
        )


def check_tokens(inputs: Inputs, name: str) -> int:
    """Returns the size of the vocabulary. Rejects inputs that are not word ids."""
    check_one_tensor(inputs, name)
    if inputs.dtype == "string":
        raise ConfigError(f"model={name}: needs text as numbers of words, but the dataset has strings; {WAY_TO_TEXT}")
    if inputs.vocabulary is None or len(inputs.shape) != 1:
        others = "model=cnn or model=resnet" if len(inputs.shape) == 3 else "model=mlp or model=linear"
        raise ConfigError(
            f"model={name}: needs text as numbers of words (int32 of shape (tokens,), with Inputs.vocabulary), but "
            f"the dataset's inputs are {inputs.dtype} of shape {inputs.shape}; use {others}"
        )
    return inputs.vocabulary


def check_shape(inputs: Inputs, name: str) -> None:
    """Rejects inputs that are not images."""
    check_one_tensor(inputs, name)
    check_numbers(inputs, name)
    if len(inputs.shape) != 3:
        raise ConfigError(
            f"model={name}: needs images of shape (height, width, channels), but the dataset's inputs have shape "
            f"{inputs.shape}; use model=mlp"
        )


#: Advice for messages: how to turn text into word ids.
WAY_TO_TEXT = (
    "add a preprocessing to the dataset that turns the text into int32 numbers of words with Inputs.vocabulary, and "
    "use model=text or model=transformer"
)


def add_rectified(
    x: keras.KerasTensor, layer: Callable[..., keras.Layer], size: int, batch_norm: bool, **options: Any
) -> keras.KerasTensor:
    """Adds a layer and ReLU, with BatchNorm between them if `batch_norm` is set (Ioffe and Szegedy 2015).

    BatchNorm's statistics cover all replicas, so the result does not depend on the number of replicas.
    """
    if not batch_norm:
        return layer(size, activation="relu", **options)(x)
    x = layer(size, use_bias=False, **options)(x)  # BatchNormalization adds the bias
    return keras.layers.ReLU()(keras.layers.BatchNormalization(synchronized=True)(x))


def hidden(
    x: keras.KerasTensor, units: int | Sequence[int], dropout: float, batch_norm: bool = False
) -> keras.KerasTensor:
    """Adds dense layers with ReLU, each followed by dropout if its rate is above 0."""
    for width in to_list(units):
        x = add_rectified(x, keras.layers.Dense, width, batch_norm=batch_norm)
        if dropout:
            x = keras.layers.Dropout(dropout)(x)
    return x
