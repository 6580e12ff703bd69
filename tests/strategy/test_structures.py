"""Dicts of inputs and outputs, targets for each position and weights train on every strategy as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Command

TWO_TOWERS = "model._target_=tests.strategy.structured.two_towers"
CASES = {
    "dict in": ("DictIn", TWO_TOWERS),
    "dict out": ("DictOut", TWO_TOWERS),
    "positions": ("Positions", "model.units=[8,8]"),
    "weights": ("Weighted", "model.units=[8,8]"),
}
STRATEGIES = {
    "one_device": ("strategy=one_device",),
    "mirrored": ("strategy=mirrored", "hardware.logical_devices=2"),
    "pipeline": ("strategy=pipeline", "hardware.logical_devices=2"),
    "multi_worker": ("strategy=multi_worker",),
    "parameter_server": ("strategy=parameter_server", "cluster.workers=1"),
}
PRECISIONS = {"float32": 1e-5, "mixed": 3e-2}
STEPS = 7

Isolated = Callable[..., Any]


def words(case: str, strategy: str, *more: str) -> tuple[str, ...]:
    source, model = CASES[case]
    return (
        *(f"dataset._target_=tests.strategy.structured.{source}", model, "dataset.validation=validation"),
        *("training.global_batch_size=48", f"training.max_steps={STEPS}", "training.steps_per_loop=1"),
        *("optimizer=sgd", "optimizer.learning_rate=0.1", "hardware=cpu", "tracking=none"),
        *STRATEGIES[strategy],
        *more,
    )


def values_of(command: Command, case: str, strategy: str, precision: str) -> dict[tuple[int, str], float]:
    """All losses and metrics of a run by their step and name."""
    (command.folder / strategy).mkdir()
    own = Command(command.folder / strategy)
    ended = own(*words(case, strategy, f"precision={precision}"), timeout=240)
    assert ended.returncode == 0, ended.stderr
    points = [(event["step"], event["values"]) for event in own.events() if event["event"] == "metrics"]
    return {
        (step, name): value
        for step, values in points
        for name, value in values.items()
        if name.startswith(("train/", "val/", "test/"))
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "one_device"])
@pytest.mark.parametrize("case", CASES)
def test_each_strategy_gives_the_losses_and_metrics_of_one_device(
    command: Command, case: str, strategy: str, precision: str
) -> None:
    wanted = values_of(command, case, "one_device", precision)
    found = values_of(command, case, strategy, precision)
    assert len([name for _, name in wanted if name == "train/loss"]) == STEPS
    assert found == pytest.approx(wanted, abs=PRECISIONS[precision])
