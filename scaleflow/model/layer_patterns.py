"""Finds layers of a model by patterns of their names, for keys such as `model.freeze`."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
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
        raise ConfigError(
            f"{setting}: {pattern} matches no layer with weights{suggest_name(pattern, layers)}; the model has "
            f"{format_paths(layers)}"
        )
    return found


def suggest_name(pattern: str, paths: Iterable[str]) -> str:
    """Returns `; did you mean X?` for the path that is most similar to a pattern, outer layers first; else nothing."""
    for depth in range(2):
        named = {path.lower(): path for path in paths if path.count("/") == depth}
        if similar := difflib.get_close_matches(pattern.removeprefix("!").lower(), named, n=1):
            return f"; did you mean {named[similar[0]]}?"
    return ""


def format_paths(names: Collection[str]) -> str:
    """Formats the paths of layers, the outermost first. Those that contain others come with the number of these."""
    inside = {path: sum(other.startswith(f"{path}/") for other in names) for path in names}
    ordered = sorted(names, key=lambda path: path.count("/"))
    shown = ordered[:NAMED]
    if len(ordered) > NAMED:  # inner layers all or none
        shown = [path for path in shown if path.count("/") < ordered[NAMED].count("/")] or shown
    described = [f"{path} (contains {inside[path]})" if inside[path] else path for path in shown]
    return ", ".join(described) + (f" and {len(ordered) - len(shown)} more" if len(ordered) > len(shown) else "")


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
