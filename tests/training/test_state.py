"""An optimizer's whole state is saved, also what Keras does not list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def list_saved(name: str, is_scaled: bool) -> tuple[int, bool]:
    """How many variables of an optimizer are saved, and whether Nadam's product of momentum factors is one of them."""
    import keras

    from scaleflow.training.state import Slots

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    inner = getattr(keras.optimizers, name)(0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(inner) if is_scaled else inner
    named = Slots(optimizer, model.trainable_variables, model).by_name()
    product = getattr(inner, "_u_product", None)
    return len(named), any(product is not None and part is product.value for parts in named.values() for part in parts)


@pytest.mark.parametrize(
    ("name", "is_scaled", "count", "has_product"),
    [("Nadam", False, 7, True), ("Nadam", True, 11, True), ("Adam", True, 10, False)],
)
def test_every_variable_of_an_optimizer_is_saved_once(
    isolated: Callable[..., Any], name: str, is_scaled: bool, count: int, has_product: bool
) -> None:
    assert isolated(list_saved, name, is_scaled) == (count, has_product)
