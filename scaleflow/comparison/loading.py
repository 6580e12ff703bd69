"""Loads what is known of a run, from its folder if that is here, else from the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking
from scaleflow.launcher.named_runs import find_named_run
from scaleflow.launcher.recording.store_transfer import WEIGHTS
from scaleflow.runs import RunFolder
from scaleflow.runs.data_digest import read_split_digests
from scaleflow.runs.provenance.record import Provenance, read_states
from scaleflow.runs.state import RunHistory
from scaleflow.sweep.ledger import IGNORED_SECTIONS, Ledger
from scaleflow.tracking.keys import to_allowed_key
from scaleflow.tracking.store import MAX_VALUE, MlflowTracker
from scaleflow.tracking.tracked_runs import TrackedRun, download_artifact

#: Metrics that differ whenever a run is repeated: speed, memory, the use of the machine.
MEASURED = ("perf/", "system/")


@dataclass(frozen=True)
class ComparedRun:
    """A run that is compared with another one.

    Attributes:
        run_id: its id in the store; None if it is not recorded.
        status: FINISHED, FAILED or KILLED; None while it is open.
        params: every key of the config, and the `resolved.` values.
        points: the (step, value) pairs of each metric.
        weights: the digest of the exported model's weights; empty if it is not known.
        states: what it was made of, when it began, and when it was resumed with something else. At least one, which
            may know nothing.
        files: its folder, or one with what the store has of it.
        repeats: the last metrics of the jobs of its sweep that differ from it at most in the seed, its own included.
    """

    name: str
    run_id: str | None
    status: str | None
    params: Mapping[str, str]
    points: Mapping[str, Sequence[tuple[int, float]]]
    weights: str
    states: Sequence[Provenance]
    files: RunFolder
    repeats: Sequence[Mapping[str, float]] = ()

    @property
    def label(self) -> str:
        """The name, with the id or the folder."""
        return f"{self.name} ({self.run_id or self.files.path})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: points[-1][1] for name, points in self.points.items() if points}


def load_named_run(named: str, options: Tracking, temporary: Path) -> ComparedRun:
    """Loads the run of a folder, of an ID or of a model's URI.

    Args:
        options: with the address of the store, if it was typed.
        temporary: an empty folder for what is downloaded.

    Raises ConfigError if there is no such run.
    """
    folder = Path(named).expanduser()
    if RunFolder(folder).events.is_file() and not RunFolder(folder).ledger.is_file():
        return load_folder(folder)
    _, tracker, tracked = find_named_run(named, options)
    return load_tracked_run(tracker, tracked, temporary)


def load_folder(folder: Path) -> ComparedRun:
    """Loads a run from its folder. Raises ConfigError if it ended before it was ready."""
    run, files = RunHistory.read(folder), RunFolder(folder.absolute())
    if run.ready is None:
        raise ConfigError(f"{folder}: this run ended before training began; there is nothing to compare")
    states = read_states(files) or [Provenance(data={"splits": read_split_digests(files)})]
    points = {to_allowed_key(name): points for name, points in run.curves.items()}
    return ComparedRun(
        run.ready.name,
        run.run_id,
        run.status,
        update_params(run.params, files),
        points,
        run.weights,
        fill_data(states, files),
        files,
        list_repeats(Path(run.ready.parent or ""), folder),
    )


def read_resume_words(files: RunFolder) -> dict[str, str]:
    """Returns the values of the keys that commands changed which resumed a run."""
    words: dict[str, str] = {}
    for number in range(1, 1 + files.count_resumes()):
        overrides = OmegaConf.to_container(OmegaConf.load(files.resume_overrides(number))) or ()
        words |= dict(str(word).split("=", 1) for word in overrides if "=" in str(word))
    return words


def update_params(params: Mapping[str, str], files: RunFolder) -> dict[str, str]:
    """Returns the params of a run with what commands changed that resumed it. Keys are those of the store."""
    changed = {key: value for key, value in read_resume_words(files).items() if key in params}
    return {to_allowed_key(key): value[:MAX_VALUE] for key, value in {**params, **changed}.items()}


def list_repeats(sweep: Path, folder: Path) -> list[Mapping[str, float]]:
    """Returns `repeats` of the job of a sweep in a folder; none of a run without a sweep."""
    if not RunFolder(sweep).ledger.is_file():
        return []
    jobs = {(sweep / entry.folder).resolve(): entry for entry in Ledger.load(RunFolder(sweep)).entries}
    own = jobs.get(folder.resolve())
    same = [path for path, entry in jobs.items() if own and drop_seed(entry.overrides) == drop_seed(own.overrides)]
    runs = [RunHistory.read(path) for path in same if not jobs[path].warms_up]
    return [run.metrics for run in runs if run.status == "FINISHED"]


def drop_seed(overrides: Sequence[str]) -> list[str]:
    return [word for word in overrides if not word.startswith("seed=")]


def select_identity(params: Mapping[str, str]) -> dict[str, str]:
    """Returns the params that say what a run computes, without its seed."""
    return {
        key: value
        for key, value in params.items()
        if key != "seed" and not f"{key}.".startswith(("resolved.", *IGNORED_SECTIONS))
    }


def fill_data(states: Sequence[Provenance], files: RunFolder) -> Sequence[Provenance]:
    """Adds the digests of the splits to a state that has no data, as of a run whose worker died."""
    return [each if each.data else replace(each, data={"splits": read_split_digests(files)}) for each in states]


def load_tracked_run(tracker: MlflowTracker, tracked: TrackedRun, temporary: Path) -> ComparedRun:
    """Loads a run of the store; from its folder if that is here. Raises ConfigError if its record cannot be read."""
    from scaleflow.tracking.inputs import read_dataset_inputs  # imports MLflow

    run = tracker.fetch_run()
    folder = Path(run.data.tags["scaleflow.folder"])
    if RunFolder(folder).read_record().get("run_id") == tracked.run_id and RunFolder(folder).events.is_file():
        return replace(load_folder(folder), name=tracked.name)
    download_artifact(f"runs:/{tracked.run_id}/{RunFolder(temporary).provenance_folder.name}", tracker.uri, temporary)
    files = RunFolder(temporary)
    while download_artifact(
        f"runs:/{tracked.run_id}/{files.resume_overrides(1 + files.count_resumes()).name}", tracker.uri, temporary
    ):
        pass
    download_artifact(f"runs:/{tracked.run_id}/{files.evaluation.name}", tracker.uri, temporary)
    states = read_states(files) or [Provenance(data={"splits": read_dataset_inputs(run)})]
    siblings = tracker.fetch_siblings()
    return ComparedRun(
        tracked.name,
        tracked.run_id,
        None if run.info.status == "RUNNING" else run.info.status,
        update_params(tracked.params, files),
        tracker.fetch_points(),
        run.data.tags.get(WEIGHTS, ""),
        states,
        files,
        [numbers for params, numbers in siblings if select_identity(params) == select_identity(tracked.params)],
    )
