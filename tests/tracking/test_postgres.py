"""A service as teams run it: `mlflow server` on PostgreSQL with artifacts in S3, and many jobs at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.judge import Stored, events_in, lost_points, written
from tests.conftest import Command
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
def test_sixteen_jobs_lose_nothing_when_their_server_is_killed_twice(
    command: Command, service: Server, database: str, object_store: dict[str, str], isolated: Callable[..., Any]
) -> None:
    """It is killed while all jobs train, and while their files and models arrive."""
    jobs = [command.folder / "sweep" / str(number) for number in range(JOBS)]
    pace = command.folder / "slow"
    long = LongRun(command, *SWEEP, slow_down(pace, 0.5), f"tracking.uri={service.uri}", only=True)
    with contextlib.closing(long.launcher):
        long.wait_for(lambda: all(len(written(job)) > 4 and taken(job) for job in jobs))
        service.stop()
        before = {job: size(job) for job in jobs}
        long.wait_for(lambda: all(size(job) > before[job] for job in jobs))
        service.start()
        long.wait_for(lambda: all(taken(job) > before[job] for job in jobs))
        pace.unlink()
        long.wait_for(lambda: any(record(job).get("model_uri") for job in jobs))
        service.stop()
        assert not all(record(job).get("done") for job in jobs)
        long.wait_for(lambda: all(events_in(job / "events.jsonl")[-1]["event"] == "end" for job in jobs))
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


def taken(job: Path) -> int:
    """How many bytes of a job's events the store has."""
    return int(record(job).get("offset", 0))


def size(job: Path) -> int:
    return (job / "events.jsonl").stat().st_size


class StoredRun:
    """A run in PostgreSQL, read past MLflow."""

    def __init__(self, cursor: Any, run_id: str, status: str, artifacts: str) -> None:
        self.id = run_id
        self.artifacts = artifacts
        self.params: dict[str, str] = dict(select(cursor, "key, value FROM params", run_id))
        self.models: list[str] = [
            name for (name,) in select(cursor, "model_id FROM logged_models", run_id, "source_run_id")
        ]
        points = Counter(select(cursor, "key, step, value, timestamp FROM metrics", run_id))
        self.stored = Stored(status, dict(select(cursor, "key, value FROM tags", run_id)), points)


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
    assert record(job)["aside"] == {}
    assert record(job)["run_id"] == run.id
    files = [Path(e["path"]) for e in events if e["event"] in ("artifact", "confusion")]
    for file in [*files, job / "config.yaml", job / "overrides.yaml", job / "environment.txt"]:
        digest = hashlib.md5(file.read_bytes()).hexdigest()
        names = [name for name, found in objects.items() if f"/{run.id}/artifacts/" in name and found == digest]
        assert file.name in {Path(name).name for name in names}, file
    assert [f"models:/{name}" for name in run.models] == [record(job)["model_uri"]]
    for file in (job / "model" / "saved_model").rglob("*"):
        if file.is_file():
            name = next(
                name
                for name in objects
                if run.models[0] in name and name.endswith(str(file.relative_to(job / "model")))
            )
            assert objects[name] == hashlib.md5(file.read_bytes()).hexdigest()


def load_and_predict(uri: str, model: str) -> list[str]:
    """The first columns of the answer of a model that is loaded from the server."""
    import mlflow
    import numpy as np

    mlflow.set_tracking_uri(uri)
    loaded = mlflow.pyfunc.load_model(model)
    return [str(name) for name in loaded.predict(np.zeros((2, 8, 8, 1), "float32")).columns][:2]
