"""Runs in MLflow, through its client: no global state, and nothing that imports TensorFlow."""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock

from scaleflow.errors import ConfigError, StoreUnreachable
from scaleflow.interfaces import IDENTITY, Point, Status, Tracking
from scaleflow.secret_masking import mask_secrets
from scaleflow.tracking.keys import LONGEST_KEY, MetricKeys, to_distinct_keys
from scaleflow.tracking.registry import register_model

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

#: How long to wait for another process that opens the same store.
SECONDS_TO_MIGRATE = 120.0

PARAMS_A_BATCH = 100
METRICS_A_BATCH = 1000
BYTES_A_BATCH = 800_000
LONGEST_VALUE = 6000
MODEL = "model"

#: The tag of a logged model that says after which update it was exported.
STEP = "scaleflow.step"

#: Metrics that are a model's, where they are of its step.
OF_THE_MODEL = ("val/", "test/")

#: Of a server that would answer, but has too much to do.
BUSY = (408, 425, 429)

#: What MLflow's pages show as the run's source, and the view in which they open the experiment.
SOURCE = {"mlflow.source.name": "scaleflow", "mlflow.source.type": "LOCAL"}
KIND = {"mlflow.experimentKind": "custom_model_development"}

#: Of a link: MLflow's pages begin in a view for language models, whose runs are evaluations.
VIEW = "workflowType=machine_learning"

#: MLflow's defaults keep on for minutes, and ask again for what may have been done; the recorder tries again itself.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}

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

    Attributes:
        adopted: the same, unchecked where it is set later: what an earlier process has begun to take.
    """

    def __init__(self, options: Tracking, adopted: str | None = None) -> None:
        assert options.uri is not None
        self._options = options
        self._uri = options.uri
        self._experiment_id = ""
        self._run_name = ""
        self._model_id: str | None = None
        self._version: str | None = None
        self._names = MetricKeys()
        self._models: dict[int, str] = {}
        self._done: set[tuple[int, str]] = set()
        self._uploaded: set[tuple[str, Path]] = set()
        self.adopted = adopted
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
            if (folder := folder_of_sqlite(self._uri)) is not None and not folder.is_dir():
                raise FileNotFoundError(f"there is no folder {folder}")
            with migration_lock(self._uri):
                self._client: MlflowClient = MlflowClient(tracking_uri=self._uri)
                self._experiment_name = self._choose_experiment_name()
        except (MlflowException, OSError, ImportError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            kind = StoreUnreachable if is_transient(error) else ConfigError
            raise kind(
                f"tracking.uri={mask_secrets(self._uri)}: the store can't be used: {mask_secrets(lines[0])}"
            ) from error
        if self.adopted is not None:
            self._check_adopted(self.adopted)

    def _check_adopted(self, run_id: str) -> None:
        """Refuses a run that is not there, or that is another command's."""
        tags = self._get_run(run_id, f"MLFLOW_RUN_ID={run_id}").data.tags
        if there := tags.get("scaleflow.folder"):
            raise ConfigError(
                f"MLFLOW_RUN_ID={run_id}: is the run of {there} already; resume={there} goes on with it, and without "
                "MLFLOW_RUN_ID there is a new run"
            )

    @property
    def uri(self) -> str:
        return self._uri

    def find_folder(self, run_id: str) -> str:
        folder = self._get_run(run_id).data.tags.get("scaleflow.folder")
        if folder is None:
            raise ConfigError(f"resume={run_id}: that run is none of scaleflow's: it has no tag scaleflow.folder")
        return str(folder)

    def fetch_run(self) -> Run:
        """What the store has of the run that was taken."""
        return self._client.get_run(self._run)

    def model_uri(self, model_id: str) -> str:
        """Where the store keeps a logged model, as a URI."""
        return str(self._client.get_logged_model(model_id).artifact_location)

    def adopt(self, run_id: str, key: str = "resume") -> None:
        run = self._get_run(run_id, key)
        self._experiment_id, self._run_name, self.run_id = run.info.experiment_id, run.info.run_name, run_id

    def reopen(self) -> None:
        self._client.update_run(self._run, status="RUNNING")
        for tag in ("scaleflow.status", "scaleflow.error"):
            if tag in self._client.get_run(self._run).data.tags:
                self._client.delete_tag(self._run, tag)

    def _get_run(self, run_id: str, key: str = "resume") -> Run:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            raise ConfigError(
                f"{key}: the store {mask_secrets(self._uri)} has no run {run_id}; name it by tracking.uri"
            ) from error
        if run.info.lifecycle_stage != "active":
            raise ConfigError(
                f"{key}: the run {run_id} was deleted; `mlflow runs restore --run-id {run_id}` brings it back"
            )
        return run

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None:
        self._run_name = name
        if self.adopted is not None:
            tags = self._adopt(self.adopted, tags)
        elif self.run_id is None:
            self.run_id = self._find_or_make(name, tags, began)
        self.set_tags({"mlflow.runName": self._run_name, **tags})

    def _find_or_make(self, name: str, tags: Mapping[str, str], began: int) -> str:
        self._experiment_id = self._experiment()
        return self._find_earlier(tags) or self._make(name, tags, began)

    def _find_earlier(self, tags: Mapping[str, str]) -> str | None:
        """The run that was asked for already, where the answer did not come, or nobody was left to hear it."""
        sought = f"tags.`{IDENTITY}` = '{tags[IDENTITY]}'"
        found = self._client.search_runs([self._experiment_id], sought, max_results=1)
        return str(found[0].info.run_id) if found else None

    def _make(self, name: str, tags: Mapping[str, str], began: int) -> str:
        """A run that has its identity from its first moment."""
        own = {"mlflow.user": user_name(), **SOURCE, IDENTITY: tags[IDENTITY]}
        return str(self._client.create_run(self._experiment_id, began, own, name).info.run_id)

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

    def _choose_experiment_name(self) -> str:
        """The experiment's name: the config's, or else what MLflow's own variables say."""
        name, named = self._options.experiment, os.environ.get("MLFLOW_EXPERIMENT_ID")
        if name != DEFAULT_EXPERIMENT:
            named = None
        elif not named:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
        if not named:
            self._client.get_experiment_by_name(name)
            return name
        return str(self._get_experiment(named).name)

    def _get_experiment(self, experiment_id: str) -> Any:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            return self._client.get_experiment(experiment_id)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            raise ConfigError(
                f"MLFLOW_EXPERIMENT_ID={experiment_id}: the store {mask_secrets(self._uri)} has no such "
                "experiment; unset "
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
            raise ConfigError(
                f"tracking.experiment={name}: was deleted; restore it with `mlflow experiments restore "
                f"--experiment-id {found.experiment_id}`, or use another name"
            )
        return str(found.experiment_id)

    def log_params(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        there = self._client.get_run(self._run).data.params
        wanted = {key: value[:LONGEST_VALUE] for key, value in to_distinct_keys(values).items()}
        # `mlflow run` logs its own params, which can't be changed: what came of them goes beside them.
        beside = {f"scaleflow.{k}"[:LONGEST_KEY]: v for k, v in wanted.items() if there.get(k, v) != v}
        new = {k: v for k, v in {**wanted, **beside}.items() if k not in there}
        for batch in split_text_batches(iter(new.items())):
            self._client.log_batch(self._run, params=[Param(*param) for param in batch])

    def log_metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        made = (Metric(self._names[p.key], p.value, p.time, p.step) for p in points)
        for batch in split_batches(made, METRICS_A_BATCH):
            self._client.log_batch(self._run, metrics=batch)

    def log_batch(self, metrics: Sequence[Metric]) -> None:
        """Logs metrics that say of which model and dataset they are."""
        self._client.log_batch(self._run, metrics=metrics)

    def set_tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        made = ((key, mask_secrets(value, key)[:LONGEST_VALUE]) for key, value in to_distinct_keys(values).items())
        for batch in split_text_batches(made):
            self._client.log_batch(self._run, tags=[RunTag(*tag) for tag in batch])

    def log_artifact(self, path: Path, folder: str | None) -> None:
        self._client.log_artifact(self._run, str(path), folder)

    def log_dataset(self, told: Mapping[str, Any]) -> None:
        from scaleflow.tracking.inputs import make_dataset_inputs

        self._client.log_inputs(self._run, datasets=make_dataset_inputs(told))

    def log_model(self, path: Path, step: int) -> None:
        """Logs and registers it; what was done before one of the requests failed is not done again."""
        from mlflow.entities import LoggedModelOutput

        if step not in self._models:
            self._models[step], is_whole = self._find_or_make_model(step)
            self._done |= {(step, "files"), (step, "ready")} if is_whole else set()
        model_id = self._model_id = self._models[step]
        self._once(step, "files", lambda: self._upload(path, model_id))
        self._once(step, "ready", lambda: self._client.finalize_logged_model(model_id, "READY"))
        if (step, "output") not in self._done and model_id not in self._outputs():
            self._client.log_outputs(self._run, [LoggedModelOutput(model_id, step)])
        self._done.add((step, "output"))
        self._once(step, "metrics", lambda: self._log_model_metrics(step, model_id))
        self._once(step, "version", lambda: self._register_model(model_id))

    def _once(self, step: int, what: str, do: Callable[[], object]) -> None:
        if (step, what) not in self._done:
            do()
            self._done.add((step, what))

    def _log_model_metrics(self, step: int, model_id: str) -> None:
        """Says of the model what the run has measured of it: the same points again, which an SQL store has once."""
        from mlflow.entities import Metric

        known = [key for key in self._client.get_run(self._run).data.metrics if key.startswith(OF_THE_MODEL)]
        points = [point for key in known for point in self._client.get_metric_history(self._run, key)]
        same = [Metric(p.key, p.value, p.timestamp, p.step, model_id=model_id) for p in points if p.step == step]
        for batch in split_batches(same, METRICS_A_BATCH):
            self._client.log_batch(self._run, metrics=batch)

    def _register_model(self, model_id: str) -> None:
        name = self._options.register_as
        if name is not None:
            self._version = register_model(self._client, name, self._options.alias, self._run, model_id)

    def _upload(self, exported: Path, model_id: str) -> None:
        """Sends a model's files, each by itself: what is there when one fails is not sent again by this command."""
        from scaleflow.tracking.mlflow_model import write_mlflow_model

        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write_mlflow_model(exported, folder, run_id=self._run, model_id=model_id)
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                name = path.relative_to(folder)
                if (model_id, name) not in self._uploaded:
                    parent = None if name.parent == Path() else name.parent.as_posix()
                    self._client.log_model_artifact(model_id, str(path), parent)
                    self._uploaded.add((model_id, name))

    def _find_or_make_model(self, step: int) -> tuple[str, bool]:
        """The model of this step, made where it was not yet; and whether its files are all there."""
        sought = f"source_run_id = '{self._run}' AND tags.`{STEP}` = '{step}'"
        for found in self._client.search_logged_models([self._experiment_id], sought):
            return str(found.model_id), str(found.status) == "READY"
        made = self._client.create_logged_model(
            self._experiment_id,
            name=MODEL,
            source_run_id=self._run,
            tags={"mlflow.user": user_name(), **SOURCE, STEP: str(step)},
        )
        return str(made.model_id), False

    def _outputs(self) -> set[str]:
        """The models that the run is known to have made."""
        outputs = self._client.get_run(self._run).outputs
        return {output.model_id for output in outputs.model_outputs} if outputs else set()

    def finish(self, status: Status, ended: int) -> None:
        self._client.set_terminated(self._run, status, ended)

    def describe_links(self) -> Sequence[tuple[str, str]]:
        lines = [("run", f"{self._run_name}  ({self.run_id})")]
        if self._model_id is not None:
            lines.append(("model", f"models:/{self._model_id}"))
        if self._version is not None:
            name, alias = self._options.register_as, self._options.alias
            lines.append(("registered", f"models:/{name}/{self._version}" + (f"  (@{alias})" if alias else "")))
        if self._uri.startswith("sqlite:"):
            place = Path(self._uri.removeprefix("sqlite:///"))
            default = place == Path("mlflow.db").absolute()
            lines.append(("look at it", "mlflow ui" + ("" if default else f" --backend-store-uri {self._uri}")))
        else:
            page = f"#/experiments/{self._experiment_id}/runs/{self.run_id}?{VIEW}"
            lines.append(("look at it", f"{mask_secrets(self._uri)}/{page}"))
        return lines

    @property
    def _run(self) -> str:
        assert self.run_id is not None, "start() comes first"
        return self.run_id


def migration_lock(uri: str) -> FileLock:
    """Locks a store while it is opened: two processes that open a new database at once race in its migration.

    The lock of an SQLite file is beside it, for all users that share the file. Any other lock is the user's own, in
    the temporary folder, and its name is a digest without the credentials of the URI.
    """
    if (path := lock_beside_sqlite(uri)) is not None:
        return FileLock(path, timeout=SECONDS_TO_MIGRATE, mode=0o666)
    digest = hashlib.sha256(without_credentials(uri).encode()).hexdigest()[:16]
    name = f"scaleflow-{os.getuid()}-{digest}.lock"
    return FileLock(Path(tempfile.gettempdir(), name), timeout=SECONDS_TO_MIGRATE, mode=0o600)


def lock_beside_sqlite(uri: str) -> Path | None:
    """The path of an SQLite file's lock; None if the URI is another store's, or the lock can't be written there."""
    if not uri.startswith("sqlite:///"):
        return None
    lock = Path(f"{uri.removeprefix('sqlite:///')}.lock")
    return lock if os.access(lock if lock.exists() else lock.parent, os.W_OK) else None


def without_credentials(uri: str) -> str:
    """A URI without user, password and query, where some stores take a password."""
    return re.sub(r"//[^/]*@", "//", uri.partition("?")[0])


def folder_of_sqlite(uri: str) -> Path | None:
    """Where an SQLite store's file is, or has to be."""
    return Path(uri.removeprefix("sqlite:///")).parent if uri.startswith("sqlite:///") else None


def is_transient(error: Exception) -> bool:
    """Whether a store that answers so, or not at all, is only away: nothing that was asked for is wrong."""
    from mlflow.exceptions import MlflowException, RestException

    if isinstance(error, RestException):
        return error.get_http_status_code() in BUSY or error.get_http_status_code() >= 500
    if isinstance(error, MlflowException):  # of the client's own: a request that nobody answered, a locked file
        return error.error_code in ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")
    return isinstance(error, OSError)


def artifact_location(uri: str, experiment: str) -> str | None:
    """Beside an SQLite file, wherever the command was given; a server decides for itself."""
    if not uri.startswith("sqlite:///"):
        return None
    folder = Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" / re.sub(r"[^\w.-]", "_", experiment)
    return folder.as_uri()


def split_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def split_text_batches(items: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Params or tags, as many to a request as MLflow takes, by their number and by their bytes."""
    batch: list[tuple[str, str]] = []
    weight = 0
    for item in items:
        own = len(json.dumps(item))  # as it is sent: a letter that is not ASCII takes six bytes
        if batch and (len(batch) == PARAMS_A_BATCH or weight + own > BYTES_A_BATCH):
            yield batch
            batch, weight = [], 0
        batch.append(item)
        weight += own
    if batch:
        yield batch


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as in some containers
        return str(os.getuid())
