"""Calls a model factory and checks what comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Batching, Inputs, Outputs
from scaleflow.model.export import WEIGHTS_FILE, keras_file_fault


def make_model(factory: Callable[[Inputs, Outputs], Any], inputs: Inputs, outputs: Outputs) -> keras.Model:
    """The model, its outputs checked against the dataset and float32.

    Call it in the strategy's scope: the variables are born here.

    Args:
        factory: (inputs, outputs) -> a Keras model from [batch, *inputs.shape] to [batch, *outputs.shape].

    Raises:
        ConfigError: if it is no model, doesn't take the inputs, or returns another shape.
    """
    model = factory(inputs, outputs)
    if not isinstance(model, keras.Model):
        raise ConfigError(f"model: the factory returned a {type(model).__name__}, expected a keras.Model")
    given = keras.Input(inputs.shape, dtype=inputs.dtype, name="inputs")
    try:
        returned = model(given)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"model: does not take inputs of shape {add_batch_dimension(inputs.shape)}: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(returned, keras.KerasTensor):
        raise ConfigError(
            f"model: returned {type(returned).__name__}, expected one tensor {add_batch_dimension(outputs.shape)}"
        )
    if tuple(returned.shape[1:]) != outputs.shape:
        raise ConfigError(
            f"model: returns outputs of shape {add_batch_dimension(returned.shape[1:])}, and the dataset's "
            f"{outputs.kind} "
            f"targets need {add_batch_dimension(outputs.shape)}"
        )
    if returned.dtype != "float32":
        returned = keras.layers.Activation("linear", dtype="float32", name="float32")(returned)
        model = keras.Model(given, returned, name=model.name)
    return model


def find_logits_warning(model: keras.Model) -> str | None:
    """What the user should know of a model whose last layer makes probabilities of logits."""
    last = model.layers[-1] if model.layers else None
    name = getattr(getattr(last, "activation", None), "__name__", "")
    if name not in ("softmax", "sigmoid"):
        return None
    return f"model: its last layer ends in {name}, and the loss expects logits; leave that activation away"


def keras_file_doubt(model: keras.Model) -> str | None:
    """What the user should know of a model that Keras cannot write as a Keras file."""
    fault = keras_file_fault(model)
    if fault is None:
        return None
    return (
        f"model: Keras cannot write it as a .keras file ({fault}); it is exported as a SavedModel and as weights "
        f"({WEIGHTS_FILE}), which model.init_from and scaleflow.evaluate do not take"
    )


def find_batch_norm_warnings(model: keras.Model, portions: Batching) -> list[str]:
    """What the user should know of BatchNorm that sees less than the global batch."""
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    trained = [layer for layer in norms if layer.trainable]  # a frozen one keeps its statistics
    alone = [layer.name for layer in trained if not layer.synchronized]
    doubts = []
    if alone and portions.replicas > 1:
        doubts.append(
            f"model: {format_first(alone)} normalizes each of {portions.replicas} replicas by its own examples, "
            "and the first "
            "one's statistics are saved: the result depends on the number of replicas; write "
            "BatchNormalization(synchronized=True), or set layer.synchronized = True in a ready-made model"
        )
    if trained and portions.accumulate > 1:
        doubts.append(
            f"model: with training.accumulate={portions.accumulate} BatchNormalization sees a micro-batch at a time, "
            f"not the {portions.global_size} examples of an update: the result depends on how they are divided"
        )
    return doubts


def format_first(names: list[str]) -> str:
    """The first of several names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def add_batch_dimension(shape: tuple[int | None, ...]) -> str:
    return "(batch" + "".join(f", {size}" for size in shape) + ")"
