"""Finds layers of a model by patterns of their names, for keys such as `model.freeze`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

import keras

from scaleflow.errors import ConfigError

#: A message names at most this many layers.
NAMED = 12


def walk_layers(model: keras.Layer, prefix: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """Yields (path, layer) of each layer with weights, at any depth: `backbone`, `backbone/block`, and so on."""
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if layer.weights:
            path = prefix + layer.name
            yield path, layer
            yield from walk_layers(layer, f"{path}/")


def matches(path: str, pattern: str) -> bool:
    """Returns whether a pattern matches a path or an end of it, such as a layer's name. `*` also matches `/`."""
    parts = path.split("/")
    return any(fnmatchcase("/".join(parts[first:]), pattern) for first in range(len(parts)))


def find_layers(model: keras.Model, pattern: str, setting: str) -> list[keras.Layer]:
    """Finds the layers with weights that a pattern matches.

    Args:
        model: the model.
        pattern: a layer's name or path, with `*` for any characters and `?` for one.
        setting: the key and its value, for the message.

    Raises:
        ConfigError: if no layer matches.
    """
    layers = dict(walk_layers(model))
    found = [layer for path, layer in layers.items() if matches(path, pattern)]
    if not found:
        raise ConfigError(f"{setting}: {pattern} matches no layer with weights; the model has {format_names(layers)}")
    return found


def format_names(names: dict[str, keras.Layer]) -> str:
    """Formats the paths of layers, except those that only contain other layers that are listed."""
    inner = [path for path in names if not any(other.startswith(f"{path}/") for other in names)]
    more = f" and {len(inner) - NAMED} more" if len(inner) > NAMED else ""
    return ", ".join(inner[:NAMED]) + more


def keep_names(make: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    """Wraps a function so that the layers of a second model have the names of the first.

    Keras numbers layers through a whole process. A coordinator makes its model twice, and patterns have to match both.
    """
    state = keras.src.backend.common.global_state
    first: list[dict[str, int]] = []

    def make_again() -> keras.Model:
        if not first:
            first.append(dict(state.get_global_attribute("object_name_uids") or {}))
        state.set_global_attribute("object_name_uids", defaultdict(int, first[0]))
        return make()

    return make_again
