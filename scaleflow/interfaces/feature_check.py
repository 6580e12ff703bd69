"""Checks the declaration of a feature from another package, so that its mistakes do not end runs without it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from scaleflow.interfaces.config import Plan, Rule

#: The fields of a `Feature` that are sequences, and the class of their items.
ITEMS: Mapping[str, type | tuple[type, ...]] = {
    "rules": Rule,
    "needs": str,
    "stages": str,
    "engines": str,
    "events": str,
    "run_files": str,
    "ignored_keys": str,
    "other_files": str,
    "folder_marks": str,
    "defaults": (str, Mapping),
}

#: The fields that are mappings from texts to texts, or texts.
MAPPINGS = ("public_names", "compared_models", "key_names", "option_names", "file_words", "typed_keys")
TEXTS = (
    "about",
    "conf",
    "group",
    "check",
    "check_job",
    "fill_in",
    "before_run",
    "end_task",
    "launcher",
    "worker",
    "report",
    "warm_server",
    "task",
)


def check_declaration(feature: Any, classes: Mapping[str, type], untrained_runs: type) -> None:
    """Raises ValueError if a field of a feature is invalid. The text names the field and the reason.

    Args:
        classes: the item classes of more fields, such as `commands`.
        untrained_runs: the class of this field.
    """
    name = feature.name
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"its name {name!r} is no identifier")
    check_types(feature, classes)
    if feature.untrained_runs is not None:
        check_items("untrained_runs", [feature.untrained_runs], untrained_runs)
        check_texts(feature.untrained_runs, "untrained_runs")
    if feature.section is not None:
        check_section(feature.section, feature.config_group)
    check_ignored_keys(feature)
    if feature.conf:
        check_conf(feature)
    elif feature.defaults:
        raise ValueError("it has defaults, but no conf, the package with these options")


def check_types(feature: Any, classes: Mapping[str, type]) -> None:
    """Raises ValueError if an attribute of a feature has a wrong type. `classes` has the types of items."""
    for field, kind in {**ITEMS, **classes}.items():
        check_items(field, getattr(feature, field), kind)
    check_commands(feature)
    for field in MAPPINGS:
        check_mapping(field, getattr(feature, field))
        check_items(field, list(getattr(feature, field).values()), str)
    check_mapping("command_files", feature.command_files)
    for patterns in feature.command_files.values():
        check_items("command_files", patterns, str)
    for field in TEXTS:
        if not isinstance(getattr(feature, field), str):
            raise ValueError(f"{field} is no text")
    if not isinstance(feature.rules_place, int):
        raise ValueError("rules_place is no whole number")
    if not isinstance(feature.changes_training, bool):
        raise ValueError("changes_training is neither True nor False")
    for field in ("is_used", "own_code"):
        if not callable(getattr(feature, field)):
            raise ValueError(f"{field} is no function")


def check_commands(feature: Any) -> None:
    """Raises ValueError if a field of a command or of a placeholder has a wrong type."""
    for command in feature.commands:
        check_texts(command, f"the command {command.name}", others=("place", "other_names"))
        check_items("other_names", command.other_names, str)
        if not isinstance(command.place, int):
            raise ValueError(f"place of the command {command.name} is no whole number")
    for placeholder in feature.placeholders:
        check_texts(placeholder, "a placeholder")


def check_mapping(field: str, mapping: Any) -> None:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{field} is no mapping")
    check_items(field, list(mapping), str)


def check_texts(item: Any, name: str, others: Sequence[str] = ()) -> None:
    """Raises ValueError if a field of a dataclass is no text, except for `others`."""
    for field in fields(item):
        if field.name not in others and not isinstance(getattr(item, field.name), str):
            raise ValueError(f"{field.name} of {name} is no text")


def check_items(field: str, items: Any, kind: type | tuple[type, ...]) -> None:
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ValueError(f"{field} is no tuple")
    for item in items:
        if not isinstance(item, kind):
            raise ValueError(f"{field} has {item!r}, which is of another type")


def check_section(section: Any, group: str) -> None:
    """Raises ValueError if a class cannot describe keys of this config group."""
    if not isinstance(section, type) or not is_dataclass(section):
        raise ValueError(f"its section {section!r} is no dataclass")
    for key in fields(section):
        if key.default is MISSING and key.default_factory is MISSING:
            raise ValueError(f"the key {key.name} of its section {section.__name__} has no default")
    try:
        get_type_hints(section)
        section()
    except Exception as error:  # the code of another package
        raise ValueError(f"its section {section.__name__}: {error}") from error
    core = get_type_hints(Plan).get(group)
    if core is not None and not is_dataclass(core):
        raise ValueError(f"{group} is a key of the core, and no group for the keys of its section")
    taken = {key.name for key in fields(core)} if core is not None else set()
    for key in fields(section):
        if key.name in taken:
            raise ValueError(f"the core has a key {group}.{key.name} already")


def check_ignored_keys(feature: Any) -> None:
    """Raises ValueError if a feature wants keys of others ignored: then runs that differ would count as the same."""
    group = feature.config_group
    own = {key.name for key in fields(feature.section)} if feature.section is not None else set()
    is_own_group = group not in get_type_hints(Plan)
    for key in feature.ignored_keys:
        section, _, name = key.partition(".")
        is_whole_group = is_own_group and not name
        if section != group or not (name in own or is_whole_group):
            raise ValueError(f"ignored_keys has {key}, which is no key of the feature")


def check_conf(feature: Any) -> None:
    """Raises ValueError if the package with config options does not exist, or if the options that every config
    includes could make other people's configs invalid.
    """
    package = feature.conf
    folders = list_package_folders(package)
    if not folders:
        raise ValueError(f"conf={package}: there is no such package")
    for entry in feature.defaults:
        if isinstance(entry, Mapping):
            for group in entry:
                if group != feature.config_group or group in get_type_hints(Plan):
                    raise ValueError(f"defaults has an option of {group!r}, which is no config group of the feature")
        elif any(Path(folder, f"{entry}.yaml").is_file() for folder in list_package_folders("scaleflow.conf")):
            raise ValueError(f"defaults has {entry}, which is a file of the core")
    for option in list_default_files(feature.defaults):
        files = [folder / option for folder in folders if (folder / option).is_file()]
        if not files:
            raise ValueError(f"conf={package}: it has no file {option}, which defaults names")
        check_option(feature, files[0], option)


def check_option(feature: Any, file: Path, option: str) -> None:
    """Raises ValueError if an option that every config includes cannot be read, or sets anything but plain values of
    the feature's keys.
    """
    where = f"conf={feature.conf}: {option}"
    try:
        text = file.read_text(encoding="utf-8")
        content = read_option(text)
    except Exception as error:  # the parser raises many types
        raise ValueError(f"{where} cannot be read: {' '.join(str(error).split())}") from error
    match = re.search(r"^# @package (\S+)", text, re.MULTILINE)
    package = match[1] if match else option.rpartition("/")[0]
    keys = content
    if package in ("", "_global_"):
        others = [key for key in content if key != feature.config_group]
        if others:
            raise ValueError(f"{where} sets {others[0]}, which is no config group of the feature")
        keys = content.get(feature.config_group) or {}
    elif package not in ("_group_", feature.config_group):
        raise ValueError(f"{where} sets keys of {package}, which is no config group of the feature")
    own = {key.name for key in fields(feature.section)} if feature.section is not None else set()
    for key, value in keys.items():
        if key not in own:
            raise ValueError(f"{where} sets {feature.config_group}.{key}, which is no key of its section")
        if "${" in str(value) or "???" in str(value):
            raise ValueError(f"{where}: {key} has the default {value}; write a plain value")


def read_option(text: str) -> Mapping[str, Any]:
    """Returns the keys of a YAML file. Raises TypeError if it has none."""
    from omegaconf import OmegaConf  # only for features of other packages

    content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if not isinstance(content, Mapping):
        raise TypeError("it has no keys")
    return {str(key): value for key, value in content.items()}


def list_package_folders(package: str) -> list[Path]:
    """Returns the folders of a package; empty if it does not exist."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def list_default_files(defaults: Sequence[str | Mapping[str, str]]) -> Iterator[str]:
    """Yields the paths of the options in Hydra's list of defaults, such as `notify/default.yaml`."""
    for entry in defaults:
        if isinstance(entry, str):
            yield f"{entry}.yaml"
            continue
        for group, option in entry.items():
            if option is not None and group.isidentifier():
                yield f"{group}/{option}.yaml"
