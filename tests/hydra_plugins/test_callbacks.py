"""Hydra's callbacks around runs and the jobs of sweeps, from modules in the folder of --config-dir."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import scaleflow
from scaleflow.cli import main
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.sweep import runner
from tests.sweep.fake_runs import FakeLaunch

CODE = """
import json
from pathlib import Path
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

class Note(Callback):
    def note(self, **values):
        with open("notes.jsonl", "a") as file:
            file.write(json.dumps(values) + "\\n")

    def on_multirun_start(self, config, **more):
        self.note(what="sweep begins")

    def on_multirun_end(self, config, **more):
        self.note(what="sweep ends")

    def on_job_start(self, config, task_function, **more):
        here = HydraConfig.get().runtime.output_dir
        is_dir = Path(config.hydra.runtime.output_dir).is_dir()
        self.note(what="begins", num=config.hydra.job.get("num"), here=here, is_dir=is_dir,
                  epochs=config.training.epochs)

    def on_job_end(self, config, job_return, **more):
        ended = dict(what="ends", status=job_return.status.name, overrides=job_return.overrides)
        if ended["status"] == "COMPLETED":
            self.note(**ended, value=job_return.return_value, epochs=job_return.cfg.training.epochs)
        else:
            self.note(**ended, error=str(job_return._return_value), epochs=config.training.epochs)
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a command whose callbacks write down what they get."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scaleflow"])
    monkeypatch.setenv(SERVER_ENV, "no server is needed")
    (tmp_path / "conf" / "hydra" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callback_code.py").write_text(CODE)
    (tmp_path / "conf" / "hydra" / "callbacks" / "note.yaml").write_text("note: {_target_: callback_code.Note}\n")
    return ["--config-dir", "conf", "hydra/callbacks=note", "tracking=none"]


def read_notes() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("notes.jsonl").read_text().splitlines()]


def test_the_jobs_of_a_sweep_begin_and_end_with_their_status(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch_run", FakeLaunch(["FINISHED", "FAILED", "REFUSED"]))
    assert main([*words, "-m", "hydra.sweep.dir=s", "training.epochs=2,4,8"]) == 1
    first, *jobs, last = read_notes()
    assert (first["what"], last["what"]) == ("sweep begins", "sweep ends")
    begun, ended = jobs[::2], jobs[1::2]
    assert [each["num"] for each in begun] == [0, 1, 2]
    assert [Path(each["here"]) for each in begun] == [Path.cwd() / "s" / str(number) for number in range(3)]
    assert all(each["is_dir"] for each in begun)
    assert [each["epochs"] for each in (*begun, *ended)] == [2, 4, 8] * 2
    assert [each["status"] for each in ended] == ["COMPLETED", "FAILED", "FAILED"]
    assert ended[0]["value"] == 0.5
    assert [each.get("error") for each in ended[1:]] == [
        "FAILED: the test lets it fail",
        "REFUSED: the test refuses it",
    ]
    assert [each["overrides"][-1] for each in ended] == [f"training.epochs={epochs}" for epochs in (2, 4, 8)]

    assert main([*words, "-m", "hydra.sweep.dir=s", "training.epochs=2,4,8"]) == 0  # the first has finished
    assert [each["num"] for each in read_notes()[8:] if each["what"] == "begins"] == [1, 2]


def test_jobs_side_by_side_get_their_own_configs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch_run", FakeLaunch())
    result = scaleflow.run_sweep(*words[2:], "training.epochs=1,2,3,4", config_dir="conf", folder="s", n_jobs=3)
    assert result.status == "FINISHED"
    notes = read_notes()
    for what in ("begins", "ends"):
        assert sorted(each["epochs"] for each in notes if each["what"] == what) == [1, 2, 3, 4]
    assert [notes[0]["what"], notes[-1]["what"]] == ["sweep begins", "sweep ends"]


@pytest.mark.parametrize(("code", "status"), [(0, "COMPLETED"), (1, "FAILED"), (2, "FAILED"), (130, "FAILED")])
def test_a_single_run_ends_with_its_status(
    code: int, status: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scaleflow.launcher.launch.launch_run", lambda run: Outcome(code))
    assert main([*words, "training.epochs=3"]) == code
    begun, ended = read_notes()
    assert (begun["epochs"], ended["status"]) == (3, status)
    assert "Error executing job" not in capsys.readouterr().err


def test_a_callback_that_is_not_there_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words[3:], "+hydra.callbacks.mine._target_=no_code.Note"]) == 2
    assert "no_code.Note" in capsys.readouterr().err
