"""Checks in the launcher that a script can run with the words of the command. It does not run the script."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError, find_similar
from scaleflow.features.script.feature import ScriptOptions
from scaleflow.features.script.source import Program, parse_script
from scaleflow.interfaces.config import Plan


@dataclass(frozen=True)
class FitArgument:
    """The values that an argument of `model.fit` can have in a command.

    Attributes:
        is_valid: returns whether a value, as Hydra reads it, is one of them.
        expected: describes them.
        example: one of them, as typed.
    """

    is_valid: Callable[[Any], bool]
    expected: str
    example: str


def is_count(value: Any, at_least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_count_or_null(value: Any) -> bool:
    return value is None or is_count(value)


def is_index(value: Any) -> bool:
    return is_count(value, at_least=0)


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def is_frequency(value: Any) -> bool:
    """Returns whether a value is a number of epochs, or a list of epochs."""
    if isinstance(value, list):
        return bool(value) and all(is_count(epoch) for epoch in value)
    return is_count(value)


COUNT = "a whole number of at least 1"
COUNT_OR_NULL = f"{COUNT}, or null"

#: The arguments of `model.fit` that a command can set.
FIT_ARGUMENTS: Mapping[str, FitArgument] = {
    "batch_size": FitArgument(is_count_or_null, COUNT_OR_NULL, "32"),
    "epochs": FitArgument(is_count, COUNT, "10"),
    "initial_epoch": FitArgument(is_index, "a whole number of at least 0", "0"),
    "shuffle": FitArgument(is_bool, "true or false", "false"),
    "steps_per_epoch": FitArgument(is_count_or_null, COUNT_OR_NULL, "100"),
    "validation_batch_size": FitArgument(is_count_or_null, COUNT_OR_NULL, "32"),
    "validation_freq": FitArgument(is_frequency, f"{COUNT}, or a list of epochs", "2"),
    "validation_split": FitArgument(is_fraction, "a number of at least 0 and below 1", "0.2"),
    "validation_steps": FitArgument(is_count_or_null, COUNT_OR_NULL, "10"),
}


def check_script(plan: Plan) -> None:
    """Raises ConfigError if the script cannot be read, or if a word names nothing that it has."""
    options = plan.of(ScriptOptions)
    assert options.path is not None
    if plan.resume is not None and not Path(options.path).is_file():
        raise ConfigError(
            f"resume={plan.resume}: its script {options.path} is not here; resume it in the folder where the run began"
        )
    program = parse_script(Path(options.path))
    change_constants(program, read_constants(plan))
    check_fit_arguments(read_fit_arguments(plan))


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


def check_fit_arguments(values: Mapping[str, Any]) -> None:
    """Raises ConfigError if `model.fit` has no such argument, or if an argument cannot have its value."""
    for name, value in values.items():
        argument = FIT_ARGUMENTS.get(name)
        if argument is None:
            similar = find_similar(name, list(FIT_ARGUMENTS))
            hint = f"; did you mean fit.{similar}?" if similar else ""
            raise ConfigError(
                f"fit.{name}: a command cannot set this argument of model.fit{hint} ({', '.join(FIT_ARGUMENTS)})"
            )
        if not argument.is_valid(value):
            raise ConfigError(
                f"fit.{name}={write_typed(value)}: expected {argument.expected}, such as fit.{name}={argument.example}"
            )
    first = values.get("initial_epoch", 0)
    if "epochs" in values and values["epochs"] <= first:
        raise ConfigError(
            f"fit.epochs={values['epochs']} fit.initial_epoch={first}: fit would train no epoch; epochs is the number "
            f"of the last one, so use fit.epochs={first + 1} or more"
        )


def write_typed(value: Any) -> str:
    """Returns a value as typed in a command."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)
