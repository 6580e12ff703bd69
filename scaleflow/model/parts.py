"""The parts of an exported model: what only TensorFlow can compute, and what other runtimes can.

Other runtimes have no lookup of words. So a model whose raw inputs are texts has two endpoints more than `serve`:

- `preprocess`: raw inputs -> a dict by the name of an input: features in place of each text, other inputs as they are;
- `portable`: this dict -> the outputs.

A model that computes in a lower precision has the endpoint `portable`, in float32, too. Without these endpoints `serve`
is portable as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from scaleflow.interfaces import InputStructure, map_named, name_leaves
from scaleflow.model.layers import label_leaves


@dataclass(frozen=True)
class Parts:
    """A trained model before its preprocessing is added.

    Attributes:
        core: the trained model.
        layers: the preprocessing of its inputs, by name.
        inputs: raw inputs.
        policy: the dtype policy of the core.
    """

    core: keras.Model
    layers: Mapping[str, keras.Layer]
    inputs: InputStructure
    policy: str

    @property
    def looked_up(self) -> set[str]:
        """The inputs that are texts, and that the preprocessing turns into numbers."""
        named = name_leaves(self.inputs)
        return {name for name in self.layers if named[name].dtype == "string"}

    def preprocess(self, raw: Any) -> dict[str, tf.Tensor]:
        """Returns features in place of texts, by the name of the input."""
        lookups = self.looked_up
        named = name_leaves(raw)
        return {name: self.layers[name](each) if name in lookups else tf.identity(each) for name, each in named.items()}

    def compute(self, features: Mapping[str, tf.Tensor]) -> Any:
        """Returns the outputs of the core for what `preprocess` returns."""
        lookups = self.looked_up

        def finish(name: str, _: Any) -> tf.Tensor:
            is_done = name in lookups or name not in self.layers
            return features[name] if is_done else self.layers[name](features[name])

        return self.core(map_named(finish, self.inputs), training=False)


def add_parts(archive: Any, model: keras.Model, parts: Parts, specs: Any) -> Any:
    """Adds the endpoints `serve`, and `preprocess` and `portable` if there are such; returns `serve`.

    Args:
        archive: Keras's `ExportArchive`.
        model: the trained model with its preprocessing.
        parts: of the model.
        specs: of the raw inputs.
    """
    is_full = parts.policy == "float32"
    serve = trace(lambda raw: model(raw, training=False), specs)
    if not parts.looked_up and is_full:
        archive.add_endpoint("serve", serve)
        return serve
    preprocess = trace(parts.preprocess, specs)
    features = preprocess.get_concrete_function().structured_outputs
    names = label_leaves(features)
    given = {name: tf.TensorSpec([None, *each.shape[1:]], each.dtype, names[name]) for name, each in features.items()}
    portable = trace(parts.compute, given)
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
