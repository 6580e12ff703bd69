"""The objective: the loss that is minimised, and the metrics that are reported."""

from scaleflow.objective.kept_values import rank_classes, sum_positions
from scaleflow.objective.losses import Loader
from scaleflow.objective.make import count_classes, describe_class_weights, find_class_weights, make_objective
from scaleflow.objective.structure import find_mask_note
from scaleflow.objective.variants import add_unknown_count, average_losses, count_as_wrong, refuse_probabilities
