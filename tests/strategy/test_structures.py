"""Dicts of inputs and outputs, targets for each position and weights train on every strategy as on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scaleflow.config.rules import SEVERAL_PROCESSES
from scaleflow.events import Event, MetricsLogged
from scaleflow.interfaces import Plan
from tests.checkpoint.test_resume import course
from tests.conftest import Command
from tests.training.fake_engine import make_session

STRUCTURED = "tests.strategy.structured"
TWO_TOWERS = f"model._target_={STRUCTURED}.two_towers"
CASES = {
    "dict in": ("DictIn", TWO_TOWERS),
    "dict out": ("DictOut", TWO_TOWERS),
    "positions": ("Positions", "model.units=[8,8]"),
    "weights": ("Weighted", "model.units=[8,8]"),
}
TWO = "hardware.logical_devices=2"
STRATEGIES = {
    "one_device": ("strategy=one_device", TWO),
    "mirrored": ("strategy=mirrored", TWO),
    "pipeline": ("strategy=pipeline", TWO),
    "fit": ("strategy=mirrored", TWO, "training.engine=fit"),
    "three stages": ("strategy=pipeline", "strategy.stages=3", "hardware.logical_devices=3"),
    "multi_worker": ("strategy=multi_worker",),
    "parameter_server": ("strategy=parameter_server", "cluster.workers=1"),
}
STREAM = ("+dataset.streams=true", "dataset.cache=none")
#: How far losses and other metrics may be from those of one device: in mixed precision an example may change its class.
PRECISIONS = {"float32": (1e-5, 1e-5), "mixed": (3e-2, 0.1)}
STEPS = 7

#: What trains as one device does, in one process with two devices: by the case, words for both runs, the strategy, and
#: words for its run only.
VARIANTS: dict[str, list[tuple[tuple[str, ...], str, tuple[str, ...]]]] = {
    case: [
        ((f"precision={precision}",), strategy, ()) for precision in PRECISIONS for strategy in ("mirrored", "pipeline")
    ]
    for case in CASES
}
VARIANTS["dict in"] += [
    (("dataset.normalise=true", "dataset.augment={flip: true, crop: 1}"), "mirrored", ()),
]
VARIANTS["dict out"] += [
    ((), "one_device", STREAM),
    ((), "mirrored", STREAM),
]
VARIANTS["weights"] += [
    (("dataset.limit=90",), "mirrored", ("training.accumulate=2",)),
    (("dataset.augment={mixup: 0.3}",), "mirrored", ()),
    (("dataset.validation=0.3",), "mirrored", ("dataset.cache=file", "+dataset.streams=true")),
]

Isolated = Callable[..., Any]
Make = Callable[..., Plan]
Values = dict[tuple[int, str], float]


def words(case: str, strategy: str, *more: str) -> tuple[str, ...]:
    source, model = CASES[case]
    return (
        *(f"dataset._target_={STRUCTURED}.{source}", model, "dataset.validation=validation"),
        *("training.global_batch_size=48", f"training.max_steps={STEPS}", "training.steps_per_loop=1"),
        *("optimizer=sgd", "optimizer.learning_rate=0.1", "hardware=cpu", "tracking=none"),
        *STRATEGIES[strategy],
        *more,
    )


def train_all(plans: Sequence[Plan]) -> list[Values]:
    """Trains one run after another; returns all losses and metrics of each by their step and name."""
    from scaleflow.worker.build import build_training

    found: list[Values] = []
    for each in plans:
        points: Values = {}

        def collect(event: Event, points: Values = points) -> None:
            if isinstance(event, MetricsLogged):
                points.update(select_values(event.step, event.values))

        make_session(each, build_training(each, collect), collect).run()
        found.append(points)
    return found


def select_values(step: int, values: Mapping[str, float]) -> Values:
    return {(step, name): value for name, value in values.items() if name.startswith(("train/", "val/", "test/"))}


def assert_equal(found: Values, wanted: Values, precision: str = "float32") -> None:
    assert len([name for _, name in wanted if name == "train/loss"]) == STEPS
    of_losses, of_others = PRECISIONS[precision]
    assert set(found) == set(wanted)
    for (step, name), value in wanted.items():
        tolerance = of_losses if name.endswith("loss") else of_others
        assert found[step, name] == pytest.approx(value, abs=tolerance), (step, name)


@pytest.mark.parametrize("case", CASES)
def test_replicas_and_stages_give_the_losses_and_metrics_of_one_device(
    isolated: Isolated, plan: Make, case: str
) -> None:
    commons = list(dict.fromkeys(common for common, _, _ in VARIANTS[case]))
    plans = [plan(*words(case, "one_device", *common)) for common in commons]
    plans += [plan(*words(case, strategy, *common, *special)) for common, strategy, special in VARIANTS[case]]
    trained = isolated(train_all, plans)
    of_one_device = dict(zip(commons, trained, strict=False))
    for (common, strategy, special), found in zip(VARIANTS[case], trained[len(commons) :], strict=True):
        print(common, strategy, special)
        assert_equal(found, of_one_device[common], "mixed" if "precision=mixed" in common else "float32")


#: The same, each in a process of its own: TensorFlow mixes up the collective operations of two mirrored strategies in a
#: process if they sum other shapes.
ALONE: dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]] = {
    "fit, dict out": ("dict out", (), "fit", ()),
    "fit, stream": ("dict out", (), "fit", STREAM),
    "fit, weights": ("weights", (), "fit", ()),
    "three stages": ("dict out", ("hardware.logical_devices=3",), "three stages", ()),
    "XLA": ("dict out", (), "mirrored", ("hardware.xla=true",)),
    "a step": ("dict out", (f"training.step={{_target_: {STRUCTURED}.mean_loss}}",), "mirrored", ()),
    "an update": ("dict out", (f"training.step={{_target_: {STRUCTURED}.OwnUpdates}}",), "mirrored", ()),
    "overfit": ("dict out", ("debug=overfit",), "mirrored", ()),
    "skipped": ("dict out", ("dataset.on_bad_example=skip",), "mirrored", ("+dataset.streams=true",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", ALONE)
def test_other_options_give_the_losses_and_metrics_of_one_device(isolated: Isolated, plan: Make, option: str) -> None:
    case, common, strategy, special = ALONE[option]
    made = [plan(*words(case, "one_device", *common)), plan(*words(case, strategy, *common, *special))]
    wanted, found = isolated(train_all, made)
    assert_equal(found, wanted)


@pytest.mark.parametrize(
    ("strategy", "case", "more"),
    [
        *((strategy, case, ()) for strategy in SEVERAL_PROCESSES for case in CASES),
        *((strategy, "dict out", ("precision=mixed",)) for strategy in SEVERAL_PROCESSES),
        ("parameter_server", "dict out", STREAM),
    ],
)
def test_processes_give_the_losses_and_metrics_of_one_device(
    isolated: Isolated, plan: Make, command: Command, strategy: str, case: str, more: tuple[str, ...]
) -> None:
    ended = command(*words(case, strategy, *more))
    assert ended.returncode == 0, ended.stderr
    found: Values = {}
    for event in command.events():
        if event["event"] == "metrics":
            found |= select_values(event["step"], event["values"])
    (wanted,) = isolated(train_all, [plan(*words(case, "one_device", *(more if more != STREAM else ())))])
    assert_equal(found, wanted, "mixed" if more == ("precision=mixed",) else "float32")


@pytest.mark.slow
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
