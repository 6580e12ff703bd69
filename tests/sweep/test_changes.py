"""A sweep that is sent again after its data or the user's code changed. Its jobs do not train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.cli import main
from scaleflow.interfaces.events import RunEnded, RunReady, TagsSet
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.runs import EventReader, RunFolder, RunState
from scaleflow.runs.event_log import append_event
from scaleflow.runs.identity import record_parts
from scaleflow.runs.state import make_length_tags
from scaleflow.sweep import plots, runner
from scaleflow.sweep.changes import SweepInputs, list_input_changes
from scaleflow.sweep.ledger import Ledger, LedgerEntry
from scaleflow.sweep.ranking import RepeatedJob
from tests.sweep.fake_runs import Ended, FakeLaunch

Send = Callable[..., tuple[int, list[str]]]

CODE = "def build(inputs, outputs):\n    return None\n"


@pytest.fixture
def send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Send:
    """Sends a sweep of a user's model and data file; returns its exit code and the folders in which jobs ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scaleflow"])
    monkeypatch.setenv(SERVER_ENV, "no server is needed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plots, "draw_plots", lambda *arguments: [])
    for name, text in {
        "data.csv": "x,y\n1,2\n",
        "nets.py": CODE,
        "conf/model/mine.yaml": "_target_: nets.build",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)

    def call(*words: str, statuses: tuple[Ended, ...] = (), seeds: str = "1,2") -> tuple[int, list[str]]:
        fake = FakeLaunch(statuses, measured=lambda plan: {"val/loss": float(plan.seed)})
        monkeypatch.setattr(runner, "launch_run", fake)
        data = ("dataset=table", "dataset.data_dir=data.csv", "dataset.target=y", "model=mine")
        code = main(
            ("-m", "--config-dir", "conf", "tracking=none", "hydra.sweep.dir=s", *data, f"seed={seeds}", *words)
        )
        return code, [path.name for path in fake.folders]

    return call


def read_entries() -> list[LedgerEntry]:
    return Ledger.load(RunFolder(Path("s"))).entries


def test_changed_code_is_refused_and_run_again_on_demand(send: Send, capsys: pytest.CaptureFixture[str]) -> None:
    assert send(statuses=("FINISHED", "KILLED")) == (1, ["0", "1"])
    Path("nets.py").write_text(f"# a comment\n{CODE}")
    Path("data.csv").touch()
    assert send() == (0, ["1"])  # neither counts
    Path("nets.py").write_text(f"import deeper\n{CODE}")
    Path("deeper.py").write_text("")
    for words in ((), ("sweep.on_change=new",)):
        before = read_entries()
        capsys.readouterr()
        assert send(*words) == (2, [])
        assert read_entries() == before
        error = capsys.readouterr().err
        assert "deeper.py is new, nets.py changed since #0, #1 ran\n" in error
        assert "sweep.on_change=rerun" in error
        assert "sweep.on_change=keep" in error
    assert send("sweep.on_change=none") == (2, [])
    assert "sweep.on_change=none: expected one of refuse, new, rerun, keep" in capsys.readouterr().err
    assert send("sweep.on_change=rerun") == (0, ["0-0", "1-1"])
    assert "deeper.py is new, nets.py changed since #0, #1 ran: they run again" in capsys.readouterr().out
    assert [entry.folder for entry in read_entries()] == ["0-0", "1-1"]
    assert (Path("s/0") / "events.jsonl").exists()
    assert send() == (0, [])
    Path("nets.py").write_text(CODE)
    assert send("sweep.on_change=rerun", seeds="1") == (0, ["0-1"])


@pytest.mark.slow
def test_a_job_that_was_resumed_alone_with_another_length_is_not_ranked_as_before(
    send: Send, capsys: pytest.CaptureFixture[str]
) -> None:
    assert send("training.epochs=1") == (0, ["0", "1"])
    folder = RunFolder(Path("s/0"))
    append_event(folder.events, RunReady("fake", steps=3, epochs=3, resumed=1))
    append_event(folder.events, TagsSet(make_length_tags({"training.epochs": 3})))
    append_event(folder.events, RunEnded("FINISHED"))
    folder.resume_overrides(1).write_text("- training.epochs=3\n")
    capsys.readouterr()
    assert send("training.epochs=1") == (2, [])
    assert "training.epochs became 3 since #0 ran\n" in capsys.readouterr().err
    assert send("training.epochs=1", "sweep.on_change=keep") == (0, [])
    assert [entry.reason for entry in read_entries()] == ["training.epochs became 3 since it ran", ""]
    assert RepeatedJob([(read_entries()[0], RunState.read(folder.path))]).find_value("training.epochs") == "3"
    assert send("training.epochs=1", "sweep.on_change=rerun") == (0, ["0-0"])


@pytest.mark.slow
def test_results_from_before_a_change_of_data_are_kept_with_a_note(
    send: Send, capsys: pytest.CaptureFixture[str]
) -> None:
    send(statuses=("FINISHED", "KILLED"))
    Path("data.csv").write_text("x,y\n1,3\n")
    assert send(seeds="3") == (2, [])  # the old jobs would be in its report
    assert "data.csv changed since #0, #1 ran" in capsys.readouterr().err
    assert send("sweep.on_change=keep") == (0, ["1-1"])  # a run has one dataset, so the killed one begins anew
    note = "data.csv changed since #0 ran"
    assert f"note: {note}: their results are kept" in capsys.readouterr().out
    assert [entry.reason for entry in read_entries()] == ["data.csv changed since it ran", ""]
    assert "data.csv changed since it ran" in Path("s/report.csv").read_text()
    assert note in read_tag()
    assert send("sweep.on_change=keep") == (0, [])
    Path("data.csv").write_text("x,y\n1,2\n")
    assert send("sweep.on_change=rerun") == (0, ["1-2"])
    assert [entry.reason for entry in read_entries()] == ["", ""]
    assert read_tag() == ""


def read_tag() -> str:
    events: list[Any] = list(EventReader(RunFolder(Path("s")).events).read())
    tags = [event.values for event in events if event.event == "tags"]
    return next(values["scaleflow.changed"] for values in reversed(tags) if "scaleflow.changed" in values)


def test_a_job_without_a_run_is_compared_with_nothing(send: Send) -> None:
    assert send(statuses=("REFUSED", "FINISHED")) == (1, ["0", "1"])
    Path("nets.py").write_text("build = 12345")
    search, entries = [str(Path.cwd())], read_entries()
    config = {"model": {"_target_": "nets.build"}, "dataset": None}
    assert SweepInputs(Path("s"), search).find_changes(entries, {0: config}) == {1: ["nets.py changed"]}


def test_a_change_while_a_sweep_runs_is_found(tmp_path: Path) -> None:
    inputs = SweepInputs(tmp_path, [str(tmp_path)])
    config = {"model": {"_target_": "nets.build"}, "dataset": None}
    (tmp_path / "nets.py").write_text(CODE)
    assert (inputs.note_changes(config), inputs.note_changes(config)) == ([], [])
    (tmp_path / "nets.py").write_text("build = 12345")
    assert inputs.note_changes(config) == ["nets.py changed"]


def test_only_files_that_both_jobs_read_are_compared_between_jobs() -> None:
    before = record_parts({"a.py": "1", "b.py": "2"}, {"s3://bucket/d.csv": "1"})
    now = record_parts({"b.py": "3", "c.py": "4"}, {"d.csv": "5"})
    assert list_input_changes(before, now, is_same_job=False) == ["b.py changed"]
    assert list_input_changes(before, now, is_same_job=True) == [
        *("a.py is gone", "b.py changed", "c.py is new", "d.csv is new")
    ]


def test_data_of_another_machine_does_not_count() -> None:
    before, now = record_parts({}, {"/there/d.csv": "1"}), record_parts({}, {})
    assert list_input_changes(before, now, is_same_job=True) == []
