"""Prepares the config of a tracked run for use on this machine, for `rerun` and `evaluate`.

Others may write to the store that the config comes from. So the code that it names is checked (`trust.py`), its
interpolations resolve only within itself, and files and addresses outside the current folder must be typed. Masked
secrets are filled in from this machine's options.
"""

import copy
import itertools
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scaleflow.config.compose import (
    ComposedConfig,
    compose_config,
    list_keys,
    list_options,
    parse_overrides,
    shorten_error,
)
from scaleflow.config.parse import parse_section, unknown_key_error, unknown_option_error
from scaleflow.config.trust import (
    check_interpolation,
    check_trusted_targets,
    check_values,
    list_own_modules,
    list_own_targets,
    unresolvable_error,
)
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking, name_command
from scaleflow.interfaces.secret_masking import MASK

#: (section, key) of values that belong to the tracked run's machine. They are cleared.
MACHINE_KEYS = (("checkpoint", "folder"), ("tracking", "uri"))

RUN_DIR = "hydra.run.dir"

#: A valid option: options are shown, and become part of a run's name.
NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class RerunCommand:
    """The arguments of a command that uses a tracked run."""

    run_id: str  # the run's id in MLflow
    overrides: Sequence[str]  # the overrides as they were typed
    config_dirs: Sequence[str] = ()  # the folders of `--config-dir`
    #: The names of `--trust`: modules whose code may run, and folders (with a `/`) whose files may be used
    trusted: Sequence[str] = ()
    line: Sequence[str] = ()  # the whole command, as it was typed
    tracked_dirs: Sequence[str] = ()  # the folders of `--config-dir` in the command of the tracked run

    @property
    def missing_dirs(self) -> list[str]:
        """The folders of options that the tracked run had, and this command has not."""
        return [each for each in dict.fromkeys(self.tracked_dirs) if each not in self.config_dirs]


def find_store_options(words: RerunCommand) -> Tracking:
    """Returns the options of the store with the run: a typed `tracking.uri`, otherwise the defaults."""
    typed = [o for o in parse_overrides(words.overrides) if not o.is_sweep_override() and not o.is_delete()]
    uri = [o.value() for o in typed if o.key_or_group == "tracking.uri"]
    return parse_section(Tracking, {"uri": uri[-1]} if uri else {}, "tracking")


def reuse_config(
    tracked_config: Mapping[str, Any],
    params: Mapping[str, str],
    words: RerunCommand,
    sections: Sequence[str] | None = None,
) -> ComposedConfig:
    """Applies a command's overrides to the config of a tracked run, and checks the result.

    Args:
        params: the run's params, which contain the chosen options.
        sections: use only these sections of the tracked config; None: all.

    Raises ConfigError, naming the key that is wrong or not trusted.
    """
    overrides = parse_rerun_overrides(words)
    options = list_options(words.config_dirs)
    for override in overrides:
        if override.is_delete() and override.key_or_group in options:
            key = override.key_or_group
            raise ConfigError(
                f"~{key}: a config group cannot be removed; write {key}=OPTION ({', '.join(options[key])})"
            )
    groups = {str(o.key_or_group): str(o.value()) for o in overrides if o.key_or_group in options}
    groups.pop("experiment", None)  # null
    for group, option in groups.items():
        if option not in options[group]:
            raise unknown_option_error(group, option, options[group])
    raw = {
        key: copy.deepcopy(value)
        for key, value in tracked_config.items()
        if key not in groups and (sections is None or key in sections)
    }
    clear_keys(raw, [str(o.key_or_group) for o in overrides])
    if sections is not None:
        params = {key: value for key, value in params.items() if key != "promotion"}  # it is of runs, and takes a model
    base = compose_base(params, groups, words, options)
    default = to_container(base.config)
    tracked, local_keys = resolve_separately(raw, default)
    local_keys |= {*groups, *(key for key in default if key not in tracked)}
    config = {**copy.deepcopy(default), **tracked, **{group: default[group] for group in groups if group in default}}
    for section, key in MACHINE_KEYS:
        if isinstance(config.get(section), dict) and key in config[section]:
            config[section][key] = None
            local_keys.add(f"{section}.{key}")
    reused = OmegaConf.create(config)
    for override in overrides:
        if override.key_or_group not in (*groups, "experiment", RUN_DIR):
            apply_override(reused, override, default)
            local_keys.add(str(override.key_or_group))
    typed_modules = reused.get("trusted_modules") if "trusted_modules" in local_keys else None  # not the tracked ones
    flagged_modules = [name for name in words.trusted if "/" not in name]
    reused.trusted_modules = list(dict.fromkeys([*flagged_modules, *(typed_modules or ())]))
    reused.resume = None
    check_code(to_container(reused), reused.trusted_modules, words, base.search)
    restore_secrets(reused, default, local_keys)
    config = to_container(reused)
    check_values(config, local_keys | {"trusted_modules"}, words.trusted)
    tracked_choices = {
        group: params[group] for group in base.choices if group in raw and NAME.fullmatch(params.get(group, ""))
    }
    folders = [Path(str(o.value())) for o in overrides if o.key_or_group == RUN_DIR]
    return replace(
        base,
        config=reused,
        choices={**base.choices, **tracked_choices, **groups},
        folder=folders[-1] if folders else base.folder,
    )


def find_config_dirs(command: str) -> list[str]:
    """Returns the folders of `--config-dir` in a command line; none if it cannot be parsed."""
    try:
        words = shlex.split(command.replace("--config-dir=", "--config-dir "))
    except ValueError:  # it was cut inside of quotes
        return []
    return [folder for flag, folder in itertools.pairwise(words) if flag in ("--config-dir", "-cd")]


def check_code(config: Mapping[str, Any], trusted: Sequence[str], words: RerunCommand, search: Sequence[str]) -> None:
    """Checks that the code of a tracked config is trusted, and that it can be found in `search` if it is the user's.

    Raises ConfigError with the command that names all modules and all folders of options that are missing.
    """
    command = complete_command(config, trusted, words)
    try:
        check_trusted_targets(config, trusted)
    except ConfigError as refusal:
        raise ConfigError(f"{refusal}; the command with all that is missing:\n{command}") from refusal
    for key, path in list_own_targets(config):
        module = path.partition(".")[0]
        if words.missing_dirs and PathFinder.find_spec(module, [*search, *sys.path]) is None:
            raise ConfigError(
                f"{key}._target_={path}: there is no module {module} here, and the tracked command has --config-dir; "
                f"with it:\n{command}"
            )


def complete_command(config: Mapping[str, Any], trusted: Sequence[str], words: RerunCommand) -> str:
    """Returns the command with a `--trust` for each module of the user's code, and the tracked run's `--config-dir`.

    It is empty if the command has all of them.
    """
    flags = [("--config-dir", each) for each in words.missing_dirs] + [
        ("--trust", each) for each in list_own_modules(config, trusted)
    ]
    return shlex.join([*words.line, *itertools.chain.from_iterable(flags)]) if flags else ""


def parse_rerun_overrides(words: RerunCommand) -> list[Override]:
    """Parses the overrides. Raises `ConfigError` for one that a tracked run does not support."""
    overrides = parse_overrides(words.overrides)
    for override in overrides:
        key = str(override.key_or_group)
        if override.is_sweep_override():
            raise ConfigError(
                f"{key}: several values make a sweep, and this command uses one run; write a list as [a,b]"
            )
        if key == "experiment" and override.value() is not None:
            raise ConfigError(
                f"experiment={override.value()}: a recipe cannot be applied to the config of an existing run; type "
                "the keys to change"
            )
        if key == "resume":
            raise ConfigError(f"resume: this command does not continue a run; use {name_command()} resume=RUN")
        if key.startswith("hydra") and key != RUN_DIR:
            raise ConfigError(f"{key}: of Hydra's own keys, only {RUN_DIR} works here")
    return overrides


def clear_keys(config: dict[str, Any], keys: Sequence[str]) -> None:
    """Clears the tracked values of keys that are typed anew, so that they are not checked."""
    for key in keys:
        parent, _, leaf = key.rpartition(".")
        section = get_at(config, parent) if parent else config
        if isinstance(section, dict) and leaf in section and not isinstance(section[leaf], dict | list):
            section[leaf] = None


def load_config(text: str, run_id: str) -> dict[str, Any]:
    """Parses a config.yaml into plain containers, with its interpolations."""
    try:
        config = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{run_id}: its config.yaml can't be read: {shorten_error(error)}") from error
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ConfigError(f"{run_id}: its config.yaml is not the config of a scaleflow run")
    return {str(key): value for key, value in config.items()}


def compose_base(
    params: Mapping[str, str], groups: Mapping[str, str], words: RerunCommand, options: Mapping[str, Sequence[str]]
) -> ComposedConfig:
    """Composes this machine's options: those that are typed, otherwise those of the run that exist here."""
    known = {group: params.get(group) for group in options if group != "experiment"}
    choices = {group: str(option) for group, option in known.items() if option in options[group]}
    choices |= groups
    return compose_config([make_override(*choice) for choice in choices.items()], words.config_dirs)


def resolve_separately(raw: dict[str, Any], default: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Resolves the interpolations of a tracked config within the tracked config alone.

    An interpolation that this machine's options have too stays unresolved. Returns the config, and the keys of these.
    """
    local_keys: set[str] = set()
    isolated = OmegaConf.create(copy.deepcopy(raw))
    for key, value in iterate_leaves(raw):
        if not (isinstance(value, str) and "${" in value):
            continue
        if value == get_at(default, key):
            local_keys.add(key)
            OmegaConf.update(isolated, key, MASK)  # another key cannot refer to this machine's value
        else:
            check_interpolation(key, value)
    try:
        resolved = to_container(isolated, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the tracked config: {shorten_error(error)}") from error
    for key, value in iterate_leaves(resolved):
        if isinstance(value, str) and "${" in value:
            raise unresolvable_error(key, value)
    restored = OmegaConf.create(resolved)
    for key in local_keys:
        OmegaConf.update(restored, key, get_at(default, key))
    return to_container(restored), local_keys


def apply_override(config: DictConfig, override: Override, default: Mapping[str, Any]) -> None:
    """Applies an override to a config, as Hydra does."""
    key = str(override.key_or_group)
    exists = key in list_keys(config)
    if override.is_delete():
        if not exists:
            raise unknown_key_error(key, list_keys(config))
        parent, _, leaf = key.rpartition(".")
        del (OmegaConf.select(config, parent) if parent else config)[leaf]
        return
    if not (exists or override.is_add() or override.is_force_add() or get_at(default, key) is not None):
        raise unknown_key_error(key, list_keys(config))
    try:
        OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(shorten_error(error)) from error


def restore_secrets(config: DictConfig, default: Mapping[str, Any], own: set[str]) -> None:
    """Replaces masked secrets by this machine's values, and adds their keys to `own`."""
    for key, value in iterate_leaves(OmegaConf.to_container(config, resolve=False)):
        if not (isinstance(value, str) and MASK in value) or key in own:
            continue
        local_value = get_at(default, key)
        if local_value is None or local_value == value:
            raise ConfigError(
                f"{key}: the tracked value is a masked secret; type the value, or add the --config-dir that sets it"
            )
        OmegaConf.update(config, key, local_value)
        own.add(key)


def to_container(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    container = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def iterate_leaves(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from iterate_leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from iterate_leaves(value, f"{key}.{index}")
    else:
        yield key, config


def get_at(config: Any, key: str) -> Any:
    """Returns the value at a dotted key of a plain config; None if there is none."""
    for name in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(name)
        elif isinstance(config, list) and name.isdigit() and int(name) < len(config):
            config = config[int(name)]
        else:
            return None
    return config
