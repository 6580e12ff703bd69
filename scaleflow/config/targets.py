"""Loads the callable that a `_target_` names, and checks its arguments before it is called."""

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from scaleflow.errors import ConfigError, find_similar, read_reason
from scaleflow.interfaces import Plan, Target
from scaleflow.interfaces.config import METRIC_WEIGHTS


def bind_target(target: Target, positional: int = 0, offered: Collection[str] = ()) -> Callable[..., Any]:
    """Loads the callable that a target names, and binds its arguments. It does not call it.

    Args:
        positional: the number of positional arguments that the caller will add.
        offered: names of arguments that the caller will add if the callable has them.

    Raises ConfigError if the callable cannot be loaded, is not callable, or does not accept the arguments.
    """
    loaded = locate_target(target)
    if not callable(loaded):
        raise ConfigError(
            f"{target.key}._target_={target.path}: this is a {type(loaded).__name__}, expected a class or a function"
        )
    arguments = {name: build_nested(target, name, value) for name, value in target.arguments.items()}
    check_arguments(target, loaded, positional, arguments=arguments, offered=offered)
    return functools.partial(loaded, **to_floats(loaded, arguments))


def check_target(target: Target, positional: int = 0, offered: Collection[str] = ()) -> None:
    """Checks that a target can be loaded and accepts its arguments, without creating it or its nested arguments.

    The parameters and errors are those that `bind_target` has.
    """
    loaded = locate_target(target)
    if callable(loaded):
        check_arguments(target, loaded, positional, arguments=dict(target.arguments), offered=offered)


def check_plan_targets(plan: Plan) -> None:
    """Checks the arguments of all targets in a plan, except the dataset.

    Arguments that depend on the data are checked later. Raises ConfigError if a target cannot be loaded or lacks an
    argument.
    """
    for callback in plan.training.callbacks or ():
        check_target(callback)
    step = plan.training.step
    if step is not None:
        check_target(step, positional=0 if is_class_target(step) else 3)
    if isinstance(plan.optimizer.schedule, Target):
        check_target(plan.optimizer.schedule)
    check_target(plan.model.target, positional=2)
    check_target(plan.optimizer.target, offered=("learning_rate",))
    for target in (*list_named(plan.objective.loss), *list_named(plan.objective.metrics)):
        # The number of classes comes from the outputs of the dataset.
        check_target(target, positional=0 if is_class_target(target) else 2, offered=("num_classes",))
    bind_metrics(plan.evaluation.metrics or ())


def list_named(value: Any) -> list[Target]:
    """Returns the targets in a value of `objective`, which may be a list or have one value per output."""
    if isinstance(value, Target):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    targets: list[Target] = []
    if isinstance(value, list | tuple):
        for item in value:
            targets += list_named(item)
    return targets


def bind_metrics(metrics: Sequence[Target | str]) -> dict[str, Callable[..., Any]]:
    """Loads the functions of `evaluation.metrics`, by name. Raises ConfigError if one cannot be used."""
    bound: dict[str, Callable[..., Any]] = {}
    for index, metric in enumerate(metrics):
        key = f"evaluation.metrics[{index}]"
        target = Target(key, metric) if isinstance(metric, str) else replace(metric, key=key)
        name = target.path.rpartition(".")[2]
        if name in bound:
            raise ConfigError(f"{key}: there are two metrics {name}; leave one out")
        if is_class_target(target):
            raise ConfigError(f"{key}._target_={target.path}: is a class; a function (targets, predictions) is needed")
        bound[name] = bind_target(target, 2, METRIC_WEIGHTS)
    return bound


def to_floats(named: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Converts integers to floats for parameters whose default is a float, because Keras rejects `momentum=0`."""
    try:
        parameters = inspect.signature(named).parameters
    except ValueError:  # a builtin without a signature
        return arguments
    converted = dict(arguments)
    for name, value in arguments.items():
        has_float_default = name in parameters and isinstance(parameters[name].default, float)
        if has_float_default and type(value) is int:
            converted[name] = float(value)
    return converted


def is_class_target(target: Target) -> bool:
    return inspect.isclass(locate_target(target))


def locate_target(target: Target) -> Any:
    """Imports the object that a target names.

    Raises ConfigError if there is no such module or attribute, or if importing fails.
    """
    try:
        with silence_hydra():
            return get_object(target.path)
    except Exception as error:  # importing a user's module may raise anything
        cause = error.__cause__ or error
        reason = explain_missing(cause, target.path)
        raise ConfigError(
            f"{target.key}._target_={target.path}: cannot be loaded ({reason}); expected the dotted name of a class "
            "or function in an installed module, the current folder or the --config-dir folder"
        ) from error


@contextlib.contextmanager
def silence_hydra() -> Iterator[None]:
    """Keeps Hydra from logging an error that is raised and reported anyway."""
    logger = logging.getLogger("hydra.utils")
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def explain_missing(error: BaseException, path: str) -> str:
    """Formats an error in one line. Leaves out its class if it only says that a part of the path does not exist."""
    missing = getattr(error, "name", None)
    is_missing = isinstance(error, ModuleNotFoundError | AttributeError) and missing is not None
    if is_missing and f".{missing}." in f".{path}.":
        return f"{error}{suggest_target(path)}"
    return name_error(error)


def suggest_target(path: str) -> str:
    """Returns `; did you mean keras.metrics.F1Score?` with the most similar name of the path's module, or ""."""
    module = path.rpartition(".")[0]
    while module and module not in sys.modules:
        module = module.rpartition(".")[0]
    if not module:
        return ""
    name = path.removeprefix(f"{module}.").partition(".")[0]
    public = [known for known in dir(sys.modules[module]) if not known.startswith("_")]
    if name in public:
        return ""
    similar = find_similar(name, public)
    return f"; did you mean {module}.{similar}?" if similar else ""


def build_nested(target: Target, name: str, value: Any) -> Any:
    """Instantiates the mappings with a `_target_` in an argument."""
    if not isinstance(value, dict | list):
        return value
    try:
        return instantiate(value, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        # For instance a wrong argument: the message is clear without its class.
        is_clear = isinstance(cause, TypeError | ValueError | ImportError)
        reason = read_reason(cause) if is_clear else name_error(cause)
        raise ConfigError(
            f"{target.key}.{name}: cannot be built ({reason}); check its _target_ and the other keys"
        ) from error


def check_arguments(
    target: Target, named: Callable[..., Any], positional: int, arguments: dict[str, Any], offered: Collection[str] = ()
) -> None:
    """Checks that a callable accepts the arguments of its target. The parameters are those of `bind_target`.

    Raises ConfigError, which names the argument that is wrong or missing.
    """
    try:
        signature = inspect.signature(named)
    except ValueError:  # a builtin without a signature raises its own error when it is called
        return
    names = list(signature.parameters)
    for name, value in arguments.items():
        if not accepts_keyword(signature, name):
            accepted = ", ".join(names[positional:]) or "no arguments"
            raise ConfigError(f"{target.key}.{name}={value}: {target.path} has no such argument; it accepts {accepted}")
    for name, value in arguments.items():
        if name in names[:positional]:
            raise ConfigError(
                f"{target.key}.{name}={value}: scaleflow itself passes {name} to {target.path}; remove this key"
            )
    added = {name: None for name in offered if name in signature.parameters}
    try:
        signature.bind(*[None] * positional, **{**added, **arguments})
    except TypeError as error:
        addition = f" in addition to the {positional} that scaleflow passes" if positional else ""
        why = f"{error}{addition}; set it under {target.key}"
        if str(error).startswith("too many"):
            why = f"scaleflow passes {positional} positional arguments, and it takes fewer"
        raise ConfigError(f"{target.key}._target_={target.path}: {why}") from None


def accepts_keyword(signature: inspect.Signature, name: str) -> bool:
    """Whether a callable accepts an argument with a name."""
    parameter = signature.parameters.get(name)
    if parameter is None:
        return any(other.kind is other.VAR_KEYWORD for other in signature.parameters.values())
    return parameter.kind is not parameter.POSITIONAL_ONLY


def name_error(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {read_reason(error)}" if str(error).strip() else name
