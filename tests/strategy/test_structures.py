"""Dicts of inputs and outputs, targets for each position and weights train on every strategy as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces import Plan
from tests.checkpoint.test_resume import course
from tests.conftest import Command

STRUCTURED = "tests.strategy.structured"
TWO_TOWERS = f"model._target_={STRUCTURED}.two_towers"
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
FIT = ("strategy=mirrored", "hardware.logical_devices=2", "training.engine=fit")
#: How far losses and other metrics may be from those of one device: in mixed precision an example may change its class.
PRECISIONS = {"float32": (1e-5, 1e-5), "mixed": (3e-2, 0.1)}
STEPS = 7

Isolated = Callable[..., Any]
Make = Callable[..., Plan]


def words(case: str, strategy: str, *more: str) -> tuple[str, ...]:
    source, model = CASES[case]
    return (
        *(f"dataset._target_={STRUCTURED}.{source}", model, "dataset.validation=validation"),
        *("training.global_batch_size=48", f"training.max_steps={STEPS}", "training.steps_per_loop=1"),
        *("optimizer=sgd", "optimizer.learning_rate=0.1", "hardware=cpu", "tracking=none"),
        *(FIT if strategy == "fit" else STRATEGIES[strategy]),
        *more,
    )


#: The results of `values_of` by the words of the run: a reference for several cases is trained once.
KNOWN: dict[tuple[str, ...], dict[tuple[int, str], float]] = {}


def values_of(command: Command, case: str, strategy: str, *more: str) -> dict[tuple[int, str], float]:
    """All losses and metrics of a run by their step and name."""
    typed = words(case, strategy, *more)
    if typed in KNOWN:
        return KNOWN[typed]
    folder = command.folder / f"run{len(list(command.folder.iterdir()))}"
    folder.mkdir()
    own = Command(folder)
    ended = own(*typed, timeout=240)
    assert ended.returncode == 0, ended.stderr
    points = [(event["step"], event["values"]) for event in own.events() if event["event"] == "metrics"]
    KNOWN[typed] = {
        (step, name): value
        for step, values in points
        for name, value in values.items()
        if name.startswith(("train/", "val/", "test/"))
    }
    return KNOWN[typed]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "one_device"])
@pytest.mark.parametrize("case", CASES)
def test_each_strategy_gives_the_losses_and_metrics_of_one_device(
    command: Command, case: str, strategy: str, precision: str
) -> None:
    wanted = values_of(command, case, "one_device", f"precision={precision}")
    found = values_of(command, case, strategy, f"precision={precision}")
    assert len([name for _, name in wanted if name == "train/loss"]) == STEPS
    of_losses, of_others = PRECISIONS[precision]
    assert set(found) == set(wanted)
    for (step, name), value in wanted.items():
        tolerance = of_losses if name.endswith("loss") else of_others
        assert found[step, name] == pytest.approx(value, abs=tolerance), (step, name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "parameter_server", "fit"])
def test_a_stream_of_dicts_trains_as_the_same_examples_in_memory(command: Command, strategy: str) -> None:
    wanted = values_of(command, "dict out", "one_device")
    found = values_of(command, "dict out", strategy, "+dataset.streams=true", "dataset.cache=none")
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dict out", "positions", "weights"])
def test_fit_trains_as_the_loop_does(command: Command, case: str) -> None:
    wanted = values_of(command, case, "mirrored")
    found = values_of(command, case, "fit")
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("case", "strategy"),
    [*((case, "mirrored") for case in CASES), ("dict out", "pipeline"), ("positions", "pipeline"), ("weights", "fit")],
)
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(
    isolated: Isolated, plan: Make, tmp_path: Path, case: str, strategy: str
) -> None:
    made = plan(*words(case, strategy, "hardware.deterministic=true", "training.epochs=3", "training.max_steps=null"))
    whole = isolated(course, made, str(tmp_path / "whole"))
    part = isolated(course, made, str(tmp_path / "parts"), stop_after=4)
    assert part.stopped
    last = isolated(course, made, str(tmp_path / "parts"), goes_on=True)
    assert part.points + last.points == whole.points
    assert set(last.state) == set(whole.state)
    for name, value in whole.state.items():
        assert last.state[name].tobytes() == value.tobytes(), name


#: What both runs have, and what the second one has besides.
OPTIONS: dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]] = {
    "XLA": ("dict out", (), "mirrored", ("hardware.xla=true",)),
    "three stages": ("dict out", (), "pipeline", ("strategy.stages=3", "hardware.logical_devices=3")),
    "micro-batches": ("weights", ("dataset.limit=90",), "mirrored", ("training.accumulate=2",)),
    "a step": ("dict out", (f"training.step={{_target_: {STRUCTURED}.mean_loss}}",), "mirrored", ()),
    "an update": ("dict out", (f"training.step={{_target_: {STRUCTURED}.OwnUpdates}}",), "mirrored", ()),
    "prepared": ("dict in", ("dataset.normalise=true", "dataset.augment={flip: true, crop: 1}"), "mirrored", ()),
    "mixed": ("weights", ("dataset.augment={mixup: 0.3}",), "mirrored", ()),
    "held out": ("weights", ("dataset.validation=0.3",), "mirrored", ("dataset.cache=file", "+dataset.streams=true")),
    "overfit": ("dict out", ("debug=overfit",), "mirrored", ()),
    "skipped": ("dict out", ("dataset.on_bad_example=skip",), "mirrored", ("+dataset.streams=true",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_other_options_take_dicts_and_weights(command: Command, option: str) -> None:
    case, common, strategy, special = OPTIONS[option]
    wanted = values_of(command, case, "one_device", *common)
    assert values_of(command, case, strategy, *common, *special) == pytest.approx(wanted, abs=1e-5)
