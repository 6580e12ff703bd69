"""A run that was stopped anywhere and goes on ends as one that was not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import Event, MetricsLogged, Note
from tests.conftest import Command
from tests.training.fake_engine import build_untested, ignore, make_session, run_apart

#: 80 examples make 5 steps an epoch; calls of two steps end at 1, 3, 5 | 7, 9, 10 | 12, 14, 15.
BASE = (
    "hardware=cpu", "hardware.deterministic=true", "tracking=none", "dataset.limit=100", "dataset.validation=0.2",
    "model.units=8", "training.epochs=3", "training.steps_per_loop=2",
)  # fmt: skip
GLOBAL = "training.global_batch_size=16"
DROPOUT = "model.dropout=0.5"
TWO = "hardware.logical_devices=2"
REPLICATED = ("strategy=pipeline", "strategy.replicas=2", "hardware.logical_devices=4")
STEPS = "training.step._target_=tests.training.steps"


@dataclass(frozen=True)
class Course:
    """How a run went: its points as (step, values) without times, its final variables, whether it was stopped."""

    points: list[tuple[int, dict[str, float]]]
    state: dict[str, np.ndarray[Any, Any]]
    stopped: bool
    model_step: int
    notes: list[str]


def course(
    plan: Plan, folder: str, stop_after: int | None = None, goes_on: bool = False, damage: bool = False
) -> Course:
    """Runs a plan, until it is asked to stop after so many calls, or from its newest checkpoint on.

    With `damage` the best checkpoint, the first of two, is cut off before it is read.
    """
    from scaleflow import checkpoint, training
    from scaleflow.worker.build import build_training

    points: list[tuple[int, dict[str, float]]] = []
    notes: list[str] = []
    calls = [0]

    def emit(event: Event) -> None:
        if isinstance(event, MetricsLogged):
            if values := {k: v for k, v in event.values.items() if not k.startswith("perf/")}:
                points.append((event.step, values))
        elif isinstance(event, Note):
            notes.append(event.text)

    def should_stop() -> bool:
        calls[0] += 1
        return calls[0] == stop_after

    built = build_training(plan, ignore)
    options = plan.checkpoint
    keeper = checkpoint.CheckpointManager(options, folder, emit)
    checkpointing = training.Checkpointing(keeper, options.criterion, options.export == "best")
    session = make_session(plan, built, emit, should_stop, checkpointing=checkpointing)
    if goes_on:
        session.restore(keeper.load_newest())
    if damage:
        read_best = keeper.load_best

        def damaged_best() -> Any:
            for path in min(Path(folder).glob("step-*")).glob("tensors.data*"):
                path.write_bytes(path.read_bytes()[:-1])
            return read_best()

        keeper.load_best = damaged_best
    result = session.run()
    keeper.finish()
    return Course(points, dict(built.engine.read_state()), result.stopped, result.model_step, notes)


WAYS = {
    "one_device": ("strategy=one_device", GLOBAL, DROPOUT),
    "XLA": ("strategy=one_device", GLOBAL, DROPOUT, "hardware.deterministic=false", "hardware.xla=true"),
    "float16": ("strategy=one_device", GLOBAL, "precision=mixed_float16", "optimizer=sgd"),
    "mirrored": ("strategy=mirrored", TWO, GLOBAL, DROPOUT, "training.accumulate=2", "optimizer=adamw"),
    "pipeline": ("strategy=pipeline", TWO, GLOBAL, "model.units=[8,8]", "optimizer.schedule=cosine"),
    "replicated": (*REPLICATED, GLOBAL, "model.units=[8,8]", DROPOUT),
    "fit": ("training.engine=fit", "training.steps_per_loop=auto", GLOBAL, DROPOUT),
    "fit mirrored": ("training.engine=fit", "training.steps_per_loop=auto", "strategy=mirrored", TWO, GLOBAL),
    "own step": (f"{STEPS}.TwoRates", "strategy=mirrored", TWO, GLOBAL),
}


def courses(plan: Plan, whole: str, parts: str, stop_after: int) -> tuple[Course, Course]:
    """A run that is not stopped, and one that is."""
    unstopped, stopped = run_apart(course, [(plan, whole), (plan, parts, stop_after)])
    return unstopped, stopped


#: After how many calls a run is stopped, and again: within an epoch, unless it is at the end of the first one.
STOPS = {"one_device": (3, 1), "fit": (5, 3)}


@pytest.mark.parametrize(("way", "stops"), [(way, STOPS.get(way, (2,))) for way in WAYS])
def test_it_ends_with_the_same_bits_and_the_same_points(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, way: str, stops: tuple[int, ...]
) -> None:
    words = [word for word in BASE if not any(word.split("=")[0] == other.split("=")[0] for other in WAYS[way])]
    own = [word.replace("training.step._target_", "training.step={_target_") + "}" if "_target_" in word else word
           for word in WAYS[way]]  # fmt: skip
    made = plan(*words, *[word.replace("{_target_=", "{_target_: ") for word in own])
    whole, part = isolated(courses, made, str(tmp_path / "whole"), str(tmp_path / "parts"), stops[0])
    assert part.stopped
    points = part.points
    for calls in stops[1:]:
        part = isolated(course, made, str(tmp_path / "parts"), stop_after=calls, goes_on=True)
        assert part.stopped
        points += part.points
    last = isolated(course, made, str(tmp_path / "parts"), goes_on=True)
    assert points + last.points == whole.points
    assert set(last.state) == set(whole.state)
    for name, value in whole.state.items():
        assert last.state[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("engine", ["loop", pytest.param("fit", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_that_was_stopped_after_its_last_step_takes_no_further_one(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, engine: str
) -> None:
    """The last step is not the last one of its epoch, whose validation is left."""
    base = [word.replace("steps_per_loop=2", "steps_per_loop=1") for word in BASE]
    made = plan(*base, GLOBAL, f"training.engine={engine}", "training.max_steps=4")
    part = isolated(course, made, str(tmp_path), stop_after=4)
    assert (part.stopped, part.model_step) == (True, 4)
    last = isolated(course, made, str(tmp_path), goes_on=True)
    assert {step for step, _ in last.points} == {4}
    assert any("val/loss" in values for _, values in last.points)
    assert last.model_step == 4


PIPELINE = ("strategy=pipeline", TWO)
CHANGES = {
    "mirrored to one_device": (("strategy=mirrored", TWO), ("strategy=one_device", TWO)),
    "one_device to pipeline": (("strategy=one_device", TWO), PIPELINE),
    "pipeline to mirrored": (PIPELINE, ("strategy=mirrored", TWO)),
    "pipeline to its replicas": ((*PIPELINE, "strategy.micro_batches=8"), REPLICATED),
}


def go_on_in_turn(plans: Sequence[Plan], folders: Sequence[str]) -> list[Course]:
    return [course(plan, folder, goes_on=True) for plan, folder in zip(plans, folders, strict=True)]


def begin_all(whole: Plan, plans: Sequence[Plan], folder: str, folders: Sequence[str]) -> Course:
    """One run that is not stopped, on whichever strategy, and several that are."""
    for plan, each in zip(plans, folders, strict=True):
        assert course(plan, each, stop_after=4).stopped
    return course(whole, folder)


@pytest.mark.parametrize("names", [list(CHANGES)[:1], list(CHANGES)[1:]], ids=["mirrored", "pipeline"])
def test_a_run_goes_on_under_another_strategy(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, names: list[str]
) -> None:
    common = (*BASE, GLOBAL, "model.units=[8,8]")
    folders = [str(tmp_path / name) for name in names]
    before, after = ([plan(*common, *CHANGES[name][part]) for name in names] for part in (0, 1))
    whole = isolated(begin_all, plan(*common, *CHANGES[names[0]][0]), before, str(tmp_path / "whole"), folders)
    on_two = [number for number, made in enumerate(after) if made.hardware.logical_devices == 2]
    lasts = isolated(go_on_in_turn, [after[n] for n in on_two], [folders[n] for n in on_two])
    for number in set(range(len(names))) - set(on_two):
        lasts.append(isolated(course, after[number], folders[number], goes_on=True))
    assert len(lasts) == len(names)
    for last in lasts:
        assert set(last.state) == set(whole.state)
        for name, value in whole.state.items():
            np.testing.assert_allclose(last.state[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def refusals_to_go_on(before: Plan, after: Sequence[Plan], folder: str) -> list[str]:
    course(before, folder, stop_after=2)
    refusals = []
    for plan in after:
        try:
            course(plan, folder, goes_on=True)
        except ConfigError as refusal:
            refusals.append(str(refusal))
        else:
            raise AssertionError("it went on")
    return refusals


CHANGED = {
    "dataset.limit=90": "resume: the run had 80 training examples, and now has 72",
    "training.global_batch_size=20": "resume: the run had 5 steps per epoch, and now has 4",
    "model.units=9": "resume: the checkpoint has model/0 of shape (64, 8), and the run needs (64, 9)",
}


@pytest.mark.slow
def test_other_data_or_another_model_is_refused(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    common = ("strategy=one_device", *BASE, GLOBAL)
    changed = [
        plan(*(word for word in common if word.split("=")[0] != change.split("=")[0]), change) for change in CHANGED
    ]
    for message, words in zip(
        isolated(refusals_to_go_on, plan(*common), changed, str(tmp_path / "parts")), CHANGED.values(), strict=True
    ):
        assert message.startswith(words)


#: With such a rate the loss of the validation split is best somewhere before the end; with a plain one at the end, that
#: is within an epoch, at a step that is saved in any case.
EARLIER = ("optimizer.learning_rate=0.3", "training.epochs=6")
AT_THE_END = ("training.max_steps=12", "checkpoint.every_steps=6")
EXPORT_BEST = ("strategy=one_device", GLOBAL, "checkpoint.export=best", "checkpoint.keep=1")


def without_epochs(*words: str) -> list[str]:
    return [*(word for word in BASE if "epochs" not in word), *EXPORT_BEST, *words]


def best_of(plan: Plan, folder: str) -> tuple[Course, dict[str, np.ndarray[Any, Any]], int]:
    from scaleflow.checkpoint import CheckpointManager

    found = course(plan, folder)
    keeper = CheckpointManager(plan.checkpoint, folder, ignore)
    newest = keeper.load_newest()
    best = keeper.load_best()
    assert newest is not None
    assert best is not None
    return found, dict(best.tensors), best.step


def losses_of(found: Course) -> dict[int, float]:
    return {step: values["val/loss"] for step, values in found.points if "val/loss" in values}


@pytest.mark.parametrize(
    ("words", "is_last"), [(EARLIER, False), pytest.param(AT_THE_END, True, marks=pytest.mark.slow)]
)
def test_the_best_one_is_what_is_tested_and_exported(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], is_last: bool
) -> None:
    found, best, step = isolated(best_of, plan(*without_epochs(*words)), str(tmp_path))
    losses = losses_of(found)
    assert step == found.model_step == min(losses, key=lambda key: losses[key])
    assert (step == max(losses)) == is_last
    assert [step for step, values in found.points if "test/loss" in values] == [step]
    for name in (name for name in best if name.startswith("model/")):
        assert found.state[name].tobytes() == best[name].tobytes()


def courses_with_another_monitor(first: Plan, second: Plan, folder: str) -> list[Any]:
    """A run, and it resumed with another monitor; then a state that is restored without a note."""
    from scaleflow.training.decisions import BestValue

    courses = run_apart(course, [(first, folder), (second, folder, None, True)])
    best = BestValue(second.checkpoint.best, {})
    note = best.restore({**best.state(), "value": 0.6, "step": 8})
    return [*courses, note, best.step]


@pytest.mark.slow
def test_the_best_value_of_another_monitor_is_forgotten(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    first = plan(*without_epochs("training.epochs=2"))
    second = plan(*without_epochs("training.epochs=4", "checkpoint.best={monitor: val/accuracy, mode: max}"))
    before, after, note, step = isolated(courses_with_another_monitor, first, second, str(tmp_path))
    accuracies = {step: values["val/accuracy"] for step, values in after.points if "val/accuracy" in values}
    assert before.model_step < min(accuracies)
    assert after.model_step == max(accuracies, key=lambda key: accuracies[key])
    assert after.notes[0] == (
        "checkpoint.best: was chosen by val/loss (min), and now by val/accuracy (max): the best checkpoint is one of "
        "those from here on"
    )
    assert (note, step) == (None, 8)


@pytest.mark.slow
def test_a_damaged_best_checkpoint_leaves_the_model_of_the_last_step(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    chosen = plan(*without_epochs(*EARLIER))
    found = isolated(course, chosen, str(tmp_path / "damaged"), damage=True)
    last = isolated(
        course, replace(chosen, checkpoint=replace(chosen.checkpoint, export="last")), str(tmp_path / "last")
    )
    losses = losses_of(found)
    best = min(losses, key=lambda key: losses[key])
    assert found.model_step == last.model_step == max(losses) > best
    assert found.points == last.points
    assert found.notes == [
        f"the best checkpoint, at step {best}, is damaged (tensors.data-00000-of-00001 has changed since it was "
        "written)",
        f"checkpoint.export=best: there is no usable best checkpoint, so the model of the last step, {max(losses)}, is "
        "tested and exported",
    ]


def confusions(plan: Plan, folder: str) -> list[Any]:
    """Of a run without a test split: what it counted, and what its model gives when it is evaluated again."""
    from scaleflow import checkpoint, training

    built = build_untested(plan)
    manager = checkpoint.CheckpointManager(plan.checkpoint, folder, ignore)
    checkpointing = training.Checkpointing(manager, plan.checkpoint.criterion, ends_as_best=True)
    make_session(plan, built, ignore, checkpointing=checkpointing).run()
    counted = built.engine.read_confusion(built.feeds.validation)
    built.engine.evaluate(built.feeds.validation)
    return [counted, built.engine.read_confusion(built.feeds.validation)]


@pytest.mark.slow
def test_without_a_test_split_the_confusions_are_those_of_the_best_one(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    counted, again = isolated(confusions, plan(*without_epochs(*EARLIER)), str(tmp_path))
    np.testing.assert_array_equal(counted, again)


@pytest.mark.slow
def test_the_logged_model_has_the_step_and_the_values_of_the_best_one(command: Command, empty_store: Path) -> None:
    shutil.copy(empty_store, command.folder / "mlflow.db")
    ended = command(*(word for word in without_epochs(*EARLIER) if not word.startswith("tracking")))
    assert ended.returncode == 0, ended.stderr
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{command.folder}/mlflow.db")
    experiment = client.get_experiment_by_name("scaleflow").experiment_id
    (run,) = client.search_runs([experiment])
    (logged,) = client.search_logged_models([experiment])
    losses = {p.step: p.value for p in client.get_metric_history(run.info.run_id, "val/loss")}
    best = min(losses, key=lambda key: losses[key])
    assert best < max(losses)
    assert [output.step for output in run.outputs.model_outputs] == [best]
    values = {metric.key: metric.value for metric in logged.metrics}
    assert values["val/loss"] == losses[best]
    assert values["test/loss"] == run.data.metrics["test/loss"]
