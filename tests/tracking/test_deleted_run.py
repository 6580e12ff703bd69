"""A logged model stays in the store after its run was deleted, and commands say what they can do with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scaleflow.interfaces import Inputs, LearnedState, Outputs

STATE = LearnedState(Inputs((2,), "float32"), Outputs("regression", (1,)))


def delete_the_run_of_a_model(folder: str, empty_store: str) -> dict[str, Any]:
    """What is found of a registered model in the trash, and after `mlflow gc`."""
    from mlflow import MlflowClient

    from scaleflow.commands.tracked_run import find_run
    from scaleflow.config.compose import CommandWords
    from scaleflow.errors import ConfigError
    from scaleflow.features.predict.command import read_state
    from scaleflow.tracking.registry import register_model
    from scaleflow.tracking.store import STEP_TAG
    from scaleflow.tracking.tracked_runs import download_model

    store = f"sqlite:///{folder}/mlflow.db"
    shutil.copyfile(empty_store, f"{folder}/mlflow.db")
    client = MlflowClient(tracking_uri=store)
    experiment = client.create_experiment("e", f"file://{folder}/artifacts")
    run = client.create_run(experiment, tags={"scaleflow.folder": folder}).info.run_id
    model = client.create_logged_model(experiment, name="model", source_run_id=run, tags={STEP_TAG: "7"})
    data = Path(folder, "exported", "data")
    data.mkdir(parents=True)
    (data / "model.keras").write_text("weights")
    (data / "learned_state.json").write_text(json.dumps(STATE.to_json()))
    client.log_model_artifacts(model.model_id, str(data.parent))
    client.finalize_logged_model(model.model_id, "READY")
    register_model(client, "churn", None, run_id=run, model_id=model.model_id)
    words = CommandWords([f"tracking.uri={store}"], run_id="models:/churn/1")
    found: dict[str, Any] = {"run": run, "model": model.model_id}

    def refuse(name: str, words: CommandWords) -> None:
        try:
            find_run(words)
        except ConfigError as error:
            found[name] = str(error)

    client.delete_run(run)
    refuse("trash", words)
    client._tracking_client.store._hard_delete_run(run)
    refuse("gone", words)
    refuse("another run", CommandWords([f"tracking.uri={store}"], run_id="0" * 32))
    alone, completed = find_run(words, needs_run=False)
    found["alone"] = (alone.is_deleted, alone.title, alone.model_uri, completed.tracked_dirs)
    state = read_state(alone)
    found["state"] = (state.inputs.shape, state.outputs.kind)
    target = Path(folder, "downloaded")
    found["weights"] = download_model(alone.tracker, alone.model, target).read_text()
    for record in Path(folder, "artifacts").rglob("learned_state.json"):
        record.unlink()
    try:
        read_state(find_run(words, needs_run=False)[0])
    except ConfigError as error:
        found["damaged"] = str(error)
    return found


def test_a_model_is_used_without_its_run_or_the_reason_is_true(
    isolated: Callable[..., Any], tmp_path: Path, empty_store: Path
) -> None:
    found = isolated(delete_the_run_of_a_model, str(tmp_path), str(empty_store))
    run, model = found["run"], found["model"]
    assert found["trash"] == (
        f"models:/churn/1: the run {run} that trained this model was deleted, and this command needs its config; "
        f"`mlflow runs restore --run-id {run}` restores it"
    )
    assert found["gone"].startswith(f"models:/churn/1: the run {run} that trained this model was deleted for good")
    assert "predict models:/churn/1 and mlflow.pyfunc.load_model('models:/churn/1') work" in found["gone"]
    assert "set tracking.uri to the store that has it" not in found["gone"]
    assert "set tracking.uri to the store that has it" in found["another run"]
    assert found["alone"] == (True, f"deleted  ({run})", f"models:/{model}", [])
    assert (tuple(found["state"][0]), found["state"][1], found["weights"]) == ((2,), "regression", "weights")
    assert (
        found["damaged"] == f"{run}: its model {model} has no data/learned_state.json; it is not a model of scaleflow"
    )
