"""Keras's callbacks, in both engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.interfaces.events import EpochEnded, Event, Note
from tests.training.fake_engine import build_untested, ignore, make_session
from tests.training.test_session import BASE, SIZE

WATCH = "training.callbacks=[{_target_: tests.training.watch.Watch, last: 1}]"


def watched(plan: Any) -> tuple[list[Any], list[str], Any]:
    from tests.training.watch import CALLED

    notes: list[str] = []
    built = build_untested(plan)

    def emit(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    def session() -> Any:
        return make_session(plan, built, emit, callbacks=built.callbacks)

    first = session()
    first.run()
    kept = first.snapshot()
    built.callbacks[0].epochs = 99
    session().restore(kept)
    return CALLED, notes, built.callbacks[0].epochs


@pytest.mark.parametrize("engine", ["loop", pytest.param("fit", marks=pytest.mark.slow)])
def test_a_callback_is_told_of_calls_and_epochs_sets_the_rate_and_ends_the_run(
    isolated: Callable[..., Any], plan: Callable[..., Any], engine: str
) -> None:
    loops = "training.steps_per_loop=5" if engine == "fit" else "training.steps_per_loop=4"
    called, notes, epochs = isolated(watched, plan(*BASE, SIZE, f"training.engine={engine}", loops, WATCH))
    norm = () if engine == "fit" else ("gradient_norm",)
    names = ("accuracy", *norm, "learning_rate", "loss")
    both = (*names, "val_accuracy", "val_loss")
    first = [4] if engine == "fit" else [0, 4]
    assert [c for c in called if c[0] != "epoch"] == [
        ("train begins", 20, ()),
        *(("batch", place, names) for place in first),
        *(("batch", place, names) for place in ([4] if engine == "fit" else [3, 4])),
        ("train ends", 0.05, ()),
    ]
    assert [(place, set(both) <= set(logs)) for hook, place, logs in called if hook == "epoch"] == [
        (0, True),
        (1, True),
    ]
    assert notes == ["a callback ended the run after epoch 2"]
    assert epochs == 2


def frozen(plan: Any) -> tuple[str, str]:
    """What the run was ended with, and the last step that was taken."""
    from scaleflow.errors import ScaleflowError

    built = build_untested(plan)
    steps = [0]

    def emit(event: Event) -> None:
        steps.append(getattr(event, "step", 0))

    try:
        make_session(plan, built, emit, callbacks=built.callbacks).run()
        built.engine.read_state()
    except ScaleflowError as error:
        return f"{type(error).__name__}: {error}", str(steps[-1])
    return "", str(steps[-1])


@pytest.mark.parametrize(
    ("hook", "engine", "kind", "step"),
    [("set_model", "loop", "ConfigError", "0"), ("on_epoch_begin", "loop", "RunError", "0"),
     pytest.param("on_epoch_end", "fit", "RunError", "5", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_callback_that_changes_what_is_trained_ends_the_run_in_words(
    isolated: Callable[..., Any], plan: Callable[..., Any], hook: str, engine: str, kind: str, step: str
) -> None:
    freeze = f"training.callbacks=[{{_target_: tests.training.watch.Freeze, hook: {hook}, layer: outputs}}]"
    assert isolated(frozen, plan(*BASE, SIZE, f"training.engine={engine}", freeze)) == (
        f"{kind}: training.callbacks: Freeze has set outputs.trainable to false, which has no effect here; set "
        "model.freeze, also by epochs: {0: ['*', '!outputs'], 3: []}",
        step,
    )


def test_a_callback_may_freeze_the_model_when_training_is_over(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    freeze = "training.callbacks=[{_target_: tests.training.watch.Freeze, hook: on_train_end}]"
    assert isolated(frozen, plan(*BASE, SIZE, freeze, "training.max_steps=3")) == ("", "3")


#: The loss falls, so the first epoch is the best one of this.
RESTORE = (
    "training.callbacks=[{_target_: keras.callbacks.EarlyStopping, monitor: val_loss, mode: max, patience: 1, "
    "restore_best_weights: true}]"
)
FIRST_IS_BEST = (*BASE, SIZE, RESTORE, "dataset.validation=test", "training.epochs=5", "optimizer.ema=0.9")


def losses_of_run(plan: Any) -> list[float]:
    """The validation loss after each epoch, the loss of the test, and that of the model that would be exported."""
    from scaleflow.worker.build import build_training

    built, losses = build_training(plan, ignore), []

    def emit(event: Event) -> None:
        if isinstance(event, EpochEnded):
            losses.append(event.values["val/loss"])

    result = make_session(plan, built, emit, callbacks=built.callbacks).run()
    assert built.feeds.test is not None
    built.engine.finish_model()
    return [*losses, result.test["test/loss"], built.engine.evaluate(built.feeds.test)["loss"]]


@pytest.mark.parametrize("engine", ["loop", pytest.param("fit", marks=pytest.mark.slow)])
def test_restored_weights_are_tested_and_exported_with_an_average(
    isolated: Callable[..., Any], plan: Callable[..., Any], engine: str
) -> None:
    best, last, *ended = isolated(losses_of_run, plan(*FIRST_IS_BEST, f"training.engine={engine}"))
    assert last < best
    assert ended == pytest.approx([best, best], abs=1e-6)


@pytest.mark.slow
def test_restored_weights_are_tested_on_parameter_servers(command: Any) -> None:
    servers = ("strategy=parameter_server", "cluster.workers=1", "tracking=none")
    ended = command(*(word for word in FIRST_IS_BEST if "tracking" not in word), *servers)
    assert ended.returncode == 0, ended.stderr
    events = command.events()
    best, last = [event["values"]["val/loss"] for event in events if event["event"] == "epoch"]
    tested = next(event["values"]["test/loss"] for event in events if "test/loss" in event.get("values", {}))
    assert tested == pytest.approx(best, abs=1e-6) != last


def judged(named: Any, silent: Any, unclear: Any) -> tuple[int, int | None, list[Any], list[str]]:
    """A run that a callback's value ends: its epochs, the step of the best one, what the callback got; two errors."""
    from scaleflow.errors import ConfigError, RunError
    from scaleflow.training import Checkpointing
    from scaleflow.worker.build import build_training
    from tests.training.watch import CALLED

    errors = []
    built = build_training(named, ignore)
    checkpointing = Checkpointing(best=named.checkpoint.criterion)
    session = make_session(named, built, ignore, callbacks=built.callbacks, checkpointing=checkpointing)
    session.run()
    for other in (silent, unclear):
        try:
            built = build_training(other, ignore)
            make_session(other, built, ignore, callbacks=built.callbacks).run()
        except (ConfigError, RunError) as error:
            errors.append(str(error))
    return session.epoch, checkpointing.best.step, CALLED[: session.epoch], errors


def test_a_callbacks_value_ends_the_run_and_is_the_best(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    monitor = "{monitor: val/own, mode: max"
    plans = [
        plan(
            *(
                *BASE,
                SIZE,
                "training.epochs=4",
                f"training.callbacks=[{{_target_: tests.training.watch.Judge{judge}}}]",
            ),
            f"training.early_stopping={monitors}, patience: 1}}",
            *extra,
        )
        for judge, monitors, extra in (
            ("", monitor, [f"checkpoint.best={monitor}}}"]),
            (", name: null", monitor, []),
            ("", "{monitor: val/own", []),
        )
    ]
    epochs, best, outputs, errors = isolated(judged, *plans)
    assert epochs == 3
    assert best == 10
    assert outputs == [("outputs", epoch, (2, 10)) for epoch in range(3)]
    assert errors[0].startswith("val/own is monitored, but no callback has reported it in")
    assert "set training.early_stopping.mode=max or min" in errors[1]
