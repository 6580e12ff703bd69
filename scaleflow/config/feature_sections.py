"""Parses the keys of features."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.config.parse import parse_section
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.feature_check import list_default_files, list_package_folders
from scaleflow.interfaces.features import Feature, list_features, list_sections, tell_problem


def parse_feature_sections(config: Mapping[str, Any]) -> dict[type, Any]:
    """Parses the keys of all features. The result is keyed by the dataclass that describes them.

    Raises ConfigError for a wrong name, type or range.
    """
    parsed: dict[type, Any] = {}
    core = {each.name for each in dataclasses.fields(Plan)}
    for feature in list_features().values():
        if feature.section is None:
            continue
        group = feature.config_group
        given = config.get(group) or {}
        own = list_keys(feature.section)
        others = {key for cls in list_sections()[group] for key in list_keys(cls)} - own
        if group in core:  # the core refuses unknown keys of its group
            given = {key: value for key, value in given.items() if key in own}
        else:
            given = {key: value for key, value in given.items() if key not in others}
        parsed[feature.section] = parse_feature_section(feature, feature.section, given)
    return parsed


def list_keys(section: Any) -> set[str]:
    return {each.name for each in dataclasses.fields(section)}


def parse_feature_section(feature: Feature, section: Any, given: Mapping[str, Any]) -> Any:
    """Parses the keys of a feature. If the feature's own defaults are invalid, uses its dataclass and reports that.

    Raises ConfigError if a value set by the user is invalid.
    """
    try:
        return parse_section(section, given, feature.config_group)
    except ConfigError as error:
        if given != read_defaults(feature):
            raise
        reason = str(error)
    except Exception as error:  # a type that config keys do not support
        reason = f"{type(error).__name__}: {error}"
    tell_problem(feature.name, f"its keys have the defaults of {section.__name__}: {reason}")
    return section()


def read_defaults(feature: Feature) -> dict[str, Any]:
    """Returns the default values of a feature's keys, from the config options that every run includes."""
    from omegaconf import OmegaConf

    values: dict[str, Any] = {}
    own = list_keys(feature.section)
    for option in list_default_files(feature.defaults):
        for folder in list_package_folders(feature.conf):
            if not (folder / option).is_file():
                continue
            content: Any = OmegaConf.to_container(OmegaConf.load(folder / option), resolve=False)
            keys = content if Path(option).parent.name == feature.config_group else content.get(feature.config_group)
            values |= {key: value for key, value in (keys or {}).items() if key in own}
    return values


def list_feature_defaults(group: str) -> dict[str, Any]:
    """Returns the keys `GROUP.KEY` that features add to a config group, with defaults, for `set_values`."""
    defaults: dict[str, Any] = {}
    for section in list_sections().get(group, ()):
        for name, value in vars(section()).items():
            defaults[f"{group}.{name}"] = value
    return defaults
