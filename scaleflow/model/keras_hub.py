"""Backbones of KerasHub, pretrained or new, with a head for the dataset. Needs the extra `hub`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Inputs, InputStructure, OutputStructure, Target, name_leaves
from scaleflow.interfaces.options import Fraction, check_options
from scaleflow.model.layers import average, check_shape, check_tokens, entry, head


@check_options("model")
def build(
    inputs: Inputs,
    outputs: OutputStructure,
    preset: str | None = None,
    backbone: str | None = None,
    config: Mapping[str, Any] | None = None,
    weights: bool = True,
    dropout: Fraction = 0.0,
) -> keras.Model:
    """Builds a backbone of KerasHub, the average of its features, and a dense layer.

    In text, token id 0 is padding. If the targets have a class for each token, the dense layer applies to each
    token's features instead of their average. The backbone gets images near [0, 1], or in the range of the preset's
    preprocessor. The dataset must do the rest of that preprocessing (tokenizing, resizing).

    Args:
        inputs: images of shape (height, width, channels), or word numbers of shape (tokens,) with a vocabulary.
        outputs: the outputs that the dataset needs.

    conf/model/keras_hub.yaml describes the other arguments.

    Raises:
        ConfigError: if the extra is not installed, there is no such backbone, or it does not take the inputs.
    """
    if importlib.util.find_spec("keras_hub") is None:
        raise ConfigError("model=keras_hub: keras-hub is not installed; pip install 'scaleflow[hub]'")
    if (preset is None) == (backbone is None):
        raise ConfigError("model=keras_hub: set model.preset=NAME, or model.backbone=CLASS and model.config={...}")
    network = load_preset(preset, weights) if backbone is None else make_backbone(backbone, config or {})
    is_text = isinstance(network.input, dict)
    raw, features = apply_to_tokens(network, inputs) if is_text else apply(network, inputs, load_converter(preset))
    if isinstance(outputs, Mapping) or len(outputs.shape) < 2 or len(features.shape) == 2:
        features = pool(features, raw)
    if dropout:
        features = keras.layers.Dropout(dropout)(features)
    if isinstance(outputs, Mapping) or len(features.shape) == 2:
        return keras.Model(raw, head(features, outputs), name="keras_hub")
    if features.shape[1:-1] != outputs.shape[:-1]:
        raise ConfigError(
            f"model=keras_hub: the backbone returns features of shape {features.shape[1:]}, but the dataset's "
            f"{outputs.kind} targets need outputs of shape {outputs.shape}"
        )
    logits = keras.layers.Dense(outputs.shape[-1], dtype="float32", name="outputs")(features)
    return keras.Model(raw, logits, name="keras_hub")


def check_preset_words(target: Target, inputs: InputStructure, reading: Mapping[str, Any]) -> None:
    """Rejects pretrained weights if the dataset assigns its own ids to words: an id then means a different word.

    Args:
        target: the model's class or function and its arguments.
        inputs: the inputs of the source, before its preprocessing.
        reading: how the source reads its data.
    """
    arguments = {"preset": None, "weights": True, **target.arguments}
    tokenizer = str(reading.get("tokenizer", "")).partition(" ")[0]
    has_texts = any(leaf.dtype == "string" for leaf in name_leaves(inputs).values())
    is_preset = target.path == f"{__name__}.build" and arguments["preset"] and arguments["weights"]
    if is_preset and (has_texts or tokenizer in ("bytes", "words")):
        raise ConfigError(
            f"model.preset={arguments['preset']}: its weights are for the tokens of its own tokenizer, and the dataset "
            "numbers words or bytes itself; use dataset=tokens dataset.tokenizer=PRESET, or ids of that tokenizer in "
            "dataset=npz, or model.weights=false"
        )


def load_preset(preset: str | None, weights: bool) -> keras.Model:
    """Loads a preset.

    Raises:
        ConfigError: if it cannot be found or loaded.
    """
    import keras_hub

    try:
        return keras_hub.models.Backbone.from_preset(preset, load_weights=weights)
    except Exception as error:  # downloads and files raise many types
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.preset={preset}: cannot be loaded: {reason}; use the folder of a saved preset, or a name of "
            "KerasHub on a machine that can download it"
        ) from error


def make_backbone(name: Any, config: Mapping[str, Any]) -> keras.Model:
    """Makes a new backbone from its class and arguments.

    Raises:
        ConfigError: if there is no such class, or it does not take the arguments.
    """
    import keras_hub

    known = sorted(name for name in dir(keras_hub.models) if name.endswith("Backbone") and name != "Backbone")
    if name not in known:
        raise ConfigError(f"model.backbone={name}: expected one of {', '.join(known)}")
    try:
        return getattr(keras_hub.models, name)(**config)
    except Exception as error:  # each class checks its arguments in its own way
        raise ConfigError(f"model.config: {name} does not accept these arguments: {read_reason(error)}") from error


def load_converter(preset: str | None) -> Any:
    """Returns the preset's image converter, for its scale and offset; None if the preset has none."""
    import keras_hub

    try:
        return None if preset is None else keras_hub.layers.ImageConverter.from_preset(preset)
    except (FileNotFoundError, ValueError):  # no such file; no such class for the backbone
        return None


def apply(network: keras.Model, inputs: Inputs, converter: Any = None) -> tuple[Any, Any]:
    """Applies a backbone to images. Returns the model's input and the features.

    Scales images to about [0, 1], then by the scale and offset of the preset's converter, which are for [0, 255].
    """
    check_shape(inputs, "keras_hub")
    raw, x = entry(inputs)
    scale = getattr(converter, "scale", None)
    offset = getattr(converter, "offset", None)
    if scale is not None or offset is not None:
        scale = np.multiply(1 if scale is None else scale, 255).tolist()
        x = keras.layers.Rescaling(scale, offset=0.0 if offset is None else offset)(x)
    try:
        return raw, take_network_features(network(x))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"model=keras_hub: {type(network).__name__} does not accept inputs of shape {inputs.shape}: "
            f"{read_reason(error)}"
        ) from error


def apply_to_tokens(network: keras.Model, inputs: Inputs) -> tuple[Any, Any]:
    """Applies a text backbone to token ids. Returns the model's input and the features [b, tokens, width]."""
    size = check_tokens(inputs, "keras_hub")
    vocabulary = getattr(network, "vocabulary_size", size)
    if size > vocabulary:
        raise ConfigError(
            f"model=keras_hub: the backbone has a vocabulary of {vocabulary}, but the dataset's is {size}; set "
            f"dataset.vocabulary={vocabulary}, or model.config.vocabulary_size={size}"
        )
    raw, tokens = entry(inputs)
    arguments = {
        "token_ids": tokens,
        "padding_mask": ops.cast(ops.not_equal(tokens, 0), "int32"),
        "segment_ids": ops.zeros_like(tokens),
    }
    unknown = sorted(set(network.input) - set(arguments))
    if unknown:
        raise ConfigError(
            f"model=keras_hub: {type(network).__name__} needs {', '.join(unknown)}, which no dataset has; use "
            "another backbone"
        )
    return raw, take_network_features(network({name: arguments[name] for name in network.input}))


def take_network_features(returned: Any) -> Any:
    """Returns the features of each position from a backbone's result."""
    return returned["sequence_output"] if isinstance(returned, dict) else returned


def pool(features: Any, raw: Any) -> Any:
    """Averages features over an image, its patches, or the tokens of a text except padding."""
    if len(features.shape) == 4:
        return keras.layers.GlobalAveragePooling2D()(features)
    if len(features.shape) == 3:
        return average(features, raw) if len(raw.shape) == 2 else keras.layers.GlobalAveragePooling1D()(features)
    return features
