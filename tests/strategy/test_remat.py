"""Training that computes activations again is the same training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Plan
from tests.training.fake_engine import ignore, take

Isolated = Callable[..., Any]
Make = Callable[..., Plan]

STEPS = 3
#: Global batches of 48: the last one of an epoch of 288 examples is a whole one.
BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "optimizer.learning_rate=0.01")
WORDS = (*BASE, "dataset._target_=tests.training.words.Words")
TRANSFORMER = (*WORDS, "model=transformer", "model.width=8", "model.units=16", "model.blocks=3", "model.dropout=0.2")
MIRRORED = ("strategy=mirrored", "hardware.logical_devices=2")
PIPELINE = ("strategy=pipeline", "hardware.logical_devices=2")
SAME = 1e-6


def follow(plan: Plan, steps: int = STEPS) -> tuple[list[float], dict[str, np.ndarray[Any, Any]], str]:
    """The losses, all variables (statistics and states of random generators too), and what is computed again."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    losses = take(built.engine, built.train, steps).losses
    return losses, {v.path: np.asarray(v) for v in built.engine.gather_model().variables}, built.resolved["remat"]


def assert_same(isolated: Isolated, plan: Make, words: Sequence[str], remat: str = "true", atol: float = SAME) -> str:
    """Compares with the run without it. Returns what was computed again."""
    losses, variables, none = isolated(follow, plan(*words))
    found, found_variables, again = isolated(follow, plan(*words, f"hardware.remat={remat}"))
    assert none == "false"
    np.testing.assert_allclose(found, losses, rtol=0, atol=atol)
    for (name, wanted), value in zip(variables.items(), found_variables.values(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0, atol=10 * atol, err_msg=name)
    return str(again)


#: What is computed again with `true`, and for patterns.
CASES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "one_device": ((*TRANSFORMER, "strategy=one_device"), "true", "2 segments"),
    "layers": ((*TRANSFORMER, "strategy=one_device"), "[block?_attention,*feed1]", "6 layers"),
    "accumulated": ((*TRANSFORMER, "strategy=one_device", "training.accumulate=2"), "true", "2 segments"),
    "mirrored": ((*TRANSFORMER, *MIRRORED), "true", "2 segments"),
    "pipeline": ((*TRANSFORMER, *PIPELINE), "true", "7 segments"),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_states_are_the_same_with_dropout(isolated: Isolated, plan: Make, case: str) -> None:
    words, remat, again = CASES[case]
    assert assert_same(isolated, plan, words, remat) == again
