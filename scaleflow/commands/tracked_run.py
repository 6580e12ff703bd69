"""Helpers that commands about runs and models share: words, the plan of one process, its worker, lines."""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from scaleflow.commands.frame import CommandParser
from scaleflow.config.compose import CommandWords, ComposedConfig
from scaleflow.config.plan import set_values
from scaleflow.config.policies import EVALUATE, Policy
from scaleflow.config.words import quote_override, split_overrides
from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import BY_SIZE, Plan, Tracking, name_command
from scaleflow.interfaces.events import Event, FaultReported, Note, PhaseBegan, RunEnded, RunRefused
from scaleflow.interfaces.features import find_own_runs, import_named
from scaleflow.launcher.command_exit import to_printable
from scaleflow.launcher.display import IMPORTING, Display
from scaleflow.launcher.prepare import make_plan
from scaleflow.launcher.processes.server_start import start_fork_server
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.processes.worker_process import start_workers
from scaleflow.launcher.recording.monitor import POLL_SECONDS
from scaleflow.runs import EventReader, EventWriter, RunSpec
from scaleflow.runs.objects import list_object_keys
from scaleflow.runs.reuse import complete_command, find_store_options
from scaleflow.runs.run import Run, locate_run
from scaleflow.tracking.model_uris import FORMS
from scaleflow.tracking.tracked_runs import download_model
from scaleflow.worker.evaluate import ALL, EvaluateModel
from scaleflow.worker.process import run_worker


def add_run_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="RUN_ID", help=f"a run or its model: {FORMS}")


def make_run_parser(name: str, about: str | None) -> CommandParser:
    """Makes the parser of a command that uses the config of a tracked run."""
    parser = CommandParser(name, about)
    add_run_id(parser)
    parser.add_overrides("an override of the run's config; GROUP=OPTION replaces a whole group")
    parser.add_repeated(
        "--trust", "NAME", "a module whose code may run, or a folder (with a /) whose files may be used"
    )
    return parser


def parse_command(
    parser: CommandParser, words: list[str], takes_run: bool = True
) -> tuple[CommandWords, argparse.Namespace]:
    """Parses the words of a command that uses the config of a tracked run. Returns them with the command's options.

    Raises ConfigError if RUN_ID has none of its forms, before it imports anything else. A command that does not always
    take a run must check that itself.
    """
    words = split_overrides(words)
    typed = parser.parse_intermixed_args(words)
    if takes_run:
        locate_run(typed.run_id, Tracking())
    line = [*name_command(parser.name).split(), *words]
    command = CommandWords(typed.overrides, typed.config_dir, run_id=typed.run_id, trusted=typed.trust, line=line)
    return command, typed


def find_run(words: CommandWords, needs_run: bool = True, is_repeated: bool = False) -> tuple[Run, CommandWords]:
    """Returns the run that a command names, and the command with the `--config-dir` folders of the run's own command.

    Args:
        needs_run: whether the command needs the run, and not only its model.
        is_repeated: whether the command only runs the same again. Others need a run whose data and outputs scaleflow
            knows.

    Raises ConfigError if there is no such run, or if the command cannot use it.
    """
    run = Run.find(words.run_id, find_store_options(words), needs_run)
    own = None if run.is_deleted else find_own_runs(run.settings)
    if own is not None:
        if not is_repeated:
            raise ConfigError(f"{words.run_id}: {own.reason}")
        translate: Callable[..., list[str]] = import_named(own.rerun_words)
        words = replace(words, overrides=translate(run.config, run.states[0].folder, words.overrides))
    return run, run.complete(words)


def reuse_for_new_run(run: Run, words: CommandWords, said: str) -> ComposedConfig:
    """Returns a run's config with the words of a command that trains anew, in the run's store. Prints `said` and the
    run.
    """
    composed = run.reuse_config(words)
    tracking = composed.config.tracking
    Display(sys.stdout).print_line(f"{said} {to_printable(run.title)}")
    is_elsewhere = tracking.name != "mlflow" or tracking.uri is not None
    return composed if is_elsewhere else composed.set({"tracking.uri": run.store.uri})


def show_notes(composed: ComposedConfig, display: Display) -> ComposedConfig:
    """Prints the notes about the config of a run, and returns the config."""
    for note in composed.notes:
        display.print_line(to_printable(note))
    return composed


def place_objects(run: Run, words: CommandWords, composed: ComposedConfig) -> tuple[ComposedConfig, Callable[[], None]]:
    """Returns the config of a new run with its own copies of the data and the model that a program passed to a run.

    Also returns a function that copies them into the folder of the new run.
    """
    values: dict[str, str] = {}
    copies: list[tuple[Path, Path]] = []
    file_names = {object_key.path: object_key.name for object_key in list_object_keys(run.config)}
    for key, path in run.find_objects(words).items():
        target = composed.folder.absolute() / file_names[key]
        values[key] = str(target)
        copies.append((path, target))

    def copy_files() -> None:
        for path, target in copies:
            shutil.copyfile(path, target)

    return composed.set(values) if values else composed, copy_files


def make_evaluation_plan(composed: ComposedConfig, takes_all: bool = False) -> Plan:
    """Makes the plan of an evaluation, which runs in one process. With `takes_all`, the run's `dataset.limit` is
    ignored.

    Raises ConfigError if the config is wrong, or requires several processes or a TPU.
    """
    values = {"dataset.shards": 1, **({"dataset.limit": None} if takes_all else {})}  # shards are for workers
    plan = make_plan(composed.set(values), EVALUATE)
    batch_size = plan.training.batch_size
    if not isinstance(batch_size, int) and batch_size != BY_SIZE:
        raise ConfigError(
            f"training.batch_size={batch_size}: an evaluation needs a number, such as training.batch_size=32"
        )
    return plan


def take_costs(plan: Plan, run: Run) -> Plan:
    """Returns the plan of an evaluation with the run's costs, unless the command sets costs."""
    if plan.evaluation.costs is not None or plan.evaluation.name == "none" or run.costs is None:
        return plan
    return set_values(plan, {"evaluation.threshold": {"cost": run.costs}})


def make_plan_on(file: str, run: Run, words: CommandWords, policy: Policy) -> Plan:
    """Makes the plan of an evaluation on all examples of a file or folder, which the user named with `--on`.

    Raises ConfigError if it does not exist, or if the run's dataset reads no files.
    """
    if "://" not in file and not Path(file).expanduser().exists():
        raise ConfigError(f"--on {file}: there is no such file or folder")
    dataset = run.config.get("dataset")
    if not isinstance(dataset, dict) or "data_dir" not in dataset:
        raise ConfigError(f"--on {file}: the dataset of {run.name} reads no file: it has no dataset.data_dir")
    words = replace(words, overrides=[*words.overrides, quote_override("dataset.data_dir", file)])
    return take_costs(make_evaluation_plan(run.reuse_config(words, policy), takes_all=True), run)


def make_evaluation_task(run: Run, words: CommandWords, plan: Plan, folder: Path, named: Run) -> EvaluateModel:
    """Downloads the model of a run into a folder, and returns its evaluation on all examples of the plan's data.

    `words` is the command; an error about untrusted code suggests it with the missing flags. `named` is the run that
    the command names.
    """
    command = complete_command(named.config, plan.trusted_modules or (), words)
    model = download_model(run.tracker, run.model, folder)
    return EvaluateModel(str(model), str(run.model_uri), ALL, precision=False, command=command, is_new=True)


def run_evaluation(plan: Plan, task: EvaluateModel, folder: Path, stop: StopRequest, display: Display) -> list[Event]:
    """Evaluates a model in a folder, and keeps its predictions there, without a report."""
    plan = set_values(plan, {"evaluation.name": "default", "evaluation.intervals": 0})
    return supervise_worker(RunSpec(plan, folder, time.time(), replace(task, is_shown=False)), stop, display)


def format_model_rows(run: Run) -> list[tuple[str, str]]:
    """Returns the first rows of a summary: the run and its model."""
    return [("run", to_printable(run.title)), ("model", str(run.model_uri))]


def answer_model(run: Run) -> Mapping[str, str]:
    """Returns a command's `--json` values for the run and its model."""
    return {"run_id": run.model.run_id, "model": str(run.model_uri)}


def supervise_worker(spec: RunSpec, stop: StopRequest, display: Display) -> list[Event]:
    """Runs one worker to its end, and shows its phases and notes as they arrive.

    Returns all events of the worker. Raises ConfigError if the worker refused its work, RunError if it failed, and
    Stopped if `stop` was set.
    """
    display.begin_phase(IMPORTING)
    reader = EventReader(spec.events)
    events: list[Event] = []

    def look() -> None:
        for event in reader.read():
            events.append(event)
            if isinstance(event, Note | RunEnded | RunRefused | PhaseBegan):
                display.show_event(event)

    if spec.plan.debug.inline:
        display.close()  # a debugger needs the terminal
        run_worker(spec, EventWriter(spec.events), stop.is_set)
        look()
        stop.check()
    else:
        with start_fork_server() as server, start_workers([spec], [{}], server) as (process,):
            while process.is_alive and not stop.is_set():
                process.wait(POLL_SECONDS)
                look()
            look()
            stop.check()
            if not events or not isinstance(events[-1], RunEnded | RunRefused):
                raise RunError(process.find_reason().why)
    last = events[-1]
    if isinstance(last, FaultReported):
        raise RunError(last.error)
    if isinstance(last, RunRefused):
        message = last.message.replace(f"; the traceback is in {spec.log}", "")  # the log is deleted
        raise (RunError if last.keep else ConfigError)(message)
    return events
