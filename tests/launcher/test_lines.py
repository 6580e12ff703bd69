"""What a run looks like on terminals of 60, 80 and 120 columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest

from scaleflow.interfaces.events import Event, MetricsLogged, Note, parse_event, to_fields
from scaleflow.launcher.display import BarDisplay, Display, JobDisplay
from scaleflow.launcher.lines import lay_out_table, wrap_line
from tests.launcher.test_display import READY, Terminal, epoch, metrics, without_codes

VALUES = {"train/loss": 0.08973, "train/accuracy": 0.9838, "val/loss": 0.1221, "val/accuracy": 0.9514}
EVENTS: list[Event] = [
    READY,
    metrics(10, {"train/loss": 0.5, "train/accuracy": 0.9}),
    epoch(1, 10, **VALUES, **{"perf/examples_per_second": 124735.4}),
    epoch(2, 20, **{**VALUES, "train/loss": 1.68e11}, **{"perf/examples_per_second": 4.0}),
    Note("the best checkpoint, at step 20, is tested and exported (it took 1.5 s)"),
]
SUMMARY = [
    ("status", "FINISHED in 5 s"),
    ("test accuracy", "0.9805 (0.967 to 0.992; baseline 0.08078: always the most frequent class)"),
    ("report", "outputs/2026-11-26/05-05-43-641164/evaluation/report.html"),
    ("model", "models:/m-25407ca9afe24e629fe65142560ff74c"),
    ("look at it", "mlflow ui --backend-store-uri sqlite:////home/me/mlflow.db"),
]
TABLE = [
    ["best", "job", "model.units", "optimizer.learning_rate", "status", "val/loss", "test/accuracy", "step ms"],
    ["*", "3", "128", "0.01", "FINISHED", "0.1179", "0.9582", "0.3998"],
    ["", "0", "32", "0.1", "FAILED", "", "", ""],
]

SCREENS = {
    60: """
digits-mlp: all 9,610 parameters train, 2 replica(s) on cpu,
  global batch 64, 100 steps
epoch  1/10  val loss 0.1221   val accuracy 0.9514
epoch  2/10  val loss 0.1221   val accuracy 0.9514
note: the best checkpoint, at step 20, is tested and
  exported (it took 1.5 s)
status         FINISHED in 5 s
test accuracy  0.9805 (0.967 to 0.992; baseline 0.08078:
               always the most frequent class)
report
  outputs/2026-11-26/05-05-43-641164/evaluation/report.html
model          models:/m-25407ca9afe24e629fe65142560ff74c
look at it
mlflow ui --backend-store-uri sqlite:////home/me/mlflow.db
best *  job 3  model.units 128  optimizer.learning_rate 0.01
  status FINISHED  val/loss 0.1179  test/accuracy 0.9582
  step ms 0.3998
job 0  model.units 32  optimizer.learning_rate 0.1
  status FAILED
""",
    80: """
digits-mlp: all 9,610 parameters train, 2 replica(s) on cpu, global batch 64,
  100 steps
epoch  1/10  loss 0.08973  val loss 0.1221   val accuracy 0.9514
epoch  2/10  loss 1.68e+11  val loss 0.1221   val accuracy 0.9514
note: the best checkpoint, at step 20, is tested and exported (it took 1.5 s)
status         FINISHED in 5 s
test accuracy  0.9805 (0.967 to 0.992; baseline 0.08078: always the most
               frequent class)
report         outputs/2026-11-26/05-05-43-641164/evaluation/report.html
model          models:/m-25407ca9afe24e629fe65142560ff74c
look at it     mlflow ui --backend-store-uri sqlite:////home/me/mlflow.db
           model.  optimizer.                 val/     test/    step
best  job  units   learning_rate  status      loss  accuracy      ms
*       3  128     0.01           FINISHED  0.1179    0.9582  0.3998
        0  32      0.1            FAILED
""",
    120: """
digits-mlp: all 9,610 parameters train, 2 replica(s) on cpu, global batch 64, 100 steps
epoch  1/10  loss 0.08973  accuracy 0.9838   val loss 0.1221   val accuracy 0.9514   124,735 examples/s
epoch  2/10  loss 1.68e+11  accuracy 0.9838   val loss 0.1221   val accuracy 0.9514   4 examples/s
note: the best checkpoint, at step 20, is tested and exported (it took 1.5 s)
status         FINISHED in 5 s
test accuracy  0.9805 (0.967 to 0.992; baseline 0.08078: always the most frequent class)
report         outputs/2026-11-26/05-05-43-641164/evaluation/report.html
model          models:/m-25407ca9afe24e629fe65142560ff74c
look at it     mlflow ui --backend-store-uri sqlite:////home/me/mlflow.db
best  job  model.units  optimizer.learning_rate  status    val/loss  test/accuracy  step ms
*       3  128          0.01                     FINISHED    0.1179         0.9582   0.3998
        0  32           0.1                      FAILED
""",
}


def draw_screen(make: Callable[[Terminal], Display], width: int) -> list[str]:
    """Returns the lines of a run, its summary and a table."""
    stream = Terminal()
    shown = make(stream)
    for event in EVENTS:
        shown.show_event(event)
    shown.close()
    shown.print_summary(SUMMARY)
    head, rows = lay_out_table(TABLE, ("best", "model.units", "optimizer.learning_rate", "status"), width)
    lines = re.split(r"[\r\n]+", without_codes(stream.getvalue().replace("\r", "\n")))
    return [line for line in (*lines, *head, *itertools.chain(*rows)) if line.strip()]


@pytest.fixture(params=SCREENS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm-256color")
    return int(request.param)


def test_a_run_on_a_terminal(width: int) -> None:
    lines = draw_screen(lambda stream: Display(stream, breaks_silence=False), width)
    assert lines == SCREENS[width].strip("\n").split("\n")
    assert max(map(len, lines)) <= width


def test_a_bar_and_the_lines_above_it_fit(width: int) -> None:
    lines = draw_screen(BarDisplay, width)
    assert max(len(line.rstrip()) for line in lines) <= width
    assert [line for line in lines if "/100" not in line] == SCREENS[width].strip("\n").split("\n")
    assert any(" 10/100 loss 0.5" in line for line in lines)


def test_the_lines_of_a_job_fit(width: int) -> None:
    stream = Terminal()
    job = JobDisplay(stream, 12)
    for event in EVENTS:
        job.show_event(event)
    job.close()
    job.print_summary(SUMMARY)
    lines = stream.getvalue().splitlines()
    assert all(line.startswith("#12 ") and len(line) <= width for line in lines)
    assert {"0.1221", "0.9514", "(0.967"} <= {word for line in lines for word in line.split()}
    assert any("124,735 examples/s" in line for line in lines) == (width == 120)


def test_columns_are_left_out_in_one_order_down_to_the_narrowest_terminal() -> None:
    cells = [["best", "job", "status", "examples/s", "step ms"], ["*", "1", "FINISHED", "12,345", "0.25"]]
    shown = [len(lay_out_table(cells, ("status",), width, ("step ms", "examples/s"))[0][-1].split()) for width in
             range(60, 19, -1)]  # fmt: skip
    assert shown == sorted(shown, reverse=True)
    assert set(shown) == {6, 5, 4, 3}  # two words of `step ms` in one line, then in two
    head, rows = lay_out_table(cells, ("status",), 18, ("step ms", "examples/s"))
    assert head == []
    assert [" ".join(line.split()) for line in rows[0]] == ["best * job 1", "status FINISHED", "examples/s", "12,345",
                                                            "step ms 0.25"]  # fmt: skip


def test_no_word_and_no_number_is_broken() -> None:
    text = "loss 0.08973  test accuracy 0.9805 (0.967 to 0.992)  took 1.5 s  outputs/2026-11-26/05-05-43-641164/x.html"
    for width in range(5, 130):
        lines = wrap_line(text, width)
        assert " ".join(lines).split() == text.split()
        assert not any(re.search(r"\d$", line) and after.split()[0] == "s" for line, after in itertools.pairwise(lines))
        assert all(len(line) <= width or len(line.split()) == 1 or "1.5 s" in line for line in lines)
    assert wrap_line(text, None) == [text]


def test_a_note_is_said_once_by_all_jobs() -> None:
    stream, noted = Terminal(), set[str]()
    for number in range(2):
        job = JobDisplay(stream, number, noted)
        for text in ("a column is left out", "a column is left out", f"job {number}"):
            job.show_event(Note(text))
    assert stream.getvalue().splitlines() == ["#0 note: a column is left out", "#0 note: job 0", "#1 note: job 1"]


def test_metrics_of_a_call_that_compiled_are_written_and_read() -> None:
    event = MetricsLogged(1, {"train/loss": 1.0}, compiled=True)
    assert parse_event(to_fields(event)) == event
    assert "compiled" not in to_fields(MetricsLogged(1, {}))
