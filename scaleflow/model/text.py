"""Text by the average of its words' embeddings, after TensorFlow's IMDb tutorial.

https://www.tensorflow.org/tutorials/keras/text_classification
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from scaleflow.interfaces import Inputs, Outputs
from scaleflow.model.layers import average, check_tokens, entry, flag, head, hidden, whole


def build(
    inputs: Inputs,
    outputs: Outputs,
    embedding: int = 16,
    units: int | Sequence[int] = 16,
    dropout: float = 0.0,
    ignore_padding: bool = True,
) -> keras.Model:
    """An embedding of each word, their average, then dense layers with ReLU.

    Args:
        inputs: text as numbers, int32 of shape (tokens,) with a vocabulary; 0 is padding.
        outputs: what the model has to return.
        embedding: the numbers that a word is described by.
        units: the width of the dense layer, or of each of several.
        dropout: the fraction dropped behind each dense layer.
        ignore_padding: average over the words alone. The tutorial averages over the padding too, so that a short
            text is near the same point whatever it says.

    Raises:
        ConfigError: if the inputs are not text as numbers.
    """
    vocabulary = check_tokens(inputs, "text")
    raw, tokens = entry(inputs)
    x = keras.layers.Embedding(vocabulary, whole(embedding, "model.embedding"), name="words")(tokens)
    words_alone = flag(ignore_padding, "model.ignore_padding")
    x = average(x, tokens) if words_alone else keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(raw, head(hidden(x, units, dropout), outputs), name="text")
