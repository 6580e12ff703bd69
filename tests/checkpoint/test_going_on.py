"""A run that was stopped anywhere and goes on ends as one that was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import Refusal
from scaleflow.interfaces import Plan
from tests.training.driving import ignore

#: 80 examples make 5 steps an epoch; calls of two steps end at 1, 3, 5 | 7, 9, 10 | 12, 14, 15.
BASE = (
    "hardware=cpu", "hardware.deterministic=true", "tracking=none", "dataset.limit=100", "dataset.validation=0.2",
    "model.units=8", "training.epochs=3", "training.steps_per_loop=2",
)  # fmt: skip
GLOBAL = "training.global_batch_size=16"
DROPOUT = "model.dropout=0.5"
TWO = "hardware.logical_devices=2"
STEPS = "training.step._target_=tests.training.steps"


@dataclass(frozen=True)
class Course:
    """How a run went: its points as (step, values) without times, its final variables, whether it was stopped."""

    points: list[tuple[int, dict[str, float]]]
    state: dict[str, np.ndarray[Any, Any]]
    stopped: bool


def course(plan: Plan, folder: str, stop_after: int | None = None, goes_on: bool = False) -> Course:
    """Runs a plan, until it is told to stop after so many calls, or from its newest checkpoint on."""
    from scaleflow import checkpoint, training
    from scaleflow.worker.life import build

    points: list[tuple[int, dict[str, float]]] = []
    calls = [0]

    def emit(event: str, /, **fields: Any) -> None:
        values = {k: v for k, v in fields.get("values", {}).items() if not k.startswith("perf/")}
        if event == "metrics" and values:
            points.append((fields["step"], values))

    def agree(seconds: float) -> tuple[float, bool]:
        calls[0] += 1
        return seconds, calls[0] == stop_after

    built = build(plan, ignore)
    options = plan.checkpoint
    keeper = checkpoint.Keeper(options, folder, emit)
    session = training.Session(
        built.loop, plan.training, built.train, built.validation, built.test, emit=emit, started=0.0, agree=agree,
        checkpoints=keeper, best=options.sought, ends_as_best=options.export == "best",
    )  # fmt: skip
    if goes_on:
        session.restore(keeper.newest())
    result = session.run()
    return Course(points, dict(built.loop.state()), result.stopped)


WAYS = {
    "one_device": ("strategy=one_device", GLOBAL, DROPOUT),
    "float16": ("strategy=one_device", GLOBAL, "precision=mixed_float16", "optimizer=sgd"),
    "mirrored": ("strategy=mirrored", TWO, GLOBAL, DROPOUT, "training.accumulate=2", "optimizer=adamw"),
    "pipeline": ("strategy=pipeline", TWO, GLOBAL, "model.units=[8,8]", "optimizer.schedule=cosine"),
    "fit": ("training.engine=fit", "training.steps_per_loop=auto", GLOBAL, DROPOUT),
    "fit mirrored": ("training.engine=fit", "training.steps_per_loop=auto", "strategy=mirrored", TWO, GLOBAL),
    "own step": (f"{STEPS}.TwoRates", "strategy=mirrored", TWO, GLOBAL),
}


@pytest.mark.parametrize(("way", "stops"), [(way, (2,)) for way in WAYS] + [("one_device", (3, 1)), ("fit", (5, 3))])
def test_it_ends_with_the_same_bits_and_the_same_points(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, way: str, stops: tuple[int, ...]
) -> None:
    words = [word for word in BASE if not any(word.split("=")[0] == other.split("=")[0] for other in WAYS[way])]
    own = [word.replace("training.step._target_", "training.step={_target_") + "}" if "_target_" in word else word
           for word in WAYS[way]]  # fmt: skip
    made = plan(*words, *[word.replace("{_target_=", "{_target_: ") for word in own])
    whole = isolated(course, made, str(tmp_path / "whole"))
    points = []
    for number, calls in enumerate(stops):
        part = isolated(course, made, str(tmp_path / "parts"), stop_after=calls, goes_on=number > 0)
        assert part.stopped
        points += part.points
    last = isolated(course, made, str(tmp_path / "parts"), goes_on=True)
    assert points + last.points == whole.points
    assert set(last.state) == set(whole.state)
    for name, value in whole.state.items():
        assert last.state[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("strategy=mirrored", TWO), ("strategy=one_device",)),
        (("strategy=one_device",), ("strategy=pipeline", TWO)),
        (("strategy=pipeline", TWO), ("strategy=mirrored", TWO)),
    ],
    ids=["mirrored to one_device", "one_device to pipeline", "pipeline to mirrored"],
)
def test_a_run_goes_on_under_another_strategy(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, before: tuple[str, ...], after: Any
) -> None:
    common = (*BASE, GLOBAL, "model.units=[8,8]")
    whole = isolated(course, plan(*common, *before), str(tmp_path / "whole"))
    isolated(course, plan(*common, *before), str(tmp_path / "parts"), stop_after=4)
    last = isolated(course, plan(*common, *after), str(tmp_path / "parts"), goes_on=True)
    assert set(last.state) == set(whole.state)
    for name, value in whole.state.items():
        np.testing.assert_allclose(last.state[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def refusal_to_go_on(before: Plan, after: Plan, folder: str) -> str:
    course(before, folder, stop_after=2)
    try:
        course(after, folder, goes_on=True)
    except Refusal as refusal:
        return str(refusal)
    raise AssertionError("it went on")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dataset.limit=90", "resume: the run had 80 training examples, and now has 72"),
        ("training.global_batch_size=20", "resume: the run had 5 steps per epoch, and now has 4"),
        ("model.units=9", "resume: the checkpoint has model/0 of shape (64, 8), and the run needs (64, 9)"),
        ("model.units=[8,8]", "resume: the checkpoint has model/2 of shape (8, 10), and the run needs (8, 8)"),
    ],
)
def test_other_data_or_another_model_is_refused(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, change: str, words: str
) -> None:
    common = ("strategy=one_device", *(word for word in BASE if word.split("=")[0] != change.split("=")[0]))
    first = [word for word in (*BASE, GLOBAL) if word.split("=")[0] == change.split("=")[0]]
    size = () if change.startswith("training.global") else (GLOBAL,)
    message = isolated(
        refusal_to_go_on, plan(*common, *size, *first), plan(*common, *size, change), str(tmp_path / "parts")
    )
    assert message.startswith(words)


def best_of(plan: Plan, folder: str) -> tuple[Course, dict[str, np.ndarray[Any, Any]], int]:
    from scaleflow.checkpoint import Keeper

    found = course(plan, folder)
    keeper = Keeper(plan.checkpoint, folder, ignore)
    newest = keeper.newest()
    best = keeper.best()
    assert newest is not None
    assert best is not None
    return found, dict(best.tensors), best.step


def test_the_best_one_is_what_is_tested_and_exported(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    """With such a rate the validation's loss is best somewhere before the end."""
    words = (
        "strategy=one_device",
        GLOBAL,
        "optimizer.learning_rate=0.3",
        "training.epochs=6",
        "checkpoint.export=best",
    )
    made = plan(*(word for word in BASE if "epochs" not in word), *words, "checkpoint.keep=1")
    found, best, step = isolated(best_of, made, str(tmp_path))
    losses = {step: values["val/loss"] for step, values in found.points if "val/loss" in values}
    assert step == min(losses, key=lambda key: losses[key]) < max(losses)
    for name in (name for name in best if name.startswith("model/")):
        assert found.state[name].tobytes() == best[name].tobytes()
