"""What a model answers, from its SavedModel alone, and the metrics that follow; in a process with TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def compute_outputs(folder: str, inputs: Mapping[str, Sequence[Any]]) -> Array:
    """Returns the outputs [rows, n] of a SavedModel for values by column."""
    import tensorflow as tf

    loaded = tf.saved_model.load(folder)
    ((specs,), _) = loaded.serve.concrete_functions[0].structured_input_signature
    tensors = {
        name: tf.constant(inputs.get(name, [float("nan")] * len(inputs["age"])), spec.dtype)
        for name, spec in specs.items()
        if name in inputs
    }
    outputs: Array = loaded.serve(tensors).numpy().astype(np.float64)
    return outputs


def to_probabilities(outputs: Array) -> Array:
    """Returns the probability of each class [rows, classes], of one logit or of several."""
    if outputs.shape[1] == 1:
        chance = 1 / (1 + np.exp(-outputs[:, 0]))
        return np.stack([1 - chance, chance], axis=1)
    raised = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    chances: Array = raised / raised.sum(axis=1, keepdims=True)
    return chances


def compute_metrics(outputs: Array, answers: Sequence[Any], classes: Sequence[str] | None) -> dict[str, float]:
    """Returns loss and accuracy for classes, or the mean absolute error for numbers."""
    if classes is None:
        return {"mae": float(np.mean(np.abs(outputs[:, 0] - np.array(answers, np.float64))))}
    chances = to_probabilities(outputs)
    targets = np.array([list(classes).index(to_class(answer)) for answer in answers])
    return {
        "loss": float(-np.mean(np.log(chances[np.arange(len(targets)), targets]))),
        "accuracy": float(np.mean(chances.argmax(axis=1) == targets)),
    }


def to_class(answer: Any) -> str:
    return str(int(answer)) if isinstance(answer, float) and answer == int(answer) else str(answer)
