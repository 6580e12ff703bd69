"""Implements `model.init_from`: copies saved weights into layers of a new model with the same names and shapes."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import LearnedChanges
from scaleflow.interfaces.formatting import join_first
from scaleflow.interfaces.versions import to_series
from scaleflow.model.export import ON_RAW_INPUTS
from scaleflow.model.make import explain_load_error
from scaleflow.model.weight_mapping import SavedWeights, WeightMapping, find_segments, label_inputs, list_shapes

#: A message names at most this many layers.
NAMED = 6

Array = np.ndarray[Any, Any]


def read_weights(path: str, origin: str, grown: Collection[str] = ()) -> SavedWeights:
    """Reads the weights of a Keras file into the host's memory.

    Args:
        path: the file.
        origin: the user's value of `model.init_from`, for messages.
        grown: the names of inputs whose vocabulary may be larger in the new model.

    Raises ConfigError if the file is missing, damaged or not a Keras model.
    """
    with tf.device("CPU:0"):
        model = load_keras_file(path, f"model.init_from={origin}")
    network = find_network(model)
    prefix = "" if network is model else f"{network.name}/"
    segments = {}
    for layer_path, input_segments in find_segments(network, label_inputs(grown)).items():
        segments[f"{prefix}{layer_path}"] = input_segments
    weights = {name: list(map(np.asarray, layer.weights)) for name, layer in list_layers(model)}
    return SavedWeights(origin, weights, segments)


def load_keras_file(path: str, key: str) -> keras.Model:
    """Loads a Keras model. Raises ConfigError (starting with `key`) if it is missing, damaged or not a Keras model."""
    try:
        return keras.models.load_model(path, compile=False)
    except Exception as error:  # zipfile, h5py and Keras raise many types
        reason = explain_load_error(error)
        if path.endswith(".keras") and not zipfile.is_zipfile(path):  # Keras reports such a file as missing
            reason = "it is damaged, or not a .keras file"
        else:
            newer = find_newer_keras(path)
            if newer:
                reason = f"Keras {newer} wrote it, and this is the older Keras {keras.__version__}"
                reason += "; install that version"
        raise ConfigError(
            f"{key}: cannot be read as a Keras model ({reason}); use a file that keras.Model.save "
            "wrote, or a model that scaleflow logged"
        ) from error


def find_newer_keras(path: str) -> str | None:
    """Returns the version of Keras that wrote a .keras file if it is newer than this one, else None."""
    if not path.endswith(".keras"):
        return None
    with zipfile.ZipFile(path) as archive, contextlib.suppress(KeyError, ValueError):
        written = str(json.loads(archive.read("metadata.json"))["keras_version"])
        if to_series(written) > to_series(keras.__version__):
            return written
    return None


def find_network(model: keras.Model) -> keras.Model:
    """Returns the trained model inside an exported model, without its preprocessing."""
    name = model.name.removesuffix(ON_RAW_INPUTS)
    return model if name == model.name else model.get_layer(name)


def initialize_from(model: keras.Model, saved: SavedWeights, changes: LearnedChanges | None = None) -> str:
    """Copies saved weights into the layers of a new model that have the same names.

    A layer gets them if its shapes are the same, or if it is known which rows and columns correspond. Call it in the
    strategy's scope, not inside a replica.

    Args:
        model: the new model.
        saved: the result of `read_weights`.
        changes: differences in the learned state of the two runs; None: the learned state of the saved model's run is
            not known.

    Returns:
        A message for the user with the number of copied layers and weights.

    Raises ConfigError if no layer matches.
    """
    layers = dict(list_layers(model))
    mapping = WeightMapping(model, saved, changes)
    matches: dict[str, Sequence[Array]] = {}
    for name, layer in layers.items():
        path = find_layer(name, layers, saved.layers)
        if path is not None:
            values = mapping.find_values(name, layer, path)
            if values is not None:
                matches[name] = values
    if not matches:
        raise explain_no_match(layers, saved, changes)
    for name, values in matches.items():
        assign_weights(layers[name], values)
    return describe_matches(layers, matches, mapping, saved.origin)


def explain_no_match(
    layers: Mapping[str, keras.Layer], saved: SavedWeights, changes: LearnedChanges | None
) -> ConfigError:
    """Returns the error for saved weights of which no layer fits."""
    if changes is not None and not changes.maps_rows and changes.is_other:
        return ConfigError(
            f"model.init_from={saved.origin}: {changes.describe()}; all layers take or give that, so no weights "
            "are left to begin with; leave model.init_from out"
        )
    own = {name: layer.weights for name, layer in layers.items()}
    return ConfigError(
        f"model.init_from={saved.origin}: no layer has the name and the shapes of a layer of this model; the file "
        f"has {format_layers(saved.layers)}, and this model has {format_layers(own)}; type the model=... of these "
        "weights"
    )


def assign_weights(layer: keras.Layer, values: Sequence[Array]) -> None:
    """Assigns all weights of a layer."""
    for variable, value in zip(layer.weights, values, strict=True):
        assign_variable(variable, value)
    if isinstance(layer, keras.layers.Normalization):
        layer.finalize_state()  # it computes with constants that it derives from its weights


def describe_matches(
    layers: Mapping[str, keras.Layer], matches: Mapping[str, Sequence[Array]], mapping: WeightMapping, origin: str
) -> str:
    """Returns a message with the number of copied layers and weights. `matches` has the values of the copied layers."""
    copied = 0
    for name, values in matches.items():
        copied += mapping.extended.get(name, sum(value.size for value in values))
    total = 0
    for layer in layers.values():
        total += sum(int(np.prod(weight.shape)) for weight in layer.weights)
    text = f"model.init_from={origin}: loaded the weights of {len(matches)} of {len(layers)} layers"
    text += f" ({copied:,} of {total:,} numbers)"
    if mapping.extended:
        text += f"; extended: {join_first(list(mapping.extended), NAMED)}"
    fresh = [name for name in layers if name not in matches]
    if fresh:
        text += f"; new weights: {join_first(fresh, NAMED)}"
    return text


def list_layers(model: keras.Model, prefix: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """Yields (path, layer) for each layer with weights, also in nested models."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from list_layers(layer, f"{prefix}{layer.name}/")
        elif layer.weights:
            yield prefix + layer.name, layer


def find_layer(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Returns the path of the corresponding layer in the saved model; None if no layer corresponds.

    That is the layer with the same path, or else the layer with the same name, if the name is unique in both models.
    `mine` and `theirs` are the layers of the new and the saved model by path.
    """
    if name in theirs:
        return name
    layer_name = last_part(name)
    if Counter(map(last_part, mine))[layer_name] > 1:
        return None
    candidates = [path for path in theirs if last_part(path) == layer_name]
    return candidates[0] if len(candidates) == 1 else None


def last_part(name: str) -> str:
    return name.rpartition("/")[2]


def assign_variable(variable: keras.Variable, value: np.ndarray[Any, Any]) -> None:
    """Assigns a value to a variable on every replica, or to its shards (along axis 0) on parameter servers."""
    shards = getattr(variable.value, "variables", None)
    if shards is None:
        variable.assign(value)
        return
    start = 0
    for shard in shards:
        end = start + int(shard.shape[0])
        shard.assign(value[start:end])
        start = end


def format_layers(layers: Mapping[str, Sequence[Any]]) -> str:
    """Returns the names of layers with the shapes of their weights."""
    if not layers:
        return "no weights"
    texts = []
    for name, weights in layers.items():
        shapes = " ".join(map(str, list_shapes(weights)))
        texts.append(f"{name} {shapes}")
    return join_first(texts, NAMED)
