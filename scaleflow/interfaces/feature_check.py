"""Checks the declaration of a feature from another package, so that its mistakes do not end runs without it."""

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
    "defaults": (str, Mapping),
}

#: The fields that are mappings, texts or functions.
MAPPINGS = ("public_names", "command_files", "compared_models", "key_names")
TEXTS = (
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
)


def check_declaration(feature: Any, classes: Mapping[str, type]) -> None:
    """Raises ValueError if a field of a feature is invalid. The text names the field and the reason.

    `classes` has the item classes of more fields, such as `commands`.
    """
    name = feature.name
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"its name {name!r} is no identifier")
    check_types(feature, classes)
    if feature.section is not None:
        check_section(feature.section, feature.group or name)
    if feature.conf:
        check_conf(feature.conf, feature.defaults)
    elif feature.defaults:
        raise ValueError("it has defaults, but no conf, the package with these options")


def check_types(feature: Any, classes: Mapping[str, type]) -> None:
    for field, kind in {**ITEMS, **classes}.items():
        check_items(field, getattr(feature, field), kind)
    for field in MAPPINGS:
        if not isinstance(getattr(feature, field), Mapping):
            raise ValueError(f"{field} is no mapping")
    for field in TEXTS:
        if not isinstance(getattr(feature, field), str):
            raise ValueError(f"{field} is no text")
    if not isinstance(feature.rules_place, int):
        raise ValueError("rules_place is no whole number")
    if not isinstance(feature.changes_training, bool):
        raise ValueError("changes_training is neither True nor False")
    if not callable(feature.is_used):
        raise ValueError("is_used is no function")


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


def check_conf(package: str, defaults: Sequence[str | Mapping[str, str]]) -> None:
    """Raises ValueError if the package with config options does not exist, or lacks one of the defaults."""
    from omegaconf import OmegaConf  # only for features of other packages

    folders = list_package_folders(package)
    if not folders:
        raise ValueError(f"conf={package}: there is no such package")
    for option in list_default_files(defaults):
        files = [folder / option for folder in folders if (folder / option).is_file()]
        if not files:
            raise ValueError(f"conf={package}: it has no file {option}, which defaults names")
        try:
            OmegaConf.load(files[0])
        except Exception as error:  # the parser raises many types
            raise ValueError(f"conf={package}: {option} cannot be read: {' '.join(str(error).split())}") from error


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
