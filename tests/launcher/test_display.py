import contextlib
import io
import math
import os
import pty
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from scaleflow.events import (
    ArtifactWritten,
    EpochEnded,
    Event,
    MetricsLogged,
    ModelExported,
    Note,
    RunEnded,
    RunReady,
)
from scaleflow.launcher import display as display_module
from scaleflow.launcher.display import BarDisplay, Display, display_for, format_metrics

READY = RunReady(
    "digits-mlp",
    params={
        "model": "mlp",
        "resolved.parameters": "9610",
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
    return made


def epoch(number: int, step: int, **values: float) -> EpochEnded:
    return EpochEnded(number, 10, step, values)


def metrics(step: int, values: Mapping[str, float], rate: float | None = None) -> MetricsLogged:
    return MetricsLogged(step, values, rate)


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
    assert line == "digits-mlp: 9610 parameters, 2 replica(s) on cpu, global batch 64, 100 steps"


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
    display.show_event(epoch(3, 30, **values))
    assert stream.getvalue().splitlines()[1] == (
        "epoch  3/10  loss 0.25    val accuracy 0.5     61,000 examples/s  1 min 10 s left"
    )


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
    assert "loss 0.5     1,234 examples/s" in shown


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
    text = bar(READY, metrics(10, {"train/loss": 0.5}), RunEnded("FINISHED"))
    assert text.count(f"{ESCAPE}[?25l") == text.count(f"{ESCAPE}[?25h") == 2  # while it starts, and while it runs


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
    assert "9610 parameters" in text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({}, ""),
        ({"train/loss": 0.31239, "train/accuracy": 0.91}, "loss 0.3124  accuracy 0.91"),
        ({"val/loss": 0.35, "train/loss": 1.0}, "loss 1       val loss 0.35"),
        ({"train/something": 1.0, "perf/step_ms": 2.0}, ""),
        ({"train/loss": math.nan}, "loss nan"),
        ({"perf/examples_per_second": math.nan}, ""),
        ({"perf/examples_per_second": 61000.4}, "61,000 examples/s"),
    ],
)
def test_figures(values: dict[str, float], shown: str) -> None:
    assert format_metrics(values) == shown


def test_a_log_that_can_not_be_written_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        display = Display(full)
        display.print_line("lost")
        display.print_summary([("status", "FINISHED")])
        monkeypatch.setattr(display_module.sys, "stderr", full)
        display_module.write_error("what is wrong")
        with contextlib.suppress(OSError):
            full.close()
