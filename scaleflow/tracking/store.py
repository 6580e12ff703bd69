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
    from mlflow.entities import Metric, Run

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

#: A name that MLflow has made up: bold-ant-123.
MLFLOWS_NAME = re.compile(r"[a-z]+-[a-z]+-\d{1,4}")

#: The experiment that is meant where the config names none other: the environment may then.
DEFAULT_EXPERIMENT = "scaleflow"

T = TypeVar("T")


class MlflowTracker:
    """One run in an MLflow store.

    Args:
        options: with an absolute `uri`.
        adopted: the id of a run that somebody has opened for this command, to be taken instead of a new one.
    """

    def __init__(self, options: Tracking, adopted: str | None = None) -> None:
        assert options.uri is not None
        self._options = options
        self._uri = options.uri
        self._experiment_id = ""
        self._run_name = ""
        self._model_id: str | None = None
        self._adopted = adopted
        self.run_id: str | None = None

    def connect(self) -> None:
        for key, value in (PATIENCE | QUIET).items():
            os.environ.setdefault(key, value)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for noisy in ("mlflow", "alembic"):  # a first migration, said line by line
            logging.getLogger(noisy).setLevel(logging.WARNING)
        try:
            with migration_lock(self._uri):
                self._client: MlflowClient = MlflowClient(tracking_uri=self._uri)
                self._experiment_name = self._named_experiment()
        except (MlflowException, OSError, ImportError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise Refusal(f"tracking.uri={masked(self._uri)}: the store can't be used: {lines[0]}") from error
        if self._adopted is not None:
            self._check_adopted(self._adopted)

    def _check_adopted(self, run_id: str) -> None:
        """Refuses a run that is not there, or that is another command's."""
        tags = self._existing(run_id, f"MLFLOW_RUN_ID={run_id}").data.tags
        if there := tags.get("scaleflow.folder"):
            raise Refusal(
                f"MLFLOW_RUN_ID={run_id}: is the run of {there} already; resume={there} goes on with it, and without "
                "MLFLOW_RUN_ID there is a new run"
            )

    @property
    def uri(self) -> str:
        return self._uri

    def folder_of(self, run_id: str) -> str:
        folder = self._existing(run_id).data.tags.get("scaleflow.folder")
        if folder is None:
            raise Refusal(f"resume={run_id}: that run is none of scaleflow's: it has no tag scaleflow.folder")
        return str(folder)

    def run(self) -> Run:
        """What the store has of the run that was taken."""
        return self._client.get_run(self._run)

    def place_of_model(self, model_id: str) -> str:
        """Where the store keeps a logged model, as a URI."""
        return str(self._client.get_logged_model(model_id).artifact_location)

    def adopt(self, run_id: str, key: str = "resume") -> None:
        run = self._existing(run_id, key)
        self._experiment_id, self._run_name, self.run_id = run.info.experiment_id, run.info.run_name, run_id

    def reopen(self) -> None:
        self._client.update_run(self._run, status="RUNNING")
        for tag in ("scaleflow.status", "scaleflow.error"):
            if tag in self._client.get_run(self._run).data.tags:
                self._client.delete_tag(self._run, tag)

    def _existing(self, run_id: str, key: str = "resume") -> Run:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            raise Refusal(
                f"{key}: the store {masked(self._uri)} has no run {run_id}; name it by tracking.uri"
            ) from error
        if run.info.lifecycle_stage != "active":
            raise Refusal(
                f"{key}: the run {run_id} was deleted; `mlflow runs restore --run-id {run_id}` brings it back"
            )
        return run

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None:
        self._run_name = name
        if self.run_id is not None:
            return
        if self._adopted is not None:
            tags = self._adopt(self._adopted, tags)
        else:
            self._experiment_id = self._experiment()
            run = self._client.create_run(self._experiment_id, began, {"mlflow.user": user(), **SOURCE}, name)
            self.run_id = run.info.run_id
        self.tags({"mlflow.runName": self._run_name, **tags})

    def _adopt(self, run_id: str, tags: Mapping[str, str]) -> dict[str, str]:
        """Takes the run that was opened for this command; gives the tags that it lacks.

        What MLflow has written of its source stays, and its name where a person gave it.
        """
        run = self._client.get_run(run_id)
        name = run.info.run_name or ""
        if self._options.run_name is None and name and not MLFLOWS_NAME.fullmatch(name):
            self._run_name = name
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")
        self._experiment_id, self.run_id = run.info.experiment_id, run_id
        return {k: v for k, v in tags.items() if not (k.startswith("mlflow.") and k in run.data.tags)}

    def _named_experiment(self) -> str:
        """The experiment's name: the config's, or else what MLflow's own variables say."""
        name, named = self._options.experiment, os.environ.get("MLFLOW_EXPERIMENT_ID")
        if name != DEFAULT_EXPERIMENT:
            named = None
        elif not named:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
        if not named:
            self._client.get_experiment_by_name(name)
            return name
        return str(self._experiment_of(named).name)

    def _experiment_of(self, experiment_id: str) -> Any:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            return self._client.get_experiment(experiment_id)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            raise Refusal(
                f"MLFLOW_EXPERIMENT_ID={experiment_id}: the store {masked(self._uri)} has no such experiment; unset "
                "it, or name one by tracking.experiment"
            ) from error

    def _experiment(self) -> str:
        """The experiment's id; it is made where it is missing, with its artifacts beside an SQLite file."""
        from mlflow.exceptions import MlflowException

        name = self._experiment_name
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

        there = self._client.get_run(self._run).data.params
        wanted = {allowed(key): str(value)[:LONGEST_VALUE] for key, value in values.items()}
        # `mlflow run` logs its own params, which can't be changed: what came of them goes beside them.
        beside = {f"scaleflow.{k}"[:LONGEST_KEY]: v for k, v in wanted.items() if there.get(k, v) != v}
        new = {k: v for k, v in {**wanted, **beside}.items() if k not in there}
        for batch in batches((Param(k, v) for k, v in new.items()), PARAMS_A_BATCH):
            self._client.log_batch(self._run, params=batch)

    def metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        made = (Metric(allowed(p.key), p.value, p.time, p.step) for p in points)
        for batch in batches(made, METRICS_A_BATCH):
            self._client.log_batch(self._run, metrics=batch)

    def batch(self, metrics: Sequence[Metric]) -> None:
        """Logs metrics that say of which model and dataset they are."""
        self._client.log_batch(self._run, metrics=metrics)

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
