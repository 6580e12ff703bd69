"""Models: factories that are called with the dataset's description in the strategy's scope."""

from scaleflow.model.export import export
from scaleflow.model.layers import entry, head, hidden
from scaleflow.model.make import doubt, make

__all__ = ["doubt", "entry", "export", "head", "hidden", "make"]
