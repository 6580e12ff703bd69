"""Creates the configured Keras optimizer and its learning rate schedule."""

from scaleflow.optimizer.in_place import update_in_place
from scaleflow.optimizer.late_start import count_from_own_start
from scaleflow.optimizer.make import create_optimizer
from scaleflow.optimizer.rate import find_warm_up_warning, make_learning_rate, scale_to_batch
from scaleflow.optimizer.rate_factors import scale_rates
from scaleflow.optimizer.rows import find_dense_cause, mark_tables, update_by_rows

__all__ = [
    "count_from_own_start",
    "create_optimizer",
    "find_dense_cause",
    "find_warm_up_warning",
    "make_learning_rate",
    "mark_tables",
    "scale_rates",
    "scale_to_batch",
    "update_by_rows",
    "update_in_place",
]
