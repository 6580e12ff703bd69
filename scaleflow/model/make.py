"""Calls a model factory, checks the model that it returns, and adds the scaling of its outputs."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from scaleflow.compat.keras import find_functional, find_node, flatten_layers
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import (
    Batching,
    FreezePhase,
    InputStructure,
    Outputs,
    OutputStructure,
    describe_keys,
    label_leaf,
    map_leaves,
    map_named,
    name_leaves,
)
from scaleflow.interfaces.data import add_batch_dimension
from scaleflow.interfaces.formatting import join_first
from scaleflow.model.export import KERAS_FILE, WEIGHTS_FILE, keras_file_fault
from scaleflow.model.layers import make_inputs, order_levels

#: A warning is given if more than LARGEST_SHARE of BatchNorm's moving averages is still their initial value at the end
#: of a run. Its advice is a number of steps after which SMALL_SHARE is left.
LARGEST_SHARE = 0.2
SMALL_SHARE = 0.05


#: At its end, a run loads its .keras file as a check, if the file has at most this size in bytes. The copy needs as
#: much memory.
LARGEST_LOADED = 2**30

#: Pattern in an error of `load_model` -> advice on what to change in the user's class.
LOAD_ADVICE = {
    "unexpected keyword argument": "let this __init__ take **options and pass them to super().__init__(**options)",
    "required (positional|keyword-only) argument": "return each argument of this __init__ from get_config",
    "deserialization of a `Lambda`": "write a class of a layer in its place",
    "Could not locate (class|function)": "decorate it with @keras.saving.register_keras_serializable() and ",
    "incompatible|expected .* (variables|shape)|shape mismatch": "return each argument of its class's __init__ from "
    "get_config, and create its layers in __init__ or build",
}

#: Methods of Keras's training that scaleflow never calls.
OWN_STEPS = (
    *("train_step", "make_train_function", "compute_loss", "compute_metrics"),
    *("test_step", "make_test_function", "predict_step", "make_predict_function"),
)


def make_model(
    factory: Callable[..., Any], inputs: InputStructure, outputs: OutputStructure, has_step: bool = False
) -> keras.Model:
    """Calls a model factory and checks the inputs and outputs of its model.

    Casts outputs that are not float32, and adds their scaling or shift (`Outputs.scaling`, `Outputs.logit_shift`). Call
    it in the strategy's scope, because it creates the variables.

    Args:
        factory: (inputs, outputs) -> a Keras model from [batch, *inputs.shape] to [batch, *outputs.shape], or from and
            to dicts of such tensors, with the keys of `inputs` and `outputs`. With `Outputs.levels`, the factory is
            asked for the shape (values * levels,), and this function puts the quantiles in order. It may also return
            ordered quantiles [batch, *model_shape].
        inputs, outputs: the dataset's description.
        has_step: whether `training.step` is set. The model's own training methods are then allowed.

    Raises ConfigError if the result is not a model, does not take the inputs, returns other keys or shapes, is
    stateful, or has methods of Keras's training that would not be called.
    """

    def flatten_levels(description: Outputs) -> Outputs:
        if not description.levels:
            return description
        return replace(description, shape=(math.prod(description.model_shape),))

    needed = map_leaves(flatten_levels, outputs)
    model = call_factory(factory, inputs, needed)
    if not has_step:
        check_own_steps(model)
    stateful = [layer.name for layer in flatten_layers(model) if getattr(layer, "stateful", False)]
    if stateful:
        raise ConfigError(
            f"model: {join_first(stateful, 1)} is stateful: it continues from the batch before, whose examples are "
            "others here; write stateful=False"
        )
    check_input_keys(model, inputs)
    model_inputs = make_inputs(inputs)
    try:
        returned = model(model_inputs)
    except (ValueError, TypeError, KeyError) as error:
        shapes = []
        for name, description in name_leaves(inputs).items():
            shapes.append(f"{name} {add_batch_dimension(description.shape)}".strip())
        raise ConfigError(
            f"model: does not accept inputs of shape {', '.join(shapes)}: {read_reason(error)}"
        ) from error
    check_outputs(returned, needed)
    descriptions = name_leaves(outputs).values()
    if any(described.scaling or described.logit_shift or described.levels for described in descriptions):
        return scale_outputs(model, model_inputs, returned, outputs=outputs)
    if any(tensor.dtype != "float32" for tensor in name_leaves(returned).values()):
        model = keras.Model(model_inputs, map_named(cast_to_float32, returned), name=model.name)
    return model


def call_factory(factory: Callable[..., Any], inputs: InputStructure, outputs: OutputStructure) -> keras.Model:
    """Calls the factory. Explains the error of a factory for single tensors that gets dicts."""
    try:
        model = factory(inputs, outputs)
    except (AttributeError, TypeError) as error:
        if not isinstance(inputs, Mapping) and not isinstance(outputs, Mapping):
            raise
        raise ConfigError(
            f"model: its function fails for a dataset whose inputs {describe_keys(inputs)} and whose outputs "
            f"{describe_keys(outputs)}: {type(error).__name__}: {read_reason(error)}"
        ) from error
    if not isinstance(model, keras.Model):
        raise ConfigError(f"model: the factory returned a {type(model).__name__}, expected a keras.Model")
    return model


def check_own_steps(model: keras.Model) -> None:
    """Rejects a model with its own training methods: nothing would call them, and it would train with another loss."""
    own = []
    for name in OWN_STEPS:
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name):
            own.append(name)
    if own:
        raise ConfigError(
            f"model: {type(model).__name__} has its own {' and '.join(own)}, which scaleflow does not call, also with "
            "training.engine=fit; write its loss as a function (model, batch, weights) -> (loss, outputs) and set "
            "training.step={_target_: my_code.my_step} with training.engine=loop, or use add_loss in its call"
        )


def check_input_keys(model: keras.Model, inputs: InputStructure) -> None:
    """Rejects a model whose inputs have other keys than the dataset's, since Keras would pass them in another order.

    Also rejects a list of several inputs, even if they have the names of the keys: Keras accepts a dict for them at run
    time, but not when it computes shapes. Subclasses of keras.Model do not show their inputs and are not checked.
    """
    graph = find_graph(model)
    if graph is None:
        return
    model_inputs, _ = graph
    is_list = isinstance(model_inputs, list | tuple)
    if is_list and not isinstance(inputs, Mapping) and len(model_inputs) == 1:
        return
    if is_list or set(name_leaves(model_inputs)) != set(name_leaves(inputs)):
        actual = f"are a list of {len(model_inputs)}" if is_list else describe_keys(model_inputs)
        keys = ", ".join(f"{name!r}: ..." for name in inputs) if isinstance(inputs, Mapping) else ""
        way = f"; build it with keras.Model({{{keys}}}, outputs)" if keys else ""
        raise ConfigError(f"model: its inputs {actual}, but the dataset's inputs {describe_keys(inputs)}{way}")


def find_graph(model: keras.Model) -> tuple[Any, Any] | None:
    """Returns the input and output structures of a functional or sequential model; None for a subclass."""
    functional = find_functional(model)
    return None if functional is None else (functional.input, functional.output)


def check_outputs(returned: Any, outputs: OutputStructure) -> None:
    """Rejects a model's result if its keys or shapes differ from the dataset's outputs."""
    if isinstance(outputs, Mapping):
        if not isinstance(returned, Mapping):
            keys = ", ".join(f"{name!r}: ..." for name in outputs)
            raise ConfigError(
                f"model: returned {describe_returned(returned)}, expected a dict with the outputs' names; build it "
                f"with keras.Model(inputs, {{{keys}}})"
            )
        if set(returned) != set(outputs):
            raise ConfigError(
                f"model: its outputs {describe_keys(returned)}, but the dataset's outputs {describe_keys(outputs)}"
            )
    for name, description in name_leaves(outputs).items():
        tensor = returned[name] if name else returned
        if not isinstance(tensor, keras.KerasTensor):
            label = f" as {label_leaf('outputs', name)}" if name else ""
            raise ConfigError(
                f"model: returned {describe_returned(tensor)}{label}, expected one tensor "
                f"{add_batch_dimension(description.shape)}"
            )
        is_ordered = description.levels is not None and tuple(tensor.shape[2:]) == (len(description.levels),)
        if tuple(tensor.shape[1:]) != tuple(description.shape) and not is_ordered:
            raise ConfigError(
                f"model: returns {label_leaf('outputs', name)} of shape {add_batch_dimension(tensor.shape[1:])}, but "
                f"the dataset's {description.kind} targets need {add_batch_dimension(description.shape)}"
            )


def find_last_layers(model: Any) -> dict[str, tuple[keras.KerasTensor, Any]]:
    """Returns each output of a functional or sequential model and the layer that computes it; {} for a subclass."""
    graph = find_graph(model) if isinstance(model, keras.Model) else None
    if graph is None:
        return {}
    return {name: (tensor, find_node(tensor)[0].operation) for name, tensor in name_leaves(graph[1]).items()}


def check_positive(model: Any, losses: Mapping[str, str]) -> None:
    """Rejects an output whose loss needs positive values if its last layer has no activation.

    `losses` are these losses, as the user typed them, by the names of the outputs.
    """
    for name, (_, layer) in find_last_layers(model).items():
        if name in losses and getattr(layer, "activation", None) is keras.activations.linear:
            raise ConfigError(
                f"{losses[name]}: is for outputs above 0, and the last layer {layer.name} of the model has no "
                "activation; write activation='softplus' into it, or use a loss such as huber"
            )


def find_low_precision_note(model: Any) -> str | None:
    """Returns a note if the last layer of a model computes in 16 bits, else None."""
    for name, (tensor, layer) in find_last_layers(model).items():
        if tensor.dtype in ("float16", "bfloat16"):
            return (
                f"model: {label_leaf('outputs', name)} of the layer {layer.name} are computed in {tensor.dtype} and "
                "rounded to about three digits; write dtype='float32' into this layer"
            )
    return None


def describe_returned(value: Any) -> str:
    """Describes a model's result for a message."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)} tensors"
    return "one tensor" if isinstance(value, keras.KerasTensor) else type(value).__name__


def cast_to_float32(name: str, tensor: keras.KerasTensor) -> keras.KerasTensor:
    if tensor.dtype == "float32":
        return tensor
    return keras.layers.Activation("linear", dtype="float32", name=None if name else "float32")(tensor)


def scale_outputs(model: keras.Model, inputs: Any, returned: Any, outputs: OutputStructure) -> keras.Model:
    """Returns a model whose outputs are in the unit of the targets.

    The layers of a functional model become layers of the result, so that config patterns, freezing and pipeline
    parallelism still find them.
    """
    described = name_leaves(outputs)
    inputs, returned = find_graph(model) or (inputs, returned)

    def scale(name: str, tensor: keras.KerasTensor) -> keras.KerasTensor:
        levels = described[name].levels
        return scale_output(
            name, tensor if levels is None or len(tensor.shape) == 3 else order_levels(tensor, levels), described[name]
        )

    return keras.Model(inputs, map_named(scale, returned), name=model.name)


def scale_output(name: str, tensor: keras.KerasTensor, described: Outputs) -> keras.KerasTensor:
    """Converts an output to `Outputs.dtype` in the unit of the targets, or adds `Outputs.logit_shift`.

    The output may also be the stacked outputs of an ensemble's members.
    """
    if described.logit_shift is not None:
        return keras.layers.Rescaling(1.0, offset=list(described.logit_shift), dtype="float32")(tensor)
    if described.scaling is None:
        return cast_to_float32(name, tensor)
    mean, deviation = described.scaling
    if described.dtype == "float32":
        return keras.layers.Rescaling(deviation, offset=mean, dtype="float32")(tensor)
    return keras.ops.cast(tensor, "float64") * deviation + mean  # the layer would round both to float32


def calibrate_outputs(model: keras.Model, inputs: InputStructure, outputs: OutputStructure) -> keras.Model:
    """Returns a model that applies `Outputs.calibration` at its end; the same model if there is no calibration."""
    described = name_leaves(outputs)
    if all(description.calibration is None for description in described.values()):
        return model

    def calibrate(name: str, tensor: Any) -> Any:
        if described[name].calibration is None:
            return tensor
        factor, shift = described[name].calibration
        return keras.layers.Rescaling(factor, offset=shift, dtype="float32")(tensor)

    model_inputs = make_inputs(inputs)
    model_inputs, returned = find_graph(model) or (model_inputs, model(model_inputs))
    return keras.Model(model_inputs, map_named(calibrate, returned), name=model.name)


def find_compile_config(model: Any) -> Mapping[str, Any] | None:
    """Returns Keras's compile config of a factory's model; None if it is not compiled, or only by KerasHub."""
    if not getattr(model, "compiled", False) or type(model).__module__.startswith("keras_hub."):
        return None
    config: Mapping[str, Any] | None = model.get_compile_config()
    return config


def keras_file_doubt(model: keras.Model) -> str | None:
    """Returns a warning if Keras cannot write the model to a Keras file or read it again, else None."""
    fault = keras_file_fault(model)
    if fault is None:
        return find_load_doubt(model)
    return (
        f"model: Keras cannot write it as a .keras file ({fault}); it is exported as a SavedModel and as weights "
        f"({WEIGHTS_FILE}), which model.init_from and scaleflow.evaluate cannot use"
    )


def find_load_doubt(model: keras.Model) -> str | None:
    """Returns a warning if the model contains code that Keras cannot load from a Keras file, else None."""
    unregistered = list_unregistered(keras.saving.serialize_keras_object(model))
    if not unregistered:
        return None
    return (
        f"model: {join_first(unregistered, 1)} cannot be read from the .keras file, which scaleflow.evaluate and "
        "model.init_from need; write a layer as a class, decorate classes and functions of your own with "
        "@keras.saving.register_keras_serializable(), and add --trust MODULE to evaluate"
    )


def list_unregistered(config: Any) -> list[str]:
    """Lists functions and classes of a serialized object that are neither Keras's nor registered with Keras."""
    own = dict.fromkeys(list_own_code(config))
    return [kind for kind, name in own if not (name and keras.saving.get_registered_object(name))]


def list_own_code(config: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, registered name) for each function and class of a serialized object that is not Keras's."""
    if isinstance(config, list | tuple | Mapping):
        for part in config.values() if isinstance(config, Mapping) else config:
            yield from list_own_code(part)
    if not isinstance(config, Mapping) or "class_name" not in config:
        return
    kind = config["class_name"]
    name = config.get("registered_name")
    if kind == "__lambda__":
        yield "a lambda of a Lambda layer", ""
    elif kind == "function":
        kind = name = config["config"]
    if name and str(config.get("module")).partition(".")[0] not in ("keras", "keras_hub"):
        yield kind, name


def find_load_fault(folder: Path) -> str | None:
    """Tries to load an exported model. Returns the reason and advice if Keras fails, else None.

    Skips models without the user's own code, models that `find_load_doubt` already warns about, and files above
    `LARGEST_LOADED`.
    """
    path = folder / KERAS_FILE
    if not path.exists() or path.stat().st_size > LARGEST_LOADED:
        return None
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    if list_unregistered(config) or not any(list_own_code(config)):
        return None
    try:
        with tf.device("CPU:0"):
            keras.models.load_model(path, compile=False)
    except Exception as error:  # the user's code may raise anything
        return explain_load_error(error)
    return None


def explain_load_error(error: Exception, takes_trust: bool = False) -> str:
    """Explains an error of `load_model`: the reason, and what to change in the user's class that caused it.

    `takes_trust`: whether the command has the option `--trust`, which imports the module of the class.
    """
    reason = read_reason(error)[:300]
    advice = next((advice for sign, advice in LOAD_ADVICE.items() if re.search(sign, reason)), "")
    if advice.endswith(" and "):
        advice += "add --trust MODULE" if takes_trust else "import its module in code that the config names"
    return f"{reason}; {advice}" if advice else reason


def find_batch_norm_warnings(model: keras.Model, portions: Batching) -> list[str]:
    """Returns warnings about BatchNorm layers that normalize over less than the global batch."""
    layers = [layer for layer in flatten_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    trainable = [layer for layer in layers if layer.trainable]  # frozen layers do not update their statistics
    unsynced = [layer.name for layer in trainable if not layer.synchronized]
    warnings = []
    if unsynced and portions.replicas > 1:
        warnings.append(
            f"model: {join_first(unsynced, 1)} normalizes each of {portions.replicas} replicas by its own examples, "
            "and only the first one's statistics are saved, so the result depends on the number of replicas; write "
            "BatchNormalization(synchronized=True), or set layer.synchronized = True in a ready-made model"
        )
    if trainable and portions.accumulate > 1:
        warnings.append(
            f"model: with training.accumulate={portions.accumulate} BatchNormalization sees one micro-batch at a "
            f"time, not the {portions.global_size} examples of an update, so the result depends on how they are "
            "divided"
        )
    return warnings


def find_moving_average_warning(
    model: keras.Model, steps: int, accumulate: int, phases: Sequence[tuple[FreezePhase, int]] = ()
) -> str | None:
    """Returns a warning if a run is too short for BatchNorm's moving averages to reach the data's, else None.

    Args:
        model: the model.
        steps: optimizer updates of the whole run.
        accumulate: micro-batches per update. Each one moves the averages.
        phases: the phases of `model.freeze`, each with its number of updates. A frozen layer keeps its averages.
    """
    slow: dict[str, tuple[float, int, float]] = {}
    for layer in flatten_layers(model):
        if not isinstance(layer, keras.layers.BatchNormalization) or not 0 < layer.momentum < 1:
            continue
        trained = count_trained_steps(layer, steps, phases)
        share = layer.momentum ** (trained * accumulate)
        if trained and share > LARGEST_SHARE:
            slow[layer.name] = share, trained, layer.momentum
    if not slow:
        return None
    share, trained, momentum = max(slow.values())
    needed = math.ceil(math.log(SMALL_SHARE) / (math.log(momentum) * accumulate))
    when = f"the run's {steps} steps" if trained == steps else f"the {trained} of {steps} steps in which they train"
    return (
        f"model: {share:.0%} of the moving averages of {join_first(list(slow), 1)} is still what they begin with after "
        f"{when}, so evaluations can be far worse than training; train for about {needed:,} steps, or lower the "
        "momentum of BatchNormalization"
    )


def count_trained_steps(layer: keras.Layer, steps: int, phases: Sequence[tuple[FreezePhase, int]]) -> int:
    """Counts the steps of a run that train a layer."""
    if not phases:
        return steps if layer.trainable else 0
    trained = 0
    for phase, count in phases:
        if any(part is layer and is_trained for part, is_trained in phase.trainable):
            trained += count
    return trained


def check_tracked(model: keras.Model) -> None:
    """Rejects a model if a layer of the user's holds a `tf.Variable`.

    Keras does not track it, so it would not train, and checkpoints and the exported model would lack it.
    """
    known = set()
    for variable in model.variables:
        known.add(id(variable.value))
        known |= set(map(id, getattr(variable.value, "values", ())))
    for layer in flatten_layers(model):
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
    """Yields the TensorFlow variables in a value: itself, or inside containers, modules and random generators."""
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, tf.random.Generator):
        yield value.state
    elif isinstance(value, tf.Module) and not isinstance(value, keras.Layer | keras.Model):
        yield from value.variables
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from list_tf_variables(item)
