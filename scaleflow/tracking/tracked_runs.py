"""Runs that are in a store already: what was tracked of them. What is read here was written by who knows whom."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking
from scaleflow.secret_masking import mask_secrets
from scaleflow.tracking.initial_weights import PLACES, use_store
from scaleflow.tracking.uri import resolve_store

if TYPE_CHECKING:
    from scaleflow.profiler.analysis_process import Profile
    from scaleflow.tracking.store import MlflowTracker

#: A config that is longer is none of ours.
LONGEST_CONFIG = 4 << 20


@dataclass(frozen=True)
class TrackedRun:
    """A run of scaleflow's that was tracked.

    Attributes:
        run_id, name: MLflow's.
        config: the text of its config.yaml.
        params: as logged, the options chosen among them.
        steps: updates that its model has had.
        model_id: of its logged model, the newest; None where it has none.
    """

    run_id: str
    name: str
    config: str
    params: Mapping[str, str]
    steps: int
    model_id: str | None


def choose_store(options: Tracking) -> Tracking:
    """The store that a command reads from; an SQLite file has to be there.

    Raises:
        ConfigError: if there is none.
    """
    found = resolve_store(options if options.name == "mlflow" else Tracking())
    assert found.uri is not None
    if found.uri.startswith("sqlite:///") and not Path(found.uri.removeprefix("sqlite:///")).exists():
        raise ConfigError(
            f"tracking.uri={found.uri}: there is no store; name the one that has the run by tracking.uri=..."
        )
    return found


def find_run(run_id: str, store: Tracking) -> tuple[MlflowTracker, TrackedRun]:
    """A run, and the tracker that has it.

    Raises:
        ConfigError: if the store has no such run, or it is none of scaleflow's.
    """
    from mlflow.exceptions import MlflowException

    from scaleflow.tracking.store import MlflowTracker

    tracker = MlflowTracker(store)
    tracker.connect()
    try:
        tracker.adopt(run_id, "RUN_ID")
        run = tracker.fetch_run()
    except MlflowException as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"tracking.uri={mask_secrets(store.uri)}: the store can't be used: {mask_secrets(reason)}"
        ) from error
    if "scaleflow.folder" not in run.data.tags:
        raise ConfigError(f"{run_id}: that run is none of scaleflow's: it has no tag scaleflow.folder")
    if "scaleflow.swept" in run.data.tags:
        raise ConfigError(f"{run_id}: that run is a sweep's; name the run of one of its jobs")
    outputs = sorted(run.outputs.model_outputs if run.outputs else [], key=lambda output: output.step)
    newest = outputs[-1] if outputs else None
    params = dict(run.data.params)
    params |= {k.removeprefix("scaleflow."): v for k, v in params.items() if k.startswith("scaleflow.")}
    past = TrackedRun(
        run_id,
        str(run.info.run_name),
        load_config_text(run_id, str(store.uri)),
        params,
        newest.step if newest else 0,
        newest.model_id if newest else None,
    )
    return tracker, past


def describe_opened_run(past: TrackedRun, store: Tracking) -> None:
    """Names the run that `mlflow run . -e evaluate` has opened, which stays empty, and puts it below what it is of."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    from scaleflow.tracking.store import MLFLOWS_NAME

    opened = os.environ.get("MLFLOW_RUN_ID")
    if not opened or opened == past.run_id:
        return
    client = MlflowClient(tracking_uri=store.uri)
    with contextlib.suppress(MlflowException):  # it is in another store, or gone: it may stay as it is
        run = client.get_run(opened)
        if run.data.tags.get("mlflow.project.entryPoint") != "evaluate":
            return
        client.set_tag(opened, "mlflow.parentRunId", past.run_id)
        if MLFLOWS_NAME.fullmatch(run.info.run_name or ""):
            client.update_run(opened, name=f"evaluation of {past.name}")


def load_config_text(run_id: str, store: str) -> str:
    """The text of a run's config.yaml."""
    with tempfile.TemporaryDirectory(prefix="scaleflow-") as folder:
        path = download_artifact(f"runs:/{run_id}/config.yaml", store, Path(folder))
        if path is None:
            raise ConfigError(f"{run_id}: the store {mask_secrets(store)} has no config.yaml of that run")
        if path.stat().st_size > LONGEST_CONFIG:
            raise ConfigError(f"{run_id}: its config.yaml has {path.stat().st_size:,} bytes, which is no run's config")
        return path.read_text(encoding="utf-8", errors="replace")


def download_model(tracker: MlflowTracker, run: TrackedRun, store: Tracking, folder: Path) -> Path:
    """Downloads the Keras file of a run's logged model.

    Raises:
        ConfigError: if the run has logged none.
    """
    where = f"{run.run_id}: the run {run.name}"
    if run.model_id is None:
        raise ConfigError(
            f"{where} has logged no model; a run logs it when it is finished (resume=... goes on with it)"
        )
    path = download_artifact(f"{tracker.model_uri(run.model_id).rstrip('/')}/{PLACES[1]}", str(store.uri), folder)
    if path is None:
        raise ConfigError(
            f"{where} has a model {run.model_id} without {PLACES[1]}: it is one that Keras could not write as a "
            f".keras file, or none of scaleflow's; mlflow.pyfunc.load_model('models:/{run.model_id}') loads it"
        )
    return path


def download_artifact(uri: str, store: str, folder: Path) -> Path | None:
    """An artifact, downloaded; None where there is none."""
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    with use_store(store), contextlib.suppress(MlflowException, OSError):
        return Path(download_artifacts(uri, dst_path=str(folder)))
    return None


def log_evaluation(
    tracker: MlflowTracker,
    run: TrackedRun,
    name: str,
    events: Sequence[Mapping[str, Any]],
    tag: str,
    profiles: Sequence[Profile] = (),
) -> dict[str, float]:
    """Puts an evaluation into the run that the model is of, and at the model.

    Args:
        tracker: has taken the run.
        run: the run.
        name: what was evaluated on.
        events: the worker's.
        tag: how, in words.
        profiles: of windows of its batches.

    Returns:
        The metrics, by the names that they have there.
    """
    from mlflow.entities import Metric

    from scaleflow.tracking.keys import to_allowed_key
    from scaleflow.tracking.plot import draw_confusion

    told = next(event for event in events if event["event"] == "data")
    (look,) = told["splits"].values()
    tracker.log_dataset({**told, "splits": {"evaluate": look}})
    values: dict[str, float] = {}
    for event in events:
        if event["event"] == "metrics":
            about = {"model_id": run.model_id, "dataset_name": told["name"], "dataset_digest": look["digest"]}
            found = {to_allowed_key(f"evaluate/{name}/{key}"): value for key, value in event["values"].items()}
            tracker.log_batch([Metric(key, value, event["time"], run.steps, **about) for key, value in found.items()])
            values |= found
        elif event["event"] == "confusion":
            table = Path(event["path"])
            for path in filter(None, (draw_confusion(table, name), table)):
                tracker.log_artifact(path, f"evaluate/{name}")
    for profile in profiles:
        values |= log_profile(tracker, run, name, profile)
    tracker.set_tags({f"scaleflow.evaluate.{name}": tag})
    return values


def log_profile(tracker: MlflowTracker, run: TrackedRun, name: str, profile: Profile) -> dict[str, float]:
    """Puts a profile of an evaluation beside its metrics; gives its own, by the names that they have there."""
    from mlflow.entities import Metric

    from scaleflow.tracking.keys import to_allowed_key

    now = int(time.time() * 1000)
    values = {to_allowed_key(f"evaluate/{name}/{key}"): value for key, value in profile.values.items()}
    tracker.log_batch([Metric(key, value, now, run.steps, model_id=run.model_id) for key, value in values.items()])
    for path, folder in profile.files:
        tracker.log_artifact(path, f"evaluate/{name}/{folder}")
    return values
