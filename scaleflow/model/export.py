"""Exports a trained model as a Keras file and a SavedModel, and checks that the SavedModel computes the same.

Other runtimes have no lookup of words, and most have no float64. So a model that preprocesses texts or numbers of
float64 has two endpoints more than `serve`:

- `preprocess`: raw inputs -> a dict by the name of an input: features in place of these, other inputs as they are;
- `portable`: this dict -> the outputs, where they are float64 before their scaling (`Outputs.scaling`).

A model that computes in a lower precision, or has outputs of float64, has these endpoints, too. Without them `serve` is
portable as it is.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
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
    """A trained model before its preprocessing is added."""

    core: keras.Model  # the trained model
    layers: Mapping[tuple[str, ...], keras.Layer]  # the preprocessing of one or several inputs, by their names
    inputs: InputStructure  # raw inputs
    policy: str  # the dtype policy of the core

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
    if private.find_functional(model) is not model or all(each.dtype != "float64" for each in model.outputs):
        return model

    def find_scaled(tensor: Any) -> Any:
        while tensor.dtype == "float64":
            (tensor,) = private.find_node(tensor)[0].input_tensors
        return tensor

    return keras.Model(model.input, map_leaves(find_scaled, model.output))


def add_parts(archive: Any, model: keras.Model, parts: Parts, specs: Any) -> Any:
    """Adds the endpoints `serve`, and `preprocess` and `portable` if there are such; returns `serve`.

    Args:
        archive: Keras's `ExportArchive`.
        model: the trained model with its preprocessing.
        specs: of the raw inputs.
    """
    core = remove_wide_scaling(parts.core)
    is_full = parts.policy == "float32" and core is parts.core
    if not parts.looked_up and is_full:
        return add_traced(archive, "serve", trace(lambda raw: model(raw, training=False), specs))
    preprocess = trace(parts.preprocess, specs)
    features = preprocess.structured_outputs
    names = label_leaves(features)
    given = {name: tf.TensorSpec([None, *each.shape[1:]], each.dtype, names[name]) for name, each in features.items()}
    with compute_in_float32(parts.core):
        portable = trace(lambda features: parts.compute(core, features), given)
    add_traced(archive, "preprocess", preprocess)
    add_traced(archive, "portable", portable)
    # One graph for both, if that is what the model computes.
    serve = chain(preprocess, portable) if is_full else lambda raw: model(raw, training=False)
    return add_traced(archive, "serve", trace(serve, specs))


def trace(function: Callable[[Any], Any], specs: Any) -> Any:
    """Returns the concrete function of one signature, which several endpoints share."""
    return tf.function(function, input_signature=[specs], autograph=False).get_concrete_function()


def add_traced(archive: Any, name: str, function: Any) -> Any:
    """Adds an endpoint that calls a concrete function, and returns that: saving traces each endpoint once more."""
    (specs,), _ = function.structured_input_signature
    archive.add_endpoint(name, tf.function(lambda given: function(given), input_signature=[specs], autograph=False))
    return function


def chain(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda given: second(first(given))


@contextlib.contextmanager
def compute_in_float32(model: keras.Model) -> Iterator[None]:
    """Sets the policy of all layers of a lower precision while the block lasts."""
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
    """Returns the functions from outputs [batch, ...] to tensors by name, by the name of the signature.

    `serving_default`: `prediction` (the name of a class, or its number if classes have no names; the label's truth; the
    value) and `probability`; of classes with sets also `prediction_set`; of values with intervals also their ends,
    `prediction_low` and `prediction_high`, or the quantiles, such as `prediction_q10`.
    `probabilities`: `probabilities` [batch, ..., classes], in the order of the record `learned_state.json`; it is left
    out if no output has probabilities. `logits`: the outputs as they are. With several outputs, names begin with that
    of the output, except those of `logits`, which are the names of the outputs.
    """
    described = name_leaves(outputs)

    def answer(make: Callable[[Outputs, tf.Tensor], dict[str, tf.Tensor]], values: Any) -> dict[str, tf.Tensor]:
        return {
            f"{name}_{key}" if name else key: tensor
            for name, each in name_leaves(values).items()
            for key, tensor in make(described[name], each).items()
        }

    signatures: dict[str, Signature] = {"serving_default": lambda values: answer(make_predictions, values)}
    if any(each.kind != "regression" for each in described.values()):
        signatures["probabilities"] = lambda values: answer(make_probabilities, values)
    signatures["logits"] = lambda values: {name or "logits": each for name, each in name_leaves(values).items()}
    return signatures


def make_predictions(described: Outputs, values: tf.Tensor) -> dict[str, tf.Tensor]:
    chances = make_probabilities(described, values).get("probabilities")
    if chances is None:
        ends = {f"prediction_{end}": each for end, each in bound_values(described, values).items()}
        found = {"prediction": take_prediction(described, values), **ends}
        return {key: tf.squeeze(each, -1) if each.shape[1:] == (1,) else each for key, each in found.items()}
    if not is_one_of_several(described):
        return {"prediction": chances >= 0.5, "probability": chances}
    best = tf.argmax(chances, axis=-1)
    chance = tf.reduce_max(chances, axis=-1)
    if described.threshold is not None:
        is_second = chances[..., 1] >= described.threshold
        best = tf.cast(is_second, tf.int64)
        chance = tf.where(is_second, chances[..., 1], chances[..., 0])
    prediction = best if described.names is None else tf.gather(tf.constant(described.names), best)
    found = {"prediction": prediction, "probability": chance}
    return (
        found if described.set_threshold is None else {**found, "prediction_set": join_sets(described, chances, best)}
    )


def join_sets(described: Outputs, chances: tf.Tensor, best: tf.Tensor) -> tf.Tensor:
    """Returns the sets of classes as JSON lists, [batch] of texts: the predicted one, and all from a probability on."""
    words = tf.constant([f", {each}" for each in quote_classes(described.names, chances.shape[-1])])
    is_inside = (chances >= described.set_threshold) | tf.one_hot(best, chances.shape[-1], True, False)
    joined = tf.strings.reduce_join(tf.where(is_inside, words, ""), axis=-1)
    return tf.strings.join(["[", tf.strings.regex_replace(joined, "^, ", ""), "]"])


def make_probabilities(described: Outputs, values: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns `probabilities` [batch, ..., classes], or [batch, labels]; nothing for values."""
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

#: The end of the name of an exported model that begins with preprocessing.
ON_RAW_INPUTS = "_on_raw_inputs"

#: The end of the name of each preprocessing that such a model begins with.
PREPROCESSING = "_preprocessing"

EXAMPLE = "input_example.npy"
EXAMPLES = "input_example.npz"

#: The file with the trained model's outputs for the example, and the name of a single one there.
ANSWERS = "example_outputs.npz"
SINGLE = "outputs"

#: An encoded picture, in place of the array that an input is decoded to.
PICTURE = Inputs((), "string")

#: The largest allowed difference between SavedModel and live model, relative to the largest output (at least 1).
TOLERANCE = {"float32": 1e-4, "mixed_float16": 1e-2, "mixed_bfloat16": 5e-2}


@dataclass(frozen=True)
class RawInputs:
    """How raw inputs become what the trained model takes, by the name of an input.

    Attributes:
        preprocessing_layers: creates the preprocessing of one or several inputs, by their names.
        decoders: traced functions from an encoded picture, a string of shape (), to one example of an input.
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
    """Exports the model into `folder`, loads the SavedModel again and compares the outputs.

    The folder then holds `model.keras` (`model.weights.h5` if Keras cannot write a Keras file), `saved_model/`,
    `signature.json` and `input_example.npy`, or for a dict of inputs `input_example.npz` with an array for each name.
    A picture in an example is the base64 text of a PNG file. `example_outputs.npz` has the trained model's outputs for
    the example, by which a served model is checked.

    The SavedModel has one endpoint `serve` from raw inputs [batch, *inputs.shape] to [batch, *outputs.shape] float32,
    or from and to dicts with the keys of `inputs` and `outputs`, and the signatures of `write_saved_model`.

    Args:
        inputs, outputs: the dataset's description of raw inputs and of outputs.
        batch: raw inputs [b, *inputs.shape] for the comparison; the first two become the input example.
        policy: the model's dtype policy, which sets the tolerance.
        folder: created if missing.
        on_host: compare in the host's memory, for a model that is too large for one device.
        raw: how raw inputs become what the model takes. The preprocessing becomes the first part of the exported model.

    Raises ExportError if the outputs differ by more than the tolerance.
    """
    raw = raw or RawInputs()
    folder.mkdir(parents=True, exist_ok=True)
    with use_first_copies(model):
        is_whole = keras_file_fault(model) is None
        if not is_whole:
            model.save_weights(folder / WEIGHTS_FILE)  # without preprocessing: the user's code loads them
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
        "arguments": label_leaves(inputs),  # of the SavedModel's signatures, by the name of the input
        "inputs": map_leaves(lambda each: {"dtype": each.dtype, "shape": [-1, *each.shape]}, inputs),
        "outputs": map_leaves(lambda each: {"dtype": each.dtype, "shape": [-1, *each.model_shape]}, outputs),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    (folder / SIGNATURE).write_text(json.dumps(signature, indent=2))


@contextlib.contextmanager
def use_first_copies(model: keras.Model) -> Iterator[None]:
    """Gives the model the first replica's copy of each mirrored variable, and leaves its random generators unchanged.

    TensorFlow cannot save a function that assigns to mirrored variables, as layers do that draw random numbers.
    """
    found = [(each, private.read_stored(each)) for each in model.variables]
    mirrored = [(each, value, first) for each, value in found if (first := find_first_copy(value)) is not None]
    seeds = [each for each in model.non_trainable_variables if each.name == "seed_generator_state"]
    states = [keras.ops.convert_to_numpy(each) for each in seeds]
    try:
        for variable, _, first in mirrored:
            private.store_variable(variable, first)
        yield
    finally:
        for variable, value, _ in mirrored:
            private.store_variable(variable, value)
        for seed, state in zip(seeds, states, strict=True):
            seed.assign(state)


def digest_weights(model: keras.Model) -> str:
    """Returns a digest of the dtypes, shapes and bits of a model's weights, in their order: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for variable in model.weights:
        values = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{values.dtype} {values.shape} ".encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def make_input_specs(inputs: InputStructure) -> Any:
    """Returns the specs of the endpoint's argument, named for its signature."""
    names = label_leaves(inputs)
    return map_named(lambda key, each: tf.TensorSpec([None, *each.shape], each.dtype, name=names[key]), inputs)


def write_example(inputs: InputStructure, batch: Any, folder: Path, pictures: Collection[str] = ()) -> None:
    """Writes the first two raw inputs; those of the names in `pictures` as base64 texts of PNG files."""

    described = name_leaves(inputs)

    def to_plain(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if name in pictures:
            return np.array([base64.b64encode(tf.io.encode_png(each).numpy()).decode() for each in values[:2]])
        return to_numpy_strings(values[:2]) if described[name].dtype == "string" else values[:2]

    examples = name_leaves(map_named(to_plain, batch))
    if "" in examples:
        np.save(folder / EXAMPLE, examples[""])
    else:
        write_arrays(folder / EXAMPLES, examples)


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays as `np.savez` does, which takes no array with the name `file`."""
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

    Keras's `model.export` sets no `training`, and random layers (`RandomFlip`, ...) then run in training mode.

    Its signatures are `serving_default`, which answers with predictions, `probabilities` (of classes and labels) and
    `logits`: all that `serve` returns (`model/export.py`). With decoders they take encoded pictures [batch] in
    place of arrays, and the endpoint `decode` maps pictures, one tensor or a dict by name, to the arrays of `serve`.
    The endpoints of `model/export.py` are what other formats are made of.
    """
    archive = keras.export.ExportArchive()
    archive.track(model)
    specs = make_input_specs(parts.inputs)
    compute = add_parts(archive, model, parts, specs=specs)
    serve: Callable[[Any], Any] = compute
    if decoders:
        specs = make_input_specs(map_named(lambda name, each: PICTURE if name in decoders else each, parts.inputs))
        decode = make_batch_decoder(parts.inputs, decoders)
        pictures = {name: each for name, each in name_leaves(specs).items() if name in decoders}
        archive.add_endpoint("decode", decode, input_signature=[pictures.get("", pictures)])
        serve = chain(lambda given: replace_pictures(given, decode, decoders), compute)
    for name, answer in make_signatures(outputs).items():
        archive.add_endpoint(name, chain(serve, answer), input_signature=[specs])
    with private.hide_default_signatures():
        archive.write_out(folder, verbose=False)


def make_batch_decoder(
    inputs: InputStructure, decoders: Mapping[str, Callable[[tf.Tensor], tf.Tensor]]
) -> Callable[[Any], Any]:
    """Returns a function from encoded pictures [batch] to arrays [batch, *shape]: a tensor, or a dict by name."""
    described = name_leaves(inputs)

    def decode_leaf(name: str, pictures: tf.Tensor) -> tf.Tensor:
        spec = tf.TensorSpec(described[name].shape, described[name].dtype)
        return tf.map_fn(decoders[name], pictures, fn_output_signature=spec)

    return lambda pictures: (
        {name: decode_leaf(name, each) for name, each in pictures.items()}
        if isinstance(pictures, Mapping)
        else decode_leaf("", pictures)
    )


def replace_pictures(given: Any, decode: Callable[[Any], Any], names: Collection[str]) -> Any:
    """Returns inputs with arrays in place of encoded pictures."""
    if not isinstance(given, Mapping):
        return decode(given)
    decoded = decode({name: each for name, each in name_leaves(given).items() if name in names})
    return map_named(lambda name, each: decoded.get(name, each), given)


def keras_file_fault(model: keras.Model) -> str | None:
    """Returns why Keras cannot write a model as a Keras file, or None if it can. Checks the config, not the weights."""
    try:
        json.dumps(keras.saving.serialize_keras_object(model))
    except Exception as error:  # a user's `get_config` can raise anything
        reason = " ".join(str(error).split()).partition(". ")[0]
        return f"{type(error).__name__}: {reason}"
    return None


def add_preprocessing(
    layers: Mapping[tuple[str, ...], keras.Layer], model: keras.Model, inputs: InputStructure
) -> keras.Model:
    """Returns a model that applies the preprocessing of each input to raw inputs, then `model`."""
    labels = label_leaves(inputs)
    raws = make_inputs(inputs)
    named = dict(name_leaves(raws))
    for names, layer in layers.items():
        raw = [named[name] for name in names]
        if len(names) == 1 or not layer.name.endswith(PREPROCESSING):
            # A nested model, because a layer of the preprocessing may have the model's name.
            nested_raw = [keras.Input(each.shape[1:], dtype=each.dtype) for each in raw]
            own = f"_{labels[names[0]]}" if len(names) == 1 and names[0] else ""
            made = apply_layer(layer, nested_raw)
            found = keras.Model(nested_raw, made, name=f"{model.name}{own}{PREPROCESSING}")(raw)
        else:
            found = layer(raw)
        named.update(zip(names, found, strict=True))
    return keras.Model(raws, model(map_named(lambda name, _: named[name], raws)), name=f"{model.name}{ON_RAW_INPUTS}")


def to_numpy_strings(batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Converts strings to numpy's `str` dtype, which `np.save` writes without pickle."""
    words = [word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in batch.ravel()]
    return np.array(words).reshape(batch.shape)


def check_export(model: keras.Model, batch: Any, tolerance: float, folder: Path) -> dict[str, Any]:
    """Compares the outputs of the SavedModel, loaded from disk, with the live model's; returns the latter by name."""
    tensors = tf.nest.map_structure(tf.constant, batch)
    live = name_leaves(model(tensors, training=False))  # without tracing, which takes long with many columns
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
