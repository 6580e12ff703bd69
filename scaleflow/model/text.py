"""A text model on the average of its word embeddings, after TensorFlow's IMDb tutorial.

https://www.tensorflow.org/tutorials/keras/text_classification
"""

from __future__ import annotations

import keras

from scaleflow.interfaces import Inputs, OutputStructure
from scaleflow.interfaces.options import Fraction, Positive, Widths, check_options
from scaleflow.model.layers import average, check_tokens, entry, head, hidden


@check_options("model")
def build(
    inputs: Inputs,
    outputs: OutputStructure,
    embedding: Positive = 16,
    units: Widths = 16,
    dropout: Fraction = 0.0,
    ignore_padding: bool = True,
) -> keras.Model:
    """Builds an embedding of each word, their average, then dense layers with ReLU.

    Args:
        inputs: word ids, int32 of shape (tokens,) with a vocabulary; 0 is padding.
        outputs: the outputs that the dataset needs.

    conf/model/text.yaml describes the other arguments.

    Raises:
        ConfigError: if the inputs are not word ids, or an argument is invalid.
    """
    vocabulary = check_tokens(inputs, "text")
    raw, tokens = entry(inputs)
    x = keras.layers.Embedding(vocabulary, embedding, name="words")(tokens)
    x = average(x, tokens) if ignore_padding else keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(raw, head(hidden(x, units, dropout), outputs), name="text")
