"""Records a run in an MLflow store with MLflow's client API, which has no global state and imports no TensorFlow."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import logging
import math
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.errors import ConfigError, RunDeleted, RunMissing
from scaleflow.interfaces import IDENTITY, Point, Status, Tracker, Tracking, find_console_script
from scaleflow.interfaces.collector import pause_collector
from scaleflow.interfaces.events import DatasetDescribed
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.tracking.connection import (
    explain_artifact_root,
    explain_unusable,
    explain_versions,
    hold_migration_lock,
    opens_by_default,
    set_mlflow_defaults,
)
from scaleflow.tracking.keys import MAX_KEY, MetricKeys, to_distinct_keys
from scaleflow.tracking.registry import ChampionRegistry, register_model
from scaleflow.tracking.uri import DEFAULT_EXPERIMENT, artifact_location, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Metric, Run


#: Pattern of database errors for a point that the store already has.
IS_KNOWN = re.compile(r"UNIQUE constraint|duplicate key|Duplicate entry|IntegrityError", re.IGNORECASE)

PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
BYTES_PER_BATCH = 800_000
MAX_VALUE = 6000
MAX_DESCRIPTION = 8000
MODEL = "model"

#: Tag of a logged model: the number of updates before its export.
STEP_TAG = "scaleflow.step"

#: Tag of a run: the ID of the logged model that is its result. It need not be the model with the largest step: with
#: `checkpoint.export=best`, a resumed run may export a model of an earlier step than before.
RESULT_TAG = "scaleflow.model"

#: MLflow's tag with a run's description, and the tag with the digest of the description that scaleflow wrote.
DESCRIPTION = "mlflow.note.content"
WRITTEN = "scaleflow.description"

#: Metrics that are also logged for the model, if they were measured at its step.
MODEL_METRICS = ("val/", "test/")

#: Tags that MLflow's UI shows as the run's source, and the tag that selects the UI's view of the experiment.
SOURCE_TAGS = {"mlflow.source.name": "scaleflow", "mlflow.source.type": "LOCAL"}
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}

#: Query of a link to MLflow's UI. Without it, the UI opens a view for language models.
UI_QUERY = "workflowType=machine_learning"

#: Tag of a run: the digest of the weights of its exported model.
WEIGHTS = "scaleflow.weights"

#: Tag of a sweep's run: the config keys that vary.
SWEPT = "scaleflow.swept"

#: A name that MLflow generated, such as bold-ant-123.
GENERATED_NAME = re.compile(r"[a-z]+-[a-z]+-\d{1,4}")

#: Maximum length of a run's name in the databases of MLflow's servers.
MAX_RUN_NAME = 250


class MlflowTracker(Tracker):
    """Records one run in an MLflow store. The `tracking` options need an absolute `uri`.

    Attributes:
        adopted_run_id: ID of a run that was opened for this command, such as by `mlflow run`. `start` uses it instead
            of a new one. `connect` checks it. The recorder may set it later, unchecked, to a run that an earlier
            process of this command already used.
    """

    uri: str

    def __init__(self, options: Tracking, adopted_run_id: str | None = None) -> None:
        assert options.uri is not None
        self.options = options
        self.uri = options.uri
        self.names_experiment = options.experiment != DEFAULT_EXPERIMENT
        self._experiment_id = ""
        self._run_name = ""
        self._model_id: str | None = None
        self._version: str | None = None
        self._names = MetricKeys()
        self._models: dict[int, str] = {}
        self._done: set[tuple[int, str]] = set()
        self._uploaded: set[tuple[str, Path]] = set()
        self.adopted_run_id = adopted_run_id
        self.run_id: str | None = None

    @pause_collector()
    def connect(self) -> None:
        set_mlflow_defaults()
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        # This logger prints a traceback for each failed statement on a locked database. The recorder reports them.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        try:
            file = sqlite_file(self.uri)
            if file and not file.parent.is_dir():
                raise FileNotFoundError(f"there is no folder {file.parent}")
            with hold_migration_lock(self.uri):
                self._client: MlflowClient = MlflowClient(tracking_uri=self.uri)
                self.experiment = self._choose_experiment_name()
        except Exception as error:
            if isinstance(error, MlflowException | OSError | ImportError) or explain_versions(error):
                raise explain_unusable(self.uri, error) from error
            raise
        if self.adopted_run_id is not None:
            self._check_unclaimed(self.adopted_run_id)

    def _check_unclaimed(self, run_id: str) -> None:
        """Raises ConfigError if the run does not exist or already belongs to another command."""
        tags = self._get_run(run_id, f"MLFLOW_RUN_ID={run_id}").data.tags
        folder = tags.get("scaleflow.folder")
        if folder:
            raise ConfigError(
                f"MLFLOW_RUN_ID={run_id}: this run already belongs to {folder}; use resume={folder} to continue it, "
                "or unset MLFLOW_RUN_ID for a new run"
            )

    def name_run(self) -> str:
        """Returns the run's name; `deleted` if the tracker is connected to the store without a run."""
        return self._run_name or "deleted"

    def fetch_run(self) -> Run:
        return self._client.get_run(self._current_run_id)

    def fetch_points(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the (step, value) pairs of each metric of the run."""
        points = {}
        for key in self.fetch_run().data.metrics:
            history = self._client.get_metric_history(self._current_run_id, key)
            points[key] = [(point.step, point.value) for point in history]
        return points

    def find_points(self, keys: Iterable[str], step: int, time: int) -> dict[str, float]:
        """Returns the values of the metrics `keys` at a step and a time (milliseconds since the epoch)."""
        values = {}
        for key in keys:
            for point in self._client.get_metric_history(self._current_run_id, key):
                if point.step == step and point.timestamp == time:
                    values[key] = point.value
        return values

    def fetch_siblings(self) -> list[tuple[dict[str, str], dict[str, float]]]:
        """Returns (params, metrics) of each finished job of the run's sweep; [] if the run belongs to no sweep."""
        run = self.fetch_run()
        parent = run.data.tags.get("mlflow.parentRunId")
        query = f"tags.`mlflow.parentRunId` = '{parent}' and attributes.status = 'FINISHED'"
        jobs = self._client.search_runs([run.info.experiment_id], query) if parent else []
        return [(job.data.params, job.data.metrics) for job in jobs]

    @property
    def model_uri(self) -> str | None:
        return self._model_id and f"models:/{self._model_id}"

    def find_artifacts(self, model_id: str) -> str:
        return str(self._client.get_logged_model(model_id).artifact_location)

    def select_run(self, run_id: str, key: str = "") -> None:
        run = self._get_run(run_id, key)
        self._experiment_id = run.info.experiment_id
        self._run_name = run.info.run_name
        self.run_id = run_id

    def check_run(self, run_id: str) -> None:
        self._get_run(run_id)

    def reopen(self) -> None:
        self._client.update_run(self._current_run_id, status="RUNNING")
        for tag in ("scaleflow.status", "scaleflow.error"):
            if tag in self.fetch_run().data.tags:
                self._client.delete_tag(self._current_run_id, tag)

    def _get_run(self, run_id: str, key: str = "") -> Run:
        """Returns a run. Raises RunMissing if it does not exist, RunDeleted if it is in MLflow's trash.

        If `key` is set, the message starts with it.
        """
        start = f"{key}: " if key else ""
        with refuse_missing(
            f"{start}the store {mask_secrets(self.uri)} has no run {run_id}; set tracking.uri to the store that has it",
            RunMissing,
        ):
            run = self._client.get_run(run_id)
        if run.info.lifecycle_stage != "active":
            raise RunDeleted(
                f"{start}the run {run_id} was deleted and is in MLflow's trash; "
                f"`mlflow runs restore --run-id {run_id}` restores it"
            )
        return run

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None:
        self._run_name = name = name[:MAX_RUN_NAME]
        if self.adopted_run_id is not None:
            tags = self._start_adopted_run(self.adopted_run_id, tags)
        elif self.run_id is None:
            self._experiment_id = self._find_or_create_experiment()
            first_tags = {"mlflow.user": user_name(), **SOURCE_TAGS, IDENTITY: tags[IDENTITY]}  # for `_find_earlier`
            self.run_id = self._find_earlier(tags) or str(
                self._client.create_run(self._experiment_id, began, first_tags, name).info.run_id
            )
        self.set_tags({"mlflow.runName": self._run_name, **tags})

    def _find_earlier(self, tags: Mapping[str, str]) -> str | None:
        """Returns the run that an earlier request created although its response was lost, or None."""
        query = f"tags.`{IDENTITY}` = '{tags[IDENTITY]}'"
        runs = self._client.search_runs([self._experiment_id], query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _start_adopted_run(self, run_id: str, tags: Mapping[str, str]) -> dict[str, str]:
        """Starts the run that was opened for this command. Returns the tags to set.

        Keeps the run's existing `mlflow.` tags. Keeps its name if the config sets none and MLflow did not generate it.
        """
        run = self._client.get_run(run_id)
        name = run.info.run_name or ""
        if self.options.run_name is None and name and not GENERATED_NAME.fullmatch(name):
            self._run_name = name
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")
        self._experiment_id = run.info.experiment_id
        self.run_id = run_id
        return {k: v for k, v in tags.items() if not (k.startswith("mlflow.") and k in run.data.tags)}

    def _choose_experiment_name(self) -> str:
        """Returns the experiment's name: the config's, or that in MLflow's variables if the config has the default."""
        name = self.options.experiment
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if name != DEFAULT_EXPERIMENT:
            experiment_id = None
        elif not experiment_id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
        if not experiment_id:
            self._client.get_experiment_by_name(name)  # fails if the store can't be used
            return name
        with refuse_missing(
            f"MLFLOW_EXPERIMENT_ID={experiment_id}: the store {mask_secrets(self.uri)} has no such experiment; unset "
            "it, or set tracking.experiment"
        ):
            return str(self._client.get_experiment(experiment_id).name)

    def _find_or_create_experiment(self) -> str:
        """Returns the experiment's ID. Creates the experiment if it is missing.

        With an SQLite store, its artifacts are next to the file.
        """
        from mlflow.exceptions import MlflowException

        if self.follows is not None:
            followed = self._find_experiment_of(self.follows)
            if followed is not None:
                return followed
        assert self.experiment is not None
        existing = self._find_experiment()
        if existing is not None:
            return str(existing)
        location = artifact_location(self.uri, self.experiment)
        try:
            return str(self._client.create_experiment(self.experiment, location, EXPERIMENT_TAGS))
        except MlflowException:  # another command may have created it since
            existing = self._find_experiment()
            if existing is None:
                raise
            return str(existing)

    def _find_experiment(self) -> str | None:
        """Returns the experiment's ID; None if it does not exist. Raises ConfigError if it was deleted."""
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            return None
        refuse_deleted_experiment(experiment)
        return str(experiment.experiment_id)

    def _find_experiment_of(self, run_id: str) -> str | None:
        """Returns the ID of a run's experiment, even if it was renamed; None if the store has no such run.

        Raises ConfigError if the experiment was deleted.
        """
        from mlflow.exceptions import MlflowException

        try:
            experiment_id = str(self._client.get_run(run_id).info.experiment_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        refuse_deleted_experiment(self._client.get_experiment(experiment_id))
        return experiment_id

    def check_experiment(self) -> None:
        if self.adopted_run_id is None:
            self._find_experiment()

    def log_params(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        existing = self.fetch_run().data.params
        params = {key: value[:MAX_VALUE] for key, value in to_distinct_keys(values).items()}
        # `mlflow run` logs its own params, which can't be changed, so different values get the prefix `scaleflow.`.
        renamed = {f"scaleflow.{k}"[:MAX_KEY]: v for k, v in params.items() if existing.get(k, v) != v}
        new = {k: v for k, v in {**params, **renamed}.items() if k not in existing}
        for batch in split_text_batches(iter(new.items())):
            self._client.log_batch(self._current_run_id, params=[Param(*param) for param in batch])

    def log_metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        self.log_batch(Metric(self._names[p.key], p.value, p.time, p.step) for p in points)

    def log_batch(self, metrics: Iterable[Metric]) -> None:
        """Logs metrics in batches. They may refer to a model and a dataset."""
        rest = list(metrics)
        for begin in range(0, len(rest), METRICS_PER_BATCH):
            log_points(self._client, self._current_run_id, rest[begin : begin + METRICS_PER_BATCH])

    def set_tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        tags = ((key, mask_secrets(value, key)[:MAX_VALUE]) for key, value in to_distinct_keys(values).items())
        for batch in split_text_batches(tags):
            self._client.log_batch(self._current_run_id, tags=[RunTag(*tag) for tag in batch])

    def describe(self, text: str) -> None:
        from mlflow.entities import RunTag

        tags = self.fetch_run().data.tags
        current = tags.get(DESCRIPTION)
        if current is None or compute_digest(current) == tags.get(WRITTEN):
            text = mask_secrets(text, DESCRIPTION)[:MAX_DESCRIPTION]
            both = [RunTag(DESCRIPTION, text), RunTag(WRITTEN, compute_digest(text))]
            self._client.log_batch(self._current_run_id, tags=both)

    def log_artifact(self, path: Path, folder: str | None) -> None:
        path.stat()  # raises FileNotFoundError
        with explain_artifact_root(self.uri, lambda: str(self.fetch_run().info.artifact_uri)):
            self._client.log_artifact(self._current_run_id, str(path), folder)

    def open_registry(self, name: str) -> ChampionRegistry:
        """Returns the registry of a registered model. Call `connect` first."""
        return ChampionRegistry(self._client, name)

    def log_model_metrics(self, model_id: str, values: Mapping[str, float], step: int, time: int) -> None:
        """Logs metrics of the run that belong to a logged model. `time` is in milliseconds since the epoch."""
        from mlflow.entities import Metric

        self.log_batch(Metric(name, value, time, step, model_id=model_id) for name, value in values.items())

    def log_model_file(self, model_id: str, path: Path, folder: str) -> None:
        """Adds a file to a logged model.

        `folder` is its place inside the model's folder, with `/` between names. `.` is the model's folder itself.
        """
        # Up to MLflow 3.14 `log_model_artifact` has no parameter for the folder. Logging a temporary folder with a
        # link to the file works in all versions.
        with tempfile.TemporaryDirectory() as temporary:
            target = Path(temporary, folder)
            target.mkdir(parents=True, exist_ok=True)
            (target / path.name).symlink_to(path.absolute())
            self._client.log_model_artifacts(model_id, temporary)

    def log_dataset(self, data: DatasetDescribed) -> None:
        from scaleflow.tracking.inputs import make_dataset_inputs

        self._client.log_inputs(self._current_run_id, datasets=make_dataset_inputs(data))

    def log_model(self, path: Path, step: int) -> None:
        """Logs and registers the model. A repeated call after a failed request skips the parts that succeeded."""
        if step not in self._models:
            self._models[step], is_whole = self._find_or_create_model(step)
            self._done |= {(step, "files"), (step, "ready")} if is_whole else set()
        model_id = self._model_id = self._models[step]
        self._once(step, "files", lambda: self._upload(path, model_id))
        self._once(step, "ready", lambda: self._client.finalize_logged_model(model_id, "READY"))
        self._once(step, "output", lambda: self._log_output(step, model_id))
        self._once(step, "result", lambda: self.set_tags({RESULT_TAG: model_id}))
        self._once(step, "metrics", lambda: self._copy_metrics_to_model(step, model_id))
        self._once(step, "version", lambda: self._register_model(model_id))

    def _once(self, step: int, what: str, do: Callable[[], object]) -> None:
        if (step, what) not in self._done:
            do()
            self._done.add((step, what))

    def _copy_metrics_to_model(self, step: int, model_id: str) -> None:
        """Logs the run's validation and test metrics of this step again, with the model's ID.

        An SQL store keeps only one copy of each point.
        """
        from mlflow.entities import Metric

        metrics = []
        for key in self.fetch_run().data.metrics:
            if not key.startswith(MODEL_METRICS):
                continue
            for point in self._client.get_metric_history(self._current_run_id, key):
                if point.step == step:
                    metrics.append(Metric(point.key, point.value, point.timestamp, point.step, model_id=model_id))
        self.log_batch(metrics)

    def _register_model(self, model_id: str) -> None:
        name = self.options.register_as
        if name is not None:
            self._version = register_model(
                self._client, name, self.options.alias, run_id=self._current_run_id, model_id=model_id
            )

    def _upload(self, exported: Path, model_id: str) -> None:
        """Uploads a model's files one by one. A repeated call after a failure skips the uploaded files."""
        from scaleflow.tracking.mlflow_model import write_mlflow_model

        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_mlflow_model(exported, folder, run_id=self._current_run_id, model_id=model_id)
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                name = path.relative_to(folder)
                if (model_id, name) not in self._uploaded:
                    with explain_artifact_root(self.uri, lambda: self.find_artifacts(model_id)):
                        self.log_model_file(model_id, path, name.parent.as_posix())
                    self._uploaded.add((model_id, name))

    def _find_or_create_model(self, step: int) -> tuple[str, bool]:
        """Finds or creates the model of this step. Returns its ID, and whether all its files are uploaded."""
        query = f"source_run_id = '{self._current_run_id}' AND tags.`{STEP_TAG}` = '{step}'"
        for existing in self._client.search_logged_models([self._experiment_id], query):
            return str(existing.model_id), str(existing.status) == "READY"
        model = self._client.create_logged_model(
            self._experiment_id,
            name=MODEL,
            source_run_id=self._current_run_id,
            tags={"mlflow.user": user_name(), **SOURCE_TAGS, STEP_TAG: str(step)},
        )
        return str(model.model_id), False

    def _log_output(self, step: int, model_id: str) -> None:
        """Adds the model to the run's outputs, if it is not one of them yet."""
        from mlflow.entities import LoggedModelOutput

        outputs = self.fetch_run().outputs
        if not outputs or model_id not in {output.model_id for output in outputs.model_outputs}:
            self._client.log_outputs(self._current_run_id, [LoggedModelOutput(model_id, step)])

    def finish(self, status: Status, ended: int) -> None:
        self._client.set_terminated(self._current_run_id, status, ended)

    def describe_links(self) -> Sequence[tuple[str, str]]:
        lines = [("run", f"{self._run_name}  ({self.run_id})")]
        if self.model_uri is not None:
            lines.append(("model", self.model_uri))
        if self._version is not None:
            name = self.options.register_as
            alias = self.options.alias
            lines.append(("registered", f"models:/{name}/{self._version}" + (f"  (@{alias})" if alias else "")))
        file = sqlite_file(self.uri)
        if file:
            words = [] if opens_by_default(file) else ["--backend-store-uri", self.uri]
            mlflow = find_console_script("mlflow") or "python -m mlflow"
            lines.append(("look at it", f"{mlflow} {shlex.join(['ui', *words])}"))
        else:
            page = f"#/experiments/{self._experiment_id}/runs/{self.run_id}?{UI_QUERY}"
            lines.append(("look at it", f"{mask_secrets(self.uri)}/{page}"))
        return lines

    @property
    def _current_run_id(self) -> str:
        assert self.run_id is not None, "start() comes first"
        return self.run_id


def refuse_deleted_experiment(experiment: Experiment) -> None:
    """Raises ConfigError if an experiment is in MLflow's trash."""
    if experiment.lifecycle_stage != "active":
        raise ConfigError(
            f"tracking.experiment={experiment.name}: was deleted; restore it with `mlflow experiments restore "
            f"--experiment-id {experiment.experiment_id}`, or use another name"
        )


def import_client() -> None:
    """Imports MLflow's client. Call it in a thread, to import during other work."""
    from mlflow import MlflowClient  # noqa: F401


@contextlib.contextmanager
def refuse_missing(message: str, kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Raises an error of type `kind` if MLflow reports that a run, an experiment or a model does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise kind(message) from error


def split_text_batches(items: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Splits params or tags into requests within MLflow's limits for items and bytes."""
    batch: list[tuple[str, str]] = []
    batch_bytes = 0
    for item in items:
        item_bytes = len(json.dumps(item))  # the size in the request: a non-ASCII character takes six bytes
        if batch and (len(batch) == PARAMS_PER_BATCH or batch_bytes + item_bytes > BYTES_PER_BATCH):
            yield batch
            batch = []
            batch_bytes = 0
        batch.append(item)
        batch_bytes += item_bytes
    if batch:
        yield batch


def compute_digest(text: str) -> str:
    """Returns 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # some containers have user IDs without names
        return str(os.getuid())


def log_points(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    """Logs points in one request, or one request per metric if the store already has some of them.

    Older versions of MLflow fail on a request that repeats points of several metrics, but not on one that repeats
    points of a single metric. NaN is logged for the run only: for a model, MLflow's SQL store would keep 0.0.
    """
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    points = []
    for metric in metrics:
        if math.isnan(metric.value):
            metric = Metric(metric.key, metric.value, metric.timestamp, metric.step)
        points.append(metric)
    try:
        client.log_batch(run_id, metrics=points)
    except MlflowException as error:
        keys = sorted({point.key for point in points})
        if len(keys) == 1 or not IS_KNOWN.search(str(error)):
            raise
        for key in keys:
            client.log_batch(run_id, metrics=[point for point in points if point.key == key])
