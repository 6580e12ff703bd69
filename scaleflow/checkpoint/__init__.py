"""What is kept of a run so that it can go on: everything, verified, in the background."""

from scaleflow.checkpoint.keeper import Keeper
from scaleflow.checkpoint.shelf import Damaged, Shelf

__all__ = ["Damaged", "Keeper", "Shelf"]
