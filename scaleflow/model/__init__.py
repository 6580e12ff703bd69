"""Model factories, initial weights and export. Factories get the dataset's description, in the strategy's scope."""

from scaleflow.model.broadcasting import correct_keras_add
from scaleflow.model.export import keras_file_fault, write_model
from scaleflow.model.initial import SavedWeights, copy_weights, initialize_from, read_weights
from scaleflow.model.layers import entry, head, hidden, make_inputs
from scaleflow.model.make import (
    find_batch_norm_warnings,
    find_graph,
    find_logits_warning,
    keras_file_doubt,
    make_model,
)

__all__ = [
    "SavedWeights",
    "copy_weights",
    "correct_keras_add",
    "entry",
    "find_batch_norm_warnings",
    "find_graph",
    "find_logits_warning",
    "head",
    "hidden",
    "initialize_from",
    "keras_file_doubt",
    "keras_file_fault",
    "make_inputs",
    "make_model",
    "read_weights",
    "write_model",
]
