from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs

IMAGES = Inputs((8, 16, 3), "uint8", 1 / 255)


def output_shapes() -> list[Any]:
    from scaleflow.model import make_model
    from scaleflow.model.unet import build

    kinds = [Outputs("classification", (8, 16, 4)), Outputs("regression", (8, 16, 1))]
    return [
        make_model(lambda i, o: build(i, o, filters=[2, 4], batch_norm=True), IMAGES, each).output_shape
        for each in kinds
    ]


def test_there_is_an_output_for_each_pixel(isolated: Callable[..., Any]) -> None:
    assert isolated(output_shapes) == [(None, 8, 16, 4), (None, 8, 16, 1)]


@pytest.mark.parametrize(
    ("outputs", "filters", "message"),
    [
        (Outputs("classification", (4,)), [2], "returns outputs for each of 8 x 16 pixels"),
        (Outputs("classification", (8, 16, 4)), [2, 2, 2, 2, 2], "are not multiples of 16"),
        (Outputs("classification", (8, 16, 4)), [0], "model.filters"),
    ],
)
def test_wrong_arguments_are_refused(outputs: Outputs, filters: list[int], message: str) -> None:
    from scaleflow.model.unet import build

    with pytest.raises(ConfigError, match=message):
        build(IMAGES, outputs, filters=filters)
