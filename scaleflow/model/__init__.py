"""Models: factories that are called with the dataset's description in the strategy's scope."""

from scaleflow.model.export import keras_file_fault, write_model
from scaleflow.model.initial import SavedWeights, copy_weights, initialize_from, read_weights
from scaleflow.model.layers import entry, head, hidden
from scaleflow.model.make import find_batch_norm_warnings, find_logits_warning, keras_file_doubt, make_model

__all__ = [
    "SavedWeights",
    "copy_weights",
    "entry",
    "find_batch_norm_warnings",
    "find_logits_warning",
    "head",
    "hidden",
    "initialize_from",
    "keras_file_doubt",
    "keras_file_fault",
    "make_model",
    "read_weights",
    "write_model",
]
