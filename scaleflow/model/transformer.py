"""A small Transformer encoder for text, after Vaswani et al. 2017 ("Attention Is All You Need", arXiv:1706.03762)."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, OutputStructure
from scaleflow.interfaces.options import Fraction, Positive, check_options
from scaleflow.model.layers import average, check_tokens, entry, head


@check_options("model")
def build(
    inputs: Inputs,
    outputs: OutputStructure,
    width: Positive = 64,
    heads: Positive = 4,
    blocks: Positive = 2,
    units: Positive = 128,
    dropout: Fraction = 0.0,
) -> keras.Model:
    """Builds word and position embeddings, encoder blocks, the average over the words, and a dense layer.

    A block is as in the paper: self-attention and a feed-forward layer with ReLU, each followed by dropout (if any), a
    residual connection and layer normalization. Position embeddings are learned; the paper found them as good as its
    sinusoids. Attention and the average ignore padding.

    Args:
        inputs: word ids, int32 of shape (tokens,) with a vocabulary; 0 is padding.
        outputs: the outputs that the dataset needs.

    conf/model/transformer.yaml describes the other arguments.

    Raises:
        ConfigError: if the inputs are not word ids, `width` is not a multiple of `heads`, or an argument is invalid.
    """
    vocabulary = check_tokens(inputs, "transformer")
    check_transformer(width, heads)
    raw, tokens = entry(inputs)
    mask = ops.expand_dims(ops.not_equal(tokens, 0), axis=1)  # [b, 1, tokens]: the tokens that attention may use
    x = keras.layers.Embedding(vocabulary, width, name="words")(tokens)
    x = apply_dropout(
        x + keras.layers.Embedding(inputs.shape[0], width, name="positions")(make_positions(tokens)), dropout
    )
    for number in range(1, blocks + 1):
        x = build_encoder_block(x, mask, f"block{number}", heads=heads, units=units, rate=dropout)
    return keras.Model(raw, head(average(x, tokens), outputs), name="transformer")


def build_encoder_block(x: Any, there: Any, name: str, heads: int, units: int, rate: float) -> Any:
    """Adds one encoder block: [b, tokens, width] -> the same shape."""
    width = x.shape[-1]
    attention = keras.layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")
    attended = apply_dropout(attention(x, x, attention_mask=there), rate)
    x = keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x + attended)
    feed = keras.layers.Dense(units, activation="relu", name=f"{name}_feed1")(x)
    feed = apply_dropout(keras.layers.Dense(width, name=f"{name}_feed2")(feed), rate)
    return keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x + feed)


def make_positions(tokens: Any) -> Any:
    """Returns positions 0, 1, 2, ... [1, tokens]. Computes them from the input, so that Keras can save the model."""
    ones = ops.sum(ops.zeros_like(tokens), axis=0, keepdims=True) + 1
    return ops.cumsum(ones, axis=1) - 1


def apply_dropout(x: Any, rate: float) -> Any:
    return keras.layers.Dropout(rate)(x) if rate else x


def check_transformer(width: int, heads: int) -> None:
    if width % heads:
        raise ConfigError(
            f"model.width={width} with model.heads={heads}: the width is not divisible by the number of heads; use "
            f"model.width={heads * max(1, width // heads)}"
        )
