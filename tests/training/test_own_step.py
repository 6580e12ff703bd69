"""A user's own training step: in the loop, or with its own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import NotFinite
from tests.conftest import Command
from tests.processes import ROOT
from tests.training.fake_engine import Course, far, follow_each, ignore, run_apart

STEPS = 30
BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "model.units=16", "optimizer=sgd")
ONE = ("strategy=one_device", "hardware.logical_devices=2")
MIRRORED = ("strategy=mirrored", "hardware.logical_devices=2")


def step(name: str, **arguments: Any) -> str:
    given = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"training.step={{_target_: tests.training.steps.{name}{given}}}"


def assert_same(found: Course, wanted: Course) -> None:
    assert found.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert far(found.weights, wanted.weights) < 1e-4


# 48 examples of 1294 make 27 steps an epoch, the last one partial.
RECIPES: dict[str, tuple[str, ...]] = {
    "smoothed": (step("smoothed"), "training.clip_norm=0.5"),
    "flat": (step("flat"), "optimizer=adam"),
    "two rates": (step("TwoRates", head_rate=3.0), "optimizer=adamw", "optimizer.schedule=cosine"),
    "adversarial": (step("Adversarial"),),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_replicas_train_as_one_device_does(
    isolated: Callable[..., Any], plan: Callable[..., Any], recipe: str
) -> None:
    one, two = isolated(follow_each, [plan(*BASE, *spread, *RECIPES[recipe]) for spread in (ONE, MIRRORED)], STEPS)
    assert_same(two, one)
    assert one.losses[-1] < one.losses[0]


@pytest.mark.slow
def test_a_step_does_what_the_loop_does(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    """A step that repeats the loop's own changes nothing; accumulated, with several optimizers or in float16."""
    half = "precision=mixed_float16"
    recipes = [(), (step("plain"), "training.accumulate=3"), (step("TwoRates"),), (half,), (half, step("plain"))]
    usual, accumulated, separate, plain, scaled = isolated(
        follow_each, [plan(*BASE, *MIRRORED, *recipe) for recipe in recipes], STEPS
    )
    assert_same(accumulated, usual)
    assert_same(separate, usual)
    assert scaled.losses == pytest.approx(plain.losses, abs=1e-5)


def rates(plan: Any) -> tuple[float, list[float], int, int]:
    """The rates of both optimizers after a step, and how many variables the step keeps, and holds of others."""
    from scaleflow.worker.build import build_training

    loop: Any = build_training(plan, ignore).engine
    own = loop._own
    made = [own.defend, own.attack]
    found = [float(np.asarray(optimizer.learning_rate)) for optimizer in made]
    expected = sum(len(optimizer.variables) for optimizer in made) + len(own.adversary.variables)
    return loop.loss_scale, found, len(loop.own_variables), expected


def test_variables_that_a_step_keeps_are_found(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    chosen = plan(*BASE, *MIRRORED, step("Adversarial"), "optimizer.scale=linear", "optimizer.base_batch_size=24")
    scale, found, kept, expected = isolated(rates, chosen)
    assert scale is None
    assert found == pytest.approx([0.02, 0.01])
    assert kept == expected > 10


def stopped_at(plan: Any) -> int:
    """The step that is named as not finite, of an epoch in one call."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    try:
        built.engine.train(built.feeds.train, built.feeds.train.open(0, 0), 0, 0, 27, 0)
    except NotFinite as error:
        return error.step
    return 0


@pytest.mark.slow
def test_a_step_whose_loss_is_not_finite_is_named(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    steps = [step(name) for name in ("not_finite", "NotFiniteUpdates")]
    made = [(plan(*BASE, *spread, each),) for each in steps for spread in (ONE, MIRRORED)]
    found = isolated(run_apart, stopped_at, made)
    assert found == [found[0]] * 4
    assert found[0] > 1


@pytest.mark.slow
def test_own_optimizers_train_alike_on_two_workers(tmp_path: Path) -> None:
    losses = []
    for words in (ONE, ("strategy=multi_worker", "cluster.workers=2")):
        folder = tmp_path / words[0]
        folder.mkdir()
        (folder / "steps.py").write_text((ROOT / "tests" / "training" / "steps.py").read_text())
        there = Command(folder)
        ended = there(
            *BASE, *words, "training.max_steps=5", "training.steps_per_loop=1",
            "training.step={_target_: steps.TwoRates, head_rate: 3.0}", "hardware.intra_op_threads=1", timeout=240,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        losses.append([e["values"]["train/loss"] for e in there.events() if "train/loss" in e.get("values", {})])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert len(losses[0]) >= 5
