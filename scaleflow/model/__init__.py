"""Models: factories that are called with the dataset's description in the strategy's scope."""

from scaleflow.model.export import export
from scaleflow.model.layers import entry, head, hidden
from scaleflow.model.make import batch_norm_doubts, doubt, make

__all__ = ["batch_norm_doubts", "doubt", "entry", "export", "head", "hidden", "make"]
