"""A decoder-only Transformer that predicts the next token, after Radford et al. 2019 (GPT-2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from scaleflow.interfaces.options import Fraction, Positive, check_options
from scaleflow.interfaces.sampling import Sampling
from scaleflow.model.generation import CachedGpt, NextToken, WholeWindow, count_blocks, generate_tokens
from scaleflow.model.layers import check_one_output, check_tokens, entry
from scaleflow.model.transformer import apply_dropout, check_transformer, make_positions


@check_options("model")
def build(
    inputs: Inputs,
    outputs: Outputs,
    width: Positive = 128,
    heads: Positive = 4,
    blocks: Positive = 4,
    units: Positive | None = None,
    dropout: Fraction = 0.0,
) -> keras.Model:
    """Builds token and position embeddings, causal blocks, and logits of the next token at each position.

    A block is GPT-2's: layer normalization before the causal self-attention and before the feed-forward layer with
    GELU, each followed by dropout (if any) and a residual connection. Weights are drawn as in GPT-2, with a standard
    deviation of 0.02. Every token counts: 0 is no padding here.

    Args:
        inputs: token ids, int32 of shape (tokens,) with a vocabulary.
        outputs: `classification` of shape (tokens, vocabulary).

    conf/model/gpt.yaml describes the other arguments.

    Raises:
        ConfigError: if the dataset does not give tokens with the next token at each position, or an argument is
            invalid.
    """
    vocabulary = check_tokens(inputs, "gpt")
    check_one_output(outputs, "gpt")
    if outputs.kind != "classification" or len(outputs.shape) != 2 or outputs.shape[0] != inputs.shape[0]:
        raise ConfigError(
            f"model=gpt: predicts a token at each of {inputs.shape[0]} positions, but the dataset's {outputs.kind} "
            f"targets need outputs of shape {outputs.shape}; use dataset=tokens, or model=transformer"
        )
    check_transformer(width, heads)
    raw, tokens = entry(inputs)
    words = keras.layers.Embedding(vocabulary, width, embeddings_initializer=small(), name="tokens")(tokens)
    positions = keras.layers.Embedding(inputs.shape[0], width, embeddings_initializer=small(), name="positions")
    x = apply_dropout(words + positions(make_positions(tokens)), dropout)
    for number in range(1, blocks + 1):
        x = build_decoder_block(x, f"block{number}", heads, units or 4 * width, dropout)
    x = keras.layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    logits = keras.layers.Dense(outputs.shape[-1], dtype="float32", kernel_initializer=small(), name="outputs")(x)
    return keras.Model(raw, logits, name="gpt")


def build_decoder_block(x: Any, name: str, heads: int, units: int, rate: float) -> Any:
    """Adds one block: [b, tokens, width] -> the same shape."""
    width = x.shape[-1]
    normed = keras.layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
    attention = keras.layers.MultiHeadAttention(
        heads, width // heads, kernel_initializer=small(), name=f"{name}_attention"
    )
    x = x + apply_dropout(attention(normed, normed, use_causal_mask=True), rate)
    normed = keras.layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(x)
    feed = keras.layers.Dense(units, activation="gelu", kernel_initializer=small(), name=f"{name}_feed1")(normed)
    return x + apply_dropout(keras.layers.Dense(width, kernel_initializer=small(), name=f"{name}_feed2")(feed), rate)


def small() -> keras.initializers.Initializer:
    """Returns a new initializer: one that is used twice draws the same values."""
    return keras.initializers.RandomNormal(stddev=0.02)


def generate(
    model: Callable[[Any], Any],
    prompt: Sequence[int],
    length: int,
    window: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Continues a prompt, one token after the other; `scaleflow.generate_text` does so with texts.

    Args:
        model: token ids [1, window] int32 -> logits [1, window, vocabulary]: a `gpt`, or `serve` of its SavedModel. A
            `gpt` keeps keys and values, so that a token does not compute those before it again.
        prompt: token ids, at least one.
        length: the number of tokens to add.
        window: the number of tokens that the model takes. Beyond it, the window moves on by half.
        temperature: divides the logits; 0 takes the most probable token each time.
        seed: draws the tokens.

    Returns:
        The prompt and the new tokens.

    Raises:
        ValueError: if the prompt is empty or the temperature is negative.
    """
    if not prompt or temperature < 0:
        raise ValueError("generate needs a prompt of at least one token, and a temperature of at least 0")
    is_gpt = isinstance(model, keras.Model) and count_blocks(model)
    predict: NextToken = CachedGpt(model, window) if is_gpt else WholeWindow(model, window)
    sampling = Sampling(tokens=length, temperature=temperature, seed=seed)
    return [*prompt, *generate_tokens(predict, prompt, window, sampling)]
