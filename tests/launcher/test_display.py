import contextlib
import io
import math
import os
import pty
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces import clock as clock_module
from scaleflow.interfaces.events import (
    ArtifactWritten,
    EpochEnded,
    Event,
    MetricsLogged,
    ModelExported,
    Note,
    PhaseBegan,
    RunEnded,
    RunReady,
    RunRefused,
    StepsPlanned,
    Waiting,
)
from scaleflow.interfaces.formatting import format_elapsed
from scaleflow.launcher import display as display_module
from scaleflow.launcher import progress
from scaleflow.launcher.display import BarDisplay, Display, JobDisplay, display_for, end_greeting, greet
from scaleflow.launcher.lines import fit_columns, list_figures
from scaleflow.launcher.progress import TrainingProgress

READY = RunReady(
    "digits-mlp",
    params={
        "model": "mlp",
        "resolved.parameters": "9610",
        "resolved.trainable_parameters": "9610",
        "resolved.replicas": "2",
        "resolved.hardware": "cpu",
        "resolved.global_batch_size": "64",
    },
    steps=100,
    epochs=10,
)
ESCAPE = "\x1b"


class Terminal(io.StringIO):
    """Where someone is looking."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(display_module, "time", made)
    monkeypatch.setattr(progress, "time", made)
    monkeypatch.setattr(clock_module, "time", made)
    clock_module.anchor.cache_clear()
    monkeypatch.setattr(Display, "printed_at", made.now)
    return made


def epoch(number: int, step: int, **values: float) -> EpochEnded:
    return EpochEnded(number, 10, step, values)


def metrics(step: int, values: Mapping[str, float], rate: float | None = None) -> MetricsLogged:
    return MetricsLogged(step, values, rate)


def compiled(step: int) -> MetricsLogged:
    return MetricsLogged(step, {"train/loss": 1.0}, compiled=True)


def show(display: Display, *events: Event) -> None:
    for event in events:
        display.show_event(event)
    display.close()


def plain(*events: Event) -> list[str]:
    stream = io.StringIO()
    show(Display(stream), *events)
    return stream.getvalue().splitlines()


def test_lines_where_nobody_looks_and_a_bar_where_someone_does() -> None:
    assert type(display_for(io.StringIO())) is Display
    assert type(display_for(Terminal())) is BarDisplay


def test_plain_lines_have_no_escape_codes() -> None:
    values = {"train/loss": 0.5, "train/accuracy": 0.9}
    lines = plain(READY, metrics(10, values, rate=5.0), epoch(1, 10, **values), Note("[bold]x"))
    assert not any(ESCAPE in line or "\r" in line for line in lines)


def test_the_first_line_says_what_is_trained_on_what() -> None:
    (line,) = plain(READY)
    assert line == "digits-mlp: all 9,610 parameters train, 2 replica(s) on cpu, global batch 64, 100 steps"


def test_the_first_line_counts_the_parameters_that_train() -> None:
    params = {**READY.params, "resolved.parameters": "1234567", "resolved.trainable_parameters": "1234"}
    (line,) = plain(replace(READY, params=params))
    assert line.startswith("digits-mlp: 1,234 of 1,234,567 parameters train, 2 replica(s)")


def test_a_line_an_epoch_and_none_for_each_call_of_the_loop(clock: Clock) -> None:
    values = {"train/loss": 0.5}
    calls = [metrics(step, values, rate=5.0) for step in range(1, 11)]
    lines = plain(READY, *calls, epoch(1, 10, **values), *calls, epoch(2, 20, **values))
    assert [line[:11] for line in lines[1:]] == ["epoch  1/10", "epoch  2/10"]


def test_an_epochs_line_has_the_figures_and_the_time_left(clock: Clock) -> None:
    stream = io.StringIO()
    display = Display(stream)
    display.show_event(READY)
    clock.now += 5  # the first call makes ready what later ones find
    display.show_event(metrics(1, {"train/loss": 2.0}))
    clock.now += 29
    values = {"train/loss": 0.25, "val/accuracy": 0.5, "perf/examples_per_second": 61000.4}
    display.show_event(metrics(30, {"train/loss": 0.25}))
    display.show_event(epoch(3, 30, **values))
    assert stream.getvalue().splitlines()[1] == (
        "epoch  3/10  loss 0.25     val accuracy 0.5      61,000 examples/s  1 min 10 s left"
    )
    display.close()


def test_the_time_left_is_right_after_each_compilation(clock: Clock) -> None:
    """A step takes 1 s. The first call, the first validation and step 30 (`model.freeze`) compile."""
    progress = TrainingProgress(100)
    shown = {}
    for step in range(0, 100, 10):
        clock.now += 20 if step in (0, 30) else 0
        clock.now += 10
        progress.add(metrics(step + 10, {"train/loss": 1.0}) if step not in (0, 30) else compiled(step + 10))
        shown[step + 10] = progress.describe_time_left()
        if step + 10 == 20:
            clock.now += 30  # the first validation
            progress.end_epoch()
            shown[25] = progress.describe_time_left()
    assert shown == {10: "", 20: "1 min 20 s left", 25: "1 min 20 s left", 30: "1 min 10 s left", 40: "", 100: ""} | {
        step: f"{100 - step} s left" for step in (50, 60, 70, 80, 90)
    }


def test_the_time_left_counts_down_while_no_step_ends(clock: Clock) -> None:
    progress = TrainingProgress(100)
    for step in (10, 20, 90):
        clock.now += 10
        progress.add(metrics(step, {"train/loss": 1.0}))
    shown = [progress.describe_time_left()]
    for _ in range(5):
        clock.now += 0.5
        shown.append(progress.describe_time_left())
    assert shown == ["2 s left", "2 s left", "2 s left", "1 s left", "0 s left", ""]


def test_no_time_is_left_after_the_last_step(clock: Clock) -> None:
    assert not plain(READY, epoch(10, 100, **{"train/loss": 0.5}))[1].endswith("left")


def test_a_note_is_a_line_as_it_is() -> None:
    assert plain(Note("took [2] of 3")) == ["note: took [2] of 3"]


def test_an_event_that_is_not_for_the_terminal_shows_nothing() -> None:
    assert plain(ModelExported("/x", 1), ArtifactWritten("/x")) == []


def test_the_summary_is_aligned() -> None:
    stream = io.StringIO()
    Display(stream).print_summary([("status", "FINISHED in 8 s"), ("look at it", "mlflow ui")])
    assert stream.getvalue().splitlines() == ["status      FINISHED in 8 s", "look at it  mlflow ui"]


def test_each_line_is_flushed_at_once() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        Display(stream).show_event(Note("now"))
        assert os.read(reader, 100) == b"note: now\n"
    os.close(reader)


def test_a_run_goes_on_unseen_when_its_reader_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        show(Display(stream), READY, Note("x" * 100_000), epoch(1, 10, **{"train/loss": 0.5}))


# Phases -------------------------------------------------------------------------------------------


@pytest.fixture
def log(clock: Clock) -> Iterator[tuple[Display, Callable[[], list[str]]]]:
    """A display, and a function that returns the lines since the last call. Its thread looks at no clock."""
    stream = io.StringIO()
    display = Display(stream)
    seen = 0

    def new_lines() -> list[str]:
        nonlocal seen
        lines = stream.getvalue().splitlines()[seen:]
        seen += len(lines)
        return lines

    yield display, new_lines
    display.close()


Log = tuple[Display, Callable[[], list[str]]]


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Display, "_start_thread", lambda display: None)


@pytest.mark.usefixtures("no_thread")
def test_a_phase_is_a_line_with_its_duration_when_it_has_ended(log: Log, clock: Clock) -> None:
    display, new_lines = log
    display.begin_phase("importing TensorFlow", since=clock.now - 1)
    clock.now += 2.1
    assert new_lines() == []
    display.begin_phase("reading")
    assert new_lines() == ["importing TensorFlow (3.1 s)"]
    clock.now += 0.05
    display.begin_phase("compiling")
    assert new_lines() == []  # too short to be worth a line
    clock.now += 70
    display.end_phase()
    assert new_lines() == ["compiling (1 min 10 s)"]
    display.end_phase()
    assert new_lines() == []


@pytest.mark.usefixtures("no_thread")
def test_a_workers_phases_are_measured_by_its_own_clock(log: Log, clock: Clock) -> None:
    """They may be read late and together, and the clock of its machine may be wrong."""
    display, new_lines = log
    display.begin_phase("importing TensorFlow")
    clock.now += 3
    display.show_event(PhaseBegan("reading house.csv", time=5_000_000))
    display.show_event(PhaseBegan("compiling", time=5_002_000))
    display.show_event(replace(READY, time=5_002_500))
    assert new_lines()[:3] == ["importing TensorFlow (3.0 s)", "reading house.csv (2.0 s)", "compiling (0.5 s)"]


@pytest.mark.usefixtures("no_thread")
def test_a_phase_in_which_the_run_fails_or_is_refused_has_no_line(log: Log, clock: Clock) -> None:
    display, new_lines = log
    for end in (RunRefused("no such column"), RunEnded("FAILED", "OSError")):
        display.show_event(PhaseBegan("reading house.csv"))
        clock.now += 3
        display.show_event(end)
        display.break_silence()
        assert new_lines() == []
    display.show_event(PhaseBegan("exporting the model", time=1000))
    display.show_event(RunEnded("FINISHED", time=3000))
    assert new_lines() == ["exporting the model (2.0 s)"]


@pytest.mark.usefixtures("no_thread")
def test_a_log_says_what_goes_on_with_growing_pauses(log: Log, clock: Clock) -> None:
    display, new_lines = log
    display.begin_phase("exporting the model")
    shown = []
    for _ in range(800):
        clock.now += 0.1
        display.break_silence()
        shown += [(round(clock.now - 1000), line) for line in new_lines()]
    times = [2, 4, 8, 16, 32, 64]
    assert shown == [(n, f"still exporting the model ({format_elapsed(n)})") for n in times]
    display.begin_phase("reading house.csv")
    clock.now += 1.9
    display.print_line("note: something")
    clock.now += 1.9
    new_lines()
    display.break_silence()
    assert new_lines() == []  # no silence that needs to be broken
    clock.now += 0.1
    display.break_silence()
    assert new_lines() == ["still reading house.csv (3.9 s)"]


@pytest.mark.usefixtures("no_thread")
def test_a_phase_of_a_day_fills_no_log(log: Log, clock: Clock) -> None:
    display, new_lines = log
    display.begin_phase("reading house.csv")
    for _ in range(24 * 360):
        clock.now += 10
        display.break_silence()
    assert 140 < len(new_lines()) < 160


@pytest.mark.usefixtures("no_thread")
def test_a_phase_that_has_just_begun_may_end_at_once(clock: Clock) -> None:
    stream = io.StringIO()
    display = JobDisplay(stream, 3)
    display.begin_phase("reading")
    clock.now += 1.9
    display.begin_phase("compiling")
    for _ in range(5):
        assert stream.getvalue() == ""
        clock.now += 0.1
        display.break_silence()
    assert stream.getvalue() == "#3 still compiling (0.5 s)\n"


@pytest.mark.usefixtures("no_thread")
def test_a_long_epoch_shows_its_steps(log: Log, clock: Clock) -> None:
    display, new_lines = log
    display.show_event(READY)
    clock.now += 2.5
    display.break_silence()
    assert new_lines()[1:] == ["still compiling the first steps (2.5 s)"]
    display.show_event(metrics(5, {"train/loss": 2.0}))
    clock.now += 10
    display.show_event(metrics(25, {"train/loss": 0.5}, rate=1234.0))
    display.show_event(metrics(25, {"val/loss": 0.7}))
    display.break_silence()
    assert new_lines() == ["step  25/100  loss 0.5      1,234 examples/s  38 s left"]
    display.show_event(RunEnded("FINISHED"))
    clock.now += 10
    display.break_silence()
    assert new_lines() == []


@pytest.mark.usefixtures("no_thread")
def test_a_script_that_trains_again_has_more_steps(log: Log, clock: Clock) -> None:
    display, new_lines = log
    display.show_event(READY)
    display.show_event(metrics(100, {"train/loss": 2.0}))
    display.show_event(StepsPlanned(150))
    display.show_event(metrics(110, {"train/loss": 0.5}))
    clock.now += 20
    display.show_event(metrics(130, {"train/loss": 0.5}))
    display.break_silence()
    assert new_lines()[1:] == ["step 130/150  loss 0.5      20 s left"]
    display.show_event(StepsPlanned(0))
    display.show_event(metrics(160, {"train/loss": 0.5}))
    clock.now += 20
    display.break_silence()
    assert new_lines() == ["step 160  loss 0.5"]


@pytest.mark.usefixtures("no_thread")
def test_a_worker_that_waits_for_others_says_so(log: Log, clock: Clock) -> None:
    display, new_lines = log
    display.show_event(Waiting(300.0, ["10.0.0.1:2222", "10.0.0.2:2222"]))
    clock.now += 2
    display.break_silence()
    assert new_lines() == ["still waiting for the other processes (2.0 s)"]


def test_a_thread_breaks_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_module, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(display_module, "SHORTEST_SHOWN", 0.0)
    before = set(threading.enumerate())
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader) as lines:
        display = Display(stream)
        for _ in range(2):  # it can be used again
            display.begin_phase("reading house.csv")
            assert re.fullmatch(r"still reading house.csv \(\d\.\d s\)\n", lines.readline())
            (thread,) = set(threading.enumerate()) - before
            display.close()
            thread.join()


@pytest.mark.parametrize("end", [end_greeting, lambda: Display(io.StringIO())], ids=["the command", "a display"])
def test_the_first_line_is_printed_once_and_breaks_the_silence_until_something_ends_it(
    capsys: pytest.CaptureFixture[str], end: Callable[[], Any]
) -> None:
    greet.cache_clear()
    before = set(threading.enumerate())
    greet("scaleflow 1.0")
    greet("scaleflow 1.0")
    assert capsys.readouterr().out == "scaleflow 1.0\n"
    (thread,) = set(threading.enumerate()) - before
    end()
    thread.join()
    assert Display.greeting is None


def test_with_a_debugger_in_the_terminal_no_thread_prints() -> None:
    before = set(threading.enumerate())
    stream = io.StringIO()
    display = display_for(stream, is_plain=True)
    display.begin_phase("importing TensorFlow")
    assert set(threading.enumerate()) <= before
    assert stream.getvalue() == "importing TensorFlow\n"  # there would be no line for seconds
    display.close()


@pytest.mark.usefixtures("no_thread")
def test_workers_other_than_the_chief_show_no_phases(clock: Clock) -> None:
    stream = io.StringIO()
    display = display_for(stream, is_chief=False)
    display.begin_phase("importing TensorFlow")
    clock.now += 10
    show(display, PhaseBegan("reading house.csv"), READY)
    assert [line[:10] for line in stream.getvalue().splitlines()] == ["digits-mlp"]


@pytest.mark.usefixtures("no_thread")
def test_a_job_of_a_sweep_shows_a_phase_only_if_it_takes_long(clock: Clock) -> None:
    stream = io.StringIO()
    display = JobDisplay(stream, 3)
    display.begin_phase("reading house.csv")
    clock.now += 2
    display.break_silence()
    display.begin_phase("reading house.csv")
    assert stream.getvalue() == "#3 still reading house.csv (2.0 s)\n"


def test_displays_of_one_process_print_whole_lines() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader) as lines:
        displays = [JobDisplay(stream, number) for number in range(4)]

        def print_lines(display: Display) -> None:
            for _ in range(100):
                display.print_line("x" * 50)

        threads = [threading.Thread(target=print_lines, args=(each,)) for each in displays]
        for thread in threads:
            thread.start()
        shown = [lines.readline() for _ in range(400)]
        for thread in threads:
            thread.join()
    assert sorted(set(shown)) == [f"#{number} {'x' * 50}\n" for number in range(4)]


# The bar ------------------------------------------------------------------------------------------


def bar(*events: Event) -> str:
    stream = Terminal()
    show(BarDisplay(stream), *events)
    return stream.getvalue()


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", text)


@pytest.mark.usefixtures("colours")
def test_the_bar_counts_steps_beside_the_latest_figures() -> None:
    shown = without_codes(bar(READY, metrics(40, {"train/loss": 0.5}, rate=1234.0)))
    assert "40/100" in shown
    assert "loss 0.5      1,234 examples/s" in shown


@pytest.mark.usefixtures("colours")
@pytest.mark.parametrize(("steps", "shown"), [(150, "110/150"), (0, "110/?")])
def test_the_bar_counts_the_steps_of_another_fit(steps: int, shown: str) -> None:
    assert shown in without_codes(bar(READY, StepsPlanned(steps), metrics(110, {"train/loss": 0.5})))


@pytest.mark.usefixtures("colours")
def test_the_same_lines_stand_above_the_bar_but_the_time_left() -> None:
    values = {"train/loss": 0.5}
    text = without_codes(bar(READY, metrics(10, values), epoch(1, 10, **values), Note("a [b] c")))
    for line in plain(READY, Note("a [b] c")):
        assert line in text
    assert "epoch  1/10  loss 0.5" in text
    assert "left" not in text


@pytest.mark.usefixtures("colours")
def test_the_bar_is_gone_and_the_cursor_back_at_the_end() -> None:
    text = bar(PhaseBegan("reading"), READY, metrics(10, {"train/loss": 0.5}), RunEnded("FINISHED"))
    assert text.count(f"{ESCAPE}[?25l") == text.count(f"{ESCAPE}[?25h") == 2  # while it starts, and while it runs


@pytest.mark.usefixtures("colours")
def test_a_spinner_shows_the_phase_and_leaves_a_line() -> None:
    stream = Terminal()
    display = BarDisplay(stream)
    display.show_event(PhaseBegan("reading [1].csv", time=1000))
    while "reading [1].csv (" not in without_codes(stream.getvalue()):
        time.sleep(0.01)  # rich's thread draws it
    display.show_event(PhaseBegan("compiling", time=4500))
    display.show_event(replace(READY, time=4600))
    display.show_event(PhaseBegan("exporting the model", time=9000))  # after the training, instead of the bar
    display.show_event(RunEnded("FINISHED", time=9500))
    lines = without_codes(stream.getvalue()).splitlines()
    for line in ("reading [1].csv (3.5 s)", "compiling (0.1 s)", "exporting the model (0.5 s)"):
        assert line in lines
    assert stream.getvalue().count(f"{ESCAPE}[?25l") == stream.getvalue().count(f"{ESCAPE}[?25h")


@pytest.mark.usefixtures("colours")
def test_a_run_that_starts_again_has_one_bar() -> None:
    text = bar(READY, metrics(10, {"train/loss": 0.5}), READY, metrics(20, {"train/loss": 0.4}))
    assert "20/100" in without_codes(text)
    assert text.count(f"{ESCAPE}[?25l") == text.count(f"{ESCAPE}[?25h") == 2


def test_a_terminal_that_can_not_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(display_for(Terminal())) is Display


@pytest.mark.usefixtures("colours")
def test_evaluations_do_not_move_the_bar() -> None:
    shown = without_codes(bar(READY, metrics(40, {"val/loss": 0.5})))
    assert "0/100" in shown
    assert "40/100" not in shown


def read_all(controller: int) -> str:
    """What was shown on a terminal whose other end is closed."""
    data = b""
    with contextlib.suppress(OSError):
        while more := os.read(controller, 4096):
            data += more
    os.close(controller)
    return data.decode()


@pytest.mark.usefixtures("colours")
def test_a_bar_on_a_real_terminal() -> None:
    controller, end = pty.openpty()
    with os.fdopen(end, "w") as stream:
        display = display_for(stream)
        assert type(display) is BarDisplay
        show(display, READY, metrics(100, {"train/loss": 0.5}), RunEnded("FINISHED"))
    text = read_all(controller)
    assert ESCAPE in text
    assert "9,610 parameters" in text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({}, ""),
        ({"train/loss": 0.31239, "train/accuracy": 0.91}, "loss 0.3124   accuracy 0.91"),
        ({"val/loss": 0.35, "train/loss": 1.0}, "loss 1        val loss 0.35"),
        ({"train/something": 1.0, "perf/step_ms": 2.0}, ""),
        ({"train/loss": math.nan}, "loss nan"),
        ({"perf/examples_per_second": math.nan}, ""),
        ({"perf/examples_per_second": 61000.4}, "61,000 examples/s"),
    ],
)
def test_figures(values: dict[str, float], shown: str) -> None:
    assert fit_columns("", list_figures(values), None) == shown


def test_a_log_that_can_not_be_written_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        display = Display(full)
        display.print_line("lost")
        display.print_summary([("status", "FINISHED")])
        monkeypatch.setattr(display_module.sys, "stderr", full)
        display_module.write_error("what is wrong")
        with contextlib.suppress(OSError):
            full.close()
