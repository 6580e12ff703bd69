"""A service as teams run it: `mlflow server` on PostgreSQL with artifacts in S3, and many jobs at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from scaleflow.runs.state import is_finished
from tests.campaign.judge import Stored, lost_points, written
from tests.conftest import Command
from tests.event_log import events_in
from tests.launcher.test_supervisor import LongRun, slow_down
from tests.object_store import make_bucket
from tests.tracking.postgres import serve_postgres
from tests.tracking.servers import Server

JOBS, STEPS = 16, 400

#: A sweep of all jobs at once, as small as jobs are.
SWEEP = (
    *("-m", f"seed=range(0,{JOBS})", f"hydra.launcher.n_jobs={JOBS}", "hydra.sweep.dir=sweep"),
    *("hardware=cpu", "model.units=4", f"training.max_steps={STEPS}", "training.steps_per_loop=1"),
    *("checkpoint=none", "evaluation=none", "dataset.check=none"),
    *("tracking.system_metrics=false", "tracking.code=false", "tracking.flush_seconds=240"),
)


@pytest.fixture
def database() -> Iterator[str]:
    with serve_postgres() as uri:
        yield uri


@pytest.fixture
def service(database: str, object_store: dict[str, str], tmp_path: Path) -> Iterator[Server]:
    make_bucket(object_store, "mlflow")
    folder = tmp_path / "server"
    folder.mkdir()
    store = database.replace("postgresql:", "postgresql+psycopg2:")  # SQLAlchemy 2.1 would take psycopg
    server = Server(folder, store, "s3://mlflow/artifacts", object_store, workers=2)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.mark.slow
def test_sixteen_jobs_lose_nothing_when_their_server_is_killed_again_and_again(
    command: Command, service: Server, database: str, object_store: dict[str, str], isolated: Callable[..., Any]
) -> None:
    """It is killed while runs begin, while points come from all jobs, and while files and models arrive."""
    jobs = [command.folder / "sweep" / str(number) for number in range(JOBS)]
    pace = command.folder / "slow"
    long = LongRun(command, *SWEEP, slow_down(pace, 0.5), f"tracking.uri={service.uri}", only=True)
    with contextlib.closing(long.launcher):
        long.wait_for(lambda: all(record(job).get("offset") and written(job) for job in jobs))
        for _ in range(2):
            service.stop()
            before = {job: size(job) for job in jobs}
            long.wait_for(lambda: all(size(job) > before[job] for job in jobs))  # noqa: B023
            service.start()
            long.wait_for(lambda: all(has_points_after(job, before[job]) for job in jobs))  # noqa: B023
        pace.unlink()
        long.wait_for(lambda: any(record(job).get("model_uri") for job in jobs))
        service.stop()
        assert not all(record(job).get("done") for job in jobs)
        long.wait_for(lambda: all(is_finished(job) for job in jobs))
        service.start()
        assert long.end(240) == 0, long.err.read_text()
    assert "Traceback" not in long.err.read_text()
    runs = read_runs(database)
    objects = list_objects(object_store, "mlflow")
    assert len(runs) == JOBS + 1  # and the sweep's
    for number, job in enumerate(jobs):
        (run,) = (run for run in runs.values() if run.stored.tags.get("scaleflow.folder") == str(job))
        assert run.params["seed"] == str(number)
        assert_is_whole(job, run, objects)
    assert isolated(load_and_predict, service.uri, record(jobs[-1])["model_uri"]) == ["prediction", "probability"]


def record(job: Path) -> dict[str, Any]:
    """What a job's launcher keeps of its recording."""
    file = job / "record.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def has_points_after(job: Path, offset: int) -> bool:
    """Whether the store has points that a job wrote after an offset in its events."""
    taken = record(job).get("offset", 0)
    data = (job / "events.jsonl").read_bytes()[offset:taken] if taken > offset else b""
    return b'"event": "metrics"' in data


def size(job: Path) -> int:
    return (job / "events.jsonl").stat().st_size


@dataclass(frozen=True)
class StoredModel:
    """A logged model in PostgreSQL, with its files' place in the bucket."""

    name: str
    artifacts: PurePosixPath


class StoredRun:
    """A run in PostgreSQL, read past MLflow, with its files' place in the bucket."""

    def __init__(self, cursor: Any, run_id: str, status: str, artifacts: str) -> None:
        self.id = run_id
        self.artifacts = to_place(artifacts)
        self.params: dict[str, str] = dict(select(cursor, "key, value FROM params", run_id))
        models = select(cursor, "model_id, artifact_location FROM logged_models", run_id, "source_run_id")
        self.models = [StoredModel(name, to_place(uri)) for name, uri in models]
        points = Counter(select(cursor, "key, step, value, timestamp FROM metrics", run_id))
        self.stored = Stored(status, dict(select(cursor, "key, value FROM tags", run_id)), points)


def to_place(uri: str) -> PurePosixPath:
    return PurePosixPath("artifacts", uri.removeprefix("mlflow-artifacts:/"))


def select(cursor: Any, asked: str, run_id: str, column: str = "run_uuid") -> list[Any]:
    cursor.execute(f"SELECT {asked} WHERE {column} = %s", (run_id,))
    return list(cursor.fetchall())


def read_runs(database: str) -> dict[str, StoredRun]:
    import psycopg2

    with contextlib.closing(psycopg2.connect(database, connect_timeout=10)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT run_uuid, status, artifact_uri FROM runs")
        return {row[0]: StoredRun(cursor, *row) for row in cursor.fetchall()}


def list_objects(store: Mapping[str, str], bucket: str) -> dict[str, str]:
    """The MD5 of each object's content, by its name."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=store["AWS_ENDPOINT_URL"],
        region_name=store["AWS_REGION"],
        aws_access_key_id=store["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=store["AWS_SECRET_ACCESS_KEY"],
    )
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return {each["Key"]: each["ETag"].strip('"') for page in pages for each in page["Contents"]}


def assert_is_whole(job: Path, run: StoredRun, objects: Mapping[str, str]) -> None:
    """A job's run is finished, and has its points once each, its params, its files and its one model."""
    assert (run.stored.status, run.stored.tags["scaleflow.status"]) == ("FINISHED", "FINISHED")
    assert list(lost_points(job, [run.stored])) == []
    steps = sorted(step for key, step, _, _ in run.stored.points if key == "train/loss")
    assert steps == list(range(1, STEPS + 1))
    events = events_in(job / "events.jsonl")
    (ready,) = (event for event in events if event["event"] == "ready")
    assert run.params == ready["params"]
    assert record(job)["done"]
    assert record(job)["left"] == {}
    assert record(job)["run_id"] == run.id
    logged = [(Path(e["path"]), e.get("folder") or "") for e in events if e["event"] in ("artifact", "confusion")]
    logged += [(job / name, "") for name in ("config.yaml", "overrides.yaml", "environment.txt")]
    for file, folder in logged:
        assert objects[str(run.artifacts / folder / file.name)] == digest(file)
    (model,) = run.models
    assert record(job)["model_uri"] == f"models:/{model.name}"
    exported = [job / "model" / "model.keras", *(job / "model" / "saved_model").rglob("*")]
    for file in filter(Path.is_file, exported):
        assert objects[str(model.artifacts / "data" / file.relative_to(job / "model"))] == digest(file)


def digest(file: Path) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


def load_and_predict(uri: str, model: str) -> list[str]:
    """The first columns of the answer of a model that is loaded from the server."""
    import mlflow
    import numpy as np

    mlflow.set_tracking_uri(uri)
    loaded = mlflow.pyfunc.load_model(model)
    return [str(name) for name in loaded.predict(np.zeros((2, 8, 8, 1), "float32")).columns][:2]
