"""Losses and metrics of each kind of target, with positions, ignored targets, weights and several outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Kind, Outputs

Array = np.ndarray[Any, Any]


def measure(described: Any, batches: list[tuple[Any, Any, Any, Any]], is_weighted: bool = False) -> dict[str, float]:
    """What an evaluation reports of batches of (targets, outputs, mask, weights or None)."""
    from scaleflow.objective import make_objective
    from scaleflow.training.evaluation import MetricSums

    sums = MetricSums(make_objective(described, is_weighted=is_weighted), evaluates=True)
    total = np.zeros(sums.size)
    for targets, outputs, mask, weights in batches:
        total += np.asarray(sums.compute(to_tensors(targets), to_tensors(outputs), None, mask, weights), np.float64)
    return dict(sums.means(total, round(sum(float(mask.sum()) for _, _, mask, _ in batches))))


def to_tensors(values: Any) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(tf.constant, values)


def draw(
    kind: Kind, count: int, shape: tuple[int, ...], ignore: int | None = None, seed: int = 0
) -> tuple[Array, Array]:
    """Random targets and outputs; every third target is ignored."""
    random = np.random.default_rng(seed)
    outputs = random.normal(0, 2, (count, *shape)).astype("float32")
    if kind == "classification":
        targets = random.integers(0, shape[-1], (count, *shape[:-1])).astype("int32")
    elif kind == "regression":
        targets = random.normal(5, 2, (count, *shape)).astype("float32")
    else:
        targets = random.integers(0, 2, (count, *shape)).astype("float32")
    if ignore is not None:
        targets[random.random(targets.shape) < 1 / 3] = ignore
        targets[0] = ignore  # an example without a target that counts
    return targets, outputs


def by_hand(kind: Kind, targets: Array, outputs: Array, ignore: int | None, weights: Array) -> dict[str, float]:
    """The same in float64: the mean over an example's positions, then over examples; metrics over all positions."""
    x = outputs.astype(np.float64)
    counts = np.ones(targets.shape) if ignore is None else (targets != ignore).astype(np.float64)
    valid = np.where(counts > 0, targets, 0)
    if kind == "classification":
        chances = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
        losses = -np.take_along_axis(chances, valid[..., None], axis=-1)[..., 0]
    elif kind == "regression":
        losses = (x - valid) ** 2
    else:
        losses = np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0) - x * valid
    shares = counts * weights.reshape(-1, *[1] * (counts.ndim - 1))

    def mean(values: Array) -> float:
        return float((values * shares).sum() / shares.sum())

    each = (losses * counts).reshape(len(x), -1).sum(1) / np.maximum(counts.reshape(len(x), -1).sum(1), 1)
    found = {"loss": float((each * weights).sum() / weights.sum())}
    if kind == "regression":
        flat = [np.broadcast_to(v, x.shape).reshape(-1, x.shape[-1]) for v in (shares, valid, x)]
        center = (flat[0] * flat[1]).sum(0) / flat[0].sum(0)
        r2 = 1 - (flat[0] * (flat[1] - flat[2]) ** 2).sum(0) / (flat[0] * (flat[1] - center) ** 2).sum(0)
        return {**found, "mae": mean(np.abs(x - valid)), "rmse": mean(losses) ** 0.5, "r2": float(r2.mean())}
    predicted = x.argmax(axis=-1) if kind == "classification" else x > 0
    right = predicted == valid
    found["accuracy"] = mean(right)
    if kind == "multi_label":
        occurs = counts.reshape(len(x), -1).max(1) * weights
        exact = (right | (counts == 0)).reshape(len(x), -1).all(1)
        return {**found, "exact_match": float((exact * occurs).sum() / occurs.sum())}
    recalls = [(right * shares)[valid == c].sum() / shares[valid == c].sum() for c in np.unique(targets[counts > 0])]
    return {**found, "balanced_accuracy": float(np.mean(recalls))}


CASES: list[tuple[Kind, tuple[int, ...], int | None]] = [
    ("classification", (3,), None),
    ("classification", (4, 3), None),
    ("classification", (4, 3), -1),
    ("classification", (2, 5, 3), 1),
    ("binary", (1,), None),
    ("binary", (4, 1), -1),
    ("multi_label", (3,), -1),
    ("multi_label", (2, 3), None),
    ("regression", (2,), None),
    ("regression", (4, 2), -1),
]


def measure_cases(is_weighted: bool) -> list[tuple[dict[str, float], dict[str, float]]]:
    found = []
    for kind, shape, ignore in CASES:
        described = Outputs(kind, shape, ignore=ignore)
        (a, x), (b, y) = draw(kind, 6, shape, ignore), draw(kind, 6, shape, ignore, seed=1)
        mask = np.array([1, 1, 1, 1, 0, 0], np.float32)  # the second batch is padded
        weights = (
            np.linspace(0.5, 3, 12).astype("float32").reshape(2, 6) if is_weighted else np.ones((2, 6), np.float32)
        )
        given = [weights[0], weights[1] * mask] if is_weighted else [None, None]
        batches = [(a, x, np.ones(6, np.float32), given[0]), (b, y, mask, given[1])]
        targets, outputs = np.concatenate([a, b[:4]]), np.concatenate([x, y[:4]])
        wanted = by_hand(kind, targets, outputs, ignore, weights.reshape(-1)[:10].astype(np.float64))
        found.append((measure(described, batches, is_weighted), wanted))
    return found


@pytest.mark.parametrize("is_weighted", [False, True])
def test_each_kind_is_numpys_over_positions_padding_and_weights(
    isolated: Callable[..., Any], is_weighted: bool
) -> None:
    for (found, wanted), case in zip(isolated(measure_cases, is_weighted), CASES, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6, abs=2e-6), case


def measure_several() -> tuple[dict[str, float], Mapping[str, dict[str, float]]]:
    """Two outputs at once, and each of them alone."""
    described = {"age": Outputs("regression", (1,)), "words": Outputs("classification", (4, 3), ignore=-1)}
    drawn = {name: draw(each.kind, 6, each.shape, each.ignore) for name, each in described.items()}
    mask = np.array([1, 1, 1, 1, 1, 0], np.float32)
    alone = {name: measure(described[name], [(*drawn[name], mask, None)]) for name in drawn}
    targets, outputs = ({name: pair[i] for name, pair in drawn.items()} for i in (0, 1))
    return measure(described, [(targets, outputs, mask, None)]), alone


def test_several_outputs_have_the_sum_of_their_losses_and_each_its_own(isolated: Callable[..., Any]) -> None:
    found, alone = isolated(measure_several)
    wanted = {f"{output}/{name}": value for output, values in alone.items() for name, value in values.items()}
    wanted["loss"] = sum(values["loss"] for values in alone.values())
    assert found == pytest.approx(wanted, abs=1e-6)


def measure_scaled() -> dict[str, Any]:
    """Values of one and of several outputs with scaled targets, and the loss of a step whose loss is NaN."""
    from scaleflow.objective import make_objective
    from scaleflow.training.evaluation import MetricSums

    price, age = Outputs("regression", (1,), scaling=(1e5, 1e4)), Outputs("regression", (1,), scaling=(40.0, 2.0))
    targets, outputs = (
        {"price": np.array([[prices]], np.float32), "age": np.array([[ages]], np.float32)}
        for prices, ages in ((1e5, 40.0), (1.2e5, 44.0))
    )
    one = np.ones(1, np.float32)
    nan = MetricSums(make_objective(price)).compute(
        targets["price"], to_tensors(outputs["price"]), to_tensors(np.float32("nan")), one
    )
    several = measure({"price": price, "age": age}, [(targets, outputs, one, None)])
    return {
        **several,
        "nan": np.asarray(nan)[1],
        "alone": measure(price, [(targets["price"], outputs["price"], one, None)]),
    }


def test_the_loss_of_scaled_targets_is_the_one_that_is_minimised(isolated: Callable[..., Any]) -> None:
    found = isolated(measure_scaled)
    assert found["alone"] == pytest.approx({"loss": 4.0, "mae": 2e4, "rmse": 2e4, "r2": 0.0})
    assert (found["price/loss"], found["age/loss"], found["loss"]) == pytest.approx((4.0, 4.0, 8.0))
    assert (found["price/mae"], found["age/rmse"]) == pytest.approx((2e4, 4.0))
    assert np.isnan(found["nan"])  # the step's own loss is looked at


def r2_far_from_zero() -> list[float]:
    """R2 of values around ten thousand, of a constant that is met, and of one that is not."""
    random = np.random.default_rng(0)
    targets = (1e4 + random.normal(0, 1, (64, 1))).astype("float32")
    near = (targets + random.normal(0, 0.5, targets.shape)).astype("float32")
    same = np.full((64, 1), 3, np.float32)
    mask = np.ones(64, np.float32)
    cases = [(targets, near), (same, same), (same, same + 1)]
    found = [measure(Outputs("regression", (1,)), [(*case, mask, None)])["r2"] for case in cases]
    exact = 1 - ((targets - near).astype(np.float64) ** 2).sum() / (targets.astype(np.float64).var() * 64)
    return [*found, float(exact)]


def test_r2_is_exact_far_from_zero_and_of_constants_as_scikit_learns(isolated: Callable[..., Any]) -> None:
    far, met, missed, wanted = isolated(r2_far_from_zero)
    assert far == pytest.approx(wanted, abs=1e-6)
    assert (met, missed) == (1.0, 0.0)
