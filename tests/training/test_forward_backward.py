"""What trains changes between epochs (`model.freeze` by epochs)."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import EpochEnded, Event, Note
from tests.checkpoint.test_resume import BASE, GLOBAL, TWO, Course, course
from tests.conftest import Command
from tests.training.fake_engine import ignore, load_weights, make_session, run_apart

#: 5 steps an epoch: the output layer trains, then `dense` too, then all. Checkpoints within each, and between.
PHASES = "model.freeze={0: ['*', '!outputs'], 1: [dense_1], 2: []}"
CHOSEN = (*BASE[:5], "training.epochs=3", "training.steps_per_loop=2", "model.units=[8,8]", PHASES)
SAVED = ("checkpoint.every_steps=4", "checkpoint.every_epochs=1", "checkpoint.keep=99")
ONE = "strategy=one_device"
WAYS = {
    "one_device": (ONE, GLOBAL, "optimizer=adamw", "optimizer.ema=0.9", "training.clip_norm=0.1"),
    "XLA": (ONE, GLOBAL, "hardware.deterministic=false", "hardware.xla=true", "model.dropout=0.5"),
    "mirrored": (
        *("strategy=mirrored", TWO, GLOBAL, "training.accumulate=2", "precision=mixed_float16"),
        *("optimizer.schedule=cosine", "optimizer.rate_factors={dense: 0.1}"),
    ),
    "fit": ("training.engine=fit", GLOBAL, "training.steps_per_loop=auto"),
    "LoRA": (ONE, GLOBAL, "model.lora={layers: [dense_1], rank: 2}", "hardware.remat=[dense]"),
    "steps": (ONE, GLOBAL, "training.max_steps=13", "optimizer=sgd", "optimizer.momentum=0.9"),
}


def chosen(*words: str) -> list[str]:
    """The words of a run, in which `words` replace others of the same key."""
    keys = {word.split("=")[0] for word in words}
    return [word for word in CHOSEN if word.split("=")[0] not in keys] + list(words)


def course_with_all_checkpoints(*arguments: Any) -> Course:
    """`course`, in which no checkpoint takes the place of one that waits to be written, however slow the disk is."""
    from scaleflow.checkpoint.manager import BackgroundWriter

    put = BackgroundWriter.put
    BackgroundWriter.put = lambda writer, item, replaceable=True: put(writer, item, False)  # type: ignore[method-assign]
    return course(*arguments)


def courses(plan: Plan, folder: str) -> tuple[Course, dict[int, Course]]:
    """A run that is not stopped, and by step those that go on from each of its checkpoints."""
    whole = run_apart(course_with_all_checkpoints, [(plan, f"{folder}/whole")])[0]
    paths = {int(path.name.partition("-")[2]): path for path in Path(folder, "whole").glob("step-*")}
    steps = sorted(paths)[:-1]
    for step in steps:
        shutil.copytree(paths[step], Path(folder, str(step), paths[step].name))
    later = run_apart(course, [(plan, f"{folder}/{step}", None, True) for step in steps])
    return whole, dict(zip(steps, later, strict=True))


@pytest.mark.slow  # checkpoint/test_resume.py resumes runs of one phase
@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_in_any_phase_as_if_it_had_not_been_stopped(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, way: str
) -> None:
    whole, later = isolated(courses, plan(*chosen(*SAVED, *WAYS[way])), str(tmp_path))
    assert {5, 10} < set(later), later.keys()
    assert {step // 5 for step in later if step % 5} == {0, 1, 2}, later.keys()
    for step, found in later.items():
        for name, value in whole.state.items():
            assert found.state[name].tobytes() == value.tobytes(), (step, name)
        assert [point for point in found.points if point[0] > step] == [p for p in whole.points if p[0] > step]
    assert set(whole.state["training/starts"].tolist()) == {0, 5, 10}


def restore_phases() -> list[tuple[list[int], bool]]:
    """In a child: the updates before the first one of each variable, and whether a step is traced, in three epochs.

    The last one is that of other phases, which were restored.
    """
    import keras

    from scaleflow.interfaces import FreezePhase
    from scaleflow.training.forward_backward import FreezePhases

    def make() -> FreezePhases:
        model = keras.Sequential([keras.layers.Dense(1), keras.layers.Dense(1)])
        model.build((None, 1))
        first, last = ([*layer.trainable_variables] for layer in model.layers)
        only_last = [*((each, False) for each in first), *((each, True) for each in last)]
        return FreezePhases(model, [FreezePhase(0, only_last), FreezePhase(2, [(each, True) for each in first + last])])

    def begin(phases: FreezePhases, epoch: int, updates: int) -> tuple[list[int], bool]:
        is_traced = phases.begin(epoch, updates)
        return [phases.find_start(variable) for variable in phases.variables], is_traced

    phases = make()
    found = [begin(phases, 0, 0), begin(phases, 1, 5), begin(phases, 2, 10)]
    restored = make()
    restored.restore(phases.read_state())
    return [*found, begin(restored, 2, 99)]


def test_a_restored_run_knows_the_updates_before_each_variable_s_first_one(isolated: Callable[..., Any]) -> None:
    first, second, later, restored = isolated(restore_phases)
    assert first[0][2:] == second[0][2:] == [0, 0]
    assert (first[1], second[1]) == (True, False)
    assert later == restored == ([10, 10, 0, 0], True)


def changes(plan: Plan) -> tuple[list[dict[str, float]], list[str], int]:
    """How far the variables move in each epoch at most; the notes; how often the training step is traced at its end."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)

    def read() -> dict[str, Any]:
        return {v.path: np.array(v) for v in built.engine.model.variables}

    notes: list[str] = []
    states = [read()]

    def emit(event: Event) -> None:
        if isinstance(event, EpochEnded):
            states.append(read())
        elif isinstance(event, Note):
            notes.append(event.text)

    make_session(plan, built, emit).run()
    moved = [
        {path: float(np.abs(after[path] - before[path]).max()) for path in after}
        for before, after in itertools.pairwise(states)
    ]
    return moved, notes, getattr(built.engine, "traces", 0)


@pytest.mark.parametrize(
    "words",
    [
        (ONE,),
        pytest.param((ONE, "hardware.deterministic=false", "hardware.xla=true"), marks=pytest.mark.slow),
        pytest.param(("strategy=mirrored", TWO), marks=pytest.mark.slow),
        pytest.param((ONE, "training.engine=fit"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_each_epoch_moves_what_its_phase_trains(
    isolated: Callable[..., Any], plan: Callable[..., Any], words: tuple[str, ...]
) -> None:
    """An epoch is one step of Adam, whose first update of a weight is the learning rate, whenever that is."""
    one_step = (*words, "training.global_batch_size=80", "training.steps_per_loop=1", "model.batch_norm=true")
    phases = "model.freeze={0: ['*', '!outputs'], 1: ['dense_1', 'batch_normalization_1'], 3: []}"
    epochs = "training.epochs=4"
    moved, notes, traces = isolated(changes, plan(*chosen(*one_step, phases, epochs, "optimizer.learning_rate=0.01")))
    layers = [{path.rpartition("/")[0].rpartition("/")[2] for path, far in each.items() if far} for each in moved]
    first = {"dense", "batch_normalization"}
    every = {*first, "dense_1", "batch_normalization_1", "outputs"}
    assert layers == [{"outputs"}, {*first, "outputs"}, {*first, "outputs"}, every]  # the statistics, too
    kernels = [each[path] for each, layer in zip(moved, ("outputs", "dense", "dense", "dense_1"), strict=True)
               for path in each if path.endswith(f"{layer}/kernel")]  # fmt: skip
    np.testing.assert_allclose([kernels[0], kernels[1], kernels[3]], 0.01, rtol=0.02)
    assert notes[:2] == [
        "model.freeze: 618 parameters train from epoch 1 on", "model.freeze: 698 parameters train from epoch 3 on"
    ]  # fmt: skip
    assert traces <= 3  # training in its last phase, and two evaluations


def refuse(plans: list[Plan]) -> list[str]:
    import keras

    from scaleflow.worker.build import build_training

    messages = []
    for plan in plans:
        notes: list[Event] = []
        try:
            build_training(plan, notes.append)
        except ConfigError as refusal:
            messages.append(str(refusal))
        else:
            messages += [note.text for note in notes if isinstance(note, Note)]
        keras.backend.clear_session()
    return messages


def test_a_phase_that_cannot_be_is_refused_and_one_that_does_not_come_is_noted(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    own = "training.step={_target_: tests.training.steps.TwoRates}"
    phases = ("{0: [], 1: [head]}", "{0: ['*'], 1: []}", "{0: [], 1: ['*']}", "{0: [dense], 3: [], 7: []}")
    plans = [plan(*chosen(ONE, GLOBAL, f"model.freeze={each}")) for each in phases]
    unknown, nothing, later, note, step = isolated(refuse, [*plans, plan(*chosen(ONE, GLOBAL, own))])
    assert unknown.startswith("model.freeze={1: [head]}: head matches no layer with weights; the model has dense,")
    assert nothing == "model.freeze={0: [*]}: no layer is left to train; the model has dense, dense_1, outputs"
    assert later.startswith("model.freeze={1: [*]}: no layer is left to train")
    assert note == (
        "model.freeze: the run ends after 3 epochs, before what is to change at epoch 3, 7; the first epoch is 0"
    )
    assert step.startswith(
        "model.freeze by epochs with training.step._target_=tests.training.steps.TwoRates: it applies"
    )


#: (the words of a run in three commands, the last of which takes it to its end)
COMMANDS = {
    "multi_worker": ("strategy=multi_worker", "cluster.workers=2"),
    "mirrored": ("strategy=mirrored", TWO),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", COMMANDS)
def test_commands_resume_a_run_at_a_boundary_and_in_a_phase(
    command: Command, isolated: Callable[..., Any], way: str
) -> None:
    words = (*chosen(GLOBAL, *COMMANDS[way]), "training.epochs=3")
    whole = command(*words, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stderr
    assert ": 90 of 682 parameters train, from epoch 1 on 610, from epoch 2 on 682, " in whole.stdout
    assert command(*words, "training.max_steps=5", "hydra.run.dir=parts").returncode == 0
    for steps in (8, 15):
        ended = command("resume=parts", f"training.max_steps={steps}", PHASES)
        assert ended.returncode == 0, ended.stderr
    models = [command.folder / name / "model" / "model.keras" for name in ("whole", "parts")]
    for found, wanted in zip(*isolated(load_weights, models), strict=True):
        assert found.tobytes() == wanted.tobytes()
    assert command("resume=parts", "training.max_steps=16", "model.freeze=null").returncode == 2
