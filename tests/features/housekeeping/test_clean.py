"""`scaleflow clean` deletes the folders of finished runs that the store has completely, and no others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from scaleflow.features.housekeeping import clean
from scaleflow.launcher.recording.recovery import repair
from scaleflow.runs import RunFolder
from tests.tracking.example_runs import MadeRun, only_run

pytestmark = pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    for variable in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


def finish(folder: Path, uri: str, status: str = "FINISHED", checkpoint: int = 1000) -> MadeRun:
    """A run with a checkpoint of so many bytes, which is recorded."""
    made = MadeRun(folder, uri=uri).ready().train(1, 3)
    write_checkpoint(folder, checkpoint)
    made.end(status)
    assert repair(folder).result == "recorded"
    return made


def write_checkpoint(folder: Path, size: int) -> None:
    step = folder / "checkpoints" / "step-00000003"
    step.mkdir(parents=True)
    (step / "weights").write_bytes(b"w" * size)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    code = clean.main([*words, "--json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == result["exit_code"]
    return result


def states(result: dict[str, Any]) -> dict[str, str]:
    return {os.path.relpath(each["folder"]): each["state"] for each in result["folders"]}


def test_only_finished_runs_that_are_recorded_and_old_go(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    day = tmp_path / "outputs" / "day"
    for name in ("whole", "trashed", "purged"):
        finish(day / name, uri)
    finish(day / "failed", uri, "FAILED")
    finish(day / "stopped", uri, "KILLED")
    MadeRun(day / "open", uri=uri).ready()
    MadeRun(day / "refused", uri=uri).write("refused", message="no")
    MadeRun(day / "untracked", name="none").ready().end()
    finish(day / "partly", uri).write("tags", values={"a": "b"})
    busy = finish(day / "busy", uri)
    client = MlflowClient(uri)
    client.delete_run(only_run(uri, "trashed").info.run_id)
    record = RunFolder(day / "purged").read_record()
    RunFolder(day / "purged").write_record({**record, "run_id": "0" * 32})
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("here")
    (day / "linked").symlink_to(tmp_path / "outside")
    expected = {
        "whole": "recorded",
        "trashed": "deleted in MLflow",
        "purged": "not in the store",
        "failed": "failed",
        "stopped": "stopped",
        "open": "not ended; see scaleflow sync",
        "refused": "ended before training began",
        "untracked": "not recorded",
        "partly": "not completely recorded; see scaleflow sync",
        "busy": "running",
    }
    with RunFolder(busy.folder).lock_writing():
        listed = answer(capsys, "--older-than", "0s")
        assert states(listed) == {f"outputs/day/{name}": state for name, state in expected.items()}
        assert listed["freed"] == 0
        assert len(list(day.iterdir())) == 11, "nothing is deleted without a question"
        assert set(states(answer(capsys, "--yes")).values()) >= {"recorded, too new", "deleted in MLflow, too new"}
        assert len(list(day.iterdir())) == 11
        deleted = answer(capsys, "outputs", "--older-than", "0s", "--yes")
    gone = {Path(each["folder"]).name for each in deleted["folders"] if each["is_deleted"]}
    assert gone == {"whole", "trashed"}
    assert {path.name for path in day.iterdir()} == {*expected, "linked"} - gone
    assert deleted["freed"] == sum(each["bytes"] for each in deleted["folders"] if each["is_deleted"]) > 2000
    assert (tmp_path / "outside" / "precious").read_text() == "here"
    capsys.readouterr()
    assert clean.main(["--older-than", "0s"]) == 0
    printed = capsys.readouterr().out
    assert "the folders of 1 runs can be deleted" in printed
    assert "Such a run can no longer be trained longer" in printed
    assert "nothing is deleted; add --yes to delete them" in printed


def test_checkpoints_alone_can_go(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, other = tmp_path / "runs/a", tmp_path / "runs/b"
    finish(whole, uri, checkpoint=5000)
    finish(other, uri)
    shutil.rmtree(other / "checkpoints")
    (other / "checkpoints").symlink_to(tmp_path / "elsewhere")
    found = answer(capsys, "runs", "--checkpoints", "--older-than", "0s", "--yes")
    assert {Path(each["folder"]).name: each["bytes"] for each in found["folders"] if each["is_deleted"]} == {"a": 5000}
    assert not (whole / "checkpoints").exists()
    assert (whole / "events.jsonl").exists()
    assert (other / "checkpoints").is_symlink()


def test_the_jobs_of_a_sweep_go_with_it_and_not_before_it_is_finished(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, status in (("done", "FINISHED"), ("failed", "FAILED")):
        sweep = finish(tmp_path / name, uri, status).folder
        RunFolder(sweep).ledger.write_text("{}")
        RunFolder(sweep).manifest.unlink()  # it does not list the ledger
        RunFolder(sweep).record.touch()  # the last file of a run
        for number in ("0", "1"):
            finish(sweep / f"{name}-{number}", uri)
    nested = finish(tmp_path / "outer", uri).folder
    finish(nested / "inner", uri)
    found = answer(capsys, ".", "--older-than", "0s", "--yes")
    assert found["exit_code"] == 1
    assert not (tmp_path / "done").exists()
    assert len(list((tmp_path / "failed").glob("failed-*"))) == 2
    assert states(found)["failed/failed-0"] == "its sweep is not finished"
    assert (nested / "inner" / "events.jsonl").exists(), "a run that holds another one stays"
    assert "it holds another run" in found["error"]


def test_wrong_words_are_refused(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert clean.main(["--older-than", "7 days"]) == 2
    assert "expected a number with s, m, h, d or w, such as 12h or 7d" in capsys.readouterr().err
    assert clean.main(["nowhere"]) == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err
    assert clean.main([]) == 0
    assert "no folder of a run in outputs, multirun" in capsys.readouterr().out


def test_a_store_that_is_gone_keeps_its_runs(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(tmp_path / "outputs/a", uri)
    (tmp_path / "mlflow.db").unlink()
    assert states(answer(capsys, "--older-than", "0s", "--yes")) == {"outputs/a": "not in the store"}
    assert not (tmp_path / "mlflow.db").exists()


def test_files_that_the_run_did_not_write_keep_its_folder(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every place: at the top, in folders of the run's, as links; with a manifest, and without one."""
    (tmp_path / "elsewhere").mkdir()
    for name in (
        "top",
        "inside",
        "link",
        "old",
        "old-inside",
        "old-later",
        "old-earlier",
        "before",
        "checkpoints",
        "whole",
    ):
        made = MadeRun(tmp_path / "runs" / name, uri=uri).ready().train(1, 3)
        write_checkpoint(made.folder, 10)
        files = RunFolder(made.folder)
        files.evaluation.mkdir()
        if name == "before":
            (files.evaluation / "mine.txt").write_text("mine")
            files.manifest.write_text(json.dumps({"before": ["evaluation/mine.txt"]}))
        (files.evaluation / "report.html").write_text("report")
        made.end()
        assert repair(made.folder).result == "recorded"
        assert set(json.loads(files.manifest.read_text())["files"]) >= {"config.yaml", "evaluation/report.html"}
        if name.startswith("old"):
            files.manifest.unlink()
    mine = {
        "top": "train.py",
        "inside": "plots/mine.png",
        "old": "mlflow.db",
        "old-inside": "src/code.py",
        "old-later": "evaluation/mine.txt",
        "old-earlier": "model/train.py",
        "checkpoints": "checkpoints/step-00000003/note",
    }
    for name, path in mine.items():
        file = tmp_path / "runs" / name / path
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    os.utime(tmp_path / "runs/old-earlier/model/train.py", (0, 0))
    (tmp_path / "runs/link/plots").symlink_to(tmp_path / "elsewhere")
    checkpoints = answer(capsys, "runs", "--checkpoints", "--older-than", "0s")
    assert {name for name, state in states(checkpoints).items() if state != "recorded"} == {"runs/checkpoints"}
    found = answer(capsys, "runs", "--older-than", "0s", "--yes")
    mine |= {"link": "plots", "before": "evaluation/mine.txt"}
    expected = {f"runs/{name}": f"holds other files: {path}" for name, path in mine.items()}
    assert states(found) == {**expected, "runs/whole": "recorded"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == mine.keys()


def test_a_run_in_a_folder_with_a_link_goes(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(tmp_path / "real", uri)
    (tmp_path / "link").symlink_to("real")
    found = answer(capsys, "link", "--older-than", "0s", "--yes")
    assert found["exit_code"] == 0
    assert [each["is_deleted"] for each in found["folders"]] == [True]
    assert not (tmp_path / "real").exists()


def test_a_folder_with_a_store_stays(
    uri: str, empty_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store of its own run, or of another one."""
    inside = RunFolder(tmp_path / "runs/holder").evaluation / "mlflow.db"
    finish(tmp_path / "runs/holder", uri)
    inside.parent.mkdir()
    shutil.copy(empty_store, inside)
    RunFolder(tmp_path / "runs/holder").manifest.unlink()
    finish(tmp_path / "runs/other", f"sqlite:///{inside}")
    found = states(answer(capsys, "runs", "--older-than", "0s", "--yes"))
    assert found == {"runs/holder": "holds a tracking store", "runs/other": "recorded"}
    assert inside.exists()
