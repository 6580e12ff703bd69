"""A pipeline from end to end: real commands, a real store, a kill, and what runs again after a change."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from scaleflow.features.pipelines.runner import end_orphaned_process
from scaleflow.runs.folder import read_json
from tests.conftest import Command
from tests.launcher.test_supervisor import wait_for

FILE = """
overrides: [dataset=digits, dataset.limit=200, model.units=8, evaluation=none, "seed=${seed}",
            "tracking.uri=sqlite:///own.db"]
seed: 1
stages:
  fit:  {command: train, overrides: [training.epochs=2]}
  some: {command: evaluate, run: "${stages.fit.run_id}", split: validation}
  tell: {command: python, target: steps.tell, arguments: {accuracy: "${stages.some.metrics.accuracy}"}}
  rare: {command: check, when: "${stages.some.metrics.accuracy} > 1"}
"""


def read_stage_answer(done: object) -> dict[str, dict[str, dict[str, object]]]:
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[attr-defined, no-any-return]


def test_after_a_kill_no_run_stays_running_though_its_stage_has_changed(command: Command) -> None:
    folder = command.folder
    (folder / "conf" / "pipeline").mkdir(parents=True)
    (folder / "conf" / "pipeline" / "mine.yaml").write_text("stages:\n  wait: {command: python, target: steps.wait}\n")
    (folder / "steps.py").write_text("import time\ndef wait():\n    time.sleep(300)\n")
    words = ("pipeline", "mine", "--config-dir", "conf")
    stage, own = folder / "pipelines" / "mine" / "wait" / "1", folder / "pipelines" / "mine" / "_runs" / "1"

    assert command(*words, "--dry-run").stdout == "wait  run  has not run\n"
    assert not (folder / "pipelines").exists()
    begun = command.start(*words)
    wait_for(lambda: (stage / "record.json").exists() and read_json(stage / "record.json").get("run_id"))
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait(240)

    (folder / "steps.py").write_text("def wait():\n    return 1\n")
    done = command(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps.py changed" in done.stdout
    ids = {name: read_json(each / "record.json")["run_id"] for name, each in (("left", stage), ("own", own))}
    assert read_statuses(folder)[ids["left"]] == "KILLED"
    assert sorted(read_statuses(folder).values()) == ["FINISHED", "FINISHED", "KILLED"]

    path = folder / "pipelines" / "mine" / "pipeline.json"
    for status in ("RUNNING", "KILLED"):  # killed, or stopped, after its last stage and before the end of its own run
        path.write_text(json.dumps({**read_json(path), "status": status}))
        *lines, _ = (own / "events.jsonl").read_text().splitlines(keepends=True)
        (own / "events.jsonl").write_text("".join(lines))
        record = {**read_json(own / "record.json"), "done": False, "offset": len("".join(lines))}
        (own / "record.json").write_text(json.dumps(record))
        with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database, database:
            database.execute("UPDATE runs SET status = ? WHERE run_uuid = ?", (status, ids["own"]))
        assert command(*words).returncode == 0
        assert sorted(read_statuses(folder).values()) == ["FINISHED", "FINISHED", "KILLED"]


def read_statuses(folder: Path) -> dict[str, str]:
    """The statuses of all runs in the store, by their ids."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db", timeout=60)) as database:
        return dict(database.execute("SELECT run_uuid, status FROM runs").fetchall())


def test_a_process_that_a_killed_pipeline_left_is_ended_and_no_other_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        began = psutil.Process(process.pid).create_time()
        end_orphaned_process((process.pid, began - 5))
        assert process.poll() is None
        end_orphaned_process((process.pid, began))
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.slow
def test_a_pipeline_runs_goes_on_after_a_kill_and_runs_again_what_changed(command: Command, empty_store: Path) -> None:
    folder = command.folder
    (folder / "conf" / "pipeline").mkdir(parents=True)
    file = folder / "conf" / "pipeline" / "mine.yaml"
    file.write_text(FILE)
    shutil.copy(empty_store, folder / "own.db")
    (folder / "steps.py").write_text("def tell(accuracy):\n    return {'is': accuracy}\n")
    words = ("pipeline", "mine", "--config-dir", "conf")

    begun = command.start(*words)
    log = folder / "pipelines" / "mine" / "fit" / "1" / "events.jsonl"
    wait_for(lambda: log.exists() and '"ready"' in log.read_text())
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait(240)

    done = command(*words, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = read_stage_answer(done)["stages"]
    assert [stages[name]["status"] for name in ("fit", "some", "tell", "rare")] == ["FINISHED"] * 3 + ["skipped"]
    accuracy = stages["some"]["metrics"]["accuracy"]  # type: ignore[index]
    assert stages["tell"]["result"] == {"is": accuracy}

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/own.db")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert {run.info.status for run in runs} == {"FINISHED"}
    (parent,) = [run for run in runs if run.info.run_name == "mine"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == len(runs) - 1 == 3
    assert {"pipeline.yaml", "stages.yaml", "results.csv", "graph.svg"} <= {
        each.path for each in client.list_artifacts(parent.info.run_id)
    }
    fit = stages["fit"]["run_id"]
    described = {run.data.tags.get("scaleflow.stage"): run.data.tags["mlflow.note.content"] for run in runs}
    assert f"[{str(fit)[:8]}](#/runs/{fit})" in described[None]
    assert f"[{str(fit)[:8]}](#/runs/{fit})" in described["some"]
    assert "--split validation" in described["some"]
    written = yaml.safe_load((folder / "pipelines" / "mine" / "_runs" / "1" / "stages.yaml").read_text())
    assert written["fit"]["overrides"][-1] == "training.epochs=2"
    assert written["fit"]["outputs"]["run_id"] == fit
    assert written["fit"]["splits"].keys() == {"digits train", "digits validation", "digits test"}
    assert written["tell"]["arguments"] == {"accuracy": accuracy}
    assert "steps.py" in written["tell"]["made_of"]["code"]
    assert written["rare"] == {"command": "check", "state": "skipped", "why": "its condition is false"}

    state = folder / "pipelines" / "mine" / "pipeline.json"  # as a kill leaves it between the evaluation and its end
    content = json.loads(state.read_text())
    content["status"] = content["stages"]["some"]["status"] = "RUNNING"
    state.write_text(json.dumps(content))
    again = command(*words, "--json")
    assert again.returncode == 0, again.stdout + again.stderr
    for name in ("loss", "accuracy"):
        assert len(client.get_metric_history(str(fit), f"evaluate/digits.validation/{name}")) == 1
    (some,) = [run for run in runs if run.data.tags.get("scaleflow.stage") == "some"]
    assert len(client.get_metric_history(some.info.run_id, "accuracy")) == 1
    assert client.get_run(some.info.run_id).info.status == "FINISHED"

    def plan(*more: str) -> dict[str, str]:
        lines = command(*words, "--dry-run", *more).stdout.splitlines()
        return {line.split()[0]: line.split(None, 1)[1] for line in lines}

    kept = {"fit": "reuse", "some": "reuse", "tell": "reuse", "rare": "skip  its condition is false"}
    file.write_text(f"# a comment\n{FILE}")
    (folder / "steps.py").write_text("# a comment\ndef tell(accuracy):\n    return {'is':  accuracy}\n")
    assert plan() == kept
    assert plan("tell.x=1") == {}
    assert plan("seed=2") == {
        "fit": "run  seed 1 -> 2",
        "some": "run  fit runs",
        "tell": "run  some runs",
        "rare": "run  some runs",
    }
    (folder / "steps.py").write_text("def tell(accuracy):\n    return accuracy\n")
    assert plan() == {**kept, "tell": "run  steps.py changed"}
    assert plan("--force", "some")["some"] == "run  is forced"
    client.delete_run(str(stages["fit"]["run_id"]))
    assert plan()["fit"] == f"run  its run {stages['fit']['run_id']} was deleted"
