"""Reads runs and the best job of a sweep from a store, and logs evaluations. A store's contents are untrusted input."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError, RunDeleted, RunMissing
from scaleflow.interfaces import LEARNED_ARRAYS, LEARNED_STATE, Tracking, name_command
from scaleflow.interfaces.events import (
    ArtifactWritten,
    ConfusionWritten,
    DatasetDescribed,
    Event,
    MetricsLogged,
    ReportMade,
)
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.tracking.connection import explain_unusable, use_store
from scaleflow.tracking.keys import to_allowed_key
from scaleflow.tracking.model_uris import KERAS_FILES, ModelReference, choose_result, resolve_reference
from scaleflow.tracking.plot import draw_confusion
from scaleflow.tracking.store import GENERATED_NAME, SWEPT, MlflowTracker
from scaleflow.tracking.uri import resolve_store, sqlite_file

#: Prefix of the tag of an evaluation, and the pattern of the data digest in its value.
EVALUATION_TAG = "scaleflow.evaluate."
TAGGED_DIGEST = re.compile(r", data ([0-9a-f]+);")

#: Maximum size of a config.yaml in bytes. A real config is much smaller.
MAX_CONFIG_BYTES = 4 << 20


def choose_store(options: Tracking) -> Tracking:
    """Returns the options of the store that a command reads. Raises ConfigError if its SQLite file does not exist."""
    store = resolve_store(options if options.name == "mlflow" else Tracking())
    assert store.uri is not None
    file = sqlite_file(store.uri)
    if file and not file.exists():
        raise ConfigError(
            f"tracking.uri={store.uri}: there is no such store; set tracking.uri=... to the store that has the run"
        )
    return store


def open_run(named: str, store: Tracking, needs_run: bool = True) -> tuple[MlflowTracker, ModelReference]:
    """Returns a tracker that is connected to a run, and its model. For a run's ID, the model is the run's result.

    A logged model stays in the store after its run was deleted. If the command does not need the run, the tracker is
    then connected only to the store.

    Args:
        named: a run's ID or a model's URI.
        store: the options of the store.
        needs_run: whether the command needs the run itself.

    Raises ConfigError if the store cannot be used or has no such run, or if the run is a sweep's own run or not a run
    of scaleflow.
    """
    tracker = MlflowTracker(store)
    tracker.connect()
    from mlflow.exceptions import MlflowException

    try:
        reference = resolve_reference(named, tracker.uri)
        run_id = reference.run_id
        try:
            tracker.select_run(run_id, named)
        except RunMissing as missing:
            if reference.model_id is None:
                raise
            if not needs_run:
                return tracker, reference
            raise explain_deleted_run(named, run_id, missing) from missing
        run = tracker.fetch_run()
    except MlflowException as error:
        raise explain_unusable(tracker.uri, error) from error
    if "scaleflow.folder" not in run.data.tags:
        raise ConfigError(f"{run_id}: this is not a run of scaleflow: it has no tag scaleflow.folder")
    if SWEPT in run.data.tags:
        raise ConfigError(f"{run_id}: this is the run of a sweep; use the run of one of its jobs")
    return tracker, reference if reference.model_id else choose_result(run)


def explain_deleted_run(named: str, run_id: str, missing: RunMissing) -> RunMissing:
    """Returns the error for a command that needs a deleted run, while the run's model is still in the store."""
    lost = f"the run {run_id} that trained this model was deleted"
    if isinstance(missing, RunDeleted):
        return RunDeleted(
            f"{named}: {lost}, and this command needs its config; `mlflow runs restore --run-id {run_id}` restores it"
        )
    return RunMissing(
        f"{named}: {lost} for good, and with it its config, its metrics and its kept predictions, which this command "
        f"needs; the model itself is there: {name_command('predict')} {named} and "
        f"mlflow.pyfunc.load_model('{named}') work"
    )


def attach_opened_run(run_id: str, name: str, store: Tracking) -> None:
    """Makes the empty run that `mlflow run . -e evaluate` opened a child of the evaluated run, and renames it.

    Keeps a name that MLflow did not generate.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    opened = os.environ.get("MLFLOW_RUN_ID")
    if not opened or opened == run_id:
        return
    client = MlflowClient(tracking_uri=store.uri)
    with contextlib.suppress(MlflowException):  # the run may be in another store or deleted; then nothing is renamed
        run = client.get_run(opened)
        if run.data.tags.get("mlflow.project.entryPoint") != "evaluate":
            return
        client.set_tag(opened, "mlflow.parentRunId", run_id)
        if GENERATED_NAME.fullmatch(run.info.run_name or ""):
            client.update_run(opened, name=f"evaluation of {name}")


def load_config_text(run_id: str, store: str) -> str:
    with tempfile.TemporaryDirectory(prefix="scaleflow-") as folder:
        path = download_artifact(f"runs:/{run_id}/config.yaml", store, Path(folder))
        if path is None:
            raise ConfigError(f"{run_id}: the store {mask_secrets(store)} has no config.yaml of that run")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{run_id}: its config.yaml has {path.stat().st_size:,} bytes, which is too large for the config of a "
                "run"
            )
        return path.read_text(encoding="utf-8", errors="replace")


def download_model(tracker: MlflowTracker, model: ModelReference, folder: Path) -> Path:
    """Downloads the Keras file of a logged model, and the run's learned state next to it.

    Raises ConfigError if the run has no logged model, or if the model has no Keras file or no learned state.
    """
    path = download_artifact(f"{find_model(tracker, model)}/{KERAS_FILES[1]}", tracker.uri, folder)
    if path is None:
        raise ConfigError(
            f"the model {model.model_id} of {model.run_id}: the run {tracker.name_run()} has no "
            f"{KERAS_FILES[1]}, because Keras could not write it as a .keras file or it is not a model of scaleflow; "
            f"load it with mlflow.pyfunc.load_model('models:/{model.model_id}')"
        )
    download_learned_state(tracker, model, path.parent)
    return path


def download_learned_state(tracker: MlflowTracker, model: ModelReference, folder: Path) -> None:
    """Downloads the learned state of a run. Raises ConfigError if its model has none."""
    address = find_model(tracker, model)
    if download_artifact(f"{address}/data/{LEARNED_STATE}", tracker.uri, folder) is None:
        raise ConfigError(
            f"{model.run_id}: its model {model.model_id} has no data/{LEARNED_STATE}; it is not a model of scaleflow"
        )
    download_artifact(f"{address}/data/{LEARNED_ARRAYS}", tracker.uri, folder)  # exists only for long lists


def find_model(tracker: MlflowTracker, model: ModelReference) -> str:
    """Returns the address of a logged model's artifacts. Raises ConfigError if the run has no model."""
    if model.model_id is None:
        raise ConfigError(
            f"{model.run_id}: the run {tracker.name_run()} has no model; a run logs its model when it "
            "finishes (resume=... continues it)"
        )
    return tracker.find_artifacts(model.model_id).rstrip("/")


def download_artifact(uri: str, store: str, folder: Path) -> Path | None:
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    with use_store(store), contextlib.suppress(MlflowException, OSError):
        return Path(download_artifacts(uri, dst_path=str(folder)))
    return None


#: Environment variable: the start of the pipeline stage that runs this command, in milliseconds since the epoch. All
#: points of an evaluation get this time. If the stage is killed and repeated, it finds its earlier points by the time.
STAGE_BEGAN = "SCALEFLOW_STAGE_BEGAN"


def log_evaluation(
    tracker: MlflowTracker, model: ModelReference, name: str, events: Sequence[Event], tag: str
) -> dict[str, float]:
    """Logs an evaluation to the model and its run. Returns the metrics by their names in the store.

    Args:
        tracker: connected to the run.
        model: the evaluated model.
        name: the evaluation's name, which is part of the metrics' names. If an evaluation on other data has this name,
            a digest is appended.
        events: the events of the evaluating worker, and the reports on its traces.
        tag: the value of the tag `scaleflow.evaluate.NAME`. It describes the evaluation and contains the digest of the
            data as `, data DIGEST;`.
    """
    from mlflow.entities import Metric

    from scaleflow.tracking.inputs import EVALUATED

    logged: dict[str, float] = {}
    began = int(os.environ.get(STAGE_BEGAN) or 0)

    def log_values(values: Mapping[str, float], time_ms: int, **dataset: str) -> None:
        metrics = {to_allowed_key(f"{folder}/{key}"): value for key, value in values.items()}
        links = {"model_id": model.model_id, **dataset}
        known = tracker.find_points(metrics, model.step, began) if began else {}
        new = [Metric(k, v, began or time_ms, model.step, **links) for k, v in metrics.items() if k not in known]
        tracker.log_batch(new)
        logged.update({**metrics, **known})

    data = next(event for event in events if isinstance(event, DatasetDescribed))
    (split,) = data.splits.values()
    name = choose_evaluation_name(name, split["digest"], tracker.fetch_run().data.tags)
    folder = f"evaluate/{name}"
    tracker.log_dataset(replace(data, splits={EVALUATED: split}))
    for event in events:
        if isinstance(event, MetricsLogged):
            log_values(event.values, event.time, dataset_name=data.name, dataset_digest=split["digest"])
        elif isinstance(event, ConfusionWritten):
            table = Path(event.path)
            for path in filter(None, (draw_confusion(table, name), table)):
                tracker.log_artifact(path, folder)
        elif isinstance(event, ArtifactWritten):
            subfolder = (event.folder or "").partition("/")[2]
            tracker.log_artifact(Path(event.path), f"{folder}/{subfolder}" if subfolder else folder)
        elif isinstance(event, ReportMade):
            log_values(event.values, int(time.time() * 1000))
            for file, part in event.files:
                tracker.log_artifact(Path(file), f"{folder}/{part}")
    tracker.set_tags({f"{EVALUATION_TAG}{name}": tag})
    return logged


def choose_evaluation_name(name: str, digest: str, tags: Mapping[str, str]) -> str:
    """Returns the name of an evaluation. Appends the data's digest if an evaluation on other data has this name."""
    tag = tags.get(f"{EVALUATION_TAG}{name}")
    if tag is None:
        return name
    earlier = TAGGED_DIGEST.search(tag)
    is_same_data = earlier is not None and earlier[1] == digest
    return name if is_same_data else f"{name}-{digest[:8]}"


#: Tags of a sweep's run about its best job: its number, its folder, its overrides as typed in a command, the metric
#: that ranks the jobs, and the updates of its model.
BEST = "scaleflow.best"
BEST_FOLDER = f"{BEST}.folder"
BEST_OVERRIDES = f"{BEST}.overrides"
BEST_METRIC = f"{BEST}.metric"
BEST_STEPS = f"{BEST}.steps"


def open_best_job(run_id: str, options: Tracking) -> tuple[MlflowTracker, ModelReference, Any]:
    """Returns a tracker that is connected to the best job of a sweep, the job's model, and the sweep's run.

    Raises ConfigError if the store cannot be used or has no such sweep, or if the sweep has no best job.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD

    tracker = MlflowTracker(choose_store(options))
    tracker.connect()
    client = MlflowClient(tracking_uri=tracker.uri)
    try:
        tracker.select_run(run_id, run_id)
        parent = tracker.fetch_run()
        check_sweep_tags(run_id, parent.data.tags)
        folder = parent.data.tags[BEST_FOLDER]
        query = f"tags.`mlflow.parentRunId` = '{run_id}'"
        jobs = client.search_runs([parent.info.experiment_id], query, max_results=SEARCH_MAX_RESULTS_THRESHOLD)
        best = [job.info.run_id for job in jobs if job.data.tags.get("scaleflow.folder") == folder]
        if not best:
            raise ConfigError(f"{run_id}: the store does not have the run of the best job, {folder}")
        tracker.select_run(best[0])
        return tracker, choose_result(tracker.fetch_run()), parent
    except MlflowException as error:
        raise explain_unusable(tracker.uri, error) from error


def check_sweep_tags(named: str, tags: Mapping[str, str]) -> None:
    """Raises ConfigError unless the tags belong to the run of a sweep with a best job."""
    if SWEPT not in tags:
        raise ConfigError(f"{named}: this is not the run of a sweep; name the run or the folder of one (-m)")
    if BEST not in tags:
        raise ConfigError(f"{named}: this sweep has no best job: no finished job has its sweep.metric yet")
