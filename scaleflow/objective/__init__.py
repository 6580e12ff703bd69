"""The objective of a run: the loss to minimise and the metrics to report."""

from scaleflow.objective.kinds import rank_classes, sum_positions
from scaleflow.objective.losses import Loader, plain_name
from scaleflow.objective.make import (
    check_classes,
    count_classes,
    describe_class_weights,
    find_class_weights,
    find_loss_class,
    find_metric_class,
    find_positive_losses,
    make_objective,
    number_classes,
    read_loss_defaults,
)
from scaleflow.objective.variants import (
    add_unknown_count,
    average_losses,
    count_as_wrong,
    find_mask_note,
    refuse_probabilities,
)
