"""The objective: the loss that is minimised, and the metrics that are reported."""

from scaleflow.objective.class_weight import count_classes, describe_class_weights, find_class_weights
from scaleflow.objective.forms import Loader
from scaleflow.objective.kept_values import rank_classes, sum_positions
from scaleflow.objective.make import make_objective
from scaleflow.objective.members import average_losses
from scaleflow.objective.probabilities import refuse_probabilities
from scaleflow.objective.structure import find_mask_note
from scaleflow.objective.unknown_classes import add_unknown_count, count_as_wrong

__all__ = [
    "Loader",
    "add_unknown_count",
    "average_losses",
    "count_as_wrong",
    "count_classes",
    "describe_class_weights",
    "find_class_weights",
    "find_mask_note",
    "make_objective",
    "rank_classes",
    "refuse_probabilities",
    "sum_positions",
]
