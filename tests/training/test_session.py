"""The host's half: epochs, events, early stopping."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.interfaces import BY_SIZE, Batching, EarlyStopping, Objective, Training, parse_duration
from scaleflow.worker.runtime import StartupTimer
from tests.training.fake_engine import ignore, make_session, to_pair

Event = tuple[str, dict[str, Any]]

BASE = ("hardware=cpu", "tracking=none", "dataset.limit=100", "dataset.validation=0.2", "model.units=4")
SIZE = "training.global_batch_size=16"  # 80 examples make 5 steps


def fitted(plan: Any, stop_after: int | None = None) -> tuple[list[Event], Any]:
    """The events of a run, and how it went; told to stop after some calls."""
    from scaleflow.worker.build import build_training

    events: list[Event] = []
    session = make_session(
        plan,
        build_training(plan, ignore),
        lambda event: events.append(to_pair(event)),
        should_stop=lambda: calls(events) + 1 == stop_after,
        startup_timer=StartupTimer(time.time()),
    )
    return events, session.run()


def calls(events: list[Event]) -> int:
    return len(training_steps(events))


def training_steps(events: list[Event]) -> list[int]:
    return [fields["step"] for name, fields in events if name == "metrics" and "train/loss" in fields["values"]]


def steps_with(events: list[Event], key: str) -> list[int]:
    return [fields["step"] for name, fields in events if name == "metrics" and key in fields["values"]]


def epochs(events: list[Event]) -> list[tuple[int, int]]:
    return [(fields["epoch"], fields["step"]) for name, fields in events if name == "epoch"]


def test_a_run_tells_one_event_a_call_and_one_an_epoch(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    events, result = isolated(fitted, plan(*BASE, SIZE, "training.epochs=2", "training.steps_per_loop=2"))
    assert (result.steps, result.stopped) == (10, False)
    assert training_steps(events) == [1, 3, 5, 7, 9, 10]
    assert steps_with(events, "val/loss") == steps_with(events, "val/accuracy") == [5, 10]
    assert steps_with(events, "test/loss") == [10]
    assert steps_with(events, "perf/seconds_to_first_step") == [1]
    assert steps_with(events, "perf/examples_per_second") == steps_with(events, "perf/step_ms") == [5, 10]
    assert epochs(events) == [(1, 5), (2, 10)]
    first, second = (fields for name, fields in events if name == "epoch")
    assert (first["epochs"], second["epochs"]) == (2, 2)
    names = {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "perf/examples_per_second", "perf/step_ms"}
    names |= {"val/balanced_accuracy", "perf/peak_host_mb", "perf/step_ms_p50", "perf/step_ms_p95"}
    names |= {"train/learning_rate", "train/gradient_norm"}
    assert set(first["values"]) == names
    assert result.test == events[-1][1]["values"]  # the last event holds the test's values


def many_fitted(*plans: Any) -> list[tuple[list[Event], Any]]:
    return [fitted(plan) for plan in plans]


def test_a_run_is_as_long_as_it_was_asked_to_be(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    cases = [
        (("training.epochs=5", "training.max_steps=7"), 7, [(1, 5), (2, 7)]),
        (("training.epochs=3", "training.steps_per_epoch=2", "training.max_steps=99"), 6, [(1, 2), (2, 4), (3, 6)]),
    ]
    found = isolated(many_fitted, *(plan(*BASE, SIZE, *limits) for limits, *_ in cases))
    for (limits, steps, ends), (events, result) in zip(cases, found, strict=True):
        assert result.steps == steps, limits
        assert epochs(events) == ends, limits
        assert training_steps(events)[-1] == steps, limits


def test_a_run_ends_after_the_call_in_which_it_is_told_to_stop(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    events, result = isolated(fitted, plan(*BASE, SIZE, "training.steps_per_loop=1"), 3)
    assert (result.steps, result.stopped, result.test) == (3, True, {})
    assert training_steps(events) == [1, 2, 3]
    assert not epochs(events)


def test_float16_reports_its_loss_scale(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    chosen = (*BASE, SIZE, "training.epochs=1", "training.steps_per_loop=2")
    scaled, _ = isolated(fitted, plan(*chosen, "precision=mixed_float16"))
    assert steps_with(scaled, "train/loss_scale") == [1, 3, 5]
    assert all(f["values"].get("train/loss_scale", 1) >= 1 for name, f in scaled if name == "metrics")


def test_training_stops_early(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    chosen = plan(
        *BASE, SIZE, "training.epochs=9", "optimizer=sgd", "optimizer.learning_rate=1e-12",
        "training.early_stopping={monitor: val/accuracy, patience: 2}",
    )  # fmt: skip
    events, result = isolated(fitted, chosen)
    assert epochs(events) == [(1, 5), (2, 10), (3, 15)]  # the first is the best, two do not improve on it
    assert result.steps == 15
    assert steps_with(events, "test/loss") == [15]
    notes = [fields["text"] for name, fields in events if name == "note"]
    assert notes == ["stopped early after epoch 3: val/accuracy has not improved for 2 epochs"]


EACH = ("training.epochs=3", "training.steps_per_loop=1")


def validate_often(plans: list[Any]) -> list[tuple[list[Event], Any]]:
    return [fitted(each) for each in plans]


@pytest.mark.slow
def test_validation_may_come_more_or_less_often_than_epochs_end(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    stops = "training.early_stopping={metric: val/loss, patience: 2, min_delta: 9}"
    often = (*BASE, SIZE, "training.epochs=3", "training.validate_every=4")
    cases = [
        often,
        (*often, "training.validate_examples=7", stops),
        (*BASE, SIZE, *EACH, "training.validate_every=2 epochs", "training.engine=fit"),
        (*BASE, SIZE, *EACH, "training.validate_every=5"),
    ]
    found = isolated(validate_often, [plan(*words) for words in cases])
    assert [steps_with(events, "val/loss") for events, _ in found] == [
        [4, 8, 12, 15],
        [4, 8, 12],
        [10, 15],
        [5, 10, 15],
    ]
    assert [steps_with(events, "test/loss") for events, _ in found] == [[15], [12], [15], [15]]
    assert epochs(found[1][0]) == [(1, 5), (2, 10)]
    notes = [fields["text"] for name, fields in found[1][0] if name == "note"]
    assert notes == ["stopped early after step 12: val/loss has not improved for 2 validations"]


def stop_and_resume(plan: Any, stop_after: int) -> bool:
    """Whether a run that stops after so many calls, and goes on in another session, equals the whole one."""
    from scaleflow.worker.build import build_training

    def make(events: list[Event], after: int | None = None) -> Any:
        built = build_training(plan, ignore)
        return make_session(
            plan, built, lambda event: events.append(to_pair(event)), should_stop=lambda: calls(events) + 1 == after
        )

    whole: list[Event] = []
    parts: list[Event] = []
    one, first, rest = make(whole), make(parts, stop_after), make(parts)
    one.run()
    assert first.run().stopped
    rest.restore(first.snapshot())
    rest.run()
    for name in ("val/loss", "val/accuracy"):
        wanted, found = (
            [fields["values"][name] for kind, fields in events if kind == "metrics" and name in fields["values"]]
            for events in (whole, parts)
        )
        assert wanted == found
    ends = one.snapshot(), rest.snapshot()
    kept = [{key: each.host[key] for key in ("patience", "best", "judged", "is_over")} for each in ends]
    same = all((ends[0].tensors[name] == ends[1].tensors[name]).all() for name in ends[0].tensors)
    return same and kept[0] == kept[1]


def resume_at_each(plan: Any) -> list[bool]:
    return [stop_and_resume(plan, calls) for calls in (4, 6)]


@pytest.mark.slow
def test_validation_within_epochs_resumes_bit_for_bit(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    words = (*EACH, "training.validate_every=4", "training.early_stopping={metric: val/loss, patience: 2}")
    schedule = ("optimizer.schedule=one_cycle", "optimizer.no_decay=[bias]", "optimizer=adamw")
    assert isolated(resume_at_each, plan(*BASE, SIZE, *words, *schedule)) == [True, True]  # at a validation, and after


def follow_plateaus(cases: list[tuple[Any, Any, int]]) -> list[tuple[list[tuple[int, float]], list[str], bool]]:
    """The rate of the last step of each epoch, and the notes, of a first run; whether a second one equals one that
    stops after so many calls.
    """
    found = []
    for plan, shorter, calls in cases:
        events, _ = fitted(plan)
        values = [(fields["step"], fields.get("values", {})) for name, fields in events if name == "metrics"]
        rates = {step: each["train/learning_rate"] for step, each in values if "train/loss" in each and step % 5 == 0}
        notes = [fields["text"] for name, fields in events if name == "note"]
        found.append((list(rates.items()), notes, stop_and_resume(shorter, calls)))
    return found


def test_the_rate_falls_on_a_plateau_and_resumes_bit_for_bit(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    never = "optimizer.plateau={metric: val/accuracy, patience: 2, min_delta: 9}"  # the first value stays the best
    words = (*BASE, SIZE, "training.steps_per_loop=1", "optimizer.schedule=plateau", never, "optimizer.step_factor=0.5")
    more = ("training.epochs=8", "optimizer.learning_rate=0.01", "optimizer.final_rate=0.2")
    cases = ("optimizer.warmup_steps=0", 12), ("optimizer.warmup_steps=3", 16)  # before the rate falls, and after
    runs = [(plan(*words, *more, case), plan(*words, "training.epochs=4", case), calls) for case, calls in cases]
    factors = [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.2]  # patience ends in epochs 3, 5 and 7; 0.125 is below the least
    for rates, notes, is_same in isolated(follow_plateaus, runs):
        assert rates == [(5 * n + 5, pytest.approx(0.01 * factor)) for n, factor in enumerate(factors)]
        assert notes[0] == "val/accuracy has not improved for 2 validations; from step 15 on 0.5 x the learning rate"
        assert len(notes) == 3
        assert is_same


def end_in_time(plans: list[Any]) -> tuple[list[Event], int, bool]:
    """The events and steps of a run out of time after a call; whether its resumption equals a run without a limit."""
    from scaleflow.worker.build import build_training

    events: list[Event] = []
    cut, rest, whole = (
        make_session(plan, build_training(plan, ignore), lambda event: events.append(to_pair(event)))
        for plan in (plans[0], plans[1], plans[1])
    )
    result = cut.run()
    of_cut = list(events)
    rest.restore(cut.snapshot())
    assert rest.run().steps == whole.run().steps == 15
    wanted, found = whole.snapshot().tensors, rest.snapshot().tensors
    return of_cut, result.steps, all((wanted[name] == found[name]).all() for name in wanted)


def test_a_run_out_of_time_is_validated_and_tested_and_can_go_on(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    words = (*BASE, SIZE, "training.epochs=3", "training.steps_per_loop=2")
    events, steps, is_same = isolated(end_in_time, [plan(*words, "training.max_seconds=1s"), plan(*words)])
    assert steps == 1
    assert steps_with(events, "val/loss") == steps_with(events, "test/loss") == [1]
    assert epochs(events) == [(1, 1)]
    notes = [fields["text"] for name, fields in events if name == "note"]
    assert notes == ["training.max_seconds=1s: training ends in time, after step 1 of 15"]
    assert is_same


def limit_time() -> list[bool]:
    """Whether training of at most 100 s is over, at times since the command began."""
    from scaleflow.training.decisions import TimeLimit

    now = SimpleNamespace(seconds=10.0)
    sync: Any = SimpleNamespace(any=bool, read_seconds=lambda: now.seconds)
    limit, found = TimeLimit(100.0, sync, 3.0), []
    for now.seconds, seconds in ((10.0, 0.0), (89.0, 0.0), (91.0, 0.0), (55.0, 5.0), (76.0, 5.0), (51.0, 90.0)):
        limit._validation = seconds
        found.append(limit.is_over())
    return found


def test_time_is_kept_for_what_follows_training(isolated: Callable[..., Any]) -> None:
    assert isolated(limit_time) == [False, False, True, False, True, True]
    limits = [parse_duration(each) for each in (None, 90.0, "10m", "2h", "1.5 h", "90s", "soon")]
    assert limits == [None, 90.0, 600.0, 7200.0, 5400.0, 90.0, 0.0]


# Parts of it ---------------------------------------------------------------------------------


def patient(cases: list[tuple[EarlyStopping | None, list[float]]]) -> list[int | None]:
    """After how many values each is over."""
    from scaleflow.training.decisions import Patience

    found = []
    for options, values in cases:
        patience = Patience(options, {"loss": "min", "mae": "min", "accuracy": "max"})
        key = options.monitor if options else "val/loss"
        over = [patience.is_over({key: value}, epoch) for epoch, value in enumerate(values, 1)]
        found.append(over.index(True) + 1 if True in over else None)
    return found


def test_patience_counts_epochs_without_a_better_value(isolated: Callable[..., Any]) -> None:
    falling, bumpy = [5.0, 4.0, 3.0, 2.0], [3.0, 4.0, 2.0, 2.0, 2.5]
    cases: list[tuple[EarlyStopping | None, list[float], int | None]] = [
        (None, [1.0] * 9, None),
        (EarlyStopping("val/loss", 1), falling, None),
        (EarlyStopping("val/loss", 1), bumpy, 2),
        (EarlyStopping("val/loss", 2), bumpy, 5),
        (EarlyStopping("val/loss", 3), bumpy, None),
        (EarlyStopping("val/accuracy", 1), falling, 2),
        (EarlyStopping("val/accuracy", 1), [0.1, 0.2, 0.3], None),
        (EarlyStopping("val/mae", 1), falling, None),
        (EarlyStopping("val/loss", 1, "max"), falling, 2),
        (EarlyStopping("val/accuracy", 1, "min"), falling, None),
        (EarlyStopping("val/loss", 1, min_delta=1.0), falling, 2),
        (EarlyStopping("val/loss", 1, min_delta=0.9), falling, None),
        (EarlyStopping("val/accuracy", 2, min_delta=0.15), [0.1, 0.2, 0.3, 0.4], None),
        (EarlyStopping("val/loss", 1, start_epoch=2), [1.0, 2.0, 3.0, 4.0], 4),
        (EarlyStopping("val/loss", 9, threshold=2.0), bumpy, 3),
        (EarlyStopping("val/accuracy", 9, threshold=0.3), [0.1, 0.2, 0.3], 3),
    ]
    found = isolated(patient, [(options, values) for options, values, _ in cases])
    assert found == [wanted for _, _, wanted in cases]


def lengths() -> list[tuple[int, int]]:
    """(epochs, steps) of runs that continue after 5 epochs of 100 steps with epochs of 50 or 200 steps."""
    from types import SimpleNamespace

    from scaleflow.interfaces import Batching, Training
    from scaleflow.training import compute_length

    found = []
    for options in (Training(epochs=10), Training(epochs=10, max_steps=800)):
        for per_epoch in (50, 200):
            feed: Any = SimpleNamespace(batching=Batching(1, 1, 1), examples=per_epoch)
            length = compute_length(options, feed, surplus=500 - 5 * per_epoch)
            found.append((length.epochs, length.total))
    return found


def test_a_run_whose_epochs_change_keeps_the_steps_that_it_has_taken(isolated: Callable[..., Any]) -> None:
    assert isolated(lengths) == [(10, 750), (10, 1500), (10, 750), (7, 800)]


def paces() -> dict[str, list[int]]:
    """The steps of each call, a call's time being so many seconds a step."""
    from scaleflow.training.calls import StepsPerLoop

    found = {}
    for name, setting, a_step, is_resumed in (
        ("fixed", 7, 0.1, False),
        ("fixed, resumed", 7, 0.1, True),
        ("slow", "auto", 1.0, False),
        ("fast", "auto", 1e-4, False),
        ("mid", "auto", 0.01, True),
    ):
        pace = StepsPerLoop(setting)  # type: ignore[arg-type]
        taken = []
        for call in range(5):
            steps = pace.choose(is_resumed)
            taken.append(steps)
            pace.record_call(steps, steps * a_step + (5.0 if call == 0 else 0.0))
        found[name] = taken
    return found


def test_a_call_is_made_to_take_half_a_second(isolated: Callable[..., Any]) -> None:
    found = isolated(paces)
    assert found["fixed"] == [1, 7, 7, 7, 7]
    assert found["fixed, resumed"] == [7] * 5
    assert found["slow"] == [1, 8, 1, 1, 1]
    assert found["mid"] == [1, 8, 50, 50, 50]
    assert found["fast"] == [1, 8, 512, 5000, 5000]


class OnPaper:
    """An engine that takes no steps: its calls last as long as they are said to.

    Args:
        seconds: of each call, in milliseconds.
        opening: of each epoch's input.
    """

    loss_scale = learning_rate = gradient_norm = flops_per_example = freezing = plateau = None
    objective = Objective(lambda targets, outputs: outputs)

    def __init__(self, seconds: list[float], opening: float) -> None:
        self._seconds = iter(seconds)
        self._opening = opening

    def begin_freeze_phase(self, epoch: int, feed: Any) -> bool:
        return False

    def run(self, feed: Any, host: Any) -> None:
        for epoch in range(host.epoch, host.epochs):
            host.begin_epoch(epoch)
            waited = self._opening
            while steps := host.next_steps():
                with host.trace_call():
                    pass
                host.end_call(steps, {"loss": 1.0}, next(self._seconds), waited)
                waited = 0.0
            if not host.end_epoch():
                return

    def count_updates(self, done: int) -> int:
        return done

    def read_state(self) -> dict[str, Any]:
        return {}

    @property
    def model(self) -> Any:
        return SimpleNamespace(variables=[])


class Watching:
    """A tracer of one window that writes nothing, and keeps what it is told."""

    def __init__(self, first: int, last: int, events: list[Event]) -> None:
        self._first, self._last, self._events = first, last, events
        self._is_written = False

    def steps_left(self, step: int) -> int | None:
        return 1 if self._first <= step + 1 <= self._last else self._first - step - 1 if step < self._first else None

    def trace_call(self, step: int) -> Any:
        return contextlib.nullcontext(self._first <= step <= self._last)

    def count_steps(self, step: int) -> None:
        self._is_written = self._is_written or step == self._last

    def report(self, usual_ms: float | None) -> None:
        if self._is_written:
            self._events.append(("profile", {"usual_ms": usual_ms}))
        self._is_written = False

    def close(self) -> None: ...

    def finish(self, step: int) -> None: ...


def timed(plan: Any, seconds: list[float], opening: float, window: tuple[int, int]) -> list[Event]:
    """The events of a run on paper, two steps to a call, 4 examples to a step."""
    events: list[Event] = []
    feed = SimpleNamespace(examples=40, batching=Batching(4, 1, 1))
    feeds = SimpleNamespace(train=feed, validation=None, test=None)
    built = SimpleNamespace(runtime=SimpleNamespace(strategy=None), engine=OnPaper(seconds, opening), feeds=feeds)
    make_session(plan, built, lambda event: events.append(to_pair(event)), tracer=Watching(*window, events)).run()
    return events


def test_a_step_takes_the_mean_of_its_epoch_waiting_included(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    """Steps that find input that was read ahead are fast, and come first: the median of those says nothing."""
    chosen = plan(*BASE, "training.epochs=2", "training.steps_per_loop=2")
    # The first call compiles. The second one finds what was read ahead, two are traced, and the others wait for input.
    first, second = [9.0, 0.01, 0.01, 5.0, 5.0, 0.065, 0.065], [0.1] * 5
    events = isolated(timed, chosen, [*first, *second], 0.5, (5, 6))
    (profile,) = [fields for name, fields in events if name == "profile"]
    speeds = [f["values"] for name, f in events if name == "epoch"]
    assert profile["usual_ms"] == speeds[0]["perf/step_ms"] == pytest.approx(1000 * 0.15 / 7)
    assert speeds[1]["perf/step_ms"] == pytest.approx(1000 * (0.5 + 0.5) / 10)
    assert speeds[1]["perf/examples_per_second"] == pytest.approx(40 / 1.0)
    assert speeds[1]["perf/step_ms_p95"] == pytest.approx(50.0)


def choose_each(cases: list[tuple[Training, int, int]]) -> list[Training]:
    from scaleflow.training.length import choose_length_by_size

    return [choose_length_by_size(*case) for case in cases]


def test_epochs_and_batch_follow_from_the_number_of_examples(isolated: Callable[..., Any]) -> None:
    counts = (1, 500, 2_000, 10_000, 40_000, 10_000_000)
    filled = isolated(choose_each, [(Training(epochs=BY_SIZE, batch_size=BY_SIZE), count, 1) for count in counts])
    assert [each.epochs for each in filled] == [64, 64, 64, 64, 23, 3]
    assert [each.global_batch_size for each in filled] == [32, 32, 128, 256, 256, 256]


def test_what_is_typed_is_kept_and_the_batch_is_shared_equally(isolated: Callable[..., Any]) -> None:
    typed, by_size = Training(epochs=3, batch_size=10), Training(epochs=3, batch_size=BY_SIZE)
    whole = Training(epochs=3, batch_size=BY_SIZE, global_batch_size=60)
    kept, shared, given = isolated(choose_each, [(each, 500, 3) for each in (typed, by_size, whole)])
    assert kept == typed
    assert shared.global_batch_size == 33
    assert given.global_batch_size == 60
