"""Models: factories that are called with the dataset's description in the strategy's scope."""

from scaleflow.model.export import export
from scaleflow.model.initial import Saved, begin_with, copy_weights, read
from scaleflow.model.layers import entry, head, hidden
from scaleflow.model.make import batch_norm_doubts, doubt, make

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
    "make",
    "read",
]
