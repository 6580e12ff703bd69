"""Reads the best job of a sweep from a store, by the tags of the sweep's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking
from scaleflow.tracking.model_uris import choose_result
from scaleflow.tracking.store import SWEPT, MlflowTracker, explain_unusable
from scaleflow.tracking.tracked_runs import choose_store

#: The tags of a sweep's run about its best job: its number, its folder, its overrides as words of a command, and the
#: metric that ranks the jobs.
BEST = "scaleflow.best"
BEST_FOLDER, BEST_OVERRIDES, BEST_METRIC = f"{BEST}.folder", f"{BEST}.overrides", f"{BEST}.metric"


@dataclass(frozen=True)
class TrackedJob:
    """The best job of a tracked sweep, as the store has it.

    Attributes:
        tags: of the sweep's run.
        run_id, folder, metrics: of the job's run; the metrics of its exported model, as the sweep's run has them.
        model_uri: the model of the job; None if it has none.
        store: the address of the store.
    """

    tags: Mapping[str, str]
    run_id: str
    folder: Path
    metrics: Mapping[str, float]
    model_uri: str | None
    store: str


def fetch_best_job(run_id: str, options: Tracking) -> TrackedJob:
    """Returns the best job of the sweep whose run has an ID.

    Raises:
        ConfigError: if the store cannot be used, has no such sweep, or if the sweep has no best job.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD

    tracker = MlflowTracker(choose_store(options))
    tracker.connect()
    client = MlflowClient(tracking_uri=tracker.uri)
    try:
        tracker.adopt(run_id, run_id)
        parent = tracker.fetch_run()
        check_sweep_tags(run_id, parent.data.tags)
        tags, query = parent.data.tags, f"tags.`mlflow.parentRunId` = '{run_id}'"
        jobs = client.search_runs([parent.info.experiment_id], query, max_results=SEARCH_MAX_RESULTS_THRESHOLD)
        found = [job.info.run_id for job in jobs if job.data.tags.get("scaleflow.folder") == tags[BEST_FOLDER]]
        if not found:
            raise ConfigError(f"{run_id}: the store does not have the run of the best job, {tags[BEST_FOLDER]}")
        run = client.get_run(found[0])
    except MlflowException as error:
        raise explain_unusable(tracker.uri, error) from error
    model, metrics = choose_result(run).model_id, {**run.data.metrics, **parent.data.metrics}
    uri = model and f"models:/{model}"
    return TrackedJob(tags, run.info.run_id, Path(tags[BEST_FOLDER]), metrics, uri, tracker.uri)


def check_sweep_tags(named: str, tags: Mapping[str, str]) -> None:
    """Raises ConfigError unless tags are those of the run of a sweep that has a best job."""
    if SWEPT not in tags:
        raise ConfigError(f"{named}: this is not the run of a sweep; name the run or the folder of one (-m)")
    if BEST not in tags:
        raise ConfigError(f"{named}: this sweep has no best job: no finished job has its sweep.metric yet")
