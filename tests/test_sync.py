"""What a store missed is sent later, once, and a run that was killed gets its end."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracker, Tracking
from scaleflow.interfaces.events import Event, RunEnded
from scaleflow.launcher.recording import recovery, request_cursor
from scaleflow.launcher.recording.recorder import Recorder
from scaleflow.launcher.recording.recovery import LAUNCHER_DIED, finalize_run, repair
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs import EventReader, RunFolder
from scaleflow.runs.run import Run, find_tracking_options
from scaleflow.sync import main
from scaleflow.tracking import store
from scaleflow.tracking.store import DESCRIPTION, MlflowTracker
from scaleflow.tracking.uri import drop_credentials
from tests.tracking.example_runs import MadeRun, assert_has_one_model, assert_is_all_there, only_run

#: MLflow's own, where it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RETRY_SECONDS", 0.01)
    for variable in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(variable)


class DiedError(BaseException):
    """The process was killed here."""


def die(*arguments: Any, **keywords: Any) -> None:
    raise DiedError


def test_runs_are_found_sent_once_and_told_of(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day = tmp_path / "multirun" / "day"
    whole = MadeRun(day / "0", uri=uri, register_as="net").ready().train(1, 40).files().end()
    failed = MadeRun(day / "1", uri=uri).ready().train(1, 3).end("FAILED", error="NotFinite: the loss")
    killed = MadeRun(day / "2", uri=uri).ready().train(1, 12)
    never = MadeRun(day / "3", uri=uri)
    never.write("refused", message="no")
    untracked = MadeRun(tmp_path / "multirun" / "other", name="none").ready().end()
    (day / "0" / "checkpoints").mkdir()
    assert main([str(tmp_path / "multirun")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2].partition(", run ")[0] for line in shown[:-1]] == [
        "FINISHED, recorded",
        "FAILED, recorded",
        "KILLED (end written by sync), recorded",
        "ended before training began, nothing to record",
        "FINISHED, tracking=none, nothing to record",
    ]
    assert shown[-1].startswith("5 folders: 3 recorded, ")
    run = assert_is_all_there(uri, whole, files=["plot.txt"])
    assert run.data.params == {"model": "mlp"}
    assert run.data.tags["team"] == "vision"
    assert run.info.start_time < run.info.end_time
    model = assert_has_one_model(uri, run)
    from mlflow import MlflowClient

    (version,) = MlflowClient(uri).search_model_versions("name = 'net'")
    assert version.source == f"models:/{model.model_id}"
    assert whole.state["model_uri"] == version.source
    assert f'load_model("{version.source}")' in run.data.tags[DESCRIPTION]
    assert MlflowClient(uri).get_model_version_by_alias("net", "newest").version == version.version
    run = assert_is_all_there(uri, failed, "FAILED")
    assert run.data.tags["scaleflow.error"] == "NotFinite: the loss"
    assert "**FAILED** at step 3:\n\n```text\nNotFinite: the loss\n```" in run.data.tags[DESCRIPTION]
    run = assert_is_all_there(uri, killed, "KILLED")
    assert run.data.tags["scaleflow.error"] == LAUNCHER_DIED
    assert f"```text\n{LAUNCHER_DIED}\n```" in run.data.tags[DESCRIPTION]
    assert f"python -m scaleflow resume={killed.folder}" in run.data.tags[DESCRIPTION]
    assert run.info.end_time == max(event.time for event in EventReader(killed.events).read())
    assert not (never.folder / "mlruns").exists()
    assert not untracked.folder.joinpath("record.json").exists()

    before = [path.read_bytes() for path in sorted(day.glob("*/events.jsonl"))]
    assert main([str(day), str(day / "0")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5
    assert sum("already recorded" in line for line in shown[:-1]) == 3
    assert [path.read_bytes() for path in sorted(day.glob("*/events.jsonl"))] == before


CRASHES = {
    "before the run is asked for": (MlflowTracker, "start"),
    "after the run was created, before its tags": (MlflowTracker, "set_tags"),
    "after its tags": (MlflowTracker, "log_params"),
    "between params and points": (MlflowTracker, "log_metrics"),
    "after all points": (MlflowTracker, "log_model"),
    "before the model is among the run's": (MlflowTracker, "_log_output"),
    "before it is registered": (store, "register_model"),
    "before the run is ended": (MlflowTracker, "finish"),
    "before the run is described": (MlflowTracker, "describe"),
}


def test_whenever_the_recorder_dies_the_run_is_there_once(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, and the recorder killed at each of these places in turn; its file's last state may be lost, too."""
    made = MadeRun(tmp_path / "run", uri=uri, register_as="net").ready().train(1, 30).files().end()
    state = made.folder / "record.json"
    for count, (place, name) in enumerate(CRASHES.values()):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, die)
            if name == "register_model":
                patch.setattr("scaleflow.tracking.store.register_model", die)
            with pytest.raises(DiedError):
                repair(made.folder)
        if count % 2:  # what was last written of it had not reached the disk
            known = json.loads(state.read_text())
            state.write_text(json.dumps({"id": known["id"], "folder": known["folder"], "offset": 0}))
    assert repair(made.folder).result == "recorded"
    run = assert_is_all_there(uri, made, files=["plot.txt"])
    model = assert_has_one_model(uri, run)
    from mlflow import MlflowClient

    (version,) = MlflowClient(uri).search_model_versions("name = 'net'")
    assert version.source == f"models:/{model.model_id}"


@pytest.mark.parametrize("call", ["start", "set_tags", "log_params"])
def test_a_run_that_was_opened_for_a_command_that_died_is_taken_all_the_same(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    opened = client.create_run(client.create_experiment("theirs")).info.run_id
    made = MadeRun(tmp_path / "run", uri=uri).ready().train(1, 3).end()
    tracker = MlflowTracker(Tracking(uri=uri), opened)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowTracker, call, die)
        transfer = EventTransfer(tracker, made.events)
        transfer.open()
        with pytest.raises(DiedError):
            transfer.send()
    assert repair(made.folder).run_id == opened
    assert client.get_run(opened).info.status == "FINISHED"
    assert client.get_experiment_by_name("scaleflow") is None


def test_a_run_has_its_end_also_where_the_store_refuses_artifacts(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError("the store takes no files")

    made = MadeRun(tmp_path / "run", uri=uri).ready().train(1, 3).files().end()
    (made.folder / "tensorboard").mkdir()
    (made.folder / "tensorboard" / "events.out").touch()
    with monkeypatch.context() as patch:
        patch.setattr(MlflowTracker, "log_artifact", refuse)
        status = repair(made.folder)
    assert status.result == "not recorded"
    from mlflow import MlflowClient

    assert MlflowClient(uri).get_run(str(status.run_id)).info.status == "FINISHED"
    assert repair(made.folder).result == "recorded"
    assert_is_all_there(uri, made, files=["plot.txt", "tensorboard"])


def test_a_run_that_is_under_way_is_left_alone(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeRun(tmp_path / "run", uri=uri).ready().train(1, 3)
    files = RunFolder(made.folder)
    for held, words in ((files.lock_recording(), "another command"), (files.lock_writing(), "a worker")):
        with held:
            before = made.events.read_bytes()
            assert main([str(made.folder)]) == 1
            assert made.events.read_bytes() == before
        assert f"skipped: {words}" in capsys.readouterr().out
    assert repair(made.folder).result == "recorded"


def test_a_store_that_is_away_is_told_of_and_asked_again_later(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(tmp_path / "run", uri="http://127.0.0.1:9").ready().train(1, 30).end()
    assert main([str(made.folder)]) == 1
    shown = capsys.readouterr().out
    assert "NOT RECORDED: tracking.uri=http://127.0.0.1:9: no tracking server answers there" in shown
    assert main([str(made.folder), "--uri", uri]) == 0
    assert_is_all_there(uri, made)


def test_masked_value_is_as_the_environment_has_it(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MadeRun(tmp_path / "run", uri="http://****@127.0.0.1:9/x").ready().end()
    assert drop_credentials("http://****@127.0.0.1:9/x") == "http://127.0.0.1:9/x"
    assert "http://127.0.0.1:9/x" in repair(made.folder).reason
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert repair(made.folder).result == "recorded"
    assert_is_all_there(uri, made)


def test_a_store_that_fails_now_and_then_gets_everything(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_cursor, "EVENTS_A_PASS", 10)
    made = MadeRun(tmp_path / "run", uri=uri).ready().train(1, 60).end()
    send, calls = MlflowTracker.log_metrics, []

    def sometimes(tracker: MlflowTracker, points: Any) -> None:
        calls.append(points)
        send(tracker, points)
        if len(calls) % 2:  # taken, and the answer lost
            raise ConnectionError("reset")

    monkeypatch.setattr(MlflowTracker, "log_metrics", sometimes)
    assert repair(made.folder).result == "recorded"
    assert len(calls) > 6
    assert_is_all_there(uri, made)


def test_a_file_that_is_gone_holds_nothing_up_and_is_sent_when_it_is_back(uri: str, tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", uri=uri).ready().files().train(1, 3).end()
    (made.folder / "model").rename(tmp_path / "elsewhere")
    status = repair(made.folder)
    assert (status.result, status.status) == ("not recorded", "FINISHED")
    assert "signature.json" in status.reason
    run = assert_is_all_there(uri, made, files=["plot.txt"])
    assert not (run.outputs and run.outputs.model_outputs)
    assert repair(made.folder).result == "not recorded"
    (tmp_path / "elsewhere").rename(made.folder / "model")
    assert repair(made.folder).result == "recorded"
    assert_has_one_model(uri, only_run(uri, "run"))
    assert repair(made.folder).result == "complete"


def test_a_run_that_went_on_without_a_store_is_still_known_there_and_one_that_began_so_is_recorded_whole(
    uri: str, tmp_path: Path
) -> None:
    for name, ways in (("with", ("mlflow", "none", "mlflow")), ("without", ("none", "mlflow"))):
        made = MadeRun(tmp_path / name, uri=uri)
        for number, way in enumerate(ways):
            before = made.events.stat().st_size
            made.ready(**({"resumed": 10 * number} if number else {})).train(10 * number + 1, 10 * number + 10).end()
            tracker = Tracker() if way == "none" else MlflowTracker(find_tracking_options(made.folder, None))
            recorder = Recorder(EventTransfer(tracker, made.events), before, is_resumed=number > 0)
            recorder.start()
            assert recorder.finish(240), recorder.reason
        assert_is_all_there(uri, made)


def test_a_run_is_recorded_from_where_its_folder_was_moved_to(uri: str, tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", uri=uri).ready().files().end()
    transfer = EventTransfer(MlflowTracker(find_tracking_options(made.folder, None)), made.events)
    transfer.record.save()
    made.folder.rename(tmp_path / "moved")
    assert repair(tmp_path / "moved").result == "recorded"
    run = assert_is_all_there(uri, made, files=["plot.txt"])
    assert run.data.tags["scaleflow.folder"] == str(made.folder)
    assert_has_one_model(uri, run)


def test_a_run_that_was_deleted_in_the_store_is_told_of_and_recorded_again(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two exports of a run the second has replaced the files of the first, so only the second is recorded again."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    made = MadeRun(tmp_path / "run", uri=uri).ready().train(1, 30).files(step=30)
    assert repair(made.folder).result == "recorded"
    shutil.rmtree(made.folder / "model")
    made.end("KILLED").ready(resumed=30).train(31, 40).files(step=20).end()
    assert repair(made.folder).result == "recorded"
    deleted = made.state["run_id"]
    run = Run.find(deleted, Tracking(uri=uri))
    assert (run.model.step, run.model_uri) == (20, made.state["model_uri"])  # not that of step 30

    client.delete_run(deleted)
    with pytest.raises(ConfigError, match=r"is in MLflow's trash.* --again"):
        EventTransfer(MlflowTracker(Tracking(uri=uri)), made.events).open()  # as `resume` does
    assert main([str(made.folder), "--json"]) == 1
    shown = capsys.readouterr().out
    assert '"exit_code": 1, "error": "1 folder: 1 DELETED FROM THE STORE", "folders": [{' in shown
    assert f"FINISHED, DELETED FROM THE STORE: the run {deleted} was deleted and is in MLflow's trash" in shown
    assert "--again records it again" in shown
    assert main([str(made.folder), "--again"]) == 0
    run = assert_is_all_there(uri, made, files=["plot.txt"])
    assert run.info.run_id == made.state["run_id"] != deleted
    assert assert_has_one_model(uri, run).tags["scaleflow.step"] == "20"
    assert main([str(made.folder), "--again"]) == 0
    assert ": FINISHED, already recorded" in capsys.readouterr().out

    made.train(41, 43).end()  # it is noticed as well where something is still to be sent
    client.delete_run(made.state["run_id"])
    assert repair(made.folder).result == "deleted"
    assert repair(made.folder, again=True).result == "recorded"
    assert_is_all_there(uri, made, files=["plot.txt"])
    (tmp_path / "mlflow.db").unlink()
    assert repair(made.folder).result == "deleted"
    assert not (tmp_path / "mlflow.db").exists()


def test_a_sweep_that_is_recorded_again_has_its_jobs_below_it(uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    parent = MadeRun(tmp_path / "sweep", uri=uri).ready().end()
    job = MadeRun(tmp_path / "sweep" / "0", uri=uri).ready(parent=str(parent.folder)).end()
    for each in (parent, job):
        repair(each.folder)
    MlflowClient(uri).delete_run(parent.state["run_id"])
    assert [repair(each.folder, again=True).result for each in (parent, job)] == ["recorded", "complete"]
    tags = MlflowClient(uri).get_run(job.state["run_id"]).data.tags
    assert tags["mlflow.parentRunId"] == parent.state["run_id"]


def last_event(made: MadeRun) -> Event:
    return list(EventReader(made.events).read())[-1]


def test_the_end_that_nobody_could_write(tmp_path: Path) -> None:
    """It depends on what the chief reported last; a run that has an end keeps it."""
    ended = MadeRun(tmp_path / "ended").ready().end()
    ended.write("note", text="more")
    assert not finalize_run(ended.folder)
    failed = MadeRun(tmp_path / "failed").ready()
    failed.write("fault", error="OSError: no")
    newest = last_event(failed).time
    assert finalize_run(failed.folder)
    assert last_event(failed) == RunEnded("FAILED", "OSError: no", time=newest)
    open_run = MadeRun(tmp_path / "open").ready().train(1, 3)
    open_run.write("fault", error="lost worker 1")
    open_run.write("restart", number=1, reason="lost worker 1")
    resumed = MadeRun(tmp_path / "resumed").ready().end("KILLED").ready(resumed=3)
    resumed.events.write_bytes(resumed.events.read_bytes() + b'{"event": "metr')  # killed within a line
    for made in (open_run, resumed):
        newest = last_event(made).time
        assert finalize_run(made.folder)
        assert not finalize_run(made.folder)
        assert last_event(made) == RunEnded("KILLED", LAUNCHER_DIED, time=newest)


@pytest.mark.parametrize("words", [["nowhere"], ["."], [], ["--uri"], ["--unknown", "."]])
def test_wrong_use_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(words)
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2
    assert capsys.readouterr().err


def test_it_suggests_what_it_has(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is away, an address without a scheme, and a run that another store has."""
    away = MadeRun(tmp_path / "away", uri="http://127.0.0.1:9").ready().end()
    there = MadeRun(tmp_path / "there", uri=uri).ready().end()
    assert main([str(there.folder)]) == 0
    (there.folder / "record.json").write_text(json.dumps({**there.state, "run_id": "0" * 32}))
    capsys.readouterr()
    shown = ""
    for words in ([str(away.folder)], [str(away.folder), "--uri", "localhost:9"], [str(there.folder)]):
        assert main(words) == 1
        shown += capsys.readouterr().out
    assert "use --uri sqlite:///mlflow.db" in shown
    assert "type --uri http://localhost:9" in shown
    assert "name the store that has it with --uri" in shown
    assert "--again records it again, as a new run" in shown
    assert "offline" not in shown
    with pytest.raises(SystemExit):
        main(["--help"])
    known = capsys.readouterr().out
    assert {word for word in re.findall(r"--\w+", shown) if word not in known} == set()
