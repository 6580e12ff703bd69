"""Defines how a run is recorded: the store that receives a run's events from the launcher."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleflow.interfaces.events import DatasetDescribed, Status


@dataclass(frozen=True)
class Point:
    """One value of a metric."""

    key: str  # the metric's name
    value: float
    step: int  # the optimizer update; for system metrics, the number of the measurement
    time: int  # when it was measured, in milliseconds since the epoch


#: The tag that identifies a run, set at its creation. A restarted or repeated command finds the run by it.
IDENTITY = "scaleflow.id"


class Tracker:
    """A run in a store. Every call can be repeated with the same arguments, and then changes nothing.

    Call `connect` first. All methods may raise the store's own errors; the recorder calls them again later. This class
    itself is `tracking=none`: it has no store, and ignores every call. config.yaml and events.jsonl hold the same data.

    Attributes:
        adopted_run_id: the id of an existing run that `start` uses instead of creating one; None: create one.
        run_id: the run's id in the store; None before `start` or `select_run`, or without a store.
        uri: the store's address; None without a store.
        experiment: the experiment's name from the command; None until `connect`, or without a store.
        names_experiment: whether the config names an experiment other than the default.
        follows: the id of an earlier run, such as the parent. `start` creates the run in the experiment of that run,
            which may have been renamed. None: in the experiment with the name `experiment`.
    """

    adopted_run_id: str | None = None
    run_id: str | None = None
    uri: str | None = None

    experiment: str | None = None
    names_experiment: bool = False

    follows: str | None = None

    @property
    def model_uri(self) -> str | None:
        """The URI of the model that was logged last; None if this object has logged no model."""
        return None

    def connect(self) -> None:
        """Opens the store. Does not create a run.

        Raises:
            StoreUnreachable: if the store does not answer now.
            ConfigError: if it cannot be used.
        """

    def check_experiment(self) -> None:
        """Checks the experiment of a new run, without creating it. Raises ConfigError if it was deleted."""

    def select_run(self, run_id: str) -> None:
        """Makes the later calls refer to an existing run. Changes nothing in the store.

        Raises ConfigError if the store has no such run.
        """

    def check_run(self, run_id: str) -> None:
        """Raises the store's error if it does not answer, and ConfigError if it has no such run."""

    def reopen(self) -> None:
        """Marks the selected run as running again."""

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None:
        """Creates the run, unless one with the same `IDENTITY` exists, or uses the run `adopted_run_id`.

        The tags contain `IDENTITY`. `began` is when the command began, in milliseconds since the epoch.
        """

    def log_params(self, values: Mapping[str, str]) -> None:
        """Logs parameters. Parameters that the run already has are not changed."""

    def log_metrics(self, points: Sequence[Point]) -> None:
        """Logs values of metrics."""

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Sets tags."""

    def describe(self, text: str) -> None:
        """Sets the run's description, Markdown with at most 8,000 characters, unless the user has written one."""

    def log_artifact(self, path: Path, folder: str | None) -> None:
        """Uploads a file into a folder of the run's artifacts; None is their root."""

    def log_dataset(self, data: DatasetDescribed) -> None:
        """Logs the dataset that an event describes as the run's input."""

    def log_model(self, path: Path, step: int) -> None:
        """Logs a folder as the run's model. A worker exported it after the optimizer update `step`."""

    def finish(self, status: Status, ended: int) -> None:
        """Ends the run. `ended` is the time of its end, in milliseconds since the epoch."""

    def describe_links(self) -> Sequence[tuple[str, str]]:
        """Returns rows of (label, value) that tell the user where to look at the run."""
        return ()
