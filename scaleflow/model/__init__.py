"""Models: factories that are called with the dataset's description in the strategy's scope."""

from scaleflow.model.export import export, keras_file_fault
from scaleflow.model.initial import Saved, begin_with, copy_weights, read
from scaleflow.model.layers import entry, head, hidden
from scaleflow.model.make import batch_norm_doubts, doubt, keras_file_doubt, make

__all__ = [
    "Saved",
    "batch_norm_doubts",
    "begin_with",
    "copy_weights",
    "doubt",
    "entry",
    "export",
    "head",
    "hidden",
    "keras_file_doubt",
    "keras_file_fault",
    "make",
    "read",
]
