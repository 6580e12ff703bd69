"""Exports a trained model as a Keras file and a SavedModel, and checks that the SavedModel computes the same.

Other runtimes cannot look up words, and most have no float64. So the SavedModel of some models has two endpoints in
addition to `serve`:

- `preprocess`: raw inputs -> a dict by input name: features for text and float64 inputs, other inputs unchanged;
- `portable`: this dict -> the outputs in float32; float64 outputs are still without their scaling (`Outputs.scaling`).

These are models that preprocess text or float64 inputs, compute in a lower precision, or have float64 outputs. For all
other models `serve` is portable.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat import keras as private
from scaleflow.compat.tensorflow import find_first_copy
from scaleflow.errors import ExportError
from scaleflow.interfaces import (
    Inputs,
    InputStructure,
    Outputs,
    OutputStructure,
    apply_layer,
    label_leaf,
    map_leaves,
    map_named,
    name_leaves,
)
from scaleflow.interfaces.collector import pause_collector
from scaleflow.model.layers import label_leaves, make_inputs
from scaleflow.serving.prediction_columns import bound_values, is_one_of_several, quote_classes, take_prediction


@dataclass(frozen=True)
class Parts:
    """A trained model and its preprocessing, not yet joined."""

    core: keras.Model  # the trained model
    layers: Mapping[tuple[str, ...], keras.Layer]  # preprocessing by the names of the inputs that it takes
    inputs: InputStructure  # raw inputs
    policy: str  # the dtype policy of the core

    @property
    def looked_up(self) -> set[str]:
        """The names of text and float64 inputs that have a preprocessing."""
        named = name_leaves(self.inputs)
        preprocessed = itertools.chain.from_iterable(self.layers)
        return {name for name in preprocessed if named[name].dtype in ("string", "float64")}

    def preprocess(self, raw: Any) -> dict[str, tf.Tensor]:
        """Computes the features of text and float64 inputs. Returns all inputs by name, the others unchanged."""
        features = self._apply(name_leaves(raw), self.looked_up)
        return {name: tf.identity(tensor) for name, tensor in features.items()}

    def compute(self, core: keras.Model, features: Mapping[str, tf.Tensor]) -> Any:
        """Computes the core's outputs from the result of `preprocess`."""
        named = self._apply(features, set(name_leaves(self.inputs)) - self.looked_up)
        return core(map_named(lambda name, _: named[name], self.inputs), training=False)

    def _apply(self, named: Mapping[str, tf.Tensor], chosen: Collection[str]) -> dict[str, tf.Tensor]:
        """Applies the preprocessing of the chosen inputs. Returns all inputs by name."""
        features = dict(named)
        for names, layer in self.layers.items():
            if names[0] in chosen:
                applied = apply_layer(layer, [named[name] for name in names])
                features.update(zip(names, applied, strict=True))
        return features


def remove_wide_scaling(model: keras.Model) -> keras.Model:
    """Returns the model without the final operations that scale float64 outputs to their unit (`Outputs.dtype`)."""
    if private.find_functional(model) is not model:  # a subclass, which has no graph
        return model
    if all(tensor.dtype != "float64" for tensor in model.outputs):
        return model

    def find_scaled(tensor: Any) -> Any:
        while tensor.dtype == "float64":
            (tensor,) = private.find_node(tensor)[0].input_tensors
        return tensor

    return keras.Model(model.input, map_leaves(find_scaled, model.output))


def add_parts(archive: Any, model: keras.Model, parts: Parts, specs: Any) -> Any:
    """Adds the endpoint `serve`, and `preprocess` and `portable` if the model needs them. Returns `serve`.

    Args:
        archive: Keras's `ExportArchive`.
        model: the trained model with its preprocessing.
        parts: the same model, with its preprocessing apart.
        specs: the `tf.TensorSpec` of each raw input.
    """
    core = remove_wide_scaling(parts.core)
    is_full = parts.policy == "float32" and core is parts.core
    if not parts.looked_up and is_full:
        return add_traced(archive, "serve", trace(lambda raw: model(raw, training=False), specs))
    preprocess = trace(parts.preprocess, specs)
    features = preprocess.structured_outputs
    names = label_leaves(features)
    feature_specs = {}
    for name, tensor in features.items():
        feature_specs[name] = tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, names[name])
    with compute_in_float32(parts.core):
        portable = trace(lambda features: parts.compute(core, features), feature_specs)
    add_traced(archive, "preprocess", preprocess)
    add_traced(archive, "portable", portable)
    # If the two endpoints together compute the same as the model, `serve` calls them and shares their graphs.
    serve = chain(preprocess, portable) if is_full else lambda raw: model(raw, training=False)
    return add_traced(archive, "serve", trace(serve, specs))


def trace(function: Callable[[Any], Any], specs: Any) -> Any:
    """Traces a function for one signature. Several endpoints can share the concrete function."""
    return tf.function(function, input_signature=[specs], autograph=False).get_concrete_function()


def add_traced(archive: Any, name: str, function: Any) -> Any:
    """Adds an endpoint that calls a concrete function, and returns that function.

    Saving traces each endpoint again. With a concrete function inside, it does not trace the whole model again.
    """
    (specs,), _ = function.structured_input_signature
    archive.add_endpoint(name, tf.function(lambda inputs: function(inputs), input_signature=[specs], autograph=False))
    return function


def chain(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls `second` with the result of `first`."""
    return lambda inputs: second(first(inputs))


@contextlib.contextmanager
def compute_in_float32(model: keras.Model) -> Iterator[None]:
    """Makes all layers with a mixed precision policy compute in float32 inside the `with` block."""
    layers = [layer for layer in private.flatten_layers(model) if layer.dtype_policy.name.startswith("mixed_")]
    policies = [layer.dtype_policy for layer in layers]
    for layer in layers:
        layer.dtype_policy = "float32"
    try:
        yield
    finally:
        for layer, policy in zip(layers, policies, strict=True):
            layer.dtype_policy = policy


Signature = Callable[[Any], dict[str, tf.Tensor]]


def make_signatures(outputs: OutputStructure) -> Mapping[str, Signature]:
    """Returns, for each signature, a function from outputs [batch, ...] to named tensors.

    - `serving_default` gives `prediction`: the name of the class (its number if classes have no names), True or False
      for a label, or the value. Classes and labels also have `probability`, and classes with prediction sets
      `prediction_set`. Values with intervals have `prediction_low` and `prediction_high`, or quantiles such as
      `prediction_q10`.
    - `probabilities` gives `probabilities` [batch, ..., classes], in the class order of the record
      `learned_state.json`. It is missing if no output has probabilities.
    - `logits` gives the model's outputs unchanged.

    With several outputs, each tensor name starts with the name of its output. In `logits` it is the output's name.
    """
    described = name_leaves(outputs)

    def answer(make: Callable[[Outputs, tf.Tensor], dict[str, tf.Tensor]], values: Any) -> dict[str, tf.Tensor]:
        tensors = {}
        for name, of_output in name_leaves(values).items():
            for key, tensor in make(described[name], of_output).items():
                tensors[f"{name}_{key}" if name else key] = tensor
        return tensors

    def name_logits(values: Any) -> dict[str, tf.Tensor]:
        return {name or "logits": tensor for name, tensor in name_leaves(values).items()}

    signatures: dict[str, Signature] = {"serving_default": lambda values: answer(make_predictions, values)}
    if any(output.kind != "regression" for output in described.values()):
        signatures["probabilities"] = lambda values: answer(make_probabilities, values)
    signatures["logits"] = name_logits
    return signatures


def make_predictions(described: Outputs, values: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the tensors of `serving_default` for one output; see `make_signatures`."""
    chances = make_probabilities(described, values).get("probabilities")
    if chances is None:
        return make_value_predictions(described, values)
    if not is_one_of_several(described):
        return {"prediction": chances >= 0.5, "probability": chances}
    best = tf.argmax(chances, axis=-1)
    chance = tf.reduce_max(chances, axis=-1)
    if described.threshold is not None:
        is_second = chances[..., 1] >= described.threshold
        best = tf.cast(is_second, tf.int64)
        chance = tf.where(is_second, chances[..., 1], chances[..., 0])
    prediction = best if described.names is None else tf.gather(tf.constant(described.names), best)
    predictions = {"prediction": prediction, "probability": chance}
    if described.set_threshold is not None:
        predictions["prediction_set"] = join_sets(described, chances, best)
    return predictions


def make_value_predictions(described: Outputs, values: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the predicted values with the ends of their intervals, or their quantiles."""
    predictions = {"prediction": take_prediction(described, values)}
    for end, ends in bound_values(described, values).items():
        predictions[f"prediction_{end}"] = ends
    for key, tensor in predictions.items():
        if tensor.shape[1:] == (1,):
            predictions[key] = tf.squeeze(tensor, -1)
    return predictions


def join_sets(described: Outputs, chances: tf.Tensor, best: tf.Tensor) -> tf.Tensor:
    """Returns the prediction sets as JSON lists, strings [batch].

    A set has the predicted class and all classes whose probability reaches `Outputs.set_threshold`.
    """
    words = tf.constant([f", {name}" for name in quote_classes(described.names, chances.shape[-1])])
    is_inside = (chances >= described.set_threshold) | tf.one_hot(best, chances.shape[-1], True, False)
    joined = tf.strings.reduce_join(tf.where(is_inside, words, ""), axis=-1)
    return tf.strings.join(["[", tf.strings.regex_replace(joined, "^, ", ""), "]"])


def make_probabilities(described: Outputs, values: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns `probabilities` [batch, ..., classes] or [batch, labels]; an empty dict for regression."""
    if described.kind == "regression":
        return {}
    if described.kind == "classification":
        return {"probabilities": tf.nn.softmax(values)}
    chances = tf.sigmoid(values)
    if not is_one_of_several(described):
        return {"probabilities": chances}
    chance = tf.reshape(chances, [-1])
    return {"probabilities": tf.stack([1 - chance, chance], axis=-1)}


KERAS_FILE = "model.keras"
WEIGHTS_FILE = "model.weights.h5"
SAVED_MODEL = "saved_model"
SIGNATURE = "signature.json"

#: Suffix of the name of an exported model that includes its preprocessing.
ON_RAW_INPUTS = "_on_raw_inputs"

#: Suffix of the name of each preprocessing inside such a model.
PREPROCESSING = "_preprocessing"

EXAMPLE = "input_example.npy"
EXAMPLES = "input_example.npz"

#: The file with the trained model's outputs for the example, and the name of the array if there is one output.
ANSWERS = "example_outputs.npz"
SINGLE = "outputs"

#: The description of an input that takes encoded pictures instead of decoded arrays.
PICTURE = Inputs((), "string")

#: Maximum difference between SavedModel and live model, relative to max(1, largest output).
TOLERANCE = {"float32": 1e-4, "mixed_float16": 1e-2, "mixed_bfloat16": 5e-2}


@dataclass(frozen=True)
class RawInputs:
    """Converts raw inputs to the inputs of the trained model.

    Attributes:
        preprocessing_layers: functions that create a preprocessing layer, by the names of the inputs that it takes.
        decoders: traced functions from an encoded picture, a string of shape (), to one example, by input name.
    """

    preprocessing_layers: Mapping[tuple[str, ...], Callable[[], keras.Layer]] = field(default_factory=dict)
    decoders: Mapping[str, Callable[[tf.Tensor], tf.Tensor]] = field(default_factory=dict)


@pause_collector()
def write_model(
    model: keras.Model,
    inputs: InputStructure,
    outputs: OutputStructure,
    batch: Any,
    policy: str,
    folder: Path,
    on_host: bool = False,
    raw: RawInputs | None = None,
) -> None:
    """Exports the model to `folder`, loads the SavedModel again and compares its outputs with the model's.

    Writes these files:

    - `model.keras`, or `model.weights.h5` if Keras cannot write a Keras file;
    - `saved_model/`;
    - `signature.json`;
    - `input_example.npy`, or for a dict of inputs `input_example.npz` with one array per name. Pictures in it are
      base64 texts of PNG files;
    - `example_outputs.npz`: the trained model's outputs for this example, to check a served model.

    The SavedModel has the signatures of `write_saved_model` and an endpoint `serve` from raw inputs
    [batch, *inputs.shape] to [batch, *outputs.shape] float32. With several inputs or outputs these are dicts with the
    keys of `inputs` and `outputs`.

    Args:
        model: the trained model.
        inputs, outputs: the dataset's description of raw inputs and of outputs.
        batch: raw inputs [b, *inputs.shape] for the comparison. The first two become the input example.
        policy: the model's dtype policy, which sets the tolerance.
        folder: created if missing.
        on_host: compare in the host's memory, for a model that is too large for one device.
        raw: the preprocessing and decoders of raw inputs. The exported model includes the preprocessing.

    Raises ExportError if the outputs differ by more than the tolerance.
    """
    raw = raw or RawInputs()
    folder.mkdir(parents=True, exist_ok=True)
    with use_first_copies(model):
        is_whole = keras_file_fault(model) is None
        if not is_whole:
            model.save_weights(folder / WEIGHTS_FILE)  # no preprocessing: only the user's code can load this file
        layers = {names: make() for names, make in raw.preprocessing_layers.items()}
        whole = add_preprocessing(layers, model, inputs) if layers else model
        if is_whole:
            whole.save(folder / KERAS_FILE)
        parts = Parts(model, layers, inputs, policy=policy)
        write_saved_model(whole, parts, outputs, folder=folder / SAVED_MODEL, decoders=raw.decoders)
        with tf.device("CPU:0") if on_host else contextlib.nullcontext():
            outputs_of = check_export(whole, batch, TOLERANCE[policy], folder=folder)
    write_example(inputs, batch, folder, pictures=raw.decoders)
    write_arrays(folder / ANSWERS, {name or SINGLE: values[:2] for name, values in outputs_of.items()})
    signature = {
        "arguments": label_leaves(inputs),  # input name -> argument of the SavedModel's signatures
        "inputs": map_leaves(lambda leaf: {"dtype": leaf.dtype, "shape": [-1, *leaf.shape]}, inputs),
        "outputs": map_leaves(lambda leaf: {"dtype": leaf.dtype, "shape": [-1, *leaf.model_shape]}, outputs),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    (folder / SIGNATURE).write_text(json.dumps(signature, indent=2))


@contextlib.contextmanager
def use_first_copies(model: keras.Model) -> Iterator[None]:
    """Replaces each mirrored variable by its first replica's copy inside the `with` block.

    TensorFlow cannot save a function that assigns to mirrored variables, for example a layer that draws random
    numbers. The random generators have their old state again after the block.
    """
    mirrored = []
    for variable in model.variables:
        stored = private.read_stored(variable)
        first = find_first_copy(stored)
        if first is not None:
            mirrored.append((variable, stored, first))
    seeds = [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
    states = list(map(keras.ops.convert_to_numpy, seeds))
    try:
        for variable, _, first in mirrored:
            private.store_variable(variable, first)
        yield
    finally:
        for variable, stored, _ in mirrored:
            private.store_variable(variable, stored)
        for seed, state in zip(seeds, states, strict=True):
            seed.assign(state)


def digest_weights(model: keras.Model) -> str:
    """Returns a digest of the dtypes, shapes and bits of a model's weights: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for variable in model.weights:
        values = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{values.dtype} {values.shape} ".encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def make_input_specs(inputs: InputStructure) -> Any:
    """Returns the `tf.TensorSpec` of each input, with a name that is valid in a signature."""
    names = label_leaves(inputs)
    return map_named(lambda key, leaf: tf.TensorSpec([None, *leaf.shape], leaf.dtype, name=names[key]), inputs)


def write_example(inputs: InputStructure, batch: Any, folder: Path, pictures: Collection[str] = ()) -> None:
    """Writes the first two examples of the raw inputs. Inputs in `pictures` become base64 texts of PNG files."""

    described = name_leaves(inputs)

    def to_plain(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if name in pictures:
            files = [tf.io.encode_png(picture).numpy() for picture in values[:2]]
            return np.array([base64.b64encode(file).decode() for file in files])
        return to_numpy_strings(values[:2]) if described[name].dtype == "string" else values[:2]

    examples = name_leaves(map_named(to_plain, batch))
    if "" in examples:
        np.save(folder / EXAMPLE, examples[""])
    else:
        write_arrays(folder / EXAMPLES, examples)


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays like `np.savez`, which does not accept an array called `file`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, values in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, np.asarray(values), allow_pickle=False)


def write_saved_model(
    model: keras.Model,
    parts: Parts,
    outputs: OutputStructure,
    folder: Path,
    decoders: Mapping[str, Callable[[tf.Tensor], tf.Tensor]],
) -> None:
    """Writes a SavedModel that runs with `training=False`.

    Keras's `model.export` does not set `training`, so random layers (`RandomFlip`, ...) would run in training mode.

    The SavedModel has the signatures of `make_signatures` and the endpoints of `add_parts`, from which other formats
    are made. With decoders, the signatures take encoded pictures [batch] instead of arrays, and an endpoint `decode`
    converts pictures (one tensor, or a dict by name) to the arrays that `serve` takes.
    """
    archive = keras.export.ExportArchive()
    archive.track(model)
    specs = make_input_specs(parts.inputs)
    compute = add_parts(archive, model, parts, specs=specs)
    serve: Callable[[Any], Any] = compute
    if decoders:
        specs = make_input_specs(map_named(lambda name, leaf: PICTURE if name in decoders else leaf, parts.inputs))
        decode = make_batch_decoder(parts.inputs, decoders)
        pictures = {name: spec for name, spec in name_leaves(specs).items() if name in decoders}
        archive.add_endpoint("decode", decode, input_signature=[pictures.get("", pictures)])
        serve = chain(lambda inputs: replace_pictures(inputs, decode, decoders), compute)
    for name, answer in make_signatures(outputs).items():
        archive.add_endpoint(name, chain(serve, answer), input_signature=[specs])
    with private.hide_default_signatures():
        archive.write_out(folder, verbose=False)


def make_batch_decoder(
    inputs: InputStructure, decoders: Mapping[str, Callable[[tf.Tensor], tf.Tensor]]
) -> Callable[[Any], Any]:
    """Returns a function that decodes pictures [batch] to arrays [batch, *shape]: one tensor, or a dict by name."""
    described = name_leaves(inputs)

    def decode_leaf(name: str, pictures: tf.Tensor) -> tf.Tensor:
        spec = tf.TensorSpec(described[name].shape, described[name].dtype)
        return tf.map_fn(decoders[name], pictures, fn_output_signature=spec)

    def decode(pictures: Any) -> Any:
        if isinstance(pictures, Mapping):
            return {name: decode_leaf(name, batch) for name, batch in pictures.items()}
        return decode_leaf("", pictures)

    return decode


def replace_pictures(inputs: Any, decode: Callable[[Any], Any], names: Collection[str]) -> Any:
    """Decodes the inputs `names`, and leaves all others unchanged."""
    if not isinstance(inputs, Mapping):
        return decode(inputs)
    decoded = decode({name: tensor for name, tensor in name_leaves(inputs).items() if name in names})
    return map_named(lambda name, tensor: decoded.get(name, tensor), inputs)


def keras_file_fault(model: keras.Model) -> str | None:
    """Returns the reason why Keras cannot write a Keras file, or None. Checks the model's config, not its weights."""
    try:
        json.dumps(keras.saving.serialize_keras_object(model))
    except Exception as error:  # a user's `get_config` can raise anything
        reason = " ".join(str(error).split()).partition(". ")[0]
        return f"{type(error).__name__}: {reason}"
    return None


def add_preprocessing(
    layers: Mapping[tuple[str, ...], keras.Layer], model: keras.Model, inputs: InputStructure
) -> keras.Model:
    """Returns a model from raw inputs: it applies the preprocessing layers, then `model`."""
    labels = label_leaves(inputs)
    raws = make_inputs(inputs)
    named = dict(name_leaves(raws))
    for names, layer in layers.items():
        raw = [named[name] for name in names]
        if len(names) == 1 or not layer.name.endswith(PREPROCESSING):
            # Nest the preprocessing in a model, because one of its layers may have the model's name.
            nested_raw = [keras.Input(tensor.shape[1:], dtype=tensor.dtype) for tensor in raw]
            own = f"_{labels[names[0]]}" if len(names) == 1 and names[0] else ""
            nested = keras.Model(nested_raw, apply_layer(layer, nested_raw), name=f"{model.name}{own}{PREPROCESSING}")
            preprocessed = nested(raw)
        else:
            preprocessed = layer(raw)
        named.update(zip(names, preprocessed, strict=True))
    return keras.Model(raws, model(map_named(lambda name, _: named[name], raws)), name=f"{model.name}{ON_RAW_INPUTS}")


def to_numpy_strings(batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Converts strings to NumPy's `str` dtype, because `np.save` needs no pickle for it."""
    words = [word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in batch.ravel()]
    return np.array(words).reshape(batch.shape)


def check_export(model: keras.Model, batch: Any, tolerance: float, folder: Path) -> dict[str, Any]:
    """Loads the SavedModel and compares its outputs with the live model's. Returns the live model's outputs by name.

    Raises ExportError if they differ by more than the tolerance.
    """
    tensors = tf.nest.map_structure(tf.constant, batch)
    live = name_leaves(model(tensors, training=False))  # eager: tracing takes long with many columns
    loaded = tf.saved_model.load(str(folder / SAVED_MODEL))  # keeps its variables alive
    saved = name_leaves(loaded.serve(tensors))
    for name, values in live.items():
        difference = float(np.max(np.abs(values.numpy() - saved[name].numpy()), initial=0.0))
        largest = float(np.max(np.abs(values.numpy()), initial=1.0))
        if not difference <= tolerance * largest:
            raise ExportError(
                f"the SavedModel's {label_leaf('outputs', name)} differ from the trained model's by {difference:.3g}, "
                f"and only {tolerance * largest:.3g} is allowed; its folder is {folder}"
            )
    return live
