"""A run with callbacks that is stopped and resumed ends as a whole one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from tests.training.interrupted import differences

#: 80 examples make 5 steps and 3 calls an epoch.
BASE = (
    *("hardware=cpu", "tracking=none", "dataset.limit=100", "dataset.validation=0.2", "model.units=4"),
    *("training.global_batch_size=16", "training.steps_per_loop=2", "training.epochs=4"),
)


def callbacks(*written: str) -> str:
    return f"training.callbacks=[{','.join(written)}]"


def of_keras(name: str, *options: str) -> str:
    return "{" + ", ".join([f"_target_: keras.callbacks.{name}", *options]) + "}"


TUNER = "{_target_: tests.training.kept.Tuner}"

#: The accuracy never gains a half, so the rate is lowered after each epoch but the first.
PLATEAU = of_keras("ReduceLROnPlateau", "monitor: val_accuracy", "patience: 1", "min_delta: 0.5", "factor: 0.5")

#: The loss falls, so the first epoch is the best.
RESTORE = of_keras("EarlyStopping", "mode: max", "patience: 2", "restore_best_weights: true")

RATES = "{_target_: tests.training.kept.decay, _partial_: true}"


@pytest.mark.parametrize(
    ("written", "more", "stops"),
    [
        ((PLATEAU, RESTORE, TUNER), (), [2, 6]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ((of_keras("SwapEMAWeights", "swap_on_epoch: true"),), ("optimizer.ema=0.9",), [4, 6]),
                ((of_keras("LearningRateScheduler", f"schedule: {RATES}"),), (), [2, 3]),
                ((*(of_keras(name) for name in ("TerminateOnNaN", "ProgbarLogger", "History")), TUNER), (), [2, 6]),
                ((PLATEAU, RESTORE, TUNER), ("training.engine=fit", "training.steps_per_loop=1"), [2, 5, 12]),
                ((PLATEAU, RESTORE, TUNER), ("strategy=mirrored", "hardware.logical_devices=2"), [2, 6]),
            )
        ),
    ],
)
def test_a_resumed_run_ends_as_a_whole_one(
    isolated: Callable[..., Any], plan: Callable[..., Any], written: tuple[str, ...], more: tuple[str, ...], stops: Any
) -> None:
    assert isolated(differences, plan(*BASE, callbacks(*written), *more), stops)[0] == []


def watched_by(callback: Any, schedule: Any = 0.1, step_has_optimizers: bool = False) -> Any:
    """The `Callbacks` of one callback, with a small engine."""
    import keras

    from scaleflow.training.callbacks import Callbacks

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    engine = SimpleNamespace(
        gather_model=lambda: model,
        get_weights=model.get_weights,
        set_weights=model.set_weights,
        variables_by_name=lambda: {"model": [variable.value for variable in model.variables]},
        optimizer=None if step_has_optimizers else keras.optimizers.SGD(schedule),
        objective=SimpleNamespace(modes={"loss": "min", "accuracy": "max"}),
    )
    return Callbacks([callback], engine, epochs=3, steps=1)  # type: ignore[arg-type]


def refused(callback: Any, **options: Any) -> str:
    try:
        watched_by(callback, **options)
    except ConfigError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    import keras

    plateau = keras.callbacks.ReduceLROnPlateau
    decayed = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    return [
        refused(keras.callbacks.BackupAndRestore("folder")),
        refused(plateau(), schedule=decayed),
        refused(plateau(), step_has_optimizers=True),
        refused(keras.callbacks.EarlyStopping("val_gap")),
        refused(keras.callbacks.EarlyStopping("val_accuracy")),
    ]


def test_a_callback_of_keras_that_cannot_do_its_work_is_refused(isolated: Callable[..., Any]) -> None:
    assert isolated(refusals) == [
        "training.callbacks: BackupAndRestore: scaleflow's checkpoints do its work; remove it, and continue a run with "
        "resume=RUN",
        "training.callbacks: ReduceLROnPlateau sets the learning rate, which here follows from the step; use "
        "optimizer.schedule=constant without a warm-up, or remove the callback",
        "training.callbacks: ReduceLROnPlateau: the training step has its own optimizers; set their rates",
        "training.callbacks: EarlyStopping has monitor=val_gap, and it is not known whether larger values are better; "
        "add mode: max or mode: min",
        "",
    ]


def held() -> tuple[list[str], list[str], list[str]]:
    """What is not held before the first step, and after an epoch; the attributes that are."""
    from tests.training.kept import Holder

    callbacks = watched_by(Holder())
    before = callbacks.list_doubts()
    callbacks.call_hook("epoch_end", 0, {})
    state, _ = callbacks.read_state()
    return before, callbacks.list_doubts(), sorted(state["callbacks"][0]["attributes"])


def test_what_no_checkpoint_holds_is_named(isolated: Callable[..., Any]) -> None:
    assert isolated(held) == (["Holder.smoother (object)"], ["Holder.smoother (object)", "Holder.later (object)"], [])


def lines_of(path: Path) -> list[str]:
    """The epochs in the file of a CSVLogger, in a run that is resumed after one of two."""
    import keras

    first = watched_by(keras.callbacks.CSVLogger(path))
    first.call_hook("train_begin")
    first.call_hook("epoch_end", 0, {"loss": 2.0})
    first.call_hook("train_end")
    second = watched_by(keras.callbacks.CSVLogger(path))
    second.restore(*first.read_state())
    second.call_hook("train_begin")
    second.restore(*first.read_state())
    second.call_hook("epoch_end", 1, {"loss": 1.0})
    second.call_hook("train_end")
    return [line.partition(",")[0] for line in path.read_text().splitlines()]


def test_a_csv_logger_keeps_the_lines_of_the_epochs_before(isolated: Callable[..., Any], tmp_path: Path) -> None:
    assert isolated(lines_of, tmp_path / "log.csv") == ["epoch", "0", "1"]


def list_of_a_class() -> tuple[list[int], list[int], list[str]]:
    """What a callback has seen that keeps it in a list of its class, resumed in a new process, and its doubts."""
    import keras

    class Seen(keras.callbacks.Callback):  # type: ignore[misc]
        seen: list[int] = []  # noqa: RUF012  # users write this

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seen.append(epoch)

    first = watched_by(Seen())
    first.call_hook("epoch_end", 0, {})
    state = first.read_state()
    Seen.seen = []
    callback = Seen()
    second = watched_by(callback)
    before = list(callback.seen)
    second.restore(*state)
    second.call_hook("epoch_end", 1, {})
    return before, callback.seen, second.list_doubts()


def test_a_list_of_a_callbacks_class_is_kept(isolated: Callable[..., Any]) -> None:
    assert isolated(list_of_a_class) == ([], [0, 1], [])
