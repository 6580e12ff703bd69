"""Dicts of inputs and outputs, targets for each position and weights train on every strategy as on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import Event, MetricsLogged
from tests.checkpoint.test_resume import course, courses
from tests.conftest import Command, make_once
from tests.training.fake_engine import make_session, run_apart

STRUCTURED = "tests.strategy.structured"
TWO_TOWERS = f"model._target_={STRUCTURED}.two_towers"
CASES = {
    "everything": ("Everything", TWO_TOWERS),
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
    "shards": (
        *("strategy=parameter_server", "cluster.workers=1", "cluster.servers=2", "strategy.partitioner.max_shards=3"),
        "strategy.partitioner.min_shard_bytes=null",
    ),
}
STREAM = ("+dataset.streams=true", "dataset.cache=none")
#: How far losses and other metrics may be from those of one device in float32: in mixed precision an example may change
#: its class.
PRECISIONS = {"float32": (1e-5, 1e-5), "mixed": (3e-2, 0.1)}
STEPS = 7

#: What trains as one device does, in one process with two devices: by the case, words for both runs, the strategy, and
#: words for its run only. `make test` trains everything at once, in float32.
VARIANTS: dict[str, list[tuple[tuple[str, ...], str, tuple[str, ...]]]] = {
    case: [
        ((), strategy, () if case == "everything" else ("precision=mixed",)) for strategy in ("mirrored", "pipeline")
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
    # A stream has no targets to draw each class its share by.
    (("dataset.validation=0.3", "dataset.split=random"), "mirrored", ("dataset.cache=file", "+dataset.streams=true")),
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
    return run_apart(train, ((plan,) for plan in plans))


def train(plan: Plan) -> Values:
    from scaleflow.worker.build import build_training

    points: Values = {}

    def collect(event: Event) -> None:
        if isinstance(event, MetricsLogged):
            points.update(select_values(event.step, event.values))

    make_session(plan, build_training(plan, collect), collect).run()
    return points


def select_values(step: int, values: Mapping[str, float]) -> Values:
    """Returns the losses and metrics, without the limits that the report adds to those of the test split."""
    names = [name for name in values if name.startswith(("train/", "val/", "test/"))]
    return {(step, name): values[name] for name in names if not name.endswith(("_low", "_high"))}


def assert_equal(found: Values, wanted: Values, precision: str = "float32", has_norm: bool = True) -> None:
    wanted = {key: value for key, value in wanted.items() if has_norm or key[1] != "train/gradient_norm"}
    assert len([name for _, name in wanted if name == "train/loss"]) == STEPS
    of_losses, of_others = PRECISIONS[precision]
    assert set(found) == set(wanted)
    for (step, name), value in wanted.items():
        tolerance = of_losses if name.endswith("loss") else of_others
        assert found[step, name] == pytest.approx(value, abs=tolerance), (step, name)


@pytest.fixture
def on_one_device(isolated: Isolated, plan: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Values]:
    """`on_one_device(case)`: the losses and metrics of the run without options, which is made once in the session."""

    def train_case(case: str) -> Values:
        def make(folder: Path) -> Values:
            (found,) = isolated(train_all, [plan(*words(case, "one_device"))])
            return dict(found)

        return make_once(tmp_path_factory, f"one-device-{case.replace(' ', '-')}", make)[1]

    return train_case


@pytest.mark.parametrize(
    "case", ["everything", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "everything")]
)
@pytest.mark.slow
def test_replicas_and_stages_give_the_losses_and_metrics_of_one_device(
    isolated: Isolated, plan: Make, on_one_device: Callable[..., Values], case: str
) -> None:
    commons = [common for common, _, _ in VARIANTS[case] if common]
    plans = [plan(*words(case, "one_device", *common)) for common in commons]
    plans += [plan(*words(case, strategy, *common, *special)) for common, strategy, special in VARIANTS[case]]
    trained = isolated(train_all, plans)
    wanted = {(): on_one_device(case), **dict(zip(commons, trained[: len(commons)], strict=True))}
    for (common, strategy, special), found in zip(VARIANTS[case], trained[len(commons) :], strict=True):
        print(common, strategy, special)
        assert_equal(found, wanted[common], "mixed" if "precision=mixed" in special else "float32")


#: Other options, each list in one process: of each run its case, words for both runs, its strategy, and words for it
#: alone.
OPTIONS: dict[str, list[tuple[str, tuple[str, ...], str, tuple[str, ...]]]] = {
    "fit": [("dict out", (), "fit", ()), ("dict out", (), "fit", STREAM), ("weights", (), "fit", ())],
    "three stages": [("dict out", (), "three stages", ())],
    "mirrored": [
        ("dict out", (), "mirrored", ("hardware.xla=true",)),
        ("dict out", (f"training.step={{_target_: {STRUCTURED}.mean_loss}}",), "mirrored", ()),
        ("dict out", (f"training.step={{_target_: {STRUCTURED}.OwnUpdates}}",), "mirrored", ()),
        ("dict out", ("debug=overfit",), "mirrored", ()),
        ("dict out", ("dataset.on_bad_example=skip",), "mirrored", ("+dataset.streams=true",)),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_other_options_give_the_losses_and_metrics_of_one_device(
    isolated: Isolated, plan: Make, on_one_device: Callable[..., Values], options: str
) -> None:
    compared = [(case, common) for case, common, _, _ in OPTIONS[options] if common]
    made = [plan(*words(case, "one_device", *common)) for case, common in compared]
    made += [plan(*words(case, strategy, *common, *special)) for case, common, strategy, special in OPTIONS[options]]
    trained = isolated(train_all, made)
    wanted = dict(zip(compared, trained[: len(compared)], strict=True))
    for option, found in zip(OPTIONS[options], trained[len(compared) :], strict=True):
        print(option)
        case, common, strategy, _ = option
        expected = wanted[case, common] if common else on_one_device(case)
        assert_equal(found, expected, has_norm=strategy != "fit")  # Keras's fit has none


@pytest.mark.parametrize(
    ("strategy", "case", "more"),
    [
        ("multi_worker", "everything", ()),
        ("shards", "everything", ()),
        ("parameter_server", "dict out", ("precision=mixed",)),
        ("parameter_server", "dict out", STREAM),
        ("multi_worker", "dict out", ("precision=mixed",)),
    ],
)
def test_processes_give_the_losses_and_metrics_of_one_device(
    command: Command, on_one_device: Callable[..., Values], strategy: str, case: str, more: tuple[str, ...]
) -> None:
    ended = command(*words(case, strategy, *more, "checkpoint=none", "hardware.intra_op_threads=1"))
    assert ended.returncode == 0, ended.stderr
    found: Values = {}
    for event in command.events():
        if event["event"] == "metrics":
            found |= select_values(event["step"], event["values"])
    assert_equal(found, on_one_device(case), "mixed" if more == ("precision=mixed",) else "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        *(("everything", "mirrored"), ("everything", "pipeline"), ("weights", "fit")),
    ],
)
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(
    isolated: Isolated, plan: Make, tmp_path: Path, case: str, strategy: str
) -> None:
    made = plan(*words(case, strategy, "hardware.deterministic=true", "training.epochs=3", "training.max_steps=null"))
    parts = str(tmp_path / "parts")
    whole, part = isolated(courses, made, str(tmp_path / "whole"), parts, 4)
    rest = isolated(course, made, parts, goes_on=True)
    assert part.stopped
    assert part.points + rest.points == whole.points
    assert set(rest.state) == set(whole.state)
    for name, value in whole.state.items():
        assert rest.state[name].tobytes() == value.tobytes(), name
