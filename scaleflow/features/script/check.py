"""Checks in the launcher that a script can run with the words of the command. It does not run the script."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError, find_similar
from scaleflow.features.script.feature import ScriptOptions
from scaleflow.features.script.source import Program, parse_script
from scaleflow.interfaces.config import Plan

#: The arguments of `model.fit` that a command can set.
FIT_ARGUMENTS = (
    *("batch_size", "epochs", "initial_epoch", "shuffle", "steps_per_epoch", "validation_batch_size"),
    *("validation_freq", "validation_split", "validation_steps"),
)


def check_script(plan: Plan) -> None:
    """Raises ConfigError if the script cannot be read, or if a word names nothing that it has."""
    if plan.resume is not None:
        raise ConfigError(
            f"resume={plan.resume}: a run of a script cannot be resumed yet; `scaleflow rerun` runs it again from the "
            "beginning"
        )
    options = plan.of(ScriptOptions)
    assert options.path is not None
    program = parse_script(Path(options.path))
    change_constants(program, read_constants(plan))
    for name in options.fit:
        check_fit_argument(name)


def read_constants(plan: Plan) -> Mapping[str, Any]:
    """Returns the values of constants that the command sets, by name."""
    section: Mapping[str, Any] = plan.config["script"]
    constants: Mapping[str, Any] = section.get("constants") or {}
    return constants


def read_fit_arguments(plan: Plan) -> Mapping[str, Any]:
    """Returns the arguments of `fit` that the command sets, by name."""
    section: Mapping[str, Any] = plan.config["script"]
    arguments: Mapping[str, Any] = section.get("fit") or {}
    return arguments


def change_constants(program: Program, values: Mapping[str, Any]) -> None:
    """Replaces constants of a script. Raises ConfigError if it has no such constant, or one of another type."""
    for name, value in values.items():
        program.replace_constant(name, value)


def check_fit_argument(name: str) -> None:
    if name in FIT_ARGUMENTS:
        return
    similar = find_similar(name, FIT_ARGUMENTS)
    hint = f"; did you mean fit.{similar}?" if similar else ""
    raise ConfigError(f"fit.{name}: a command cannot set this argument of model.fit{hint} ({', '.join(FIT_ARGUMENTS)})")
