"""A run, found by its folder, its id or a model's URI. Its facts are read on first use."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from omegaconf import OmegaConf

from scaleflow.config.compose import CommandWords, ComposedConfig
from scaleflow.config.interpolations import KeyPath
from scaleflow.config.parse import parse_section
from scaleflow.config.policies import TRAIN, Policy
from scaleflow.config.trust import leads_out
from scaleflow.errors import ConfigError, RunMissing
from scaleflow.interfaces import LearnedState, Tracking, name_command
from scaleflow.interfaces.secret_masking import MASK
from scaleflow.runs.data_digest import SplitDigests, read_split_digests
from scaleflow.runs.folder import RunFolder, is_object_file, read_json
from scaleflow.runs.identity import is_computed_by
from scaleflow.runs.learned_state import read_learned_state
from scaleflow.runs.objects import list_object_keys
from scaleflow.runs.provenance.record import Provenance, read_states
from scaleflow.runs.resume import apply_length
from scaleflow.runs.reuse import (
    find_config_dirs,
    load_config,
    load_interpolations,
    read_interpolations,
    reuse_config,
)
from scaleflow.runs.state import RunState, parse_length_tags
from scaleflow.tracking.keys import to_allowed_key
from scaleflow.tracking.model_uris import FORMS, RUN_OR_MODEL, ModelReference, choose_result
from scaleflow.tracking.store import MAX_VALUE, WEIGHTS, MlflowTracker
from scaleflow.tracking.tracked_runs import (
    choose_store,
    download_artifact,
    download_learned_state,
    load_config_text,
    open_run,
)
from scaleflow.tracking.uri import drop_credentials, resolve_store


class Run:
    """A run of scaleflow.

    Args:
        folder: the run's folder; None: missing files are downloaded from the store.
        tracker: connected to the run in the store; None: only the folder is read.
        model: the model in the store that the user named, or the run's result.
    """

    def __init__(
        self, folder: Path | None, tracker: MlflowTracker | None = None, model: ModelReference | None = None
    ) -> None:
        self._folder = folder
        self._tracker = tracker
        self._model = model

    @classmethod
    def find(cls, named: str, options: Tracking | None = None, needs_run: bool = True) -> Self:
        """Finds a run in the store, named by its id, its folder or the URI of a model.

        For an id or a folder, `model` is the run's result. If the run of a model was deleted and the command does not
        need it, `is_deleted` is true, and only the model exists.

        A folder's record names the store unless `options` has a typed address. Raises ConfigError if there is no such
        run or model, or if scaleflow did not create it.
        """
        reference, located = locate_run(named, options or Tracking())
        try:
            return cls(None, *open_run(reference, choose_store(located), needs_run))
        except RunMissing as missing:
            if reference == named:
                raise
            raise RunMissing(f"{missing}; {name_command('sync')} {named} --again records it again") from missing

    @classmethod
    def read(cls, named: str, options: Tracking | None = None) -> Self:
        """Returns the run of a folder without asking the store. Finds any other run as `find` does.

        Raises ConfigError if there is no such run, or if it ended before it was ready.
        """
        folder = Path(named).expanduser()
        is_folder = RunFolder(folder).events.is_file() and not RunFolder(folder).ledger.is_file()
        run = cls(folder.absolute()) if is_folder else cls.find(named, options)
        if run.is_here and run.state.ready is None:
            raise ConfigError(f"{run.files.path}: this run ended before training began; there is nothing to compare")
        return run

    @property
    def tracker(self) -> MlflowTracker:
        """The connection to the run in the store."""
        assert self._tracker is not None
        return self._tracker

    @property
    def store(self) -> Tracking:
        """The options of the run's store."""
        return self.tracker.options

    @property
    def model(self) -> ModelReference:
        """The model that the user named, or the run's result."""
        assert self._model is not None
        return self._model

    @property
    def model_uri(self) -> str | None:
        """The URI `models:/m-...` of `model`; for a run read from its folder, of the model logged last. None if there
        is no model."""
        if self._model is None:
            return self.record.get("model_uri")
        return self._model.model_id and f"models:/{self._model.model_id}"

    @property
    def is_result(self) -> bool:
        """Whether `model` is the result of the run."""
        return self.model.model_id == choose_result(self.tracked).model_id

    @property
    def is_deleted(self) -> bool:
        """Whether the run was deleted and only its model is left in the store."""
        return self._tracker is not None and self._tracker.run_id is None

    @cached_property
    def tracked(self) -> Any:
        """The run as an MLflow object."""
        return self.tracker.fetch_run()

    @property
    def address(self) -> str | None:
        """The address of the run's store; None if it is not recorded. Credentials are masked if the folder names it."""
        return self._tracker.uri if self._tracker else self.record.get("uri")

    @property
    def path(self) -> Path:
        """The path of the run's folder, which may be on another machine."""
        return self._folder or Path(self.tracked.data.tags["scaleflow.folder"])

    @cached_property
    def files(self) -> RunFolder:
        """The run's folder. If it is not on this machine, a temporary one with the record, resume overrides and
        predictions.
        """
        files = RunFolder(self.path)
        if self._folder or (files.read_record().get("run_id") == self.run_id and files.events.is_file()):
            return files
        files = RunFolder(self._make_temporary_folder())
        self.download(files.provenance_folder.name, files.path)
        while self.download(files.resume_overrides(1 + files.count_resumes()).name, files.path):
            pass
        self.download(files.evaluation.name, files.path)
        return files

    @property
    def is_here(self) -> bool:
        """Whether the run's folder is on this machine."""
        return self.files.events.is_file()

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """The folder's `record.json`: the run's id and address in the store."""
        return self.files.read_record()

    @cached_property
    def state(self) -> RunState:
        """The run's state, with the points of all metrics."""
        return RunState.read(self.files.path, has_points=True)

    @cached_property
    def run_id(self) -> str | None:
        """The run's id in the store; None if it is not recorded."""
        return self.record.get("run_id") if self._model is None else self._model.run_id

    @cached_property
    def name(self) -> str:
        if self.is_deleted:
            return "deleted"
        return str(self.tracked.info.run_name) if self._tracker else self.state.name

    @property
    def label(self) -> str:
        """The name with the id or the folder."""
        return f"{self.name} ({self.run_id or self.files.path})"

    @property
    def title(self) -> str:
        return f"{self.name}  ({self.run_id})"

    @cached_property
    def status(self) -> str | None:
        """FINISHED, FAILED or KILLED; None while the run is open."""
        if self.is_here:
            return self.state.status
        return None if self.tracked.info.status == "RUNNING" else str(self.tracked.info.status)

    @cached_property
    def command(self) -> str:
        """The command line that began the run; empty if unknown."""
        if self.is_deleted:
            return ""
        tags = self.tracked.data.tags if self._tracker else read_json(self.files.provenance)
        return str(tags.get("scaleflow.command", ""))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's config, with references between keys and the current length. Raises ConfigError if it is
        unreadable.
        """
        if self._tracker is None:
            config = load_config(self.files.config.read_text(), str(self.files.path))
        else:
            config = load_config(load_config_text(self.model.run_id, str(self.tracker.uri)), self.model.run_id)
        return apply_length(config, self.resumed_length, self.params)

    @cached_property
    def resumed_length(self) -> Mapping[str, Any]:
        """The length keys that a resume changed: they differ from `params`."""
        if self._tracker is None:
            return self.state.resumed_length
        return parse_length_tags(self.tracked.data.tags)

    @cached_property
    def interpolations(self) -> Mapping[KeyPath, str]:
        """The interpolations whose values are in the run's config."""
        if self._tracker is None:
            return read_interpolations(self.files)
        with tempfile.TemporaryDirectory(prefix="scaleflow-") as folder:
            path = self.download(RunFolder(Path()).interpolations.name, Path(folder))
            if path is None:
                return {}
            return load_interpolations(path.read_text(encoding="utf-8", errors="replace"))

    @cached_property
    def params(self) -> Mapping[str, str]:
        """The params at the run's start: every key of the config, the chosen options and the `resolved.` values."""
        if self._tracker is None:
            return self.state.params
        params = dict(self.tracked.data.params)
        for key, value in list(params.items()):
            if key.startswith("scaleflow."):
                params[key.removeprefix("scaleflow.")] = value
        return params

    @cached_property
    def resumed_words(self) -> dict[str, str]:
        """The values of the keys that resume= commands changed, the last value of each key."""
        words: dict[str, str] = {}
        for number in range(1, 1 + self.files.count_resumes()):
            overrides = OmegaConf.to_container(OmegaConf.load(self.files.resume_overrides(number))) or ()
            for word in overrides:
                key, is_override, value = str(word).partition("=")
                if is_override:
                    words[key] = value
        for key, length in self.resumed_length.items():
            words[key] = json.dumps(length)
        return words

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The params as the store holds them, updated with the values that resume= commands changed."""
        params = dict(self.state.params if self.is_here else self.params)
        for key, value in self.resumed_words.items():
            if key in params:
                params[key] = value
        return {to_allowed_key(key): value[:MAX_VALUE] for key, value in params.items()}

    @cached_property
    def points(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """The (step, value) pairs of each metric."""
        if self.is_here:
            return {to_allowed_key(name): points for name, points in self.state.curves.items()}
        return self.tracker.fetch_points()

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: points[-1][1] for name, points in self.points.items() if points}

    @property
    def modes(self) -> Mapping[str, str]:
        """Which values of a metric are better, such as `auc: max`; empty if the run's folder is not here."""
        return self.state.ready.modes if self.is_here and self.state.ready else {}

    @property
    def costs(self) -> list[float] | None:
        """The costs of a miss and of a false alarm that the user set; None if both are the default."""
        section = self.config.get("evaluation")
        if not isinstance(section, dict):
            return None
        goal = section.get("threshold")
        if isinstance(goal, dict) and goal.get("cost") is not None:
            return [float(cost) for cost in goal["cost"]]
        costs = [float(section.get("miss_cost", 1.0)), float(section.get("alarm_cost", 1.0))]
        return None if costs == [1.0, 1.0] else costs

    @cached_property
    def weights(self) -> str:
        """The digest of the exported model's weights; empty if unknown."""
        return self.state.model.weights if self.is_here else str(self.tracked.data.tags.get(WEIGHTS, ""))

    @cached_property
    def splits(self) -> SplitDigests:
        """The digests of the data of the run's last training."""
        from scaleflow.tracking.inputs import read_dataset_inputs  # imports MLflow

        if self._tracker is None:
            return read_split_digests(self.files)
        return read_dataset_inputs(self.tracked)

    @cached_property
    def states(self) -> Sequence[Provenance]:
        """The run's ingredients at its start, and at each resume that changed them.

        There is at least one state, which is empty if nothing is known.
        """
        states = read_states(self.files) or [Provenance()]
        if all(state.data for state in states):
            return states
        splits = read_split_digests(self.files) if self.is_here else self.splits  # its worker may have died
        completed = []
        for state in states:
            completed.append(state if state.data or not splits else replace(state, data={"splits": splits}))
        return completed

    @cached_property
    def repeats(self) -> Sequence[Mapping[str, float]]:
        """The last metrics of the sweep's jobs that differ from this run at most in the seed, including its own."""
        if not self.is_here:
            own_params = select_computed(self.params)
            siblings = self.tracker.fetch_siblings()
            return [metrics for params, metrics in siblings if select_computed(params) == own_params]
        jobs = self._read_jobs_of_sweep()
        own_job = jobs.get(self.files.path.resolve())
        if own_job is None:
            return []
        repeats = []
        for folder, job in jobs.items():
            is_repeat = drop_seed(job) == drop_seed(own_job) and not job["warms_up"]
            if is_repeat:
                state = RunState.read(folder)
                if state.status == "FINISHED":
                    repeats.append(state.metrics)
        return repeats

    def _read_jobs_of_sweep(self) -> dict[Path, Mapping[str, Any]]:
        """Returns the jobs of the run's sweep, by their folders; empty if the run is no job of a sweep."""
        parent = (self.state.ready and self.state.ready.parent) or ""
        sweep = self.files.find_moved(Path(parent), Path(self.record.get("folder") or self.files.path))
        jobs = {}
        for job in read_json(RunFolder(sweep).ledger).get("jobs", ()):
            jobs[(sweep / job["folder"]).resolve()] = job
        return jobs

    @cached_property
    def learned_state(self) -> LearnedState:
        """What the run learned from its data. Raises ConfigError if its model or the record is missing."""
        if self._tracker is None:
            return read_learned_state(self.files.path)
        with tempfile.TemporaryDirectory(prefix="scaleflow-") as folder:
            download_learned_state(self.tracker, self.model, Path(folder))
            return read_learned_state(Path(folder))

    def download(self, name: str, folder: Path) -> Path | None:
        """Downloads one of the run's artifacts into a folder; None if there is no such artifact."""
        return download_artifact(f"runs:/{self.run_id}/{name}", str(self.tracker.uri), folder)

    def complete(self, words: CommandWords) -> CommandWords:
        """Returns a command about this run that knows the `--config-dir` folders of the run's own command."""
        return replace(words, run_id=self.model.run_id, tracked_dirs=find_config_dirs(self.command))

    def reuse_config(self, words: CommandWords, policy: Policy = TRAIN) -> ComposedConfig:
        """Applies a command's overrides to the run's config, or to the sections that the command uses.

        Raises ConfigError, which names the key that is wrong or not trusted.
        """
        files = self.find_objects(words, policy) if policy.needs_files else {}
        return reuse_config(
            self.config, self.params, words, policy.sections, interpolations=self.interpolations, files=files
        )

    def find_objects(self, words: CommandWords, policy: Policy = TRAIN) -> dict[str, Path]:
        """Returns the present paths of the data and the model that a program passed to the run, by config key.

        Downloads a file that is neither at its original path nor in the run's folder. Leaves out files whose keys are
        typed, files that cannot be found, and a Keras file of the user that still exists at its path.
        """
        paths: dict[str, Path] = {}
        for object_key in list_object_keys(self.config):
            is_typed = object_key.section in words.keys or object_key.path in words.keys
            is_used = policy.sections is None or object_key.section in policy.sections
            if is_typed or not is_used:
                continue
            original = Path(object_key.value)
            if original.exists() and not leads_out(object_key.value, words.trusted):
                if is_object_file(object_key.name):
                    paths[object_key.path] = original
                continue
            copy = self._find_copy(object_key.name)
            if copy is not None:
                paths[object_key.path] = copy
        return paths

    def _find_copy(self, name: str) -> Path | None:
        """Returns a file of the run's folder, or else downloads it from the store; None if there is no such file."""
        copy = self.path / name
        is_own_folder = self._tracker is None or RunFolder(self.path).read_record().get("run_id") == self.run_id
        if is_own_folder and copy.is_file():
            return copy
        if self._tracker is None:
            return None
        return self.download(name, self._make_temporary_folder())

    def _make_temporary_folder(self) -> Path:
        """Makes a folder that is deleted together with this object."""
        folder = Path(tempfile.mkdtemp(prefix="scaleflow-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder


def select_computed(params: Mapping[str, str]) -> dict[str, str]:
    """Returns the params that decide what a run computes, without the seed."""
    return {key: value for key, value in params.items() if key != "seed" and is_computed_by(key)}


def drop_seed(job: Mapping[str, Any]) -> list[str]:
    """Returns the overrides of a job, without the seed."""
    return [word for word in job["overrides"] if not word.startswith("seed=")]


def locate_run(named: str, options: Tracking) -> tuple[str, Tracking]:
    """Returns a run's id or a model's URI, and the options of its store. Does not import MLflow.

    Raises ConfigError if `named` has none of these forms, or is not the folder of a recorded run.
    """
    if RUN_OR_MODEL.fullmatch(named):
        return named, options
    folder = Path(named).expanduser()
    files = RunFolder(folder)
    if not folder.is_dir():
        raise ConfigError(f"{named}: expected {FORMS}")
    if files.ledger.is_file():
        raise ConfigError(f"{named}: this is the folder of a sweep; use the folder of one of its jobs")
    if not files.events.is_file():
        raise ConfigError(f"{named}: this is not the folder of a run: it has no {files.events.name}")
    record = files.read_record()
    if record.get("run_id") is None:
        raise ConfigError(
            f"{named}: this run is not recorded in a store; {name_command('sync')} {named} records it, with "
            "--uri STORE if it had tracking=none"
        )
    store = find_tracking_options(folder, options.uri or record.get("uri"))
    return str(record["run_id"]), replace(options, uri=store.uri)


def find_tracking_options(folder: Path, uri: str | None) -> Tracking:
    """Returns the options of a run's store. Its address is `uri`, else the one in `record.json`, else the config's.

    If credentials in the address are masked, `MLFLOW_TRACKING_URI` replaces it, or the masked part is removed. Raises
    ConfigError if the run's config cannot be read, or the store cannot be used.
    """
    try:
        config = OmegaConf.load(RunFolder(folder).config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: its config.yaml can't be read: {error}") from error
    section = OmegaConf.to_container(OmegaConf.select(config, "tracking"), resolve=True)
    tracking = parse_section(Tracking, section if isinstance(section, dict) else {}, "tracking")
    address = uri or RunFolder(folder).read_record().get("uri") or tracking.uri
    if address is not None and MASK in address:
        address = os.environ.get("MLFLOW_TRACKING_URI") or drop_credentials(address)
    if tracking.name == "none" and uri is None:
        return tracking
    return resolve_store(replace(tracking, name="mlflow", uri=address, offline=False))
