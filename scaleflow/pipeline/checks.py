"""Checks every stage of a pipeline before any of them runs, with stand-ins for values that do not exist yet."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.config.compose import list_own_folders
from scaleflow.config.parse import suggest
from scaleflow.dataset.launch_check import check_source_files
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Target, Tracking
from scaleflow.launcher.named_runs import locate_run
from scaleflow.pipeline.composition import (
    UNKNOWN,
    Composer,
    expand_sweep,
    is_open,
    is_swept,
    read_tracking,
    refuse_own_keys,
)
from scaleflow.pipeline.definition import DeclaredPipeline, Stage, name_place
from scaleflow.runs.code_digest import find_folders, find_source
from scaleflow.tracking.uri import check_model_name

#: Values of outputs that have a known form.
STAND_INS = {"run_id": "0" * 32, "model": f"models:/m-{'0' * 32}", "promoted": True, "version": "1"}

#: Commands that may write the data of stages after them.
WRITERS = ("python", "predict")


def check_stages(pipeline: DeclaredPipeline, composer: Composer, folder: Path) -> Tracking:
    """Checks the configs, the functions and the options of all stages; returns the options of the store: those of the
    first training or sweep, else of the first check.

    Raises ConfigError, which says where the stage is written, for the first that cannot work.
    """
    tracked: dict[str, list[str]] = {}
    best: dict[str, list[str]] = {}

    def stand_in(name: str, path: Sequence[str]) -> Any:
        if path[0] == "best" and path[1:2] == ["overrides"]:
            return best.get(name, [])
        known = {**STAND_INS, "folder": str(folder / name / "1")}
        return UNKNOWN if path[0] == "result" else known.get(path[-1], UNKNOWN)

    for stage in pipeline.stages.values():
        values = pipeline.resolve(stage, stand_in)
        with name_place(stage.place):
            words = [f"{UNKNOWN}={UNKNOWN}" if word == UNKNOWN else word for word in values.get("overrides", [])]
            refuse_own_keys([word for word in words if UNKNOWN not in word])
            if stage.command.name == "sweep":
                first = next(expand_sweep(words))
                best[stage.name] = [new for new, word in zip(first, words, strict=True) if is_swept(word)]
            check_stage(pipeline, stage, values, words, composer)
            if stage.command.composes:
                tracked.setdefault("run" if stage.command.has_own_run else "check", words)
    chosen = tracked.get("run") or tracked.get("check")
    return Tracking() if chosen is None else read_tracking(chosen, pipeline.config_dirs)


def check_stage(
    pipeline: DeclaredPipeline, stage: Stage, values: Mapping[str, Any], words: Sequence[str], composer: Composer
) -> None:
    command = stage.command
    if command.composes:
        if is_open(words, composer.config_dirs):
            return
        made = composer.compose(stage, words)
        if made.source and UNKNOWN not in str(made.source) and not find_writers(pipeline, stage):
            check_source_files(Target("dataset", **made.source))
        return
    if command.name == "python":
        check_function(str(values["target"]), values.get("arguments") or {}, pipeline.config_dirs)
        return
    if UNKNOWN not in str(values["run"]):
        locate_run(str(values["run"]), Tracking())
    if command.name == "promote":
        check_model_name("model: ", str(values["model"]))


def find_writers(pipeline: DeclaredPipeline, stage: Stage) -> set[str]:
    """Returns the stages before one that may write its data."""
    before = {name for name in pipeline.stages if stage.name in pipeline.find_dependents(name)}
    return {name for name in before if pipeline.stages[name].command.name in WRITERS}


def check_function(target: str, arguments: Any, config_dirs: Sequence[str] = ()) -> None:
    """Checks that a function exists and takes the arguments, without importing it. Raises ConfigError if not."""
    if not isinstance(arguments, Mapping) and arguments != UNKNOWN:
        raise ConfigError(f"arguments: {arguments}: expected {{NAME: VALUE}}")
    module, _, name = target.rpartition(".")
    if not module:
        raise ConfigError(f"target: {target}: expected MODULE.FUNCTION")
    found = find_source(module, list_own_folders(config_dirs))
    if found is None:
        if not find_folders(module.partition(".")[0]):
            raise ConfigError(
                f"target: {target}: there is no module {module} in the current folder, in one of "
                "--config-dir, or installed"
            )
        return
    try:
        tree = ast.parse(found[0].read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"target: {target}: {found[0].name} cannot be read: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        if re.search(rf"\b{re.escape(name)}\b", found[0].read_text()):  # it is imported or assigned there
            return
        raise ConfigError(f"target: {target}: {found[0].name} has no function {name}{suggest(name, functions, '')}")
    if isinstance(arguments, Mapping):
        check_parameters(target, functions[name].args, arguments)


def check_parameters(target: str, taken: ast.arguments, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError if a function does not take the arguments, or needs others."""
    if taken.kwarg is None:
        names = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
        for each in arguments:
            if each not in names:
                raise ConfigError(
                    f"arguments: {each}: {target} has no such parameter{suggest(each, names, '')} ({', '.join(names)})"
                )
    optional = len(taken.defaults)
    needed = [each.arg for each in taken.args[: len(taken.args) - optional]]
    needed += [each.arg for each, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None]
    if missing := [each for each in needed if each not in arguments]:
        raise ConfigError(f"arguments: {', '.join(missing)}: missing; {target} needs {', '.join(needed)}")
