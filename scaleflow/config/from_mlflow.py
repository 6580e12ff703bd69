"""The config of a tracked run, made ready to be used again on this machine: `rerun` and `evaluate`.

It was read from a store that others may write to. So it is the base, and: what it says of code is checked
(`trust.py`); its interpolations see nothing but itself; what it says of files and addresses outside of this folder
counts only where it is typed; what was masked in it comes from this command.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scaleflow.config.compose import ComposedConfig, compose_config, list_options
from scaleflow.config.hydra_errors import list_keys, parse_overrides, shorten_error
from scaleflow.config.parse import parse_section, unknown_key_error, unknown_option_error
from scaleflow.config.trust import check_interpolation, check_targets, check_values, unresolvable_error
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking
from scaleflow.secret_masking import MASK

#: What a tracked config says of the place where the run was, which another run is not to have.
OF_ITS_PLACE = (("checkpoint", "folder"), ("tracking", "uri"))

RUN_DIR = "hydra.run.dir"

#: Of an option; it is shown, and is a part of names.
NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class RerunCommand:
    """A command's words about a tracked run.

    Attributes:
        run_id: whose.
        overrides: as typed.
        config_dirs: folders with options of the user's.
        trusted: modules, and folders, that may be followed.
    """

    run_id: str
    overrides: Sequence[str]
    config_dirs: Sequence[str] = ()
    trusted: Sequence[str] = ()


def find_store_options(words: RerunCommand) -> Tracking:
    """The options of the store in which the run is looked for: those typed, or the environment's."""
    typed = [o for o in parse_overrides(words.overrides) if not o.is_sweep_override() and not o.is_delete()]
    uri = [o.value() for o in typed if o.key_or_group == "tracking.uri"]
    return parse_section(Tracking, {"uri": uri[-1]} if uri else {}, "tracking")


def reuse_config(
    text: str, params: Mapping[str, str], words: RerunCommand, sections: Sequence[str] | None = None
) -> ComposedConfig:
    """A tracked config with a command's overrides.

    Args:
        text: of its config.yaml.
        params: of the run; which options were chosen is among them.
        words: the command's.
        sections: of the tracked config only these count; None: all.

    Raises:
        ConfigError: naming what is wrong, or is not followed.
    """
    overrides = parse_rerun_overrides(words)
    there = list_options(words.config_dirs)
    groups = {str(o.key_or_group): str(o.value()) for o in overrides if o.key_or_group in there}
    groups.pop("experiment", None)  # null
    check_options(groups, there)
    raw = {
        key: value
        for key, value in load_config(text, words.run_id).items()
        if key not in groups and (sections is None or key in sections)
    }
    clear_keys(raw, [str(o.key_or_group) for o in overrides])
    ours = compose_base(params, groups, words, there)
    default = to_container(ours.config)
    kept, own = resolve_separately(raw, default)
    own |= {*groups, *(key for key in default if key not in kept)}
    config = {**copy.deepcopy(default), **kept, **{group: default[group] for group in groups if group in default}}
    drop_machine_keys(config, own)
    made = OmegaConf.create(config)
    for override in overrides:
        if override.key_or_group not in (*groups, "experiment", RUN_DIR):
            apply_override(made, override, default)
            own.add(str(override.key_or_group))
    restore_secrets(made, default, own)
    made.trusted_modules = list_trusted_modules(words, made, own)
    made.resume = None
    config = to_container(made)
    check_targets(config, made.trusted_modules)
    check_values(config, own | {"trusted_modules"}, words.trusted)
    tracked_choices = {
        group: params[group] for group in ours.choices if group in raw and NAME.fullmatch(params.get(group, ""))
    }
    folder = [Path(str(o.value())) for o in overrides if o.key_or_group == RUN_DIR]
    return replace(
        ours,
        config=made,
        choices={**ours.choices, **tracked_choices, **groups},
        folder=folder[-1] if folder else ours.folder,
    )


def parse_rerun_overrides(words: RerunCommand) -> list[Override]:
    """The overrides, if they are such as a tracked run takes."""
    overrides = parse_overrides(words.overrides)
    for override in overrides:
        key = str(override.key_or_group)
        if override.is_sweep_override():
            raise ConfigError(f"{key}: several values are a sweep; a list is written [a,b]")
        if key == "experiment" and override.value() is not None:
            raise ConfigError(f"experiment={override.value()}: a recipe begins a run; type the keys that are to change")
        if key == "resume":
            raise ConfigError("resume: goes on with a run; python -m scaleflow resume=... does that")
        if key.startswith("hydra") and key != RUN_DIR:
            raise ConfigError(f"{key}: of Hydra's own keys only {RUN_DIR} counts here")
    return overrides


def check_options(groups: Mapping[str, str], there: Mapping[str, Sequence[str]]) -> None:
    for group, option in groups.items():
        if option not in there[group]:
            raise unknown_option_error(group, option, there[group])


def clear_keys(config: dict[str, Any], keys: Sequence[str]) -> None:
    """Empties what is typed anew: nothing of it is looked at."""
    for key in keys:
        parent, _, leaf = key.rpartition(".")
        place = get_at(config, parent) if parent else config
        if isinstance(place, dict) and leaf in place and not isinstance(place[leaf], dict | list):
            place[leaf] = None


def load_config(text: str, run_id: str) -> dict[str, Any]:
    """A config.yaml as plain containers, interpolations kept."""
    try:
        found = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{run_id}: its config.yaml can't be read: {shorten_error(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{run_id}: its config.yaml is no run's")
    return {str(key): value for key, value in found.items()}


def compose_base(
    params: Mapping[str, str], groups: Mapping[str, str], words: RerunCommand, there: Mapping[str, Sequence[str]]
) -> ComposedConfig:
    """What this machine's options give for the choices: the run's, as far as they are here, and the typed ones."""
    choices = {group: params[group] for group in there if group != "experiment" and params.get(group) in there[group]}
    choices |= groups
    return compose_config([f"{group}='{option}'" for group, option in choices.items()], words.config_dirs)


def resolve_separately(raw: dict[str, Any], default: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A tracked config, resolved in itself alone, but for the interpolations that this machine's options have too.

    Returns:
        The config, and the keys of those interpolations.
    """
    own: set[str] = set()
    inert = OmegaConf.create(copy.deepcopy(raw))
    for key, value in iterate_leaves(raw):
        if not (isinstance(value, str) and "${" in value):
            continue
        if value == get_at(default, key):
            own.add(key)
            OmegaConf.update(inert, key, MASK)  # so that nothing else in it can ask for what it is here
        else:
            check_interpolation(key, value)
    try:
        resolved = to_container(inert, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the tracked config: {shorten_error(error)}") from error
    for key, value in iterate_leaves(resolved):
        if isinstance(value, str) and "${" in value:
            raise unresolvable_error(key, value)
    kept = OmegaConf.create(resolved)
    for key in own:
        OmegaConf.update(kept, key, get_at(default, key))
    return to_container(kept), own


def drop_machine_keys(config: dict[str, Any], own: set[str]) -> None:
    for section, key in OF_ITS_PLACE:
        if isinstance(config.get(section), dict) and key in config[section]:
            config[section][key] = None
            own.add(f"{section}.{key}")


def apply_override(config: DictConfig, override: Override, default: Mapping[str, Any]) -> None:
    """Does to a config what an override says, as Hydra would."""
    key = str(override.key_or_group)
    is_there = key in list_keys(config)
    if override.is_delete():
        if not is_there:
            raise unknown_key_error(key, list_keys(config))
        parent, _, leaf = key.rpartition(".")
        del (OmegaConf.select(config, parent) if parent else config)[leaf]
        return
    if not (is_there or override.is_add() or override.is_force_add() or get_at(default, key) is not None):
        raise unknown_key_error(key, list_keys(config))
    try:
        OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(shorten_error(error)) from error


def restore_secrets(config: DictConfig, default: Mapping[str, Any], own: set[str]) -> None:
    """Puts this machine's values where secrets were masked."""
    for key, value in iterate_leaves(OmegaConf.to_container(config, resolve=False)):
        if not (isinstance(value, str) and MASK in value) or key in own:
            continue
        here = get_at(default, key)
        if here is None or here == value:
            raise ConfigError(
                f"{key}: was masked where it was tracked; type its value, or give the --config-dir that has it"
            )
        OmegaConf.update(config, key, here)
        own.add(key)


def list_trusted_modules(words: RerunCommand, config: DictConfig, own: set[str]) -> list[str]:
    """The modules that this command trusts; what the tracked config trusted does not count."""
    typed = config.get("trusted_modules") if "trusted_modules" in own else None
    named = [each for each in words.trusted if "/" not in each]
    return list(dict.fromkeys([*named, *(typed or ())]))


def to_container(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    found = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def iterate_leaves(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each that is no container."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from iterate_leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from iterate_leaves(value, f"{key}.{index}")
    else:
        yield key, config


def get_at(config: Any, key: str) -> Any:
    """A plain config's value at a dotted key; None where there is none."""
    for name in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(name)
        elif isinstance(config, list) and name.isdigit() and int(name) < len(config):
            config = config[int(name)]
        else:
            return None
    return config
