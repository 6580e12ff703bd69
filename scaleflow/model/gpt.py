"""A decoder-only Transformer that predicts the next token, after Radford et al. 2019 (GPT-2)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from scaleflow.interfaces.options import Fraction, Positive, check_options
from scaleflow.interfaces.sampling import Sampling
from scaleflow.model.layers import check_one_output, check_tokens, entry
from scaleflow.model.make import explain_load_error
from scaleflow.model.transformer import apply_dropout, check_transformer, make_positions

#: Logits of the next token [vocabulary].
Logits = np.ndarray[Any, Any]


class NextToken(Protocol):
    """Predicts the next token. Usually each call has the last call's tokens and one more; any others work as well."""

    def __call__(self, tokens: Sequence[int]) -> Logits:
        """Returns the logits of the next token. `tokens` has at most as many ids as the model's window."""


class WholeWindow:
    """Predicts by computing all positions of the window for each token.

    Args:
        model: token ids [1, window] -> logits [1, window, vocabulary].
        window: the number of tokens that the model takes.
        dtype: the dtype of the token ids.
    """

    def __init__(self, model: Callable[[Any], Any], window: int, dtype: str = "int32") -> None:
        self._model = model
        self._window = window
        self._dtype = dtype

    def __call__(self, tokens: Sequence[int]) -> Logits:
        padded = np.zeros([1, self._window], self._dtype)
        padded[0, : len(tokens)] = tokens  # later positions do not matter: the model is causal
        logits: Logits = np.asarray(self._model(padded), np.float32)[0, len(tokens) - 1]
        return logits

    def check_causal(self) -> None:
        """Raises ConfigError if the prediction at a position depends on later tokens."""
        rows = [np.full([1, self._window], token, self._dtype) for token in (0, 1)]
        rows[1][0, 0] = 0
        first, second = (np.asarray(self._model(row), np.float32)[0, 0] for row in rows)
        if self._window > 1 and not np.allclose(first, second, rtol=1e-3, atol=1e-4):
            raise ConfigError("the run's model looks at later tokens, so it cannot predict the next one; use model=gpt")


class CachedGpt:
    """Predicts with `model=gpt` in float32, and caches keys and values: a new token computes only its own position.

    It repeats the computation of the layers in fewer operations, because for a single position starting an operation
    takes longer than running it.

    Args:
        model: a model from `scaleflow.model.gpt.build`.
        window: the number of tokens that the model takes.
    """

    def __init__(self, model: keras.Model, window: int) -> None:
        layer = model.get_layer
        attentions = [layer(f"block{number}_attention") for number in range(1, count_blocks(model) + 1)]
        self._heads = attentions[0].num_heads
        self._width = attentions[0].key_dim
        self._window = window
        self._tokens = tf.constant(layer("tokens").embeddings)
        self._positions = tf.constant(layer("positions").embeddings)
        self._blocks = []
        for number, attention in enumerate(attentions, 1):
            self._blocks.append(
                (
                    take_norm(layer(f"block{number}_norm1")),
                    join_dense(attention),
                    take_dense(attention.output_dense, rows=self._heads * self._width),
                    take_norm(layer(f"block{number}_norm2")),
                    take_dense(layer(f"block{number}_feed1")),
                    take_dense(layer(f"block{number}_feed2")),
                )
            )
        self._last_norm = take_norm(layer("norm"))
        self._outputs = take_dense(layer("outputs"))
        empty = tf.zeros([self._heads, window, self._width])
        self._caches = [(tf.Variable(empty), tf.Variable(empty)) for _ in attentions]
        self._known: list[int] = []
        self._advance = tf.function(self._compute)

    def __call__(self, tokens: Sequence[int]) -> Logits:
        known = len(self._known)
        if known + 1 != len(tokens) or list(tokens[:known]) != self._known:
            known = 0
        padded = np.zeros(1 if len(tokens) == known + 1 else self._window, np.int32)  # each size is traced once
        padded[: len(tokens) - known] = tokens[known:]
        last = len(tokens) - known - 1
        logits: Logits = self._advance(tf.constant(padded), tf.constant(known), tf.constant(last)).numpy()
        self._known = list(tokens)
        return logits

    def _compute(self, ids: tf.Tensor, first: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        """Returns the logits [vocabulary] that follow `ids[last]`. `ids[0]` is at position `first` of the window."""
        count = ids.shape[0]
        heads = self._heads
        places = first + tf.range(count)
        x = tf.gather(self._tokens, ids) + tf.gather(self._positions, places)
        later = tf.where(tf.range(self._window)[None] > places[:, None], -np.inf, 0.0)
        for (norm1, inner, outer, norm2, feed1, feed2), cache in zip(self._blocks, self._caches, strict=True):
            parts = tf.reshape(apply_dense(normalize(x, norm1), inner), [count, 3, heads, self._width])
            query, new_keys, new_values = tf.unstack(tf.transpose(parts, [1, 2, 0, 3]))
            cached_keys, cached_values = cache
            keys = cached_keys[:, first : first + count].assign(new_keys)
            values = cached_values[:, first : first + count].assign(new_values)
            shares = tf.nn.softmax(tf.matmul(query, keys, transpose_b=True) + later)
            seen = tf.transpose(tf.matmul(shares, values), [1, 0, 2])
            x = x + apply_dense(tf.reshape(seen, [count, heads * self._width]), outer)
            x = x + apply_dense(tf.nn.gelu(apply_dense(normalize(x, norm2), feed1)), feed2)
        return apply_dense(normalize(x[last : last + 1], self._last_norm), self._outputs)[0]


#: A dense layer: its kernel [in, out] and its bias [out].
Weights = tuple[tf.Tensor, tf.Tensor]


def take_dense(layer: Any, rows: int | None = None) -> Weights:
    """Returns the kernel of a dense layer, flattened to [in, out], and its bias [out]."""
    kernel = tf.cast(tf.convert_to_tensor(layer.kernel), tf.float32)
    bias = tf.cast(tf.convert_to_tensor(layer.bias), tf.float32)
    return tf.reshape(kernel, [rows or kernel.shape[0], -1]), tf.reshape(bias, [-1])


def join_dense(attention: Any) -> Weights:
    """Joins the weights of query, key and value of all heads. The query's are scaled by 1 / sqrt(key_dim)."""
    parts = [take_dense(layer) for layer in (attention.query_dense, attention.key_dense, attention.value_dense)]
    parts[0] = (parts[0][0] * attention.key_dim**-0.5, parts[0][1] * attention.key_dim**-0.5)
    kernels, biases = zip(*parts, strict=True)
    return tf.concat(kernels, axis=1), tf.concat(biases, axis=0)


def take_norm(layer: Any) -> tuple[tf.Tensor, tf.Tensor, float]:
    return tf.constant(layer.gamma), tf.constant(layer.beta), layer.epsilon


def apply_dense(x: tf.Tensor, weights: Weights) -> tf.Tensor:
    return tf.nn.bias_add(tf.matmul(x, weights[0]), weights[1])


def normalize(x: tf.Tensor, norm: tuple[tf.Tensor, tf.Tensor, float]) -> tf.Tensor:
    """Applies layer normalization to [n, width]."""
    centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
    return centred * (tf.math.rsqrt(variance + norm[2]) * norm[0]) + norm[1]


def count_blocks(model: keras.Model) -> int:
    """Returns the number of blocks of a model from `scaleflow.model.gpt.build`; 0 for any other model."""
    names = {layer.name for layer in model.layers}
    blocks = [name for name in names if re.fullmatch(r"block\d+_attention", name)]
    needed = {"tokens", "positions", "norm", "outputs"}
    for n in range(1, len(blocks) + 1):
        for part in ("norm1", "attention", "norm2", "feed1", "feed2"):
            needed.add(f"block{n}_{part}")
    if model.name != "gpt" or not needed <= names:
        return 0
    return len(blocks)


def make_next_token(model: keras.Model, window: int, dtype: str) -> NextToken:
    """Returns the fastest predictor for a model. Raises ConfigError if its predictions depend on later tokens."""
    if count_blocks(model):
        return CachedGpt(model, window)
    whole = WholeWindow(tf.function(lambda ids: model(ids, training=False)), window, dtype)
    whole.check_causal()
    return whole


def load_next_token(path: Path, window: int, dtype: str) -> NextToken:
    """Loads a predictor from an exported model: a Keras file or the folder of a SavedModel.

    Raises ConfigError if it cannot be loaded, or if its predictions depend on later tokens.
    """
    try:
        if path.suffix == ".keras":
            return make_next_token(keras.models.load_model(path, compile=False), window, dtype)
        loaded = tf.saved_model.load(str(path))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"the model of the run cannot be loaded: {explain_load_error(error)}") from error
    whole = WholeWindow(lambda ids: loaded.serve(ids), window, dtype)  # `loaded` keeps the variables alive
    whole.check_causal()
    return whole


def generate_tokens(
    predict: NextToken, prompt: Sequence[int], window: int, sampling: Sampling, unused: Collection[int] = ()
) -> Iterator[int]:
    """Yields the tokens after a prompt.

    Args:
        prompt: token ids, at least one.
        window: the number of tokens that the model takes.
        sampling: the number of tokens, and how to draw them.
        unused: token ids that are never drawn.
    """
    draw = np.random.default_rng(sampling.seed)
    recent = list(prompt)[-window:]
    for _ in range(sampling.tokens):
        if len(recent) > window:
            recent = recent[-(window - window // 2) :]
        token = choose_token(predict(recent), sampling, draw, unused=unused)
        recent.append(token)
        yield token


def choose_token(logits: Logits, sampling: Sampling, draw: np.random.Generator, unused: Collection[int] = ()) -> int:
    """Draws a token id from logits [vocabulary]."""
    logits = logits.astype(np.float64)
    logits[list(unused)] = -np.inf
    if not sampling.temperature:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")[: sampling.top_k]
    shares = np.exp((logits[order] - logits[order[0]]) / sampling.temperature)
    shares /= shares.sum()
    if sampling.top_p < 1:
        kept = 1 + int(np.searchsorted(np.cumsum(shares), sampling.top_p))  # the fewest tokens that reach top_p
        order = order[:kept]
        shares = shares[:kept] / shares[:kept].sum()
    return int(draw.choice(order, p=shares))


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

    A block is as in GPT-2: layer normalization before the causal self-attention and before the feed-forward layer with
    GELU, each followed by dropout (if any) and a residual connection. Initial weights have a standard deviation of
    0.02, as in GPT-2. Token 0 is an ordinary token, not padding.

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
        x = build_decoder_block(x, f"block{number}", heads, units=units or 4 * width, rate=dropout)
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
    """Returns a new initializer. Using one twice would give equal weights."""
    return keras.initializers.RandomNormal(stddev=0.02)


def generate(
    model: Callable[[Any], Any],
    prompt: Sequence[int],
    length: int,
    window: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Continues a prompt token by token. `scaleflow.generate_text` does the same with text.

    Args:
        model: token ids [1, window] int32 -> logits [1, window, vocabulary]: a `gpt`, or `serve` of its SavedModel. A
            `gpt` caches keys and values, so a new token computes only its own position.
        prompt: token ids, at least one.
        length: the number of tokens to add.
        window: the number of tokens that the model takes. When it is full, it moves on by half its length.
        temperature: the divisor of the logits; 0 always takes the most probable token.
        seed: the seed for drawing tokens.

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
    return [*prompt, *generate_tokens(predict, prompt, window, sampling=sampling)]
