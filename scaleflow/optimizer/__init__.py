"""The Keras optimizer that a config names, with the learning rate composed around it."""

from scaleflow.optimizer.make import make
from scaleflow.optimizer.placed import update_in_place
from scaleflow.optimizer.rate import doubt, learning_rate, scaled_rate

__all__ = ["doubt", "learning_rate", "make", "scaled_rate", "update_in_place"]
