"""A run is the same run, however its global batch is divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.training.fake_engine import far, follow_each, run_apart

ONE = ("one_device", 1)
#: strategy and accumulate: each makes a global batch of 48, on three devices.
DIVISIONS = [("one_device", 4), ("mirrored", 1), ("mirrored", 4)]

#: The digits' 1294 training examples make 27 steps of 48 an epoch, the last one partial.
STEPS = 50
BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "model.units=16")
SGD = ("optimizer=sgd", "optimizer.learning_rate=0.1")  # and momentum 0.9
ADAM = ("optimizer=adam", "optimizer.learning_rate=0.01")
ADAMW = ("optimizer=adamw", "optimizer.learning_rate=0.01")
CLIP = "training.clip_norm=0.3"


def divided(strategy: str, accumulate: int, devices: int = 3) -> tuple[str, ...]:
    return (
        *BASE,
        f"strategy={strategy}",
        f"hardware.logical_devices={devices}",
        f"training.accumulate={accumulate}",
    )


@pytest.mark.parametrize(
    ("recipe", "divisions", "devices"),
    [
        ((*SGD, CLIP), DIVISIONS, 3),
        (ADAM, DIVISIONS[1:], 3),
        ((*ADAMW, "optimizer.schedule=cosine", "optimizer.warmup_steps=5"), DIVISIONS[-1:], 3),
        (SGD, [("mirrored", 1)], 1),
    ],
    ids=["sgd-clipped", "adam", "adamw-scheduled", "one replica"],
)
def test_float32_equals_one_device(
    isolated: Callable[..., Any], plan: Callable[..., Any], recipe: tuple[str, ...], divisions: list[Any], devices: int
) -> None:
    made = [plan(*divided(*division, devices), *recipe) for division in (ONE, *divisions)]
    if CLIP in recipe:
        made.append(plan(*divided(*ONE), *recipe[:-1]))
    one, *others = isolated(follow_each, made, STEPS)
    assert one.losses[-1] < 0.7 * one.losses[0]
    for division, found in zip(divisions, others[: len(divisions)], strict=True):
        np.testing.assert_allclose(found.losses, one.losses, rtol=0, atol=1e-5, err_msg=str(division))
        assert far(found.weights, one.weights) < 1e-4, division
    if CLIP in recipe:
        assert far(others[-1].weights, one.weights) > 1e-2


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_equals_one_device_within_its_rounding(
    isolated: Callable[..., Any], plan: Callable[..., Any], precision: str
) -> None:
    recipe = (f"precision={precision}", *SGD, CLIP)
    made = [plan(*divided(*division), *recipe) for division in (ONE, DIVISIONS[-1])]
    one, found = isolated(follow_each, made, STEPS)
    assert one.losses[-1] < 0.7 * one.losses[0]
    tolerance = 5e-3 if precision == "mixed_float16" else 3e-2
    np.testing.assert_allclose(found.losses, one.losses, rtol=0, atol=tolerance)
    assert far(found.weights, one.weights) < tolerance


#: 864 training examples: whole batches of 48, since BatchNorm sees padding too.
NORMALIZED = (
    "hardware=cpu", "tracking=none", "training.global_batch_size=48", "model=cnn", "model.filters=[4]", "model.units=8",
    "model.batch_norm=true", "optimizer=sgd", "dataset.limit=960",
)  # fmt: skip


def follow_all(plan: Any) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    """The losses, and all variables, the moving statistics among them."""
    from scaleflow.worker.build import build_training
    from tests.training.fake_engine import ignore, take

    built = build_training(plan, ignore)
    losses = take(built.engine, built.feeds.train, STEPS).losses
    return losses, [np.asarray(v) for v in built.engine.model.variables if "seed" not in v.path]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "rate", "tolerance"),
    [("float32", 0.1, 1e-5), ("mixed_float16", 0.01, 1e-2)],
    ids=["float32", "float16"],
)
def test_batch_norm_equals_one_device(
    isolated: Callable[..., Any], plan: Callable[..., Any], precision: str, rate: float, tolerance: float
) -> None:
    chosen = (*NORMALIZED, f"precision={precision}", f"optimizer.learning_rate={rate}", "hardware.logical_devices=2")
    made = [(plan(*chosen, f"strategy={strategy}"),) for strategy in ("one_device", "mirrored")]
    (losses, wanted), (found_losses, found) = isolated(run_apart, follow_all, made)
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(found_losses, losses, rtol=0, atol=tolerance)
    assert far(found, wanted) < 10 * tolerance
