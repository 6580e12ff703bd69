from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs

TOKENS = Inputs((8,), "int32", vocabulary=20)
NEXT = Outputs("classification", (8, 20))


def inspect_gpt(folder: str) -> dict[str, Any]:
    import keras
    import numpy as np

    from scaleflow.model import make_model
    from scaleflow.model.gpt import build, generate

    net = make_model(lambda i, o: build(i, o, width=16, heads=2, blocks=2), TOKENS, NEXT)
    batch = np.arange(8)[None].astype(np.int32)
    other = batch.copy()
    other[0, 5] = 19
    differs = np.abs(np.asarray(net(batch)) - np.asarray(net(other)))[0].max(axis=-1)
    net.save(f"{folder}/model.keras")
    again = keras.models.load_model(f"{folder}/model.keras")
    most_probable = generate(net, [1, 2, 3], 2, window=8, temperature=0.0)
    return {
        "shape": net.output_shape,
        "earlier": float(differs[:5].max()),
        "later": float(differs[5:].min()),
        "reloaded": float(np.abs(np.asarray(net(batch)) - np.asarray(again(batch))).max()),
        "next": most_probable[3] == int(np.argmax(np.asarray(net(np.array([[1, 2, 3, 0, 0, 0, 0, 0]])))[0, 2])),
        "drawn": [len(generate(net, [1], 10, window=8, seed=seed)) for seed in (0, 1)],
        "same": generate(net, [1], 10, window=8, seed=3) == generate(net, [1], 10, window=8, seed=3),
    }


def test_a_position_sees_only_what_is_before_it(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(inspect_gpt, str(tmp_path))
    assert found["shape"] == (None, 8, 20)
    assert found["earlier"] == 0.0
    assert found["later"] > 0.0
    assert found["reloaded"] < 1e-6
    assert found["next"]
    assert found["drawn"] == [11, 11]
    assert found["same"]


@pytest.mark.parametrize(
    ("outputs", "arguments", "message"),
    [
        (Outputs("classification", (20,)), {}, "predicts a token at each of 8 positions"),
        (NEXT, {"width": 10, "heads": 4}, "model.width=10 with model.heads=4"),
        (NEXT, {"blocks": 0}, "model.blocks=0: expected an integer"),
        (NEXT, {"units": -1}, "model.units=-1: expected an integer"),
    ],
)
def test_wrong_arguments_are_refused(outputs: Outputs, arguments: dict[str, Any], message: str) -> None:
    from scaleflow.model.gpt import build

    with pytest.raises(ConfigError, match=message):
        build(TOKENS, outputs, **arguments)


def test_images_are_refused() -> None:
    from scaleflow.model.gpt import build

    with pytest.raises(ConfigError, match="model=gpt: needs text as numbers"):
        build(Inputs((8, 8, 1)), NEXT)
    with pytest.raises(
        ConfigError, match="model=gpt: returns one tensor, but the dataset's outputs have the keys a, b"
    ):
        build(Inputs((8,), "int32", vocabulary=5), {"a": NEXT, "b": NEXT})
