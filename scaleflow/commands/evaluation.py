"""Evaluates the model of a tracked run in a worker process."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scaleflow.commands.tracked_run import make_evaluation_plan, supervise_worker
from scaleflow.config.from_mlflow import RerunCommand, complete_command, load_config, reuse_config
from scaleflow.config.words import quote_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan, Tracking
from scaleflow.interfaces.events import Event
from scaleflow.launcher.display import Display
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.runs import EvaluationSpec, RunSpec
from scaleflow.tracking.store import MlflowTracker
from scaleflow.tracking.tracked_runs import TrackedRun, download_model
from scaleflow.worker.evaluate import ALL

#: The store of a run, a tracker that is connected to the run, and the run.
Found = tuple[Tracking, MlflowTracker, TrackedRun]


def make_plan_on(file: str, found: Found, words: RerunCommand, sections: Sequence[str]) -> Plan:
    """Makes the plan of an evaluation on all examples of a file or folder, which the user named with `--on`.

    Raises ConfigError if it is not there, or if the run's dataset reads no file.
    """
    store, _, run = found
    if "://" not in file and not Path(file).expanduser().exists():
        raise ConfigError(f"--on {file}: there is no such file or folder")
    dataset = load_config(run.config, run.run_id).get("dataset")
    if not isinstance(dataset, dict) or "data_dir" not in dataset:
        raise ConfigError(f"--on {file}: the dataset of {run.name} reads no file: it has no dataset.data_dir")
    words = replace(words, overrides=[*words.overrides, quote_override("dataset.data_dir", file)])
    return make_evaluation_plan(reuse_config(run.config, run.params, words, sections), store, takes_all=True)


def make_evaluation_spec(
    found: Found, words: RerunCommand, plan: Plan, folder: Path, named: TrackedRun
) -> EvaluationSpec:
    """Downloads the model of a run into a folder, and returns its evaluation on all examples of the plan's data.

    The words are the command, of which a message says what to trust; `named` is the run that they name.
    """
    store, tracker, run = found
    command = complete_command(load_config(named.config, named.run_id), plan.trusted_modules or (), words)
    model = download_model(tracker, run, store, folder)
    return EvaluationSpec(str(model), str(run.model_uri), ALL, False, command, True)


def run_evaluation(plan: Plan, spec: EvaluationSpec, folder: Path, stop: StopRequest, display: Display) -> list[Event]:
    """Evaluates a model in a folder, and keeps its predictions there, without a report."""
    options = replace(plan.evaluation, name="default", slices=None, worst=0, intervals=0, importance=0)
    run_spec = RunSpec(replace(plan, evaluation=options), folder, time.time(), evaluation=spec)
    return supervise_worker(run_spec, stop, display)
