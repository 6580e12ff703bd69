"""Creates the configured Keras optimizer and its learning rate schedule."""

from scaleflow.optimizer.make import (
    clip_values,
    count_from_own_start,
    create_optimizer,
    find_dense_cause,
    find_warm_up_warning,
    make_learning_rate,
    mark_tables,
    read_optimizer_defaults,
    scale_rates,
    scale_to_batch,
    update_by_rows,
    update_in_place,
)
