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

from scaleflow.errors import Refusal

#: How many layers a message names.
NAMED = 6

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Saved:
    """What a Keras file holds.

    Attributes:
        origin: where it is from, as the user said it.
        layers: the weights of each layer, by its name behind those of the models that it is in.
    """

    origin: str
    layers: Mapping[str, Sequence[Array]]


def read(path: str, origin: str) -> Saved:
    """Reads a Keras file into the host's memory.

    Raises:
        Refusal: if it is none, or is damaged.
    """
    try:
        with tf.device("CPU:0"):
            model = keras.models.load_model(path, compile=False)
    except Exception as error:  # whatever zipfile, h5py and Keras raise for what is no such file
        reason = (str(error).strip().splitlines() or [""])[0]
        if path.endswith(".keras") and not zipfile.is_zipfile(path):  # Keras says that it is not there
            reason = "it is damaged, or none"
        raise Refusal(
            f"model.init_from={origin}: cannot be read as a Keras model ({type(error).__name__}: {reason}); give a "
            "file that keras.Model.save wrote, or a model that scaleflow logged"
        ) from error
    return Saved(origin, {name: [np.asarray(w) for w in layer.weights] for name, layer in layers_of(model)})


def begin_with(model: keras.Model, saved: Saved) -> str:
    """Gives the layers of a new model the weights of those that have their name and shapes.

    Call it in the strategy's scope, outside of the replicas.

    Returns:
        How many were taken, for the user.

    Raises:
        Refusal: if none fits.
    """
    layers = dict(layers_of(model))
    found = {name: place for name in layers if (place := place_of(name, layers, saved.layers)) is not None}
    fits = {n: p for n, p in found.items() if shapes(layers[n].weights) == shapes(saved.layers[p])}
    if not fits:
        raise Refusal(
            f"model.init_from={saved.origin}: none of its layers has the name and the shapes of one of this model's; "
            f"it has {some(saved.layers)}, this model {some({n: layer.weights for n, layer in layers.items()})}"
        )
    for name, place in fits.items():
        for variable, value in zip(layers[name].weights, saved.layers[place], strict=True):
            assign(variable, value)
    fresh = [name for name in layers if name not in fits]
    taken, total = (sum(int(np.prod(w.shape)) for n in names for w in layers[n].weights) for names in (fits, layers))
    told = f"; fresh: {listed(fresh)}" if fresh else ""
    return (
        f"model.init_from={saved.origin}: took the weights of {len(fits)} of {len(layers)} layers ({taken:,} of "
        f"{total:,} numbers){told}"
    )


def copy_weights(origin: keras.Model, model: keras.Model) -> None:
    """Gives a model the weights of another one of the same factory."""
    for mine, theirs in zip(model.weights, origin.weights, strict=True):
        assign(mine, np.asarray(theirs))


def layers_of(model: keras.Model, prefix: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """The layers that have weights, those of models inside the model one by one."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from layers_of(layer, f"{prefix}{layer.name}/")
        elif layer.weights:
            yield prefix + layer.name, layer


def place_of(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Where a layer is in a saved model: under its whole name, or in another model inside if its own name is unique."""
    if name in theirs:
        return name
    own = last(name)
    if Counter(map(last, mine))[own] > 1:
        return None
    places = [place for place in theirs if last(place) == own]
    return places[0] if len(places) == 1 else None


def last(name: str) -> str:
    return name.rpartition("/")[2]


def shapes(weights: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(w.shape) for w in weights]


def assign(variable: keras.Variable, value: Array) -> None:
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


def some(layers: Mapping[str, Sequence[Any]]) -> str:
    return listed([f"{name} {' '.join(map(str, shapes(weights)))}" for name, weights in layers.items()]) or "no weights"


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
