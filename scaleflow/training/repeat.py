"""A loop in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def repeat(body: Callable[..., Any], first: tf.Tensor, count: tf.Tensor, state: Any) -> Any:
    """`state = body(index, *state)` for `count` indices from `first` on, in the graph; gives the last state."""
    last = first + count
    return tf.while_loop(
        lambda index, *_: index < last, lambda index, *carried: (index + 1, *body(index, *carried)), (first, *state)
    )[1:]
