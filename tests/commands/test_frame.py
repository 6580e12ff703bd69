"""The frame of all commands, and what they answer to `--json`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scaleflow import cli, evaluate, sync
from scaleflow.commands.frame import run_command
from scaleflow.commands.hydra_task import MAY_SET_MODE
from scaleflow.errors import ConfigError, RunError
from scaleflow.features.compare import diff, rerun
from scaleflow.features.predict import command as predict
from scaleflow.features.search import find
from scaleflow.interfaces.events import MetricsLogged, RunEnded, RunReady
from scaleflow.launcher.command_exit import Outcome, find_interruption
from scaleflow.runs import EventWriter, RunFolder
from scaleflow.sweep.ledger import Ledger
from scaleflow.sweep.parent_run import describe_jobs
from tests.conftest import Command


def raising(error: BaseException) -> Callable[[list[str]], Outcome]:
    def work(words: list[str]) -> Outcome:
        print("a line")
        raise error

    return work


@pytest.mark.parametrize(
    ("word", "is_sweep"),
    [
        *((word, True) for word in ("-cd=mine", "hydra.mode=MULTIRUN", "+hydra.mode=MULTIRUN", "hydra/sweeper=optuna")),
        *((word, True) for word in ("hydra={mode: MULTIRUN}", "experiment=mine", "+experiment=mine")),
        *((word, False) for word in ("hydra.run.dir=a", "hydra.sweep.dir=a", "hydra.verbose=true", "model=cnn")),
    ],
)
def test_a_word_that_may_start_a_sweep_is_told_from_others(word: str, is_sweep: bool) -> None:
    assert (MAY_SET_MODE.match(word) is not None) == is_sweep


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("a.b=1: cannot work"), 2, "a.b=1: cannot work"),
        (RunError("it failed"), 1, "it failed"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
        (SystemExit(143), 143, "stopped by SIGTERM"),
        (SystemExit(0), 0, None),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
    ],
)
def test_every_end_of_a_command_is_answered_in_the_last_line(
    error: BaseException, code: int, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(raising(error), ["--json"]) == code
    first, last = capsys.readouterr().out.splitlines()
    assert first == "a line"
    assert json.loads(last) == {"exit_code": code, "error": text}


def test_the_words_and_the_output_are_those_without_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[list[str]] = []

    def work(words: list[str]) -> Outcome:
        seen.append(words)
        values = {"metrics": {"a": math.nan, "b": [1.5]}, "folder": Path("x"), "error": "not an error"}
        return Outcome(read=lambda: values)

    assert [run_command(work, words) for words in (["a=1"], ["--json", "a=1"])] == [0, 0]
    assert seen == [["a=1"], ["a=1"]]
    (line,) = capsys.readouterr().out.splitlines()
    found = {"exit_code": 0, "error": None, "metrics": {"a": None, "b": [1.5]}, "folder": "x"}
    assert json.loads(line) == found
    with pytest.raises(KeyboardInterrupt):
        run_command(raising(KeyboardInterrupt()), [])


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("words", [["--json"], []])
def test_an_error_that_a_library_makes_of_a_signal_is_no_error(
    stop: BaseException, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def work(words: list[str]) -> Outcome:
        try:
            try:
                raise stop
            finally:
                {}["flags"]
        except KeyError as error:
            raise ConfigError("config.yaml: cannot be read") from error

    if words:
        assert run_command(work, words) == (143 if isinstance(stop, SystemExit) else 130)
    else:
        with pytest.raises(type(stop)):
            run_command(work, words)
    assert "cannot be read" not in capsys.readouterr().err


def test_causes_that_form_a_circle_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__cause__ = second, first
    assert find_interruption(first) is None


@pytest.mark.parametrize(
    ("main", "words", "text"),
    [
        (cli.main, ["training.epochs=x"], "training.epochs=x: expected an integer"),
        (cli.main, ["resume=nowhere"], "resume=nowhere: expected the folder of a run"),
        (cli.main, ["-m", "model.unit=1,2"], "model.unit"),
        (cli.main, ["--jsn", "model=mlp"], "unrecognized arguments: --jsn; see python -m scaleflow --help"),
        (rerun.main, ["abc"], "abc: expected the id of a run"),
        (evaluate.main, ["abc", "--split", "x"], "--split"),
        (predict.main, ["abc"], "the following arguments are required: --input, --output"),
        (find.main, ["lr", "--steps", "1"], "--steps 1: expected at least 20"),
        (evaluate.main, ["abc", "--splt", "test"], "--splt: there is no such flag; did you mean --split? (--json, "),
        (sync.main, ["nowhere"], "no folder of a run in nowhere"),
        (diff.main, ["a", "b", "c"], "c: there is one word too many; type python -m scaleflow diff --help"),
        (diff.main, ["a", "b", "seed=1"], "seed=1: this command takes no KEY=VALUE"),
        (diff.main, ["a", "b", "tracking.uri=x"], "this command takes no KEY=VALUE; type --uri x"),
    ],
)
def test_a_refusal_is_answered(
    main: Callable[[list[str]], int],
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scaleflow"])
    assert main([*words, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["exit_code"] == 2
    assert text in answer["error"]


def test_a_run_and_the_command_that_repeats_it_are_answered(command: Command) -> None:
    ended = command("--json", "training.max_steps=3", "hydra.run.dir=run", "tracking=none", "evaluation=none")
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == answer["exit_code"] == 0, ended.stderr
    assert (answer["status"], answer["error"], answer["model"], answer["run_id"]) == ("FINISHED", None, None, None)
    assert answer["folder"] == str(command.folder / "run")
    assert 0 < answer["metrics"]["test/loss"] < 10
    again = command("resume=run", "--json")
    assert json.loads(again.stdout.splitlines()[-1]) == answer


def write_run(folder: Path, *events: Any, **record: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write = EventWriter(RunFolder(folder).events)
    for event in (RunReady("a-run"), *events):
        write(event)
    write.close()
    RunFolder(folder).record.write_text(json.dumps(record))


def test_a_sweep_answers_for_its_parent_and_for_each_job(tmp_path: Path) -> None:
    write_run(tmp_path, RunEnded("FAILED", "1 of 2 jobs did not finish"), run_id="p")
    write_run(tmp_path / "0", MetricsLogged(3, {"val/loss": 0.5}), RunEnded("FINISHED"), run_id="a", model_uri="m")
    ledger = Ledger(RunFolder(tmp_path))
    for number, status in enumerate(("FINISHED", "REFUSED", "waiting")):
        entry = ledger.add_entry(str(number), [f"model.units={number}"], str(number), 0)
        entry.status, entry.reason = status, "model.units=1: no" if status == "REFUSED" else "data.csv changed"
    ledger.save()
    found: Mapping[str, Any] = describe_jobs(tmp_path)
    assert (found["run_id"], found["status"], found["error"]) == ("p", "FAILED", "1 of 2 jobs did not finish")
    first, second, third = found["jobs"]
    assert (first["run_id"], first["model"], first["metrics"]) == ("a", "m", {"val/loss": 0.5})
    assert (first["exit_code"], first["error"], first["folder"]) == (0, None, str(tmp_path / "0"))
    assert second == {
        "job": 1,
        "overrides": ["model.units=1"],
        "status": "REFUSED",
        "exit_code": 2,
        "error": "model.units=1: no",
    }
    assert (third["status"], third["exit_code"], third["error"]) == ("waiting", None, None)
