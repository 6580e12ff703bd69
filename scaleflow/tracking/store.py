"""Runs in MLflow, through its client: no global state, and nothing that imports TensorFlow."""

from __future__ import annotations

import getpass
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from filelock import FileLock

from scaleflow.errors import Refusal
from scaleflow.interfaces import Point, Status, Tracking
from scaleflow.masking import masked

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARAMS_A_BATCH = 100
METRICS_A_BATCH = 1000
LONGEST_VALUE = 6000
LONGEST_KEY = 250
MODEL = "model"

#: What MLflow's pages show as the run's source, and the view in which they open the experiment.
SOURCE = {"mlflow.source.name": "scaleflow", "mlflow.source.type": "LOCAL"}
KIND = {"mlflow.experimentKind": "custom_model_development"}

#: MLflow's defaults keep on for minutes; the recorder tries again itself, and keeps what it has.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}

#: The launcher itself says where to look.
QUIET = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}

T = TypeVar("T")


class MlflowTracker:
    """One run in an MLflow store.

    Args:
        options: with an absolute `uri`.
    """

    def __init__(self, options: Tracking) -> None:
        assert options.uri is not None
        self._options = options
        self._uri = options.uri
        self._experiment_id = ""
        self._run_name = ""
        self._model_id: str | None = None
        self.run_id: str | None = None

    def connect(self) -> None:
        for key, value in (PATIENCE | QUIET).items():
            os.environ.setdefault(key, value)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for noisy in ("mlflow", "alembic"):  # a first migration, said line by line
            logging.getLogger(noisy).setLevel(logging.WARNING)
        # It would show a traceback for each statement that a locked database does not take; the recorder tells of it.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        try:
            with migration_lock(self._uri):
                self._client: MlflowClient = MlflowClient(tracking_uri=self._uri)
                self._client.get_experiment_by_name(self._options.experiment)
        except (MlflowException, OSError, ImportError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise Refusal(f"tracking.uri={masked(self._uri)}: the store can't be used: {lines[0]}") from error

    @property
    def uri(self) -> str:
        return self._uri

    def folder_of(self, run_id: str) -> str:
        folder = self._existing(run_id).data.tags.get("scaleflow.folder")
        if folder is None:
            raise Refusal(f"resume={run_id}: that run is none of scaleflow's: it has no tag scaleflow.folder")
        return str(folder)

    def adopt(self, run_id: str) -> None:
        run = self._existing(run_id)
        self._experiment_id, self._run_name, self.run_id = run.info.experiment_id, run.info.run_name, run_id

    def reopen(self) -> None:
        self._client.update_run(self._run, status="RUNNING")
        for tag in ("scaleflow.status", "scaleflow.error"):
            if tag in self._client.get_run(self._run).data.tags:
                self._client.delete_tag(self._run, tag)

    def _existing(self, run_id: str) -> Run:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            raise Refusal(
                f"resume: the store {masked(self._uri)} has no run {run_id}; name it by tracking.uri"
            ) from error
        if run.info.lifecycle_stage != "active":
            raise Refusal(
                f"resume: the run {run_id} was deleted; `mlflow runs restore --run-id {run_id}` brings it back"
            )
        return run

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None:
        self._run_name = name
        if self.run_id is not None:
            return
        adopted = os.environ.get("MLFLOW_RUN_ID")
        if adopted:
            self._adopt(adopted)
        else:
            self._experiment_id = self._experiment()
            run = self._client.create_run(self._experiment_id, began, {"mlflow.user": user(), **SOURCE}, name)
            self.run_id = run.info.run_id
        self.tags({"mlflow.runName": name, **tags})

    def _adopt(self, run_id: str) -> None:
        """Takes the run that `mlflow run` opened for this command."""
        run = self._client.get_run(run_id)
        self._experiment_id = run.info.experiment_id
        self.run_id = run_id
        self._client.update_run(run_id, status="RUNNING")

    def _experiment(self) -> str:
        """The experiment's id; it is made where it is missing, with its artifacts beside an SQLite file."""
        from mlflow.exceptions import MlflowException

        name = self._options.experiment
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location(self._uri, name), KIND))
            except MlflowException:  # another command was quicker
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise Refusal(
                f"tracking.experiment={name}: was deleted; restore it with `mlflow experiments restore "
                f"--experiment-id {found.experiment_id}`, or use another name"
            )
        return str(found.experiment_id)

    def params(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        there = self._client.get_run(self._run).data.params  # `mlflow run` logs its own, which can't be changed
        new = {allowed(k): str(v)[:LONGEST_VALUE] for k, v in values.items() if allowed(k) not in there}
        for batch in batches((Param(k, v) for k, v in new.items()), PARAMS_A_BATCH):
            self._client.log_batch(self._run, params=batch)

    def metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        made = (Metric(allowed(p.key), p.value, p.time, p.step) for p in points)
        for batch in batches(made, METRICS_A_BATCH):
            self._client.log_batch(self._run, metrics=batch)

    def tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(allowed(k), masked(str(v), k)[:LONGEST_VALUE]) for k, v in values.items()]
        self._client.log_batch(self._run, tags=tags)

    def artifact(self, path: Path, folder: str | None) -> None:
        self._client.log_artifact(self._run, str(path), folder)

    def data(self, told: Mapping[str, Any]) -> None:
        from scaleflow.tracking.inputs import dataset_inputs

        self._client.log_inputs(self._run, datasets=dataset_inputs(told))

    def model(self, path: Path, step: int) -> None:
        from mlflow.entities import LoggedModelOutput

        from scaleflow.tracking.package import package

        if self._model_id is None:
            logged = self._client.create_logged_model(self._experiment_id, name=MODEL, source_run_id=self._run)
            self._model_id = logged.model_id
        with tempfile.TemporaryDirectory() as folder:
            package(path, Path(folder), run_id=self._run, model_id=self._model_id)
            self._client.log_model_artifacts(self._model_id, folder)
        self._client.finalize_logged_model(self._model_id, "READY")
        self._client.log_outputs(self._run, [LoggedModelOutput(self._model_id, step)])

    def finish(self, status: Status, ended: int) -> None:
        self._client.set_terminated(self._run, status, ended)

    def where(self) -> Sequence[tuple[str, str]]:
        lines = [("run", f"{self._run_name}  ({self.run_id})")]
        if self._model_id is not None:
            lines.append(("model", f"models:/{self._model_id}"))
        if self._uri.startswith("sqlite:"):
            place = Path(self._uri.removeprefix("sqlite:///"))
            default = place == Path("mlflow.db").absolute()
            lines.append(("look at it", "mlflow ui" + ("" if default else f" --backend-store-uri {self._uri}")))
        else:
            lines.append(("look at it", f"{masked(self._uri)}/#/experiments/{self._experiment_id}/runs/{self.run_id}"))
        return lines

    @property
    def _run(self) -> str:
        assert self.run_id is not None, "start() comes first"
        return self.run_id


def migration_lock(uri: str) -> FileLock:
    """Held while a store is opened: two first openings of an SQLite file race in its migration."""
    name = quote(uri, safe="") if not uri.startswith("sqlite:///") else None
    path = Path(tempfile.gettempdir(), name[-100:]) if name else Path(uri.removeprefix("sqlite:///"))
    return FileLock(f"{path}.lock", timeout=120)


def artifact_location(uri: str, experiment: str) -> str | None:
    """Beside an SQLite file, wherever the command was given; a server decides for itself."""
    if not uri.startswith("sqlite:///"):
        return None
    folder = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" / re.sub(r"[^\w.-]", "_", experiment)
    return folder.as_uri()


def allowed(key: str) -> str:
    """A key with what MLflow does not take in one replaced."""
    return re.sub(r"[^/\w.\- :]", "_", key)[:LONGEST_KEY]


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as in some containers
        return str(os.getuid())
