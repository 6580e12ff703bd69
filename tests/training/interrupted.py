"""Whole runs, and the same runs stopped and resumed, in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from scaleflow.interfaces import Plan, Snapshot
from scaleflow.interfaces.events import EpochEnded, MetricsLogged, Note
from tests.training.fake_engine import build_untested, make_session, run_apart


class LastCheckpoint:
    """Keeps the last snapshot of a run, as a checkpoint gives it back."""

    snapshot: Snapshot | None = None

    def steps_left(self, step: int) -> int | None:
        return None

    def is_due(self, *_: Any) -> bool:
        return False

    is_due_after = is_due

    def save(self, snapshot: Snapshot, is_best: bool = False) -> None:
        self.snapshot = Snapshot(snapshot.step, snapshot.tensors, json.loads(json.dumps(snapshot.host)))

    def wait(self) -> None: ...


def train(plan: Plan, stops: Sequence[int] = ()) -> dict[str, Any]:
    """What a run ends with that is stopped after some of its calls, and goes on in an engine of its own each time.

    If it is stopped at all, it is resumed after its end, too.

    Returns its variables by name, `epochs`: the values of each epoch, `test` and `notes`.
    """
    from scaleflow import training

    found: dict[str, Any] = {"epochs": {}, "notes": []}
    checkpoint, calls = LastCheckpoint(), [0]

    def emit(event: Any) -> None:
        if isinstance(event, MetricsLogged) and "train/loss" in event.values:
            calls[0] += 1
        if isinstance(event, EpochEnded):
            found["epochs"][event.epoch] = {k: v for k, v in event.values.items() if not k.startswith("perf/")}
        if isinstance(event, Note):
            found["notes"].append(event.text)

    def run_until(stop: int | None) -> None:
        built = build_untested(plan)
        session = make_session(
            plan,
            built,
            emit,
            lambda: stop is not None and calls[0] + 1 >= stop,
            callbacks=built.callbacks,
            checkpointing=training.Checkpointing(checkpoint),  # type: ignore[arg-type]
        )
        if checkpoint.snapshot is not None:
            session.restore(checkpoint.snapshot)
        assert session.run().stopped == (stop is not None)
        found.update(built.engine.read_state())

    run_apart(run_until, [(stop,) for stop in (*stops, *([None] if stops else []), None)])
    return found


def differences(plan: Plan, stops: Sequence[int]) -> tuple[list[str], list[str]]:
    """What differs between a whole run and one that is stopped after some calls, and the notes of the latter."""
    whole, resumed = run_apart(train, [(plan,), (plan, stops)])
    # The sums of an epoch that is over are forgotten.
    names = [name for name in whole if name != "notes" and not name.startswith("training/")]
    return [name for name in names if not is_same(whole[name], resumed[name])], resumed["notes"]


def is_same(one: Any, other: Any) -> bool:
    return bool(one == other if isinstance(one, dict) else one.tobytes() == other.tobytes())
