"""Checks the options of datasets and models against the annotations of their parameters.

An annotation without checks, such as `str`, accepts any value.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from scaleflow.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Check(NamedTuple):
    """A test of a value, and a description of valid values for a message."""

    is_valid: Callable[[Any], bool]
    expected: str


def check_options(group: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator that checks the arguments of each call, which are options of a config group."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)

        @functools.wraps(function)
        def check_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                check_option(value, hints.get(name), f"{group}.{name}")
            return function(*args, **kwargs)

        return check_and_call

    return decorate


def to_list(value: Any) -> list[Any]:
    """Returns an option as a list. It may be one name or number, or several."""
    return [value] if isinstance(value, str | int) else list(value)


def check_option(value: Any, hint: Any, key: str) -> None:
    """Raises ConfigError, which names the key, if a value does not fit an annotation."""
    if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
        if value is None:
            return
        hint = get_args(hint)[0]
    for is_valid, expected in find_checks(hint):
        if not is_valid(value):
            is_one = "a list such as" in expected and isinstance(value, str) and is_valid([value])
            hint = f"; type '{key}=[{value}]'" if is_one else ""
            raise ConfigError(f"{key}={value}: expected {expected}{hint}")


def find_checks(hint: Any) -> Sequence[Check]:
    if get_origin(hint) is Literal:
        return [Check(lambda value: value in get_args(hint), f"one of {', '.join(map(str, get_args(hint)))}")]
    if hint is bool:
        return [Check(lambda value: isinstance(value, bool), "true or false")]
    return [check for check in get_args(hint) if isinstance(check, Check)]  # from `Annotated`


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    return is_integer(value) or isinstance(value, float)


def is_list_of(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(of, value))


def is_size(value: Any) -> bool:
    return is_integer(value) and value > 0


def is_count(value: Any) -> bool:
    return is_integer(value) and value >= 0


def is_fraction(value: Any) -> bool:
    return is_real(value) and 0 <= value < 1


def at_least(least: int) -> Check:
    return Check(lambda value: is_integer(value) and value >= least, f"an integer, at least {least}")


IN_RANGE = "a number from 0 to less than 1"

Positive = Annotated[int, at_least(1)]
AtLeastTwo = Annotated[int, at_least(2)]
Seed = Annotated[int, at_least(0)]
Fraction = Annotated[float, Check(is_fraction, IN_RANGE)]
NotNegative = Annotated[
    float, Check(lambda value: is_real(value) and 0 <= value < float("inf"), "a number, at least 0")
]
Widths = Annotated[
    int | Sequence[int],
    Check(lambda value: is_size(value) or is_list_of(value, is_size), "an integer, at least 1, or a list of them"),
]
SizeByName = Annotated[
    Mapping[str, int],
    Check(lambda value: isinstance(value, Mapping) and all(map(is_count, value.values())), "sizes, such as {town: 8}"),
]
TestFraction = Annotated[
    float,
    Check(lambda value: value != 1, f"{IN_RANGE}; scaleflow evaluate --split all evaluates every example"),
    Check(is_fraction, IN_RANGE),
]
Words = Annotated[
    Sequence[str], Check(lambda value: is_list_of(value, lambda word: isinstance(word, str)), "a list such as [a, b]")
]
Shape = Annotated[
    Sequence[int], Check(lambda value: is_list_of(value, is_size), "a list of sizes; [] for a single value")
]
ArrayShape = Annotated[
    Sequence[int],
    Check(lambda value: is_list_of(value, is_size) and len(value) > 0, "a list of sizes, such as [32, 32, 3]"),
]
