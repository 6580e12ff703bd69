"""The learning rate of a run that has gone back because of what a higher one did."""

from __future__ import annotations

from typing import Any

import keras

from scaleflow.training.forward_backward import to_tf_variable


def scale_rate(optimizer: Any, factor: float, held: float) -> bool:
    """Has an optimizer's rate be `factor` times what the config says.

    A constant rate is a variable, part of the run's state, which holds `held` times the config's already. A schedule
    has to be one that multiplies what it gives by its attribute `factor`.

    Returns:
        Whether what was traced with the optimizer has to be traced again.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    schedule = inner._learning_rate
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        schedule.factor = factor
        return True
    rate = to_tf_variable(inner.learning_rate)
    rate.assign(float(rate.read_value().numpy()) * factor / held)
    return False
