"""The parts of an exported model: what only TensorFlow can compute, and what other runtimes can.

Other runtimes have no lookup of words, and most have no float64. So a model that preprocesses texts or numbers of
float64 has two endpoints more than `serve`:

- `preprocess`: raw inputs -> a dict by the name of an input: features in place of these, other inputs as they are;
- `portable`: this dict -> the outputs, where they are float64 before their scaling (`Outputs.scaling`).

A model that computes in a lower precision, or has outputs of float64, has these endpoints, too. Without them `serve` is
portable as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from scaleflow.interfaces import InputStructure, apply_layer, map_leaves, map_named, name_leaves
from scaleflow.model.layers import label_leaves


@dataclass(frozen=True)
class Parts:
    """A trained model before its preprocessing is added.

    Attributes:
        core: the trained model.
        layers: the preprocessing of one or several inputs, by their names.
        inputs: raw inputs.
        policy: the dtype policy of the core.
    """

    core: keras.Model
    layers: Mapping[tuple[str, ...], keras.Layer]
    inputs: InputStructure
    policy: str

    @property
    def looked_up(self) -> set[str]:
        """The inputs that are texts or float64, and that the preprocessing turns into other numbers."""
        named = name_leaves(self.inputs)
        return {name for names in self.layers for name in names if named[name].dtype in ("string", "float64")}

    def preprocess(self, raw: Any) -> dict[str, tf.Tensor]:
        """Returns features in place of texts and float64, by the name of the input."""
        return {name: tf.identity(each) for name, each in self._apply(name_leaves(raw), self.looked_up).items()}

    def compute(self, core: keras.Model, features: Mapping[str, tf.Tensor]) -> Any:
        """Returns the outputs of the core for what `preprocess` returns."""
        named = self._apply(features, set(name_leaves(self.inputs)) - self.looked_up)
        return core(map_named(lambda name, _: named[name], self.inputs), training=False)

    def _apply(self, named: Mapping[str, tf.Tensor], chosen: Collection[str]) -> dict[str, tf.Tensor]:
        """Returns inputs by name, with features in place of those that are chosen and have a preprocessing."""
        found = dict(named)
        for names, layer in self.layers.items():
            if names[0] in chosen:
                found.update(zip(names, apply_layer(layer, [named[name] for name in names]), strict=True))
        return found


def remove_wide_scaling(model: keras.Model) -> keras.Model:
    """Returns a model without the last operations that bring outputs of float64 to their unit (`Outputs.dtype`)."""
    if not isinstance(model, Functional) or all(each.dtype != "float64" for each in model.outputs):
        return model

    def find_scaled(tensor: Any) -> Any:
        while tensor.dtype == "float64":
            tensor = tensor._keras_history.operation.input
        return tensor

    return keras.Model(model.input, map_leaves(find_scaled, model.output))


def add_parts(archive: Any, model: keras.Model, parts: Parts, specs: Any) -> Any:
    """Adds the endpoints `serve`, and `preprocess` and `portable` if there are such; returns `serve`.

    Args:
        archive: Keras's `ExportArchive`.
        model: the trained model with its preprocessing.
        parts: of the model.
        specs: of the raw inputs.
    """
    core = remove_wide_scaling(parts.core)
    is_full = parts.policy == "float32" and core is parts.core
    serve = trace(lambda raw: model(raw, training=False), specs)
    if not parts.looked_up and is_full:
        archive.add_endpoint("serve", serve)
        return serve
    preprocess = trace(parts.preprocess, specs)
    features = preprocess.get_concrete_function().structured_outputs
    names = label_leaves(features)
    given = {name: tf.TensorSpec([None, *each.shape[1:]], each.dtype, names[name]) for name, each in features.items()}
    portable = trace(lambda features: parts.compute(core, features), given)
    with compute_in_float32(parts.core):
        portable.get_concrete_function()
    if is_full:  # one graph for both
        serve = trace(chain(preprocess, portable), specs)
    for name, endpoint in (("serve", serve), ("preprocess", preprocess), ("portable", portable)):
        archive.add_endpoint(name, endpoint)
    return serve


def trace(function: Callable[[Any], Any], specs: Any) -> Any:
    """Returns a `tf.function` of one signature, which several endpoints share."""
    return tf.function(function, input_signature=[specs], autograph=False)


def chain(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda given: second(first(given))


@contextlib.contextmanager
def compute_in_float32(model: keras.Model) -> Iterator[None]:
    """Sets the policy of all layers of a lower precision while the block lasts."""
    layers = [layer for layer in model._flatten_layers() if layer.dtype_policy.name.startswith("mixed_")]
    policies = [layer.dtype_policy for layer in layers]
    for layer in layers:
        layer.dtype_policy = "float32"
    try:
        yield
    finally:
        for layer, policy in zip(layers, policies, strict=True):
            layer.dtype_policy = policy
