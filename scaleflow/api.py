"""Runs from Python: from a script, a notebook, a thread, or another Hydra app.

    from scaleflow import compose, run

    config = compose("model=cnn", "training.epochs=3")    # what the command line would make of these words
    result = run("model=cnn", "training.epochs=3")        # or run(config)
    print(result.run_id, result.metrics["test/accuracy"])

The worker is a process of its own, as on the command line: a script needs no `if __name__ == "__main__"`, and this
process imports no TensorFlow. In the main thread Ctrl-C stops the run, which is recorded as KILLED, and then raises
KeyboardInterrupt; in another thread signals are left alone.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from scaleflow.config.compose import ComposedConfig, compose_config, read_app_choices, to_plain, user_module_folders
from scaleflow.config.folders import create_folder
from scaleflow.config.hydra_config import check_folder_writable
from scaleflow.config.hydra_errors import shorten_error
from scaleflow.config.plan import make_plan
from scaleflow.errors import ConfigError, RunError
from scaleflow.events import EVENTS, Event, EventReader
from scaleflow.interfaces import Plan, Status
from scaleflow.launcher.recorder import STATE, read_recorder_state
from scaleflow.launcher.resume import find_resumed_run
from scaleflow.launcher.supervisor import launch_run
from scaleflow.sync import repair_quietly
from scaleflow.tracking import locate_weights

#: The exit codes of a command that was interrupted.
INTERRUPTED, TERMINATED = 130, 143

Folders = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Result:
    """What became of a run.

    Attributes:
        status: as MLflow has it. A run that was to end early, by `checkpoint.max_seconds`, is KILLED.
        run_id: in MLflow; None where it is not tracked, or the store has been away all the time.
        folder: the run's, with its events, logs, checkpoints and model.
        metrics: the last value of each metric.
        error: why it did not finish.
    """

    status: Status
    run_id: str | None
    folder: Path
    metrics: Mapping[str, float]
    error: str | None = None


class RunFailed(RunError):
    """A run that had begun and failed.

    Attributes:
        result: what there is of it.
    """

    def __init__(self, result: Result) -> None:
        super().__init__(f"{result.error or 'the run failed'}; its folder is {result.folder}")
        self.result = result


def compose(*overrides: str, config_dir: Folders = ()) -> DictConfig:
    """The config of a command line, interpolations kept.

    Args:
        overrides: as on the command line: "model=cnn", "training.epochs=3".
        config_dir: a folder, or several, with options of your own, as `--config-dir`.

    Raises:
        ConfigError: naming the word that is wrong, and what would work.
    """
    return compose_config(overrides, to_folders(config_dir)).config


def run(
    *what: str | Mapping[str, Any] | DictConfig, config_dir: Folders = (), folder: str | Path | None = None
) -> Result:
    """Trains, as `python -m scaleflow` does, and comes back when the run is over.

    Args:
        what: overrides, as on the command line; or one config: what `compose` gave, or what another Hydra app made of
            scaleflow's config groups.
        config_dir: a folder, or several, with options of your own, as `--config-dir`.
        folder: the run's; as `hydra.run.dir`.

    Returns:
        What became of it. A run that was stopped by `checkpoint.max_seconds` is one with the status KILLED.

    Raises:
        ConfigError: if it cannot work; there is no run then.
        RunFailed: if it had begun and failed; its `result` says more.
        KeyboardInterrupt, SystemExit: after Ctrl-C, SIGTERM, once the run is recorded.
    """
    if len(what) == 1 and not isinstance(what[0], str):
        made, overrides = normalize_config(what[0], to_folders(config_dir)), []
    else:
        overrides = [to_override(word) for word in what]
        made = compose_config(overrides, to_folders(config_dir))
    if folder is not None:
        made = replace(made, folder=Path(folder))
    return run_config(made, overrides)


def run_config(made: ComposedConfig, overrides: Sequence[str]) -> Result:
    """Runs a composed config, or goes on with the run that it names."""
    refusals: list[str] = []
    code, folder = launch_config(made, overrides, refused=refusals.append)
    if refusals:
        raise ConfigError(refusals[0])
    return result_or_raise(read_result(folder), code)


def launch_config(
    made: ComposedConfig,
    overrides: Sequence[str],
    tags: Mapping[str, str] | None = None,
    refused: Callable[[str], None] | None = None,
) -> tuple[int, Path]:
    """Checks a composed config and launches it.

    Args:
        made: the config.
        overrides: as typed, for `overrides.yaml`.
        tags: of the run, beside those that every run has.
        refused: told why there is no run, once its processes have begun.

    Returns:
        The exit code of a command, and the run's folder.
    """
    started = time.time()
    with contextlib.ExitStack() as until_it_ended:
        try:
            config = to_plain(made.config)
        except OmegaConfBaseException as error:
            raise ConfigError(shorten_error(error)) from error
        life, folder, told = 0, made.folder, OmegaConf.to_container(made.config, resolve=False)
        if config.get("resume") is not None:
            went = find_resumed_run(str(config["resume"]), config, made.choices, overrides)
            if went.is_through:
                repair_quietly(went.folder)
                return 0, went.folder
            plan, overrides = went.plan(made.search), went.changes
            life, folder, told = went.number, went.folder, went.config
        else:
            plan = make_plan(config, made.choices, made.search)
            check_main(plan)
        plan = until_it_ended.enter_context(locate_weights(plan))
        folder = make_writable(folder)
        return launch_run(plan, told, overrides, folder, started, attempt=life, tags=tags, refused=refused), folder


def normalize_config(config: Any, dirs: Sequence[str | Path]) -> ComposedConfig:
    """A config that was composed elsewhere."""
    if not isinstance(config, Mapping | DictConfig):
        raise ConfigError(f"run({type(config).__name__}): expected overrides, KEY=VALUE, or one config")
    made = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    try:
        own = OmegaConf.create(to_plain(made))  # a part of another app's config leads elsewhere with its interpolations
    except OmegaConfBaseException as error:
        raise ConfigError(shorten_error(error)) from error
    with open_dict(own):
        own.pop("hydra", None)
    own_dirs = [str(Path(each).absolute()) for each in dirs]
    return ComposedConfig(
        own, {**infer_choices(own), **read_app_choices()}, [*user_module_folders(), *own_dirs], default_folder()
    )


def infer_choices(config: DictConfig) -> dict[str, str]:
    """What the options were, as far as a config says it: by its `name`, or by what its `_target_` is in."""
    found: dict[str, str] = {}
    for group, section in config.items():
        if not isinstance(section, DictConfig):
            continue
        path = str(section.get("_target_") or "").split(".")
        if isinstance(section.get("name"), str) and "_target_" not in section:
            found[str(group)] = section.name
        elif len(path) > 1:
            found[str(group)] = path[-2] if path[0] == "scaleflow" else path[-1].lower()
    return found


def check_main(plan: Plan) -> None:
    """Refuses what the worker, a process of its own, can't import: what is defined in this very script."""
    targets = [plan.dataset.target, plan.model.target, plan.optimizer.target, plan.training.step]
    for target in (*targets, *(plan.training.callbacks or ())):
        if target is not None and target.path.startswith("__main__.") and not plan.debug.inline:
            raise ConfigError(
                f"{target.key}._target_={target.path}: the worker is a process of its own, which cannot import a "
                "script or a notebook; put it into a module beside it, or use debug=inline"
            )


def make_writable(folder: Path) -> Path:
    """A run's folder, made if it is not there."""
    try:
        create_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir={folder}: cannot be made ({error.strerror}); choose another folder"
        ) from error
    return check_folder_writable(folder)


def default_folder() -> Path:
    return Path("outputs", f"{datetime.now():%Y-%m-%d}", f"{datetime.now():%H-%M-%S-%f}")


def read_result(folder: Path) -> Result:
    """What a run's folder tells of it."""
    events = list(EventReader(folder / EVENTS).read())
    last: Event = next((event for event in reversed(events) if event["event"] == "end"), {"status": "FAILED"})
    metrics: dict[str, float] = {}
    for event in events:
        if event["event"] == "metrics":
            metrics.update(event["values"])
    run_id = read_recorder_state(folder / STATE).get("run_id")
    return Result(last["status"], run_id, folder.absolute(), metrics, last.get("error"))


def result_or_raise(result: Result, code: int) -> Result:
    """Raises what the end of a run is to its caller."""
    if result.status == "FAILED":
        raise RunFailed(result)
    is_by_signal = result.status == "KILLED" and not str(result.error).startswith("checkpoint.max_seconds")
    if is_by_signal and code == INTERRUPTED:
        raise KeyboardInterrupt(result.error)
    if is_by_signal and code == TERMINATED:
        raise SystemExit(code)
    return result


def to_folders(config_dir: Folders) -> list[str | Path]:
    return [config_dir] if isinstance(config_dir, str | Path) else list(copy.copy(config_dir))


def to_override(word: Any) -> str:
    if not isinstance(word, str):
        raise ConfigError(f"run(..., {type(word).__name__}): expected overrides, KEY=VALUE, or one config alone")
    return word
