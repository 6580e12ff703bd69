"""Finds variables of a model that Keras does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from scaleflow.errors import ConfigError


def check_tracked(model: keras.Model) -> None:
    """Raises ConfigError if a layer of the user's holds a `tf.Variable`.

    Keras does not track it: it would not be trained, and neither in checkpoints nor in the exported model.
    """
    known = {id(part) for each in model.variables for part in (each.value, *getattr(each.value, "values", ()))}
    for layer in model._flatten_layers():
        is_own = not type(layer).__module__.startswith(("keras.", "keras_hub."))
        attributes = {name: value for name, value in vars(layer).items() if not name.startswith(("_self_", "_tracker"))}
        for name, value in attributes.items() if is_own else ():
            if any(id(variable) not in known for variable in list_tf_variables(value)):
                raise ConfigError(
                    f"model: the layer {layer.name} has a tf.Variable in its attribute {name}, which Keras does not "
                    "track: it would not be trained, and neither in checkpoints nor in the exported model; make it "
                    "with self.add_weight(...), or a random generator as keras.random.SeedGenerator"
                )


def list_tf_variables(value: Any) -> Iterator[tf.Variable]:
    """Yields what TensorFlow's variables are in a value, its containers, modules and random generators."""
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, tf.random.Generator):
        yield value.state
    elif isinstance(value, tf.Module) and not isinstance(value, keras.Layer | keras.Model):
        yield from value.variables
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from list_tf_variables(each)
