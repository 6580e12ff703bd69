from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs

CLICK = Outputs("binary", (1,))
COLUMNS = {
    "user": Inputs((), "int32", vocabulary=10),
    "genres": Inputs((3,), "int32", vocabulary=5),
    "age": Inputs(()),
    "prices": Inputs((2,), scale=0.1),
}


def shapes() -> list[Any]:
    import numpy as np

    from scaleflow.model.dlrm import build

    net = build(COLUMNS, CLICK, width=4)
    batch = {
        "user": np.array([1, 2], np.int32),
        "genres": np.array([[1, 0, 0], [0, 0, 0]], np.int32),
        "age": np.array([3.0, 4.0], np.float32),
        "prices": np.ones((2, 2), np.float32),
    }
    kernels = [tuple(variable.shape) for variable in net.trainable_variables if variable.name == "kernel"]
    only_one = build({"größe in m": COLUMNS["user"]}, CLICK, width=4)
    assert np.asarray(only_one({"größe in m": batch["user"]})).shape == (2, 1)
    return [np.asarray(net(batch)).shape, kernels, only_one.output_shape]


def test_each_pair_of_vectors_has_a_product(isolated: Callable[..., Any]) -> None:
    numbers, rest = [(3, 32), (32, 4)], [(15, 64), (64, 32), (32, 1)]  # 15: three vectors of 4, and three pairs
    assert isolated(shapes) == [(2, 1), numbers + rest, (None, 1)]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (Inputs((3,)), "needs several inputs by name"),
        ({"age": Inputs(())}, "has no categorical input"),
        ({"name": Inputs((), "string")}, "name is text"),
        ({"image": Inputs((4, 4, 1))}, "image has more dimensions"),
    ],
)
def test_other_inputs_are_refused(inputs: Any, message: str) -> None:
    from scaleflow.model.dlrm import build

    with pytest.raises(ConfigError, match=message):
        build(inputs, CLICK)
