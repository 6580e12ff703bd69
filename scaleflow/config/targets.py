"""From a `_target_` in a config to the callable it names, its arguments checked before it is called."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Target


def bind_target(target: Target, given: int = 0) -> Callable[..., Any]:
    """The callable that `target` names with its arguments bound, still to be called.

    Args:
        target: what the config says.
        given: how many positional arguments the caller will add.

    Raises:
        ConfigError: if there is no such thing, it can't be called, or does not take the arguments.
    """
    named = locate_target(target)
    if not callable(named):
        raise ConfigError(
            f"{target.key}._target_={target.path}: is a {type(named).__name__}, expected a class or a function"
        )
    arguments = {name: build_nested(target, name, value) for name, value in target.arguments.items()}
    check_arguments(target, named, given, arguments)
    return functools.partial(named, **to_floats(named, arguments))


def to_floats(named: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments; a whole number is a float if the parameter's default is one (Keras refuses `momentum=0`)."""
    with contextlib.suppress(ValueError):  # a builtin without a signature
        parameters = inspect.signature(named).parameters
        wanted = {name for name, parameter in parameters.items() if isinstance(parameter.default, float)}
        return {
            name: float(value) if name in wanted and type(value) is int else value for name, value in arguments.items()
        }
    return arguments


def is_class_target(target: Target) -> bool:
    """Whether it is a class that `target` names, rather than a function."""
    return inspect.isclass(locate_target(target))


def locate_target(target: Target) -> Any:
    try:
        return get_object(target.path)
    except Exception as error:  # a user's module may raise anything while it is imported
        cause = error.__cause__ or error
        reason = explain_missing(cause, target.path)
        raise ConfigError(
            f"{target.key}._target_={target.path}: cannot be loaded ({reason}); expected the dotted name of a class "
            "or function in an installed module, the current folder or the --config-dir folder"
        ) from error


def explain_missing(error: BaseException, path: str) -> str:
    """An error in a line: without its class if it says no more than that something on the path is not there."""
    missing = getattr(error, "name", None)
    is_known = isinstance(error, ModuleNotFoundError | AttributeError) and missing is not None
    return str(error) if is_known and f".{missing}." in f".{path}." else first_line(error)


def build_nested(target: Target, name: str, value: Any) -> Any:
    """An argument, built where it is itself a mapping with a `_target_`."""
    if not isinstance(value, dict | list):
        return value
    try:
        return instantiate(value, _convert_="all")
    except InstantiationException as error:
        raise ConfigError(f"{target.key}.{name}: {first_line(error)} {first_line(error.__cause__ or error)}") from error


def check_arguments(target: Target, named: Callable[..., Any], given: int, arguments: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(named)
    except ValueError:  # a builtin without one: it will say so itself
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in arguments:
        parameter = signature.parameters.get(name)
        if (parameter is None and not takes_any) or (
            parameter is not None and parameter.kind is parameter.POSITIONAL_ONLY
        ):
            takes = ", ".join(list(signature.parameters)[given:]) or "no arguments"
            raise ConfigError(
                f"{target.key}.{name}={arguments[name]}: {target.path} does not take it; it takes {takes}"
            )
    ours = list(signature.parameters)[:given]
    for name in arguments:
        if name in ours:
            raise ConfigError(
                f"{target.key}.{name}={arguments[name]}: scaleflow gives {target.path} its {name}; leave it away"
            )
    try:
        signature.bind(*[None] * given, **arguments)
    except TypeError as error:
        positional = f" beside the {given} that scaleflow gives it" if given else ""
        raise ConfigError(
            f"{target.key}._target_={target.path}: {error}{positional}; set it under {target.key}"
        ) from None


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
