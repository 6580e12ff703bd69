"""The objective: the loss that is minimised, and the metrics that are reported."""

from scaleflow.objective.make import make_objective

__all__ = ["make_objective"]
