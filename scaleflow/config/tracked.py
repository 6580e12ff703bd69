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

from scaleflow.config.composing import Composed, composed, options
from scaleflow.config.explain import in_a_line, keys_of, parsed
from scaleflow.config.sections import read, unknown_key, unknown_option
from scaleflow.config.trust import check_interpolation, check_targets, check_values, unresolved
from scaleflow.errors import Refusal
from scaleflow.interfaces import Tracking
from scaleflow.masking import MASK

#: What a tracked config says of the place where the run was, which another run is not to have.
OF_ITS_PLACE = (("checkpoint", "folder"), ("tracking", "uri"))

RUN_DIR = "hydra.run.dir"

#: Of an option; it is shown, and is a part of names.
NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Words:
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


def store_named(words: Words) -> Tracking:
    """The options of the store in which the run is looked for: those typed, or the environment's."""
    typed = [o for o in parsed(words.overrides) if not o.is_sweep_override() and not o.is_delete()]
    uri = [o.value() for o in typed if o.key_or_group == "tracking.uri"]
    return read(Tracking, {"uri": uri[-1]} if uri else {}, "tracking")


def again(text: str, params: Mapping[str, str], words: Words, sections: Sequence[str] | None = None) -> Composed:
    """A tracked config with a command's overrides.

    Args:
        text: of its config.yaml.
        params: of the run; which options were chosen is among them.
        words: the command's.
        sections: of the tracked config only these count; None: all.

    Raises:
        Refusal: naming what is wrong, or is not followed.
    """
    overrides = checked(words)
    there = options(words.config_dirs)
    groups = {str(o.key_or_group): str(o.value()) for o in overrides if o.key_or_group in there}
    groups.pop("experiment", None)  # null
    check_options(groups, there)
    raw = {
        key: value
        for key, value in loaded(text, words.run_id).items()
        if key not in groups and (sections is None or key in sections)
    }
    forget(raw, [str(o.key_or_group) for o in overrides])
    ours = base(params, groups, words, there)
    default = container(ours.config)
    kept, own = separated(raw, default)
    own |= {*groups, *(key for key in default if key not in kept)}
    config = {**copy.deepcopy(default), **kept, **{group: default[group] for group in groups if group in default}}
    leave_place(config, own)
    made = OmegaConf.create(config)
    for override in overrides:
        if override.key_or_group not in (*groups, "experiment", RUN_DIR):
            apply(made, override, default)
            own.add(str(override.key_or_group))
    unmask(made, default, own)
    made.trusted_modules = trusted(words, made, own)
    made.resume = None
    config = container(made)
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


def checked(words: Words) -> list[Override]:
    """The overrides, if they are such as a tracked run takes."""
    overrides = parsed(words.overrides)
    for override in overrides:
        key = str(override.key_or_group)
        if override.is_sweep_override():
            raise Refusal(f"{key}: several values are a sweep; a list is written [a,b]")
        if key == "experiment" and override.value() is not None:
            raise Refusal(f"experiment={override.value()}: a recipe begins a run; type the keys that are to change")
        if key == "resume":
            raise Refusal("resume: goes on with a run; python -m scaleflow resume=... does that")
        if key.startswith("hydra") and key != RUN_DIR:
            raise Refusal(f"{key}: of Hydra's own keys only {RUN_DIR} counts here")
    return overrides


def check_options(groups: Mapping[str, str], there: Mapping[str, Sequence[str]]) -> None:
    for group, option in groups.items():
        if option not in there[group]:
            raise unknown_option(group, option, there[group])


def forget(config: dict[str, Any], keys: Sequence[str]) -> None:
    """Empties what is typed anew: nothing of it is looked at."""
    for key in keys:
        parent, _, leaf = key.rpartition(".")
        place = at(config, parent) if parent else config
        if isinstance(place, dict) and leaf in place and not isinstance(place[leaf], dict | list):
            place[leaf] = None


def loaded(text: str, run_id: str) -> dict[str, Any]:
    """A config.yaml as plain containers, interpolations kept."""
    try:
        found = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise Refusal(f"{run_id}: its config.yaml can't be read: {in_a_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Refusal(f"{run_id}: its config.yaml is no run's")
    return {str(key): value for key, value in found.items()}


def base(
    params: Mapping[str, str], groups: Mapping[str, str], words: Words, there: Mapping[str, Sequence[str]]
) -> Composed:
    """What this machine's options give for the choices: the run's, as far as they are here, and the typed ones."""
    choices = {group: params[group] for group in there if group != "experiment" and params.get(group) in there[group]}
    choices |= groups
    return composed([f"{group}='{option}'" for group, option in choices.items()], words.config_dirs)


def separated(raw: dict[str, Any], default: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A tracked config, resolved in itself alone, but for the interpolations that this machine's options have too.

    Returns:
        The config, and the keys of those interpolations.
    """
    own: set[str] = set()
    inert = OmegaConf.create(copy.deepcopy(raw))
    for key, value in leaves(raw):
        if not (isinstance(value, str) and "${" in value):
            continue
        if value == at(default, key):
            own.add(key)
            OmegaConf.update(inert, key, MASK)  # so that nothing else in it can ask for what it is here
        else:
            check_interpolation(key, value)
    try:
        resolved = container(inert, resolve=True)
    except OmegaConfBaseException as error:
        raise Refusal(f"the tracked config: {in_a_line(error)}") from error
    for key, value in leaves(resolved):
        if isinstance(value, str) and "${" in value:
            raise unresolved(key, value)
    kept = OmegaConf.create(resolved)
    for key in own:
        OmegaConf.update(kept, key, at(default, key))
    return container(kept), own


def leave_place(config: dict[str, Any], own: set[str]) -> None:
    for section, key in OF_ITS_PLACE:
        if isinstance(config.get(section), dict) and key in config[section]:
            config[section][key] = None
            own.add(f"{section}.{key}")


def apply(config: DictConfig, override: Override, default: Mapping[str, Any]) -> None:
    """Does to a config what an override says, as Hydra would."""
    key = str(override.key_or_group)
    is_there = key in keys_of(config)
    if override.is_delete():
        if not is_there:
            raise unknown_key(key, keys_of(config))
        parent, _, leaf = key.rpartition(".")
        del (OmegaConf.select(config, parent) if parent else config)[leaf]
        return
    if not (is_there or override.is_add() or override.is_force_add() or at(default, key) is not None):
        raise unknown_key(key, keys_of(config))
    try:
        OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise Refusal(in_a_line(error)) from error


def unmask(config: DictConfig, default: Mapping[str, Any], own: set[str]) -> None:
    """Puts this machine's values where secrets were masked."""
    for key, value in leaves(OmegaConf.to_container(config, resolve=False)):
        if not (isinstance(value, str) and MASK in value) or key in own:
            continue
        here = at(default, key)
        if here is None or here == value:
            raise Refusal(
                f"{key}: was masked where it was tracked; type its value, or give the --config-dir that has it"
            )
        OmegaConf.update(config, key, here)
        own.add(key)


def trusted(words: Words, config: DictConfig, own: set[str]) -> list[str]:
    """The modules that this command trusts; what the tracked config trusted does not count."""
    typed = config.get("trusted_modules") if "trusted_modules" in own else None
    named = [each for each in words.trusted if "/" not in each]
    return list(dict.fromkeys([*named, *(typed or ())]))


def container(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    found = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def leaves(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each that is no container."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from leaves(value, f"{key}.{index}")
    else:
        yield key, config


def at(config: Any, key: str) -> Any:
    """A plain config's value at a dotted key; None where there is none."""
    for name in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(name)
        elif isinstance(config, list) and name.isdigit() and int(name) < len(config):
            config = config[int(name)]
        else:
            return None
    return config
