"""Finds keys of features' rules that do not exist: such a rule would never apply, and nothing would say so."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from scaleflow.cluster.engines import list_engines
from scaleflow.config.conditions import find_keys, parse_condition
from scaleflow.config.parse import list_key_types, type_hints
from scaleflow.config.unknown_keys import suggest
from scaleflow.errors import find_similar
from scaleflow.interfaces import Plan, Rule
from scaleflow.interfaces.features import Feature, list_features, list_sections

#: A group that does not exist is a misspelling of a known group if it is as similar as this, and has such a key.
MIN_SIMILARITY = 0.85


def find_unknown_keys(feature: Feature, rule: Rule) -> list[str]:
    """Describes the keys of a feature's rule that do not exist, each with a similar key.

    Skips keys of groups that only other features can have: these features may be absent.

    Raises:
        ValueError: if the rule's condition cannot be parsed.
    """
    groups = list_known_groups(feature)
    keys = [*find_keys(rule), *(term.key for term in parse_condition(rule.when))]
    problems: list[str] = []
    for key in dict.fromkeys(keys):
        group, _, name = key.partition(".")
        if group not in groups:
            similar = find_similar(group, groups, MIN_SIMILARITY)
            if similar and name and key_exists(f"{similar}.{name}"):
                problems.append(f"there is no key {key}; did you mean {similar}.{name}?")
        elif not key_exists(key):
            problems.append(f"there is no key {key}{suggest(key, list_keys(group))}")
    return problems


def list_known_groups(feature: Feature) -> list[str]:
    """Returns the config groups of the core, of a feature, and of the features that it needs, and keys without a
    group.
    """
    features = list_features()
    own = [feature, *(features[name] for name in feature.needs if name in features)]
    return [*type_hints(Plan), *(known.config_group for known in own)]


def key_exists(key: str) -> bool:
    """Whether a rule can read the value of a key. Only a class has the arguments below its `_target_`: a rule cannot
    read them.
    """
    group, _, name = key.partition(".")
    if not name:
        return group in type_hints(Plan) or group in list_sections()
    return any(True for _ in list_types(key))


def list_keys(group: str) -> list[str]:
    """Returns the keys of a config group that rules can read, and the keys one level below them."""
    keys: list[str] = []
    for section in list_group_sections(group):
        for name, hint in list_key_types(section, group).items():
            keys.append(f"{group}.{name}")
            for option in get_args(hint):
                if dataclasses.is_dataclass(option):
                    keys += [f"{group}.{name}.{field.name}" for field in dataclasses.fields(option)]
    return keys


def list_group_sections(group: str) -> Sequence[Any]:
    """Returns the dataclasses with keys of a config group: the core's, those of the cluster engines, and features'."""
    core = type_hints(Plan).get(group)
    sections: list[Any] = [*list_sections().get(group, ())]
    if group == "cluster":
        sections += [engine.section for engine in list_engines().values()]
    elif dataclasses.is_dataclass(core):
        sections.append(core)
    return sections


def list_types(key: str) -> Iterator[Any]:
    """Yields the types that a key of the config can have. A config group alone has the type of its option's name."""
    group, *names = key.split(".")
    for section in list_group_sections(group):
        hint: Any = section
        path = group
        for name in names or ["name"]:
            hint = find_type(hint, path, name)
            path = f"{path}.{name}"
        if hint is not None:
            yield hint


def find_type(section: Any, path: str, name: str) -> Any:
    """Returns the type of a key of a section, which may be one of several types; None if it has no such key."""
    options = (section, *get_args(section))
    for option in options:
        if not dataclasses.is_dataclass(option):
            continue
        cls: Any = option
        hint = str if name == "_target_" else list_key_types(cls, path).get(name)
        if hint is not None:
            return hint | None if type(None) in options else hint
    return None
