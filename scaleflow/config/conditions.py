"""Reads the conditions of rules, such as `training.engine=fit & training.accumulate>1`.

A condition is one term, or several joined by ` & `. It holds if all of its terms hold:

| term | holds if the value of KEY |
|---|---|
| `KEY` | is something: not null, false, 0 or empty |
| `!KEY` | is null, false, 0 or empty |
| `KEY=VALUE`, `KEY!=VALUE` | is VALUE; is not VALUE |
| `KEY>NUMBER`, `KEY>=NUMBER`, `KEY<NUMBER`, `KEY<=NUMBER` | is a number above NUMBER, and so on |
| `KEY in VALUE|VALUE`, `KEY not in VALUE|VALUE` | is one of the values; is not one of them |

KEY is a dotted key of the config. A config group alone means its option (`strategy=mirrored`). If a section is null,
its keys are null. VALUE is null, true, false, `[]` (an empty list), a number, or else text. The value `auto` is
ordinary text. It means that the value is not known yet, so `strategy!=tpu` holds for it.

A rule that needs more has a function, `only_if`. `tests/config/test_conditions.py` checks that each key of a rule
exists and that it can have the values that the rule names.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scaleflow.interfaces import Plan, Rule
from scaleflow.interfaces.features import list_sections

Comparison = Callable[[Any, Any], bool]

#: Values that are neither numbers nor text.
CONSTANTS: dict[str, Any] = {"null": None, "true": True, "false": False, "[]": []}


class Term(NamedTuple):
    """A term of a condition. It holds if `compare(value of the key, expected)` is true."""

    key: str
    compare: Comparison
    expected: Any


def is_something(value: Any, expected: bool) -> bool:
    return bool(value) == expected


def compare_numbers(compare: Comparison) -> Comparison:
    """Returns a comparison that is false if the value is not a number."""
    return lambda value, number: isinstance(value, int | float) and compare(value, number)


#: The comparison of each operator. Longer operators come before operators that they contain.
OPERATORS: dict[str, Comparison] = {
    " not in ": lambda value, values: value not in values,
    " in ": lambda value, values: value in values,
    "!=": operator.ne,
    ">=": compare_numbers(operator.ge),
    "<=": compare_numbers(operator.le),
    "=": operator.eq,
    ">": compare_numbers(operator.gt),
    "<": compare_numbers(operator.lt),
}


@functools.cache
def parse_condition(text: str) -> Sequence[Term]:
    """Returns the terms of a condition. Raises ValueError if the text is not a condition."""
    return [parse_term(part) for part in text.split(" & ")]


@functools.cache  # many conditions share terms
def parse_term(text: str) -> Term:
    for symbol, compare in OPERATORS.items():
        key, is_comparison, operand = text.partition(symbol)
        if is_comparison:
            return Term(check_key(key, text), compare, parse_operand(symbol, operand, text))
    key = text.removeprefix("!")
    return Term(check_key(key, text), is_something, key == text)


def check_key(key: str, term: str) -> str:
    if not all(part.isidentifier() for part in key.split(".")):
        raise ValueError(f"{term!r}: expected a dotted key, and not {key!r}")
    return key


def parse_operand(symbol: str, text: str, term: str) -> Any:
    """Returns the right side of a comparison: a value, or a list of values for `in`."""
    texts = text.split("|")
    values = [parse_constant(operand, term) for operand in texts]
    if symbol.endswith(" in "):
        return values
    if len(values) > 1:
        raise ValueError(f"{term!r}: only `in` and `not in` take several values")
    if symbol in (">", ">=", "<", "<=") and not isinstance(values[0], int | float):
        raise ValueError(f"{term!r}: expected a number, and not {text!r}")
    return values[0]


def parse_constant(text: str, term: str) -> Any:
    if text in CONSTANTS:
        return CONSTANTS[text]
    digits = text.removeprefix("-").replace(".", "", 1)
    if digits.isdecimal():
        return float(text) if "." in text else int(text)
    if not text or any(character in " =!<>&" for character in text):
        raise ValueError(f"{term!r}: expected a value, and not {text!r}")
    return text


def holds(condition: str, plan: Plan) -> bool:
    return all(term.compare(find_value(plan, term.key), term.expected) for term in parse_condition(condition))


def is_applicable(rule: Rule, plan: Plan) -> bool:
    """Whether a rule's condition holds for a plan."""
    try:
        is_combined = holds(rule.when, plan)
    except AttributeError:  # the rule names a key of a feature that is not installed
        return False
    return is_combined and (rule.only_if is None or rule.only_if(plan))


def find_keys(rule: Rule) -> Sequence[str]:
    """Returns the keys that a rule's message shows."""
    return rule.keys or tuple(dict.fromkeys(term.key for term in parse_condition(rule.when)))


def find_section(plan: Plan, group: str, names: Sequence[str]) -> Any:
    """Returns the section with the first of some keys: the core's section of the group, or a feature's.

    Without keys it prefers the core's section. Raises AttributeError if there is no such section.
    """
    if not names and hasattr(plan, group):
        return getattr(plan, group)
    for section in list_sections().get(group, ()):
        options: Any = plan.of(section)
        if not names or names[0] in vars(options):
            return options
    return getattr(plan, group)


def find_value(plan: Plan, key: str) -> Any:
    """Returns the value of a dotted key in a plan. The value of a config group is its option."""
    group, *names = key.split(".")
    value = find_section(plan, group, names)
    for name in names:
        if value is None:
            return None
        if name == "_target_":  # the section names a class, or is itself a target
            value = getattr(value, "target", value).path
        elif group == "cluster" and not hasattr(value, name):  # only another cluster engine has the key
            value = plan.config["cluster"].get(name)
        else:
            value = getattr(value, name)
    return getattr(value, "name", value)
