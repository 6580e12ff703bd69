"""LazyAdam is Adam for the rows that have a gradient, and leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from scaleflow.errors import ConfigError

Array: TypeAlias = np.ndarray[Any, Any]

#: The rows that have a gradient, step by step.
USED = ([0, 1, 2], [0], [0, 2], [0, 1])
ROWS, WIDTH = 4, 3


def follow(
    is_by_rows: bool,
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Returns the table after each step by LazyAdam, that of an Adam which sees only row 0, and a bias by each."""
    import keras
    import tensorflow as tf

    from scaleflow.optimizer import mark_tables, update_by_rows
    from scaleflow.optimizer.lazy_adam import LazyAdam

    random = np.random.default_rng(0)
    start, bias = random.normal(size=(ROWS, WIDTH)).astype("float32"), np.ones(2, "float32")
    table, first, biases = keras.Variable(start), keras.Variable(start[:1]), [keras.Variable(bias) for _ in range(2)]
    lazy, adam = LazyAdam(0.1), keras.optimizers.Adam(0.1)
    mark_tables(lazy, [True, False])
    update_by_rows(lazy)
    lazy.build([table, biases[0]])
    adam.build([first, biases[1]])
    tables, firsts = [start], [start[:1]]
    for used in USED:
        values = random.normal(size=(len(used), WIDTH)).astype("float32")
        gradient = tf.IndexedSlices(tf.constant(values), tf.constant(used), tf.constant([ROWS, WIDTH]))
        whole = gradient if is_by_rows else tf.convert_to_tensor(gradient)
        of_bias = tf.constant([0.0, 1.0])
        lazy.apply([whole, of_bias], [table, biases[0]])
        adam.apply([tf.constant(values[:1]), of_bias], [first, biases[1]])
        tables.append(table.numpy().copy())
        firsts.append(first.numpy().copy())
    return tables, firsts, [each.numpy() for each in biases]


@pytest.mark.parametrize("is_by_rows", [True, False], ids=["by rows", "of the whole table"])
def test_rows_with_a_gradient_move_as_by_adam_and_others_stay(isolated: Callable[..., Any], is_by_rows: bool) -> None:
    tables, firsts, biases = isolated(follow, is_by_rows)
    np.testing.assert_allclose([each[:1] for each in tables], firsts, rtol=0, atol=1e-6)  # it has one in each step
    np.testing.assert_array_equal(*biases)
    for before, after, used in zip(tables, tables[1:], USED, strict=False):
        moved = np.flatnonzero((before != after).any(axis=1))
        assert list(moved) == used


def make(plan: Any) -> str:
    """Returns what the optimizer is, or why it is refused."""
    from scaleflow.config.targets import bind_target
    from scaleflow.optimizer import create_optimizer

    try:
        made = create_optimizer(bind_target(plan.optimizer.target), 0.1, loss_scaling=False)
    except ConfigError as refusal:
        return str(refusal)
    return f"{type(made).__name__} {made.beta_1}"


def test_the_option_makes_it_and_refuses_what_is_not_kept_by_rows(isolated: Callable[..., Any], plan: Any) -> None:
    assert isolated(make, plan("optimizer=lazy_adam", "optimizer.beta_1=0.8")) == "LazyAdam 0.8"
    refused = isolated(make, plan("optimizer=lazy_adam", "+optimizer.amsgrad=true"))
    assert refused == "optimizer.amsgrad=True: the maxima of amsgrad are not kept by rows; leave it out"
