"""Variables that begin to train after others: their updates are counted from their own first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def count_from_own_start(optimizer: keras.optimizers.Optimizer, find_start: Callable[[Any], int]) -> None:
    """Makes an optimizer correct the bias of a variable's averages by the updates since the variable's first one.

    Adam's averages begin with 0. It divides them by what is then missing, which shrinks with the number of updates
    (Kingma and Ba 2014, https://arxiv.org/abs/1412.6980). With the number of the run, the first updates of a variable
    that begins late are up to six times too large.

    Args:
        optimizer: as it is used; built, or not yet.
        find_start: a variable that the optimizer is built for -> the number of updates before its first one. It is
            called when an update is traced.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    update = inner.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        start = find_start(inner._trainable_variables[inner._get_variable_index(variable)])
        if start <= 0:
            update(gradient, variable, learning_rate)
            return
        iterations = inner._iterations
        object.__setattr__(inner, "_iterations", iterations - start)
        try:
            update(gradient, variable, learning_rate)
        finally:
            object.__setattr__(inner, "_iterations", iterations)

    inner.update_step = update_step
