"""Creates the configured Keras optimizer and its learning rate schedule."""

from scaleflow.optimizer.make import (
    count_from_own_start,
    create_optimizer,
    find_warm_up_warning,
    make_learning_rate,
    scale_rates,
    scale_to_batch,
    update_in_place,
)
from scaleflow.optimizer.rows import find_dense_cause, mark_tables, update_by_rows
