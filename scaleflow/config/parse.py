"""Parses the sections of a composed config into dataclasses, and checks names, types and ranges.

Each error names the key, the value and a fix.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from scaleflow.config.unknown_keys import dotted_key_error, unknown_key_error
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlyStopping, Plateau, Split, Target
from scaleflow.interfaces.features import list_placeholders, list_sections
from scaleflow.interfaces.secret_masking import mask_secrets

#: The patience of `training.early_stopping=auto`. Measured on 17 public tables with four seeds each: `model=tabular`
#: would have missed the best of 64 epochs twice, by at most 0.3 % of its loss, and saved a third of all epochs.
LONG_PATIENCE = 20

#: The limit of an integer without its own `at_most`.
MAX_INT = 2**31 - 1

T = TypeVar("T")


def parse_section(cls: type[T], section: object, key: str) -> T:
    """Parses a mapping into the dataclass `cls`. `key` is the mapping's dotted key, for messages.

    If `cls` has the field `target`, keys that `cls` lacks are arguments of the section's `_target_`.

    Raises ConfigError if the section is not a mapping, or if a name, type or range is wrong.
    """
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    has_target = fields.pop("target", None) is not None
    if not isinstance(section, Mapping):
        example = f"including {key}._target_" if has_target else f"such as {key}.{next(iter(fields))}=..."
        raise ConfigError(f"{key}={format_value(section)}: expected keys under {key}, {example}")
    is_of_feature = cls in list_sections().get(key, ())
    feature_keys = set() if is_of_feature else list_feature_keys(key)
    others = {}
    for name, value in section.items():
        if name not in fields and name not in feature_keys:
            others[name] = value
    check_names(others, key)
    if others and not has_target:
        known_keys = [f"{key}.{name}" for name in (*fields, *feature_keys)]
        raise unknown_key_error(f"{key}.{next(iter(others))}", known_keys)
    hints = list_key_types(typing.cast(Any, cls), key)
    values: dict[str, Any] = {}
    if has_target:
        values["target"] = parse_target(others, key)
    for name, value in section.items():
        if name in fields:
            values[name] = parse_value(value, hints[name], f"{key}.{name}", limits=fields[name].metadata)
    return cls(**values)


def check_names(section: Mapping[Any, Any], key: str) -> None:
    """Raises ConfigError if the name of a key is not text, or has a dot."""
    for name in section:
        if not isinstance(name, str):
            raise ConfigError(f"{key}.{name}: the name of a key is text; leave this one out")
        if "." in name:
            raise dotted_key_error(f"{key}.{name}", name)


def list_feature_keys(group: str) -> set[str]:
    """Returns the keys that features add to a config group."""
    keys: set[str] = set()
    for cls in list_sections().get(group, ()):
        keys.update(field.name for field in dataclasses.fields(cls))
    return keys


def parse_target(section: Mapping[str, Any], key: str) -> Target:
    """Parses a mapping with a `_target_`. The other keys are its arguments."""
    path = section.get("_target_")
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{key}._target_={format_value(path)}: expected the dotted name of a class or function")
    arguments = {name: value for name, value in section.items() if name not in ("_target_", "_partial_")}
    return Target(key, path.strip(), arguments)


@functools.cache
def type_hints(cls: Any) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields. Cached because the tests parse thousands of configs."""
    return typing.get_type_hints(cls)


@functools.cache
def list_key_types(cls: Any, section: str) -> Mapping[str, Any]:
    """Returns the types of the keys of a config section, including placeholder words that features add."""
    types_by_name = dict(type_hints(cls))
    for placeholder in list_placeholders():
        group, _, name = placeholder.key.partition(".")
        if group == section and name in types_by_name:
            types_by_name[name] = add_word(types_by_name[name], placeholder.word)
    return types_by_name


def add_word(hint: Any, word: str) -> Any:
    """Returns a type that also allows a word."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = [word]
    others = []
    for option in options:
        if get_origin(option) is Literal:
            words += get_args(option)
        else:
            others.append(option)
    return Union[(*others, Literal[tuple(sorted(words))])]


def parse_value(value: object, hint: Any, key: str, limits: Mapping[str, Any] = {}) -> Any:
    """Converts a value to the type `hint`, and checks the field's `limits`: `at_least`, `above`, `at_most`, `below`.

    Raises ConfigError if the type or the range is wrong.
    """
    converted = convert_value(value, hint, key)
    if converted is _INVALID or not is_within(converted, limits):
        raise ConfigError(f"{key}={format_value(value)}: expected {describe_type(hint, limits)}")
    if "at_most" not in limits and not is_within(converted, {"at_most": MAX_INT}) and not isinstance(converted, float):
        raise ConfigError(f"{key}={format_value(value)}: expected an integer, at most {MAX_INT}")
    return converted


_INVALID = object()


def convert_value(value: object, hint: Any, key: str) -> Any:
    """Converts a value to a type, or returns `_INVALID`. It does not parse text as a number: YAML has done that."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return convert_union(value, get_args(hint), key)
    if origin is Literal:
        return value if isinstance(value, str) and value in get_args(hint) else _INVALID
    if origin is list:
        return convert_list(value, get_args(hint)[0], key) if isinstance(value, list | tuple) else _INVALID
    if origin is dict:
        return convert_mapping(value, get_args(hint), key) if isinstance(value, Mapping) else _INVALID
    if hint is Target:
        return parse_target(value, key) if isinstance(value, Mapping) else _INVALID
    if dataclasses.is_dataclass(hint):
        value = expand_short(value, hint, key)
        return parse_section(typing.cast(type[Any], hint), value, key) if isinstance(value, Mapping) else _INVALID
    return convert_plain(value, hint)


def convert_union(value: object, options: Sequence[Any], key: str) -> Any:
    """Converts a value to the first of several types that it fits."""
    has_mapping = any(get_origin(option) is dict for option in options)
    is_plain_mapping = isinstance(value, Mapping) and "_target_" not in value
    for option in options:
        if option is Target and is_plain_mapping and has_mapping:
            continue
        converted = convert_value(value, option, key)
        if converted is not _INVALID:
            return converted
    return _INVALID


def convert_list(value: Sequence[object], hint: Any, key: str) -> Any:
    items = [convert_value(item, hint, key) for item in value]
    if any(item is _INVALID for item in items):
        return _INVALID
    return items


def expand_short(value: object, hint: Any, key: str) -> object:
    """Expands the short forms of a section to a mapping with its field names."""
    if hint is Split and isinstance(value, str):
        return {"by": value}
    if hint is EarlyStopping and value == "auto":
        return {"monitor": "auto", "patience": LONG_PATIENCE}
    if hint in (EarlyStopping, Plateau) and isinstance(value, Mapping) and "metric" in value:
        if "monitor" in value:
            raise ConfigError(f"{key}.metric={value['metric']} with {key}.monitor: both name the value; give one")
        return {("monitor" if name == "metric" else name): item for name, item in value.items()}
    return value


def convert_mapping(value: Mapping[Any, object], hints: tuple[Any, ...], key: str) -> Any:
    """Converts the names and values of a mapping. If values must be text, any value is accepted.

    Integer names may be text, because JSON names are always text.
    """
    name_hint, hint = hints
    items: dict[str, Any] = {}
    for name, item in value.items():
        items[str(name)] = str(item) if hint is str else convert_value(item, hint, f"{key}.{name}")
    if any(item is _INVALID for item in items.values()):
        return _INVALID
    if name_hint is not int:
        return items
    if not all(re.fullmatch(r"-?\d+", name) for name in items):
        return _INVALID
    return {int(name): item for name, item in items.items()}


def convert_plain(value: object, hint: Any) -> Any:
    """Converts a value to None, bool, a number, text, or a class without keys of its own."""
    if hint is type(None):
        return None if value is None else _INVALID
    if isinstance(value, bool) or hint is bool:
        return value if isinstance(value, bool) and hint is bool else _INVALID
    if hint is float:
        is_finite = isinstance(value, int | float) and abs(value) < float("inf")
        return float(typing.cast(float, value)) if is_finite else _INVALID
    return value if isinstance(value, hint) else _INVALID


def is_within(value: object, limits: Mapping[str, Any]) -> bool:
    """Whether all numbers of a value are within limits. Other values have no limits."""
    if isinstance(value, Mapping):
        return all(is_within(item, limits) for item in value.values())
    items = value if isinstance(value, list) else [value]
    numbers = [item for item in items if isinstance(item, int | float)]
    return all(is_number_within(number, limits) for number in numbers)


def is_number_within(number: float, limits: Mapping[str, Any]) -> bool:
    at_least = limits.get("at_least")
    if at_least is not None and not number >= at_least:  # `not`, since NaN is never within
        return False
    at_most = limits.get("at_most")
    if at_most is not None and not number <= at_most:
        return False
    above = limits.get("above")
    if above is not None and not number > above:
        return False
    below = limits.get("below")
    return below is None or number < below


TARGET_EXAMPLE = "{_target_: the dotted name of a class, and its arguments}"

#: Items of a list that a message shows, by their type.
LIST_EXAMPLES: dict[Any, str] = {
    int: "0, 1",
    float: "5, 1",
    Target: TARGET_EXAMPLE,
    Target | str: f"auc, {TARGET_EXAMPLE}",
}

#: The names of plain types in a message.
TYPE_NAMES: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def describe_type(hint: Any, limits: Mapping[str, Any]) -> str:
    """Describes a type and its limits for a message: `an integer, at least 1, or null`."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        return describe_union(arguments, limits)
    if origin is Literal:
        return "one of " + ", ".join(arguments) if len(arguments) > 1 else str(arguments[0])
    if origin is list:
        example = limits.get("example", LIST_EXAMPLES.get(arguments[0], "a, b"))
        return f"a list such as [{example}]{describe_limits(limits)}"
    if origin is dict and arguments[1] is not str:
        name = "NUMBER" if arguments[0] is int else "NAME"
        return f"{{{name}: {describe_type(arguments[1], limits)}}}"
    if hint is Target:
        return "{_target_: the dotted name of a class or function, and its arguments}"
    if dataclasses.is_dataclass(hint):
        short = "auto or " if hint is EarlyStopping else ""
        names = ", ".join(field.name for field in dataclasses.fields(hint))
        return f"{short}{{{names}}}"
    return TYPE_NAMES.get(hint, "keys and values") + describe_limits(limits)


def describe_union(options: Sequence[Any], limits: Mapping[str, Any]) -> str:
    """Describes a choice between types for a message. Only numbers, lists and mappings have the limits."""
    descriptions = []
    for option in options:
        if option is type(None):
            continue
        if option is str and Target in options:
            descriptions.append("a short name")
            continue
        has_limits = option in (int, float) or get_origin(option) in (dict, list)
        descriptions.append(describe_type(option, limits if has_limits else {}))
    text = " or ".join(descriptions)
    return f"{text}, or null" if type(None) in options else text


def describe_limits(limits: Mapping[str, Any]) -> str:
    """Describes limits for a message: `, at least 1, below 2`; "" without limits."""
    text = ""
    for name in ("at_least", "above", "at_most", "below"):
        limit = limits.get(name)
        if limit is not None:
            text += f", {name.replace('_', ' ')} {limit}"
    return text


def format_value(value: object) -> str:
    """Formats a value as a user types it, with secrets masked, cut to 80 characters."""
    if dataclasses.is_dataclass(value):
        items = [f"{name}: {format_value(item)}" for name, item in vars(value).items() if item is not None]
        return f"{{{', '.join(items)}}}"
    value = mask_secrets(value)
    if isinstance(value, str) and re.fullmatch(r"null|true|false|[+-]?\d*\.?\d+", value):
        return f"'{value}'"  # text that looks like another type
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by their dotted keys. An empty inner mapping is a leaf."""
    is_section = isinstance(config, Mapping) and (config or not prefix)
    if not is_section:
        return {prefix: config}
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        leaves |= flatten_config(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def is_under(key: str, names: Iterable[str]) -> bool:
    """Whether a key or module equals one of the names, or is inside a section, group or package with such a name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def every_key(config: Any, prefix: str = "") -> list[str]:
    """Lists the dotted keys of nested mappings, including keys of inner mappings."""
    if not isinstance(config, Mapping):
        return []
    keys = []
    for name, value in config.items():
        keys.append(f"{prefix}{name}")
        keys += every_key(value, f"{prefix}{name}.")
    return keys
