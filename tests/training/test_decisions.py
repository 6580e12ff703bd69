"""`training.on_nan=rollback`: back to the last good checkpoint, with a lower rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import NotFinite, RunError
from scaleflow.interfaces import Plan, Snapshot
from tests.training.fake_engine import ignore, run_apart, to_pair

#: 80 examples make 5 steps an epoch.
BASE = (
    "hardware=cpu", "hardware.deterministic=true", "tracking=none", "dataset.limit=100", "dataset.validation=0.2",
    "model.units=8", "training.epochs=3", "training.steps_per_loop=2", "training.global_batch_size=16",
    "training.on_nan=rollback",
)  # fmt: skip
ONE = ("strategy=one_device",)
TWO = ("strategy=mirrored", "hardware.logical_devices=2")
COSINE = "optimizer.schedule=cosine"
#: With such a rate the second loss is not finite; with such a factor after it, all is well.
WILD = ("optimizer=sgd", "optimizer.learning_rate=1e20", "training.nan_rate_factor=1e-21")


@dataclass(frozen=True)
class Course:
    """How a run went: its points, the notes, the tags of rollbacks, the state at the end, and what ended it."""

    points: list[tuple[int, str, float]]
    notes: list[str]
    rollbacks: list[tuple[int, str]]
    state: dict[str, np.ndarray[Any, Any]]
    saved: list[int]
    host: dict[str, Any]
    error: str


def course(
    plan: Plan,
    folder: str,
    *,
    bad_after: int | None = None,
    broken_after: int | None = None,
    factor: float = 1.0,
    start: str | None = None,
    stop: int = 0,
) -> Course:
    """Runs a plan.

    Args:
        plan: what to do.
        folder: of the checkpoints.
        bad_after: the loss of the step after so many calls is reported as NaN, once.
        broken_after: so many calls, and the weights are Inf, once.
        factor: what the rate is multiplied by where the run goes on.
        start: the folder of the checkpoints that it goes on from.
        stop: asked to stop after so many calls.
    """
    from scaleflow import checkpoint, training
    from scaleflow.runs.event_log import DeduplicatingEmitter
    from scaleflow.worker.build import build_training

    events: list[tuple[str, dict[str, Any]]] = []
    calls = [0]

    class CallCounter(training.WorkerSync):
        """Stops after some calls of the engine; `sync(0.0)` is a barrier, not the end of a call."""

        def __call__(self, seconds: float) -> tuple[float, bool]:
            calls[0] += seconds > 0
            return seconds, calls[0] == stop

    class WaitingManager(checkpoint.CheckpointManager):
        """Writes each checkpoint: where a run goes back to would depend on the disk otherwise."""

        def save(self, snapshot: Snapshot, is_best: bool = False) -> None:
            super().save(snapshot, is_best)
            self.wait()

    built = build_training(plan, ignore)
    go_bad_once(built.engine, bad_after)
    break_once(built.engine, broken_after)
    emit = DeduplicatingEmitter(Path(folder, "events.jsonl"), lambda event: events.append(to_pair(event)))
    keeper = WaitingManager(plan.checkpoint, folder, emit)
    session = training.Session(
        built.engine,
        plan.training,
        built.feeds,
        training.MetricsLog(built.engine, emit),
        CallCounter(built.runtime.strategy, 1, bool),
        checkpointing=training.Checkpointing(keeper),
    )
    if start is not None:
        session.restore(checkpoint.CheckpointManager(plan.checkpoint, start, ignore).load_newest())
        if factor != 1.0:
            built.engine.set_rate_factor(factor, 1.0)
    error = ""
    try:
        session.run()
    except RunError as raised:
        error = f"{type(raised).__name__}: {raised}"
    host = dict(session.snapshot().host) if not error else {}
    return Course(
        [(f["step"], k, v) for n, f in events if n == "metrics" for k, v in f["values"].items() if "perf/" not in k],
        [fields["text"] for name, fields in events if name == "note"],
        [(fields["number"], fields["reason"]) for name, fields in events if name == "rollback"],
        dict(built.engine.read_state()),
        [fields["step"] for name, fields in events if name == "checkpoint"],
        host,
        error,
    )


def courses(folder: Path, *runs: tuple[Plan, str, dict[str, Any]]) -> list[Course]:
    """One run after another: of each its plan, the name of its folder, and more arguments of `course`."""
    return run_apart(lambda plan, name, more: course(plan, str(folder / name), **more), runs)


def go_bad_once(loop: Any, calls: int | None) -> None:
    take, taken = loop._take, [0]

    def fake(feed: Any, opened: Any, epoch: int, first: int, steps: int) -> Any:
        sums, bad = take(feed, opened, epoch, first, steps)
        taken[0] += 1
        return (sums, first) if taken[0] - 1 == calls else (sums, bad)

    loop._take = fake


def break_once(loop: Any, calls: int | None) -> None:
    take, taken = loop._take, [0]

    def fake(*arguments: Any, **steps: int) -> Any:
        result = take(*arguments, **steps)
        taken[0] += 1
        if taken[0] == calls:
            weights = loop.model.trainable_variables[-1]  # of the last layer, so that the loss shows it
            weights.assign(weights * np.inf)
        return result

    loop._take = fake


@pytest.mark.parametrize("words", [(*ONE, "optimizer=sgd"), (*TWO, COSINE)], ids=["constant", "cosine mirrored"])
def test_it_goes_on_from_the_checkpoint_with_the_same_data_and_half_the_rate(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, words: tuple[str, ...]
) -> None:
    made = plan(*BASE, *words)
    # Calls end at 1, 3, 5 | 7, 9, 10: the one after six is step 11, whose last good checkpoint is that at step 5.
    found, stopped, wanted = isolated(
        courses,
        tmp_path,
        (made, "whole", {"bad_after": 6}),
        (made, "part", {"stop": 3}),
        (made, "rest", {"start": str(tmp_path / "part"), "factor": 0.5}),
    )
    why = "the loss is not finite at step 11; going back to the checkpoint at step 5, with 0.5 x the learning rate"
    assert found.rollbacks == [(1, why)]
    assert f"{why} (1 of at most 3)" in found.notes
    assert found.host["rollbacks"] == 1
    assert found.host["rate_factor"] == 0.5
    assert found.error == ""

    assert stopped.host["rate_factor"] == 1.0
    for name, value in wanted.state.items():
        assert found.state[name].tobytes() == value.tobytes(), name
    after = [point for point in found.points if point[0] > 10 and "rollbacks" not in point[1]]
    assert after
    assert after == [point for point in wanted.points if point[0] > 10]

    steps = [step for step, key, _ in found.points if key == "train/loss"]
    assert steps == sorted(set(steps))  # no point comes twice
    assert steps[-1] == 15
    assert {1, 3, 5, 7, 9, 10} < set(steps)
    assert [step for step, key, _ in found.points if key == "val/loss"] == [5, 10, 15]
    assert {value for step, key, value in found.points if key == "train/rollbacks"} == {1.0}
    # There are two at step 10, the second of the lower rate. It replaces the first if that is not written yet.
    assert list(dict.fromkeys(found.saved)) == [0, 5, 10, 15]


@pytest.mark.parametrize(
    "words",
    [ONE, (*TWO, COSINE), ("strategy=pipeline", "hardware.logical_devices=2", "model.units=[8,8]", COSINE)],
    ids=["one_device", "mirrored cosine", "pipeline cosine"],
)
def test_a_rate_that_was_too_high_ends_well(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, words: tuple[str, ...]
) -> None:
    base = [word for word in BASE if word.split("=")[0] not in [other.split("=")[0] for other in words]]
    found = isolated(course, plan(*base, *WILD, *words), str(tmp_path))
    assert [number for number, _ in found.rollbacks] == [1]
    assert found.error == ""
    assert all(np.isfinite(value).all() for value in found.state.values())
    assert max(value for step, key, value in found.points if key == "val/loss") < 2.5


def test_it_is_not_tried_for_ever(isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path) -> None:
    words = (*WILD[:2], "training.nan_rate_factor=0.9", "training.nan_rollbacks=2")
    found = isolated(course, plan(*BASE, *ONE, *words), str(tmp_path))
    assert [number for number, _ in found.rollbacks] == [1, 2]
    assert found.error.startswith(
        "RunError: the loss is not finite at step 2, after training.nan_rollbacks=2 rollbacks; try a lower"
    )


@pytest.mark.slow
def test_a_run_that_went_back_and_is_resumed_ends_as_one_that_was_not_stopped(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    made = plan(*BASE, *ONE, COSINE)
    whole, _, rest = isolated(
        courses,
        tmp_path,
        (made, "whole", {"bad_after": 6}),
        (made, "part", {"bad_after": 6, "stop": 10}),
        (made, "part", {"start": str(tmp_path / "part")}),
    )
    assert rest.host["rollbacks"] == 1
    for name, value in whole.state.items():
        assert rest.state[name].tobytes() == value.tobytes(), name


def test_weights_that_are_not_finite_are_not_saved(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    """The step whose loss is still finite makes them so, and is the last before a checkpoint."""
    stops, goes_back = (plan(*BASE, *ONE, f"training.on_nan={choice}") for choice in ("stop", "rollback"))
    broken = {"broken_after": 6}
    stopped, found = isolated(courses, tmp_path, (stops, "stop", broken), (goes_back, "back", broken))
    assert stopped.error.startswith("NotFinite: the weights are not finite at step 10; try a lower")
    assert stopped.saved[-1] == 5
    assert [why.partition(",")[0] for _, why in found.rollbacks] == [
        "the weights are not finite at step 10; going back to the checkpoint at step 5"
    ]
    assert found.error == ""
    validated = {step: value for step, key, value in found.points if key == "val/loss"}
    assert list(validated) == [5, 10, 15]
    assert np.isfinite(list(validated.values())).all()  # the broken weights were not evaluated
    assert all(np.isfinite(value).all() for value in found.state.values())


def test_the_first_loss_says_that_no_rate_is_to_blame() -> None:
    assert "look for NaN in the dataset's inputs" in str(NotFinite(1))
    assert NotFinite(1).last_cause == 0
    assert "training.on_nan=rollback" in str(NotFinite(7))


def test_early_stopping_says_that_a_value_is_no_number() -> None:
    from scaleflow.interfaces import EarlyStopping
    from scaleflow.training.decisions import Patience

    patience = Patience(EarlyStopping(monitor="val/loss", patience=2), {"loss": "min"})
    values = {"val/loss": float("nan"), "val/not_finite": 24.0}
    assert [patience.is_over(values, epoch) for epoch in (1, 2)] == [False, True]
    assert patience.reason == (
        "val/loss is not a number, and has not improved for 2 epochs: the model's outputs for 24 examples are NaN or "
        "infinite"
    )
