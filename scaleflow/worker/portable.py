"""The SavedModel of a run as converters take it: numbers in, numbers out, a name for each tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.export.formats import PortableModel
from scaleflow.interfaces import LearnedState, map_named, name_leaves
from scaleflow.model import label_leaves

#: The file beside that of a format that says what its tensors mean.
DESCRIPTION = "model.json"

#: The version of this file.
VERSION = 1


class SavedParts:
    """A SavedModel, and the parts of it that are portable (`model/parts.py`).

    Args:
        folder: of the SavedModel.

    Attributes:
        specs: of the arguments of the portable part, by the name of the input.
        outputs: the names of the outputs, and of the tensors that they become.
        wide: the outputs of float64, which the portable part returns before their scaling.
    """

    def __init__(self, folder: Path) -> None:
        self._loaded = tf.saved_model.load(str(folder))
        self.serve = self._loaded.serve
        self._raw = read_specs_of(self.serve)
        self._preprocess = getattr(self._loaded, "preprocess", None)
        self._portable = getattr(self._loaded, "portable", None)
        specs = name_leaves(read_specs_of(self._portable or self.serve))
        names = label_leaves(specs)
        self.specs = {name: tf.TensorSpec(each.shape, each.dtype, names[name]) for name, each in specs.items()}
        returned = name_leaves(self.serve.concrete_functions[0].structured_outputs)
        self.outputs = {name: f"output_{n}" for n, name in enumerate(returned)}
        self.wide = {name for name, each in returned.items() if each.dtype == tf.float64}

    def decode_pictures(self, pictures: Any) -> Any:
        return self._loaded.decode(pictures)

    def split_off(self, raw: Any) -> dict[str, tf.Tensor]:
        """Returns what the portable part takes for raw inputs, by the name of the input. Traced."""
        return name_leaves(raw) if self._preprocess is None else dict(self._preprocess(raw))

    def nest_raw(self, named: Mapping[str, Any]) -> Any:
        """Returns raw inputs in the structure that `serve` takes."""
        return map_named(lambda name, _: named[name], self._raw)

    def compute(self, features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the outputs by the names of their tensors. Traced."""
        portable = self._portable
        outputs = self.serve(self.nest_raw(features)) if portable is None else portable(dict(features))
        return {self.outputs[name]: each for name, each in name_leaves(outputs).items()}

    def write(self, folder: Path) -> PortableModel:
        """Writes a SavedModel of the portable part, with one signature of flat arguments."""
        names = list(self.specs)
        module = tf.Module()
        module.loaded = self._loaded  # keeps the variables
        module.portable = tf.function(
            lambda *arguments: self.compute(dict(zip(names, arguments, strict=True))),
            input_signature=list(self.specs.values()),
            autograph=False,
        )
        tf.saved_model.save(module, str(folder), {"portable": module.portable.get_concrete_function()})
        return PortableModel(folder, module.portable, {spec.name: spec for spec in self.specs.values()})

    def describe(self, state: LearnedState | None, takes_raw: bool) -> str:
        """Returns the text of `model.json`: what the tensors mean, and how texts and numbers of float64 become them."""
        learned = {} if state is None or takes_raw else state.preprocessing
        described = {} if state is None else name_leaves(state.outputs)
        raw = name_leaves(self._raw)
        inputs = []
        for name, spec in self.specs.items():
            entry = {"name": name, "tensor": spec.name, "shape": [None, *spec.shape[1:]], "dtype": spec.dtype.name}
            if raw[name].dtype in (tf.string, tf.float64) and name in learned:
                entry["preprocessing"] = asdict(learned[name])
            inputs.append(entry)
        outputs = []
        for name, tensor in self.outputs.items():
            keys = ["kind", "names", *(["scaling"] if name in self.wide and not takes_raw else [])]
            more = {} if name not in described else {key: asdict(described[name])[key] for key in keys}
            outputs.append({"name": name, "tensor": tensor, **more})
        return json.dumps({"version": VERSION, "inputs": inputs, "outputs": outputs}, indent=1)


def read_specs_of(endpoint: Any) -> Any:
    """Returns the specs of the argument of an endpoint."""
    ((specs,), _) = endpoint.concrete_functions[0].structured_input_signature
    return specs


def measure_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the largest difference between outputs, and the size of the largest one; NaN if one has other NaNs."""
    difference, largest = 0.0, 1.0
    for name, values in expected.items():
        both = np.asarray(values, np.float64), np.asarray(found[name], np.float64)
        is_nan = np.isnan(both[0])
        if not np.array_equal(is_nan, np.isnan(both[1])):
            return float("nan"), largest
        known = ~is_nan
        difference = max(difference, float(np.max(np.abs(both[0] - both[1])[known], initial=0.0)))
        largest = max(largest, float(np.max(np.abs(both[0][known]), initial=1.0)))
    return difference, largest
