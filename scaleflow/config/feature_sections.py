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
    for feature in list_features().values():
        if feature.section is not None:
            values = select_own_values(feature, config.get(feature.config_group) or {})
            parsed[feature.section] = parse_feature_section(feature, feature.section, values)
    return parsed


def select_own_values(feature: Feature, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config group that are for a feature, without the keys of other owners of the group.

    Unknown keys stay, so that they are refused, unless the core owns the group: then the core refuses them.
    """
    own = list_keys(feature.section)
    is_core_group = feature.config_group in list_keys(Plan)
    others: set[str] = set()
    for section in list_sections()[feature.config_group]:
        others |= list_keys(section) - own
    selected = {}
    for key, value in values.items():
        is_selected = key in own if is_core_group else key not in others
        if is_selected:
            selected[key] = value
    return selected


def list_keys(section: Any) -> set[str]:
    """Returns the names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(section)}


def parse_feature_section(feature: Feature, section: Any, values: Mapping[str, Any]) -> Any:
    """Parses the keys of a feature. If the feature's own defaults are invalid, uses its dataclass and reports that.

    Raises ConfigError if a value set by the user is invalid.
    """
    try:
        return parse_section(section, values, feature.config_group)
    except ConfigError as error:
        if values != read_defaults(feature):
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
        is_of_group = Path(option).parent.name == feature.config_group
        for folder in list_package_folders(feature.conf):
            if not (folder / option).is_file():
                continue
            content: Any = OmegaConf.to_container(OmegaConf.load(folder / option), resolve=False)
            section = content if is_of_group else content.get(feature.config_group)
            for key, value in (section or {}).items():
                if key in own:
                    values[key] = value
    return values


def list_feature_defaults(group: str) -> dict[str, Any]:
    """Returns the keys `GROUP.KEY` that features add to a config group, with defaults, for `set_values`."""
    defaults: dict[str, Any] = {}
    for section in list_sections().get(group, ()):
        for name, value in vars(section()).items():
            defaults[f"{group}.{name}"] = value
    return defaults
