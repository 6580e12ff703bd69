"""The task of one process of a run, and its transfer to that process."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scaleflow.cluster.tasks import count_workers, process_name
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import Plan
from scaleflow.interfaces.secret_masking import find_known_secrets, mask_secrets, remember_secrets
from scaleflow.interfaces.trials import Trial
from scaleflow.runs.data_digest import Repetition
from scaleflow.runs.folder import RunFolder, to_file_name


@dataclass(frozen=True)
class EvaluationSpec:
    """The evaluation of a tracked model."""

    model: str  # the path of a Keras file
    origin: str  # the model's name in messages
    #: `test`, `validation`, `train`, or `all` examples; None: all of a new file without splits, otherwise the first of
    #: these splits that the dataset has
    split: str | None
    precision: bool  # whether the plan's precision replaces the model's own
    command: str = ""  # the command that trusts the user's code which the run used
    is_new: bool = False  # whether the data are others than those of the run
    counts_unknown: bool = False  # whether an example of an unknown class counts as wrong; else it is an error
    #: The plan of the run that trained the model, if the examples that it was trained on are to be found in the split
    trained: Plan | None = None


@dataclass(frozen=True)
class ConversionSpec:
    """The export of a trained model in further formats."""

    model: str  # the folder of the exported model, to which the formats are added
    formats: Sequence[str]  # of `export.formats`
    is_trial: bool = False  # whether it is only tried with a few examples, before the training


@dataclass(frozen=True)
class DataCheckSpec:
    """A look at a dataset."""

    report: str  # the path of the page to write
    examples: int  # the most that are looked at, of each split
    schema: Mapping[str, Any] | None = None  # of the run with which the data are compared


@dataclass(frozen=True)
class RunSpec:
    """The task of one process of a run."""

    plan: Plan  # the checked config
    folder: Path  # the run's folder, an absolute path
    started: float  # when the command began, in seconds since the epoch
    worker: int = 0  # the number of this process; 0 is the chief, whose events are the run's
    attempt: int = 0  # how often this command has restarted all processes of the run
    parent: str | None = None  # the folder of the sweep, if the run is a job of one
    label: str = ""  # what distinguishes it from other runs, or jobs of its sweep, for the run's name
    environment: Mapping[str, str] = field(default_factory=dict)  # variables to add to the environment of the processes
    server: str | None = None  # the address of the fork server; None: the run starts its own
    tags: Mapping[str, str] = field(default_factory=dict)  # tags of the run, for the launcher
    #: The keys of the length, such as `training.epochs`, that differ from those with which the run began
    length: Mapping[str, Any] = field(default_factory=dict)
    #: The model to evaluate or to convert, or the data to look at; None: train a model
    evaluation: EvaluationSpec | ConversionSpec | DataCheckSpec | None = None
    trial: Trial | None = None  # the setting to look for; None: train a model
    repeats: Repetition = field(default_factory=Repetition)  # the run that this one repeats

    @property
    def name(self) -> str:
        """The name of this process in messages."""
        return process_name(self.plan, self.worker)

    @property
    def file_name(self) -> str:
        """The name of this process in names of files."""
        return to_file_name(self.name)

    @property
    def records(self) -> bool:
        """Whether the events of this process are those of the run."""
        return self.worker == 0

    @property
    def serves(self) -> bool:
        """Whether this process does what a coordinator asks for, instead of training by itself."""
        return self.plan.strategy.has_coordinator and self.worker > 0

    @property
    def is_replaceable(self) -> bool:
        """Whether this process can restart while the others continue: it holds no variables."""
        return self.serves and self.worker <= count_workers(self.plan)

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues from an earlier command or attempt."""
        return self.attempt > 0 or self.plan.resume is not None

    @property
    def files(self) -> RunFolder:
        """The files in the run's folder."""
        return RunFolder(self.folder)

    @property
    def checkpoints(self) -> str:
        """The folder of the run's checkpoints; that in the run's folder if they are kept in an object store."""
        folder = self.plan.checkpoint.folder
        return str(self.files.checkpoints) if folder is None or is_store_address(folder) else folder

    @property
    def events(self) -> Path:
        """The file of this process's events."""
        return self.files.events if self.records else self.files.process_events(self.name)

    @property
    def log(self) -> Path:
        """The file of this process's output."""
        return self.files.log(self.name)

    def without_credentials(self) -> RunSpec:
        """Returns the spec for a worker, without credentials of the store and without what only the launcher needs.

        Of the tracking options only the address is masked: a password may be equal to another value, such as `mlflow`.
        A worker has the address that was typed: it uses no store.
        """
        from scaleflow.config.plan import set_values  # `scaleflow --help` imports this module, and needs no rules

        uri = mask_secrets((self.plan.config.get("tracking") or {}).get("uri"))
        return replace(self, plan=set_values(self.plan, {"tracking.uri": uri}), environment={}, server=None, tags={})

    def to_line(self, environment: Mapping[str, str] | None = None) -> bytes:
        """Serializes the spec for a pipe to a process of the same version, which has this environment.

        The line contains the secrets of the config and of the environment, so that the process can mask them. Never
        write it to a file.
        """
        spec = self.without_credentials()
        text = json.dumps([spec.plan.config, str(self.folder), self.label, dict(environment or {})], default=str)
        return base64.b64encode(pickle.dumps((find_known_secrets(text), spec))) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> RunSpec:
        """Parses a line of `to_line`, and remembers the secrets to mask."""
        secrets, spec = pickle.loads(base64.b64decode(line))
        remember_secrets(secrets)
        assert isinstance(spec, cls)
        return spec
