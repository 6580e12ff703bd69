"""The Python API: runs and sweeps from a script, a notebook, a thread or another Hydra app.

    from scaleflow import best_run, compose, run, run_sweep

    config = compose("model=cnn", "training.epochs=3")    # the config of this command line
    result = run("model=cnn", "training.epochs=3")        # or run(config)
    print(result.run_id, result.metrics["test/accuracy"])
    sweep = run_sweep("model.units=32,128,512")           # a job for each value, like -m
    print(sweep.best.overrides, sweep.best.result.model_uri)

    best = best_run(sweep.run_id)                         # later: by the ID of the sweep's run, or by its folder

The worker is a separate process, as on the command line, except with `debug=inline`. So a script needs no
`if __name__ == "__main__"`, and this process does not import TensorFlow. In the main thread, Ctrl-C stops the run,
records it as KILLED, and then raises KeyboardInterrupt. In other threads, signal handlers stay unchanged.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from scaleflow.commands.hydra_task import HydraTask
from scaleflow.config.compose import (
    CommandWords,
    ComposedConfig,
    Folders,
    as_command,
    compose_config,
    compose_sweep,
    find_own_modules,
    list_keys,
    list_own_folders,
    read_app_choices,
    resolve_config,
    to_folders,
)
from scaleflow.config.parse import flatten_config, format_value
from scaleflow.config.plan import DERIVED_FIELDS
from scaleflow.config.trust import list_targets
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import Plan, Status, Tracking
from scaleflow.interfaces.features import CompiledTraining, find_compiled_training, list_sections
from scaleflow.interfaces.formatting import Readable, list_metric_rows
from scaleflow.launcher.command_exit import FINISHED, REFUSED, Outcome, raise_interruption
from scaleflow.launcher.launch import answer_run, launch_run
from scaleflow.launcher.objects import (
    add_options,
    is_compiled,
    place_file,
    plan_data_file,
    plan_model_file,
    use_function,
)
from scaleflow.launcher.prepare import PreparedRun, prepare_run
from scaleflow.launcher.recording.recovery import repair_quietly
from scaleflow.runs import RunFolder
from scaleflow.runs.folder_use import RUN_DIR, FolderRefused, check_folder, create_folder
from scaleflow.runs.run import Run
from scaleflow.sweep.ledger import Ledger, LedgerEntry
from scaleflow.sweep.ranking import BestJob, find_best_job
from scaleflow.tracking.tracked_runs import BEST

#: Config groups of the core, and other top-level keys of a config.
GROUPS = frozenset(field.name for field in fields(Plan)) - {*DERIVED_FIELDS}

#: Sections that every whole config has. Another Hydra app may leave out groups with a default for each key, such as
#: `objective`. For an incomplete config with at most MAX_SUGGESTED values, the error shows these as overrides.
MAIN_SECTIONS = ("dataset", "model", "optimizer", "training")
MAX_SUGGESTED = 10


@dataclass(frozen=True)
class Result(Readable):
    """The result of a run.

    Attributes:
        status: FINISHED, FAILED or KILLED, as in MLflow. A run that `checkpoint.max_seconds` stopped is KILLED.
        run_id: the run's ID in MLflow; None if the run is not tracked, or if the store never answered.
        folder: the run's folder, with its events, logs, checkpoints and model.
        metrics: the last value of each metric.
        error: why the run did not finish; None if it finished.
        model_uri: the last model that the run logged to MLflow, for `mlflow.pyfunc.load_model`. None if it logged no
            model, for example with `tracking=none`. The model is then in the folder `model` of the run's folder.
        history: metric -> step -> value, also from earlier commands of a resumed run.
            `pandas.DataFrame(result.history)` has a row for each step and a column for each metric.
    """

    status: Status
    run_id: str | None
    folder: Path
    metrics: Mapping[str, float]
    error: str | None = None
    model_uri: str | None = None
    history: Mapping[str, Mapping[int, float]] = field(default_factory=dict, repr=False)

    def list_rows(self) -> list[tuple[str, str]]:
        places = {"error": self.error, "folder": self.folder, "run": self.run_id, "model": self.model_uri}
        rows = [("status", str(self.status)), *list_metric_rows(self.metrics)]
        return [*rows, *((label, str(value)) for label, value in places.items() if value is not None)]


@dataclass(frozen=True)
class JobResult:
    """A job of a sweep.

    Attributes:
        number: the number of the job in the sweep, from 0.
        overrides: the overrides of the job, such as `model.units=128`, with secrets masked.
        result: the result of its run, with the metrics of the exported model, as in the sweep's report. If the job has
            no run, the status is FAILED, `error` is the reason, and there are no metrics.
    """

    number: int
    overrides: tuple[str, ...]
    result: Result


@dataclass(frozen=True)
class SweepResult(Readable):
    """The result of a sweep.

    Attributes:
        status: FINISHED if all jobs finished, KILLED if `sweep.max_seconds` stopped the sweep, else FAILED.
        run_id: the ID of the sweep's own run in MLflow, the parent of its jobs' runs; None if it is not tracked.
        folder: the sweep's folder, with `report.csv`. `run_sweep(..., folder=folder)` continues the sweep.
        jobs: all jobs in the folder.
        best: the best job; None if no finished job has the metric.
    """

    status: Status
    run_id: str | None
    folder: Path
    jobs: tuple[JobResult, ...]
    best: JobResult | None

    def list_rows(self) -> list[tuple[str, str]]:
        rows = [("status", str(self.status))]
        for job in self.jobs:
            figures = (f"{name} {value}" for name, value in list_metric_rows(job.result.metrics))
            shown = "  ".join([" ".join(job.overrides), job.result.status, *figures])
            rows.append((f"#{job.number}{' (best)' if job is self.best else ''}", shown))
        return [*rows, ("folder", str(self.folder)), *([("run", self.run_id)] if self.run_id else [])]


class RunFailed(RunError):
    """A run started and failed.

    Attributes:
        result: the result of the failed run.
    """

    def __init__(self, result: Result) -> None:
        super().__init__(f"{result.error or 'the run failed'}; its folder is {result.folder}")
        self.result = result


@in_typed_folder
def compose(*overrides: str, config_dir: Folders = ()) -> DictConfig:
    """Composes the config of a command line. Keeps interpolations unresolved.

    Args:
        overrides: overrides as on the command line, such as "model=cnn" or "training.epochs=3".
        config_dir: one or more folders with your own config options, like `--config-dir`.

    Raises:
        ConfigError: if an override is wrong. The message names it and suggests a fix.
    """
    config: DictConfig = compose_config(overrides, to_folders(config_dir)).config
    return config


@in_typed_folder
def run(
    *what: str | Mapping[str, Any] | DictConfig,
    config_dir: Folders = (),
    folder: str | Path | None = None,
    data: Any = None,
    model: Any = None,
    **unknown: Any,
) -> Result:
    """Trains like the command `scaleflow`, and returns when the run has ended.

    Args:
        what: overrides, as on the command line; or one config, from `compose` or from another Hydra app that uses
            scaleflow's config groups.
        config_dir: one or more folders with your own config options, like `--config-dir`.
        folder: the run's folder, like `hydra.run.dir`.
        data: the rows of `dataset=table`: a pandas DataFrame (its index is left out) or a pyarrow Table. Or the arrays
            of `dataset=npz`: (x, y), (x, y, weights) or arrays by name such as x_train. The run reads a copy, a file in
            its folder with a hash of the content in its name. It uploads files of up to 1 GiB to the tracking store,
            except with `tracking.code=false`.
        model: a Keras model, whose training continues from its weights. Or a function in a module (or a
            `functools.partial` of one) that takes `inputs` and `outputs` and returns a Keras model. The run uses its
            own loss, metrics and optimizer. A Keras model that is compiled is trained by Keras as it is compiled, with
            `fit.NAME=VALUE` for the arguments of `fit`, and with data of NumPy arrays: (x, y), (x, y, sample_weight),
            or x_train, y_train, x_val, y_val by name; each may be a list or dict of arrays.
        unknown: other arguments are rejected. The message says how to write them.

    Returns:
        The result. A run that `checkpoint.max_seconds` stopped has the status KILLED and raises no error.

    Raises:
        ConfigError: if the config cannot work, if the run was stopped before it was ready, or if a search for a value
            before the run failed. There is then no run, except the run of the search.
        RunFailed: if the run started and failed.
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the run is recorded.
    """
    if unknown:
        raise unknown_argument_error(unknown)
    plan_compiled = find_compiled_training() if is_compiled(model) else None
    if plan_compiled is not None:
        if not all(isinstance(word, str) for word in what):
            raise ConfigError("run(config, model=...): the model is compiled; write words in place of the config")
        return run_compiled(plan_compiled(model, data, [to_override(word) for word in what]), config_dir, folder)
    objects = [None if data is None else plan_data_file(data), plan_model_file(model)]
    files = [file for file in objects if file is not None]
    if len(what) == 1 and not isinstance(what[0], str):
        composed = normalize_config(what[0], to_folders(config_dir))
    else:
        composed = compose_config(add_options([to_override(word) for word in what], files), to_folders(config_dir))
    if folder is not None:
        composed = replace(composed, folder=Path(folder))
    if model is not None and objects[1] is None:
        composed = use_function(composed, model)
    written: dict[Path, Callable[[Path], object]] = {}
    for file in files:
        composed, path = place_file(composed, file)
        written[path] = file.write
    return launch_with_files(composed, written)


def run_compiled(training: CompiledTraining, config_dir: Folders, folder: str | Path | None) -> Result:
    """Runs the training of a compiled model. The arguments and errors are those of `run`."""
    composed = compose_config(training.words, to_folders(config_dir))
    if folder is not None:
        composed = replace(composed, folder=Path(folder))
    written = {composed.folder.absolute() / name: write for name, write in training.files.items()}
    composed = composed.set({training.key: [str(path) for path in written]})
    return launch_with_files(composed, written)


def launch_with_files(composed: ComposedConfig, written: Mapping[Path, Callable[[Path], object]]) -> Result:
    """Runs a config, with files that are written to the run's folder. Raises the errors of `run`."""

    def fill_folder() -> None:
        for path, write in written.items():
            write(path)

    try:
        return check_outcome(*launch_prepared(prepare_run(composed), fill_folder))
    except ConfigError:
        for path in written:
            path.unlink(missing_ok=True)  # there is no run to read it
        raise


def launch_prepared(run: PreparedRun, fill_folder: Callable[[], None] | None = None) -> tuple[Outcome, Path]:
    """Creates the folder of a prepared run and launches the run. A finished run is not launched again.

    Args:
        run: the prepared run.
        fill_folder: writes additional files to the run's folder.

    Returns:
        The outcome of the corresponding command, and the run's folder.


    Raises:
        ConfigError: if the config cannot work.
    """
    if run.is_finished:
        repair_quietly(run.spec.folder)
        return Outcome(read=partial(answer_run, run.spec.folder)), run.spec.folder
    if not run.resume_number:
        check_main(run.spec.plan)
    make_folder(run.spec.folder)
    if fill_folder is not None:
        fill_folder()
    return launch_run(run), run.spec.folder


def normalize_config(config: Any, dirs: Sequence[str | Path]) -> ComposedConfig:
    """Converts a config, for example of another Hydra app, to a `ComposedConfig`.

    Raises ConfigError if it is not a whole config.
    """
    if not isinstance(config, Mapping | DictConfig):
        raise ConfigError(f"run({type(config).__name__}): expected overrides KEY=VALUE, or one config")
    if not all(isinstance(config.get(name), Mapping | DictConfig) for name in MAIN_SECTIONS):
        values = flatten_config({str(key): value for key, value in config.items()})
        words = suggest_words(values) if len(values) <= MAX_SUGGESTED else []
        advice = f"write run({', '.join(words)})" if words else 'write overrides, such as run("model=mlp")'
        raise ConfigError(f"run({{...}}): expected a whole config, as compose(...) returns it; {advice}")
    node = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    resolved = OmegaConf.create(resolve_config(node))  # interpolations may refer to keys of the other app
    with open_dict(resolved):
        resolved.pop("hydra", None)
    choices = {**infer_choices(resolved), **read_app_choices()}
    return ComposedConfig(resolved, choices, list_own_folders(dirs), folder=default_folder())


def infer_choices(config: DictConfig) -> dict[str, str]:
    """Infers the option of each group from `name`, or from the module in `_target_`. Leaves out unclear groups."""
    choices: dict[str, str] = {}
    for group, section in config.items():
        if not isinstance(section, DictConfig):
            continue
        path = str(section.get("_target_") or "").split(".")
        if isinstance(section.get("name"), str) and "_target_" not in section:
            choices[str(group)] = section.name
        elif len(path) > 1:
            choices[str(group)] = path[-2] if path[0] == "scaleflow" else path[-1].lower()
    return choices


def check_main(plan: Plan) -> None:
    """Rejects targets in `__main__`, because the worker process cannot import the script. Allows `debug=inline`."""
    for key, path in list_targets(plan.config):
        if str(path).startswith("__main__.") and not plan.debug.inline:
            raise ConfigError(
                f"{key}._target_={path}: the worker is a separate process, which cannot import a script "
                "or a notebook; move this code into a module next to it, or use debug=inline"
            )


def make_folder(folder: Path) -> None:
    """Creates a run's folder if it does not exist. Raises ConfigError if the run cannot use it."""
    try:
        create_folder(folder)
    except OSError as error:
        raise ConfigError(f"{RUN_DIR}={folder}: cannot be created ({error.strerror}); choose another folder") from error
    check_folder(folder)


def default_folder() -> Path:
    return Path("outputs", f"{datetime.now():%Y-%m-%d}", f"{datetime.now():%H-%M-%S-%f}")


def read_result(folder: Path, of_model: bool = False) -> Result:
    """Reads the result of the run in a folder: with its last metrics, or with `of_model` the exported model's."""
    run = Run(folder.absolute())
    state = run.state
    metrics = state.model_metrics if of_model else state.metrics
    return make_result(run, state.status or "FAILED", metrics, error=state.error or None)


def make_result(run: Run, status: Status, metrics: Mapping[str, float], error: str | None = None) -> Result:
    history = {name: dict(points) for name, points in run.state.curves.items()} if run.is_here else {}
    return Result(status, run.run_id, run.path, metrics=metrics, error=error, model_uri=run.model_uri, history=history)


def check_outcome(outcome: Outcome, folder: Path) -> Result:
    """Returns the result of the run in a folder, or raises the error for its outcome.

    Raises:
        ConfigError: if the run was rejected.
        RunFailed: if it failed.
        KeyboardInterrupt, SystemExit: if a signal stopped it.
    """
    if outcome.error:
        raise_interruption(outcome.code, outcome.error)
        raise ConfigError(outcome.error)
    result = read_result(folder)
    if result.status == "FAILED":
        raise RunFailed(result)
    if result.status == "KILLED" and not str(result.error).startswith("checkpoint.max_seconds"):
        raise_interruption(outcome.code, str(result.error))
    return result


def to_override(word: Any) -> str:
    if not isinstance(word, str):
        raise ConfigError(f"run(..., {type(word).__name__}): expected overrides KEY=VALUE, or one config alone")
    parts = word.split()
    keys = [part.partition("=")[0].partition(".")[0] for part in parts]
    is_known = {*GROUPS, *list_sections()}.issuperset(keys)
    if len(parts) > 1 and all("=" in part for part in parts) and is_known:
        words = ", ".join(f'"{part}"' for part in parts)
        raise ConfigError(f'run("{word}"): this is one text with several overrides; write run({words})')
    return word


def unknown_argument_error(unknown: Mapping[str, Any]) -> ConfigError:
    """Returns the error for unknown arguments, with the overrides to write instead."""
    names = ", ".join(f"{name}=..." for name in unknown)
    words = suggest_words(unknown)
    if not words:
        return ConfigError(
            f"run({names}): there is no such argument; write config keys as text, such as "
            'run("model=mlp", "training.epochs=3")'
        )
    return ConfigError(f"run({names}): write config keys as text: run({', '.join(words)})")


def suggest_words(values: Mapping[str, Any]) -> list[str]:
    """Returns quoted overrides that set these values. Keys may lack their group (`epochs` for `training.epochs`).

    Returns [] if one of them is not a key of the default config.
    """
    known = sorted(list_keys(compose_config(()).config), key=lambda key: not key.startswith("training."))
    words = []
    for name, value in values.items():
        key = name if name in known else next((key for key in known if key.rpartition(".")[2] == name), None)
        if key is None:
            return []
        words.append(f'"{key}={format_value(value)}"')
    return words


@in_typed_folder
def run_sweep(
    *overrides: str, config_dir: Folders = (), folder: str | Path | None = None, n_jobs: int | None = None
) -> SweepResult:
    """Runs a job for each combination of values like `scaleflow -m`, and returns when all jobs have ended.

    Args:
        overrides: overrides as on the command line, such as `model.units=32,128` or `hydra/sweeper=optuna5`.
        config_dir: one or more folders with your own config options, like `--config-dir`.
        folder: the sweep's folder, like `hydra.sweep.dir`. If it has an earlier sweep, its finished jobs are skipped.
        n_jobs: the number of jobs that run at once, like `hydra.launcher.n_jobs`; None: the launcher's default.

    Returns:
        The result, also if jobs failed or were rejected, or if `sweep.max_seconds` stopped the sweep (KILLED).


    Raises:
        ConfigError: if no job can run.
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the jobs are recorded.
    """
    words = [to_override(word) for word in overrides]
    if folder is not None:
        words.append(make_override("hydra.sweep.dir", folder))
    if n_jobs is not None:
        words.append(f"hydra.launcher.n_jobs={n_jobs}")
    task = HydraTask(time.time())
    dirs = to_folders(config_dir)
    command = CommandWords(words, dirs, is_sweep=True)
    with find_own_modules(dirs):
        context, config = compose_sweep(command)
    if not str(config.hydra.launcher.get("_target_")).startswith("hydra_plugins.scaleflow."):
        name = config.hydra.runtime.choices["hydra/launcher"]
        raise ConfigError(f"hydra/launcher={name}: run_sweep needs a launcher of scaleflow; use isolated or ray")
    try:
        context.callbacks.on_multirun_start(config=config, config_name="config")
    except FolderRefused as refusal:
        raise ConfigError(str(refusal)) from refusal
    path = Path(str(config.hydra.sweep.dir)).absolute()
    with as_command(command), find_own_modules(dirs), task:
        sweeper = Plugins.instance().instantiate_sweeper(hydra_context=context, task_function=task, config=config)
        typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        try:
            sweeper.sweep(arguments=typed)
        except HydraException as error:
            raise ConfigError(str(error)) from error
        context.callbacks.on_multirun_end(config=config, config_name="config")
    code = task.outcome.code
    if not task.limit:
        raise_interruption(code, f"the sweep was stopped; its folder is {path}")
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED"
    if task.limit:
        status = "KILLED"
    elif code == FINISHED:
        status = "FINISHED"
    result = read_sweep(path, status)
    if code == REFUSED:
        raise ConfigError(str(result.jobs[0].result.error))
    return result


@in_typed_folder
def best_run(parent: str | Path, uri: str | None = None) -> JobResult:
    """Returns the best job of a sweep by its `sweep.metric`. While the sweep runs, it is the best job so far.

    Args:
        parent: the sweep's folder, or the ID of its run in MLflow.
        uri: the address of the store with the run; None: MLFLOW_TRACKING_URI, or else sqlite:///mlflow.db.

    Returns:
        The job. If its folder is not on this machine, the result comes from the store and has no history.


    Raises:
        ConfigError: if there is no such sweep, or no finished job has the metric.
    """
    return to_job_result(find_best_job(str(parent), Tracking(uri=uri)))


def to_job_result(best: BestJob) -> JobResult:
    return JobResult(best.number, tuple(best.overrides), make_result(best.run, "FINISHED", best.metrics))


def read_sweep(folder: Path, status: Status) -> SweepResult:
    """Reads the result of the sweep in a folder."""
    run = Run(folder)
    jobs = tuple(read_job(folder, entry) for entry in Ledger.load(RunFolder(folder)).entries)
    best = next((job for job in jobs if str(job.number) == run.state.annotations.tags.get(BEST)), None)
    return SweepResult(status, run.run_id, folder, jobs=jobs, best=best)


def read_job(folder: Path, entry: LedgerEntry) -> JobResult:
    """Reads the result of a job of the sweep in a folder."""
    result = read_result(folder / entry.folder, of_model=True)
    return JobResult(entry.number, tuple(entry.overrides), replace(result, error=result.error or entry.reason or None))
