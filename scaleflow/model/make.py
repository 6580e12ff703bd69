"""Calls a model factory and checks the model that it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Batching, Inputs, Outputs
from scaleflow.model.export import WEIGHTS_FILE, keras_file_fault


def make_model(factory: Callable[[Inputs, Outputs], Any], inputs: Inputs, outputs: Outputs) -> keras.Model:
    """Returns the factory's model after checking its outputs; adds a cast if they are not float32.

    Call it in the strategy's scope, because it creates the variables.

    Args:
        factory: (inputs, outputs) -> a Keras model from [batch, *inputs.shape] to [batch, *outputs.shape].
        inputs, outputs: the dataset's description.

    Raises:
        ConfigError: if it is no model, does not take the inputs, or returns another shape.
    """
    model = factory(inputs, outputs)
    if not isinstance(model, keras.Model):
        raise ConfigError(f"model: the factory returned a {type(model).__name__}, expected a keras.Model")
    model_input = keras.Input(inputs.shape, dtype=inputs.dtype, name="inputs")
    try:
        returned = model(model_input)
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
            f"{outputs.kind} targets need {add_batch_dimension(outputs.shape)}"
        )
    if returned.dtype != "float32":
        returned = keras.layers.Activation("linear", dtype="float32", name="float32")(returned)
        model = keras.Model(model_input, returned, name=model.name)
    return model


def find_logits_warning(model: keras.Model) -> str | None:
    """Returns a warning if the last layer applies softmax or sigmoid, else None."""
    last = model.layers[-1] if model.layers else None
    name = getattr(getattr(last, "activation", None), "__name__", "")
    if name not in ("softmax", "sigmoid"):
        return None
    return f"model: its last layer ends in {name}, and the loss expects logits; leave that activation away"


def keras_file_doubt(model: keras.Model) -> str | None:
    """Returns a warning if Keras cannot write the model as a Keras file, else None."""
    fault = keras_file_fault(model)
    if fault is None:
        return None
    return (
        f"model: Keras cannot write it as a .keras file ({fault}); it is exported as a SavedModel and as weights "
        f"({WEIGHTS_FILE}), which model.init_from and scaleflow.evaluate do not take"
    )


def find_batch_norm_warnings(model: keras.Model, portions: Batching) -> list[str]:
    """Returns warnings about BatchNorm layers that normalize over less than the global batch."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    trainable = [layer for layer in layers if layer.trainable]  # frozen ones do not update their statistics
    unsynced = [layer.name for layer in trainable if not layer.synchronized]
    warnings = []
    if unsynced and portions.replicas > 1:
        warnings.append(
            f"model: {format_first(unsynced)} normalizes each of {portions.replicas} replicas by its own examples, "
            "and the first one's statistics are saved: the result depends on the number of replicas; write "
            "BatchNormalization(synchronized=True), or set layer.synchronized = True in a ready-made model"
        )
    if trainable and portions.accumulate > 1:
        warnings.append(
            f"model: with training.accumulate={portions.accumulate} BatchNormalization sees a micro-batch at a time, "
            f"not the {portions.global_size} examples of an update: the result depends on how they are divided"
        )
    return warnings


def format_first(names: list[str]) -> str:
    """Formats the first of several names and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def add_batch_dimension(shape: tuple[int | None, ...]) -> str:
    return "(batch" + "".join(f", {size}" for size in shape) + ")"
