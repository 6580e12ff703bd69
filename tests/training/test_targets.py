"""Each kind of target has its loss and metric, and trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Arrays, Batching, Inputs, Kind, Outputs
from tests.training.fake_engine import assemble, dense, random_arrays, spread_over

Array = np.ndarray[Any, Any]


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def by_hand(kind: Kind, targets: Array, outputs: Array) -> dict[str, float]:
    """The mean loss and the metrics of training over the examples."""
    x = outputs.astype(np.float64)
    if kind == "classification":
        chances = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
        return {
            "loss": -chances[np.arange(len(x)), targets].mean(),
            "accuracy": (x.argmax(axis=1) == targets).mean(),
        }
    if kind == "regression":
        squared = ((x - targets) ** 2).mean()
        return {"loss": squared, "mae": np.abs(x - targets).mean(), "rmse": np.sqrt(squared)}
    right = (x > 0) == (targets == 1)
    exact = {"exact_match": right.all(axis=1).mean()} if kind == "multi_label" else {}
    return {"loss": (softplus(x) - x * targets).mean(), "accuracy": right.mean(), **exact}


def evaluated_by_hand(kind: Kind, targets: Array, outputs: Array) -> dict[str, float]:
    """What an evaluation reports besides that."""
    if kind == "regression":
        deviation = ((targets - targets.mean(axis=0)) ** 2).sum(axis=0)
        return {"r2": (1 - ((targets - outputs) ** 2).sum(axis=0) / deviation).mean()}
    if kind == "multi_label":
        return {}
    true, found = (targets, outputs.argmax(axis=1)) if kind == "classification" else (targets > 0.5, outputs > 0)
    return {"balanced_accuracy": np.mean([(found[true == each] == each).mean() for each in np.unique(true)])}


def confused_by_hand(kind: Kind, targets: Array, outputs: Array) -> list[list[int]] | None:
    """How many examples of each class are taken for each."""
    if kind not in ("classification", "binary"):
        return None
    true, found = (targets, outputs.argmax(axis=1)) if kind == "classification" else (targets > 0.5, outputs > 0)
    classes = range(outputs.shape[1] if kind == "classification" else 2)
    return [[int(((true == i) & (found == j)).sum()) for j in classes] for i in classes]


def trained(kind: Kind, outputs: int) -> dict[str, Any]:
    """The first training step's values, those of an evaluation after training, and both by hand."""
    from scaleflow import dataset

    strategy = spread_over(2)
    arrays = random_arrays(70, kind, outputs=outputs)
    parts = assemble(strategy, arrays, kind, outputs, dense, batch_size=8, accumulate=2, optimizer="Adam", rate=0.03)
    loop, feed = parts.loop, parts.feed
    whole = dataset.make_feed(arrays, Batching(16, 1, 2), strategy)

    def hand(count: int, *parts: Callable[[Kind, Array, Array], dict[str, float]]) -> dict[str, float]:
        values = np.asarray(loop.model(arrays.inputs[:count], training=False))
        return {k: float(v) for part in parts for k, v in part(kind, arrays.targets[:count], values).items()}

    before = hand(32, by_hand)
    loop.start_epoch()
    first = dict(loop.train(feed, feed.open(0, 0), 0, 0, 1, 0))
    for epoch in range(30):
        loop.start_epoch()
        loop.train(feed, feed.open(epoch, 0), epoch, 0, 3, 3 * epoch)
    last = dict(loop.evaluate(whole))
    confusion = loop.read_confusion(whole)
    return {
        "first": first,
        "first by hand": before,
        "last": last,
        "last by hand": hand(70, by_hand, evaluated_by_hand),
        "confusion": None if confusion is None else confusion.tolist(),
        "confusion by hand": confused_by_hand(
            kind, arrays.targets, np.asarray(loop.model(arrays.inputs, training=False))
        ),
    }


@pytest.mark.parametrize(
    ("kind", "outputs"), [("classification", 3), ("binary", 1), ("multi_label", 3), ("regression", 2)]
)
def test_a_kind_of_target_trains_and_its_values_are_numpys(
    isolated: Callable[..., Any], kind: Kind, outputs: int
) -> None:
    found = isolated(trained, kind, outputs)
    assert found["first"] == pytest.approx(found["first by hand"], abs=1e-5)
    assert found["last"] == pytest.approx(found["last by hand"], abs=1e-5)
    assert found["last"]["loss"] < 0.75 * found["first"]["loss"]
    assert found["confusion"] == found["confusion by hand"]


def grid_values() -> tuple[list[float], list[float]]:
    """The losses of two examples whose output is a grid, and their means by hand."""
    from scaleflow.objective import make_objective

    targets = np.array([[[1, 0, 1], [0, 0, 1]], [[0, 0, 0], [1, 1, 1]]], np.float32)
    outputs = np.linspace(-2, 2, 12, dtype=np.float32).reshape(2, 2, 3)
    losses = make_objective(Outputs("multi_label", (2, 3))).loss(targets, outputs)
    wanted = (softplus(outputs) - outputs * targets).mean(axis=(1, 2))
    return np.asarray(losses).tolist(), wanted.tolist()


def test_an_example_of_many_outputs_counts_as_one(isolated: Callable[..., Any]) -> None:
    found, wanted = isolated(grid_values)
    assert found == pytest.approx(wanted, abs=1e-6)


def integer_inputs() -> float:
    """Bytes as inputs, whole numbers as binary targets."""
    strategy = spread_over(1)
    arrays = random_arrays(40, "binary", outputs=1)
    whole = Arrays((arrays.inputs * 20 + 128).clip(0, 255).astype(np.uint8), arrays.targets.astype(np.int64))
    parts = assemble(strategy, whole, "binary", 1, scaled, batch_size=8)
    parts.loop.start_epoch()
    return parts.loop.train(parts.feed, parts.feed.open(0, 0), 0, 0, 5, 0)["loss"]


def scaled(inputs: Inputs, outputs: Outputs) -> Any:
    import dataclasses

    from scaleflow.model.mlp import build

    return build(dataclasses.replace(inputs, scale=1 / 255), outputs, units=4)


def test_bytes_and_whole_numbers_train(isolated: Callable[..., Any]) -> None:
    assert 0 < isolated(integer_inputs) < 2
