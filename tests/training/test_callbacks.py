"""Keras's callbacks, in both engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.training.test_session import BASE, SIZE

WATCH = "training.callbacks=[{_target_: tests.training.watch.Watch, last: 1}]"


def watched(plan: Any) -> tuple[list[Any], list[str], Any]:
    from scaleflow import training
    from scaleflow.worker.life import build
    from tests.training.driving import ignore
    from tests.training.watch import CALLED

    notes: list[str] = []
    built = build(plan, ignore)

    def session() -> Any:
        return training.Session(
            built.loop, plan.training, built.train, built.validation, None, started=0.0, agree=lambda s: (s, False),
            emit=lambda event, **fields: notes.append(fields["text"]) if event == "note" else None,
            callbacks=built.callbacks,
        )  # fmt: skip

    first = session()
    first.run()
    kept = first.snapshot()
    built.callbacks[0].epochs = 99
    session().restore(kept)
    return CALLED, notes, built.callbacks[0].epochs


@pytest.mark.parametrize("engine", ["loop", "fit"])
def test_a_callback_is_told_of_calls_and_epochs_sets_the_rate_and_ends_the_run(
    isolated: Callable[..., Any], plan: Callable[..., Any], engine: str
) -> None:
    loops = "training.steps_per_loop=5" if engine == "fit" else "training.steps_per_loop=4"
    called, notes, epochs = isolated(watched, plan(*BASE, SIZE, f"training.engine={engine}", loops, WATCH))
    names = ("accuracy", "loss")
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


def test_what_is_no_callback_is_refused(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    made = plan(*BASE, SIZE, "training.callbacks=[{_target_: keras.losses.MeanSquaredError}]")
    assert isolated(refusal_of, made) == (
        "training.callbacks: keras.losses.MeanSquaredError made a MeanSquaredError, expected a keras.callbacks.Callback"
    )


def refusal_of(plan: Any) -> str:
    from scaleflow.errors import Refusal
    from scaleflow.worker.life import build
    from tests.training.driving import ignore

    try:
        build(plan, ignore)
    except Refusal as refusal:
        return str(refusal)
    raise AssertionError("it was built")
