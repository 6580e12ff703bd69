"""A model for tables with large vocabularies, after Naumov et al. 2019 (DLRM, arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from scaleflow.interfaces.options import Fraction, Positive, Widths, check_options
from scaleflow.model.layers import average, head, hidden, label_leaves, make_inputs


@check_options("model")
def build(
    inputs: Mapping[str, Inputs],
    outputs: Outputs,
    width: Positive = 16,
    dense_units: Widths = 32,
    units: Widths = (64, 32),
    dropout: Fraction = 0.0,
) -> keras.Model:
    """Builds a DLRM: embeddings of categories, dense layers for numbers, dot products of all pairs, then dense layers.

    An input with a vocabulary is categorical: one id, or a list of ids whose embeddings are averaged (0 is padding).
    All other inputs are numbers. They are concatenated, and dense layers turn them into one more vector. The model
    takes the dot product of each pair of these vectors.

    Args:
        inputs: the inputs by name, at least one with a vocabulary.
        outputs: the outputs that the dataset needs.

    conf/model/dlrm.yaml describes the other arguments.

    Raises:
        ConfigError: if the dataset has a single input or no categorical one, or an argument is invalid.
    """
    check_columns(inputs)
    raw = make_inputs(inputs)
    vectors = []
    numbers = []
    labels = label_leaves(inputs)
    for name, spec in inputs.items():
        if spec.vocabulary is None:
            numbers.append(scale_numbers(raw[name], spec))
            continue
        embedded = keras.layers.Embedding(spec.vocabulary, width, name=f"{labels[name]}_embedding")(raw[name])
        vectors.append(average(embedded, raw[name]) if spec.shape else embedded)
    if numbers:
        joined = keras.layers.Concatenate()(numbers) if len(numbers) > 1 else numbers[0]
        x = hidden(hidden(joined, dense_units, dropout), width, 0.0)
        vectors.append(x)
    parts = [multiply_pairs(vectors)] if len(vectors) > 1 else []
    joined = [*parts, *vectors]
    x = keras.layers.Concatenate()(joined) if len(joined) > 1 else joined[0]
    return keras.Model(raw, head(hidden(x, units, dropout), outputs), name="dlrm")


def check_columns(inputs: Any) -> None:
    if not isinstance(inputs, Mapping):
        raise ConfigError("model=dlrm: needs several inputs by name, but the dataset has one; use model=mlp")
    wrong = [name for name, spec in inputs.items() if not isinstance(spec, Inputs) or spec.dtype == "string"]
    if wrong:
        raise ConfigError(f"model=dlrm: accepts numbers and categories, but {', '.join(wrong)} is text or a group")
    long = [name for name, spec in inputs.items() if len(spec.shape) > 1]
    if long:
        raise ConfigError(f"model=dlrm: accepts single values and lists, but {', '.join(long)} has more dimensions")
    if not any(spec.vocabulary for spec in inputs.values()):
        raise ConfigError("model=dlrm: the dataset has no categorical input (Inputs.vocabulary); use model=mlp")


def scale_numbers(x: Any, spec: Inputs) -> Any:
    """Converts a numeric input to [b, n], and multiplies it by its scale if there is one."""
    x = x if spec.shape else ops.expand_dims(x, axis=-1)
    return keras.layers.Rescaling(1.0 if spec.scale is None else spec.scale)(x)


def multiply_pairs(vectors: Sequence[Any]) -> Any:
    """Returns the dot product of each pair of vectors [b, width]: [b, pairs]."""
    products = []
    for number, vector in enumerate(vectors):
        products += [ops.sum(vector * earlier, axis=-1) for earlier in vectors[:number]]
    return ops.stack(products, axis=-1)
