"""Finds the run that a command names by its ID, by the URI of a model, or by its folder, without TensorFlow."""

from dataclasses import replace
from pathlib import Path

from scaleflow.errors import ConfigError, RunMissing
from scaleflow.interfaces import Tracking, name_command
from scaleflow.launcher.recording.recovery import find_tracking_options
from scaleflow.runs import RunFolder
from scaleflow.tracking.model_uris import FORMS, RUN_OR_MODEL
from scaleflow.tracking.store import MlflowTracker
from scaleflow.tracking.tracked_runs import TrackedRun, choose_store, find_run


def find_named_run(named: str, options: Tracking) -> tuple[Tracking, MlflowTracker, TrackedRun]:
    """Returns the store of a run, a tracker that is connected to the run, and the run with the model to use.

    A model's URI names that model; a run's ID and its folder name the model that is the run's result.

    Args:
        named: a run's ID, a model's URI, or the path of a run's folder.
        options: with the typed address of the store; without one, a folder's record names it.

    Raises ConfigError if there is no such run or model, or it is not scaleflow's.
    """
    reference, options = locate_run(named, options)
    store = choose_store(options)
    try:
        return store, *find_run(reference, store)
    except RunMissing as missing:
        if reference == named:
            raise
        raise RunMissing(f"{missing}; {name_command('sync')} {named} --again records it again") from missing


def locate_run(named: str, options: Tracking) -> tuple[str, Tracking]:
    """Returns a run's ID or a model's URI, and the options of its store. Imports no MLflow.

    Raises ConfigError if `named` has none of the forms, or is not the folder of a recorded run.
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
