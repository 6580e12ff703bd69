"""Fine-tuning: a new model begins with the weights of a saved one, as far as their layers are the same."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError

#: How many layers a message names.
NAMED = 6

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SavedWeights:
    """What a Keras file holds.

    Attributes:
        origin: where it is from, as the user said it.
        layers: the weights of each layer, by its name behind those of the models that it is in.
    """

    origin: str
    layers: Mapping[str, Sequence[Array]]


def read_weights(path: str, origin: str) -> SavedWeights:
    """Reads a Keras file into the host's memory.

    Raises:
        ConfigError: if it is none, or is damaged.
    """
    try:
        with tf.device("CPU:0"):
            model = keras.models.load_model(path, compile=False)
    except Exception as error:  # whatever zipfile, h5py and Keras raise for what is no such file
        reason = (str(error).strip().splitlines() or [""])[0]
        if path.endswith(".keras") and not zipfile.is_zipfile(path):  # Keras says that it is not there
            reason = "it is damaged, or none"
        raise ConfigError(
            f"model.init_from={origin}: cannot be read as a Keras model ({type(error).__name__}: {reason}); give a "
            "file that keras.Model.save wrote, or a model that scaleflow logged"
        ) from error
    return SavedWeights(origin, {name: [np.asarray(w) for w in layer.weights] for name, layer in list_layers(model)})


def initialize_from(model: keras.Model, saved: SavedWeights) -> str:
    """Gives the layers of a new model the weights of those that have their name and shapes.

    Call it in the strategy's scope, outside of the replicas.

    Returns:
        How many were taken, for the user.

    Raises:
        ConfigError: if none fits.
    """
    layers = dict(list_layers(model))
    found = {name: task for name in layers if (task := find_layer(name, layers, saved.layers)) is not None}
    fits = {n: p for n, p in found.items() if list_shapes(layers[n].weights) == list_shapes(saved.layers[p])}
    if not fits:
        raise ConfigError(
            f"model.init_from={saved.origin}: none of its layers has the name and the shapes of one of this model's; "
            f"it has {format_first(saved.layers)}, this model "
            f"{format_first({n: layer.weights for n, layer in layers.items()})}"
        )
    for name, task in fits.items():
        for variable, value in zip(layers[name].weights, saved.layers[task], strict=True):
            assign_variable(variable, value)
    fresh = [name for name in layers if name not in fits]
    taken, total = (sum(int(np.prod(w.shape)) for n in names for w in layers[n].weights) for names in (fits, layers))
    told = f"; fresh: {format_names(fresh)}" if fresh else ""
    return (
        f"model.init_from={saved.origin}: took the weights of {len(fits)} of {len(layers)} layers ({taken:,} of "
        f"{total:,} numbers){told}"
    )


def copy_weights(origin: keras.Model, model: keras.Model) -> None:
    """Gives a model the weights of another one of the same factory."""
    for mine, theirs in zip(model.weights, origin.weights, strict=True):
        assign_variable(mine, np.asarray(theirs))


def list_layers(model: keras.Model, prefix: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """The layers that have weights, those of models inside the model one by one."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from list_layers(layer, f"{prefix}{layer.name}/")
        elif layer.weights:
            yield prefix + layer.name, layer


def find_layer(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Where a layer is in a saved model: under its whole name, or in another model inside if its own name is unique."""
    if name in theirs:
        return name
    own = last_part(name)
    if Counter(map(last_part, mine))[own] > 1:
        return None
    places = [place for place in theirs if last_part(place) == own]
    return places[0] if len(places) == 1 else None


def last_part(name: str) -> str:
    return name.rpartition("/")[2]


def list_shapes(weights: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(w.shape) for w in weights]


def assign_variable(variable: keras.Variable, value: Array) -> None:
    """Sets a variable, on every replica; of one that is divided among servers each part."""
    shards = getattr(variable.value, "variables", None)
    if shards is None:
        variable.assign(value)
        return
    first = 0
    for shard in shards:
        end = first + int(shard.shape[0])
        shard.assign(value[first:end])
        first = end


def format_first(layers: Mapping[str, Sequence[Any]]) -> str:
    return (
        format_names([f"{name} {' '.join(map(str, list_shapes(weights)))}" for name, weights in layers.items()])
        or "no weights"
    )


def format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
