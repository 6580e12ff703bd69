"""Makes a config from the config of a tracked run, for a new run or another command about that run.

Others may write to the store that the config comes from. So the code that it names is checked (`trust.py`), its
interpolations resolve only within itself, and files and addresses outside the current folder must be typed. Masked
secrets are filled in from this machine's options. `resume.py` has the rules of `resume=RUN`.
"""

import copy
import itertools
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scaleflow.config.compose import (
    CommandWords,
    ComposedConfig,
    compose_config,
    list_keys,
    list_options,
    parse_config_dirs,
    shorten_error,
)
from scaleflow.config.interpolations import (
    KeyPath,
    depends_on_environment,
    list_interpolations,
)
from scaleflow.config.parse import format_value, parse_section
from scaleflow.config.trust import (
    KEY_INTERPOLATION,
    check_trusted_targets,
    check_values,
    list_own_modules,
    list_own_targets,
    unresolvable_error,
)
from scaleflow.config.unknown_keys import unknown_key_error, unknown_option_error
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Tracking, name_command
from scaleflow.interfaces.features import list_ignored_keys
from scaleflow.interfaces.secret_masking import MASK
from scaleflow.runs.folder import RunFolder

Config = dict[str, Any]

#: (section, key) of values that belong to the machine of the tracked run. They are cleared.
MACHINE_KEYS = (("checkpoint", "folder"), ("tracking", "uri"))

RUN_DIR = "hydra.run.dir"

#: A valid option name: it is shown in messages and becomes part of the run's name.
NAME = re.compile(r"[\w.-]+")


def find_store_options(words: CommandWords) -> Tracking:
    """Returns the options of the store that holds the run: with a typed `tracking.uri`, otherwise the defaults."""
    return parse_section(Tracking, {"uri": words.find("tracking.uri")}, "tracking")


def reuse_config(
    tracked_config: Mapping[str, Any],
    params: Mapping[str, str],
    words: CommandWords,
    sections: Sequence[str] | None = None,
    interpolations: Mapping[KeyPath, str] = MappingProxyType({}),
    files: Mapping[str, Path] | None = None,
) -> ComposedConfig:
    """Applies a command's overrides to the config of a tracked run, and checks the result.

    Args:
        params: the run's params, which contain the chosen options.
        sections: use only these sections of the tracked config; None: all.
        interpolations: the interpolations whose values are in the tracked config.
        files: the present paths of the run's files, by config key. Their locations are not checked.

    Raises ConfigError, which names the key that is wrong or not trusted.
    """
    check_rerun_overrides(words)
    overrides = words.parsed
    options = list_options(words.config_dirs)
    groups = choose_groups(overrides, options)
    raw = {
        key: copy.deepcopy(value)
        for key, value in tracked_config.items()
        if key not in groups and (sections is None or key in sections)
    }
    unused = {key: value for key, value in tracked_config.items() if key not in raw}
    clear_keys(raw, sorted(words.keys))
    for key, path in (files or {}).items():
        section, _, name = key.partition(".")
        raw[section][name] = str(path)
    if sections is not None:
        # The base uses this machine's default option for these groups: another option may have keys without a value.
        left_out = list_ignored_keys()
        params = {key: value for key, value in params.items() if key not in left_out}
    base = compose_base(params, groups, words, options=options)
    default = base.raw if sections is None else drop_missing(base.raw, {*raw, *groups})
    tracked, local_keys = resolve_separately(raw, default, unused, list_typed_values(overrides))
    local_keys |= {*groups, *(files or ()), *(key for key in default if key not in tracked)}
    same_keys, notes = compare_environment(tracked, base, interpolations)
    local_keys |= same_keys
    config = copy.deepcopy({**default, **tracked})
    for section, key in MACHINE_KEYS:
        if isinstance(config.get(section), dict) and key in config[section]:
            config[section][key] = None
            local_keys.add(f"{section}.{key}")
    reused = OmegaConf.create(config)
    for override in overrides:
        if override.key_or_group not in (*groups, "experiment", RUN_DIR):
            apply_override(reused, override, default)
            local_keys.add(str(override.key_or_group))
    typed_modules = reused.get("trusted_modules") if "trusted_modules" in local_keys else None  # not the tracked one
    flagged_modules = [name for name in words.trusted if "/" not in name]
    reused.trusted_modules = list(dict.fromkeys([*flagged_modules, *(typed_modules or ())]))
    reused.resume = None
    check_code(to_container(reused), reused.trusted_modules, words, search=base.search)
    restore_secrets(reused, default, local_keys)
    check_values(to_container(reused), local_keys | {"trusted_modules"}, words.trusted)
    tracked_choices = {
        group: params[group] for group in base.choices if group in raw and NAME.fullmatch(params.get(group, ""))
    }
    folders = [Path(str(o.value())) for o in overrides if o.key_or_group == RUN_DIR]
    return replace(
        base,
        config=reused,
        choices={**base.choices, **tracked_choices, **groups},
        folder=folders[-1] if folders else base.folder,
        words=words,
        notes=notes,
    )


def choose_groups(overrides: Sequence[Override], options: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the typed option of each group. Raises ConfigError for an unknown option."""
    groups = {str(o.key_or_group): o for o in overrides if o.key_or_group in options}
    for key, override in groups.items():
        if override.is_delete():
            known = ", ".join(options[key])
            raise ConfigError(f"~{key}: a config group cannot be removed; write {key}=OPTION ({known})")
        if key != "experiment" and str(override.value()) not in options[key]:  # `experiment=null` is allowed
            raise unknown_option_error(key, str(override.value()), options[key])
    return {key: str(override.value()) for key, override in groups.items() if key != "experiment"}


def drop_missing(config: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
    """Returns a config in which the sections that a command does not use lose their keys without a value."""
    kept = dict(config)
    for name, section in config.items():
        if name not in used and isinstance(section, Mapping):
            kept[name] = {key: value for key, value in section.items() if value != MISSING}
    return kept


def find_config_dirs(command: str) -> list[str]:
    """Returns the folders of `--config-dir` in a command line; empty if the line cannot be parsed."""
    try:
        return parse_config_dirs(shlex.split(command))
    except ValueError:  # the line was cut inside quotes
        return []


def check_code(config: Mapping[str, Any], trusted: Sequence[str], words: CommandWords, search: Sequence[str]) -> None:
    """Checks that the code of a tracked config is trusted, and that user modules can be found in `search`.

    Raises ConfigError with the complete command: it names all missing modules and option folders.
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


def complete_command(config: Mapping[str, Any], trusted: Sequence[str], words: CommandWords) -> str:
    """Returns the command with the missing `--trust` flags for user modules and the run's missing `--config-dir` flags.

    Returns an empty text if nothing is missing.
    """
    flags = [("--config-dir", each) for each in words.missing_dirs] + [
        ("--trust", each) for each in list_own_modules(config, trusted)
    ]
    return shlex.join([*words.line, *itertools.chain.from_iterable(flags)]) if flags else ""


def check_rerun_overrides(words: CommandWords) -> None:
    """Raises ConfigError for an override that is not supported with a tracked run."""
    words.refuse_sweep("this command uses one run")
    for override in words.parsed:
        key = str(override.key_or_group)
        if key == "experiment" and override.value() is not None:
            raise ConfigError(
                f"experiment={override.value()}: a recipe cannot be applied to the config of an existing run; type "
                "the keys to change"
            )
        if key == "resume":
            raise ConfigError(f"resume: this command does not continue a run; use {name_command()} resume=RUN")
        if key.startswith("hydra") and key != RUN_DIR:
            raise ConfigError(f"{key}: of Hydra's own keys, only {RUN_DIR} works here")


def clear_keys(config: dict[str, Any], keys: Sequence[str]) -> None:
    """Clears the tracked values of keys that are typed, so that the old values are not checked."""
    for key in keys:
        parent, _, leaf = key.rpartition(".")
        section = get_at(config, parent) if parent else config
        if isinstance(section, dict) and leaf in section and not isinstance(section[leaf], dict | list):
            section[leaf] = None


def load_config(text: str, run_id: str) -> dict[str, Any]:
    """Parses a config.yaml into plain containers and keeps its interpolations."""
    try:
        config = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{run_id}: its config.yaml can't be read: {shorten_error(error)}") from error
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ConfigError(f"{run_id}: its config.yaml is not the config of a scaleflow run")
    return {str(key): value for key, value in config.items()}


def compose_base(
    params: Mapping[str, str], groups: Mapping[str, str], words: CommandWords, options: Mapping[str, Sequence[str]]
) -> ComposedConfig:
    """Composes this machine's options: the typed ones, otherwise the run's options that also exist here."""
    known = {group: params.get(group) for group in options if group != "experiment"}
    choices = {group: str(option) for group, option in known.items() if option in options[group]}
    choices |= groups
    return compose_config([make_override(*choice) for choice in choices.items()], words.config_dirs)


def list_typed_values(overrides: Sequence[Override]) -> dict[str, Any]:
    """Returns the typed values to which a tracked config may refer: those without interpolations."""
    values = {str(each.key_or_group): each.value() for each in overrides if not each.is_delete()}
    return {key: value for key, value in values.items() if not list_interpolations({"": value})}


def resolve_separately(
    raw: Config,
    default: Config,
    unused: Mapping[str, Any] = MappingProxyType({}),
    typed: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Config, set[str]]:
    """Resolves the interpolations of a tracked config, using only its own values and the typed values.

    An interpolation that this machine's options also have stays unresolved. Returns the config, and the keys of the
    unresolved interpolations.

    Args:
        raw: the sections of the tracked config that the command uses.
        default: this machine's options.
        unused: the other sections of the tracked config; the used sections may refer to them.
        typed: the typed values. Tracked keys that refer to a typed key follow its value.
    """
    local_keys = find_local_interpolations(raw, default)
    isolated = OmegaConf.create({**hide_resolvers(unused), **copy.deepcopy(raw)})
    for key, value in typed.items():
        if has_leaf(raw, key):
            OmegaConf.update(isolated, key, value)
    for key in local_keys:
        OmegaConf.update(isolated, key, MASK)  # no other key may refer to this machine's value
    try:
        everything = to_container(isolated, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the tracked config: {shorten_error(error)}") from error
    resolved = {key: everything[key] for key in raw}
    for key, value in iterate_leaves(resolved):
        if isinstance(value, str) and "${" in value:
            raise unresolvable_error(key, value)
    restored = OmegaConf.create(resolved)
    for key in local_keys:
        OmegaConf.update(restored, key, get_at(default, key))
    return to_container(restored), local_keys


def find_local_interpolations(raw: Config, default: Config) -> set[str]:
    """Returns the keys whose interpolations this machine's options also have.

    Raises ConfigError for any other interpolation that is more than a reference to a key.
    """
    local_keys: set[str] = set()
    for key, value in iterate_leaves(raw):
        if not (isinstance(value, str) and "${" in value):
            continue
        if value == get_at(default, key):
            local_keys.add(key)
        elif "${" in KEY_INTERPOLATION.sub("", value) or "\\${" in value:  # more than a reference to a key
            raise unresolvable_error(key, value)
    return local_keys


def hide_resolvers(config: Mapping[str, Any]) -> Config:
    """Returns a tracked config in which masks replace the interpolations that would call a resolver."""
    hidden = copy.deepcopy(dict(config))
    for path, text in list_interpolations(hidden).items():
        if "${" in KEY_INTERPOLATION.sub("", text):
            find_section(hidden, path)[path[-1]] = MASK
    return hidden


def has_leaf(config: Config, key: str) -> bool:
    """Whether a plain config has a key whose value is not a section."""
    parent, _, leaf = key.rpartition(".")
    section = get_at(config, parent) if parent else config
    return isinstance(section, dict) and leaf in section and not isinstance(section[leaf], dict)


def compare_environment(
    tracked: Config, base: ComposedConfig, interpolations: Mapping[KeyPath, str]
) -> tuple[set[str], list[str]]:
    """Compares the values that a run began with to the values that this machine's options give now.

    It resolves only interpolations that this machine's options contain: others may have been written by someone else.
    Returns the keys whose values are equal, and a note for each key whose value differs.
    """
    same_keys: set[str] = set()
    notes = []
    for path, text in interpolations.items():
        section = find_section(tracked, path)
        local = find_section(base.raw, path)
        key = ".".join(map(str, path))
        if not section or not local or local[path[-1]] != text or section[path[-1]] is None:
            continue
        if path in base.values and base.values[path] == section[path[-1]]:
            same_keys.add(key)
        elif depends_on_environment(text):
            state = f"is {format_value(base.values[path])} here" if path in base.values else "cannot be resolved here"
            notes.append(f"note: {key}={format_value(section[path[-1]])} as when the run began; {text} {state}")
    return same_keys, notes


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
    """Replaces masked secrets with this machine's values, and adds their keys to `own`."""
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
    """Returns the value at a dotted key of a plain config; None if the key does not exist."""
    for name in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(name)
        elif isinstance(config, list) and name.isdigit() and int(name) < len(config):
            config = config[int(name)]
        else:
            return None
    return config


def load_interpolations(text: str) -> dict[KeyPath, str]:
    """Parses an interpolations.yaml: the interpolations whose values are in config.yaml."""
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        return {}
    return list_interpolations(content)


def read_interpolations(files: RunFolder) -> dict[KeyPath, str]:
    """Reads the interpolations whose values are in the run's config.yaml; {} if it has none."""
    return load_interpolations(files.interpolations.read_text()) if files.interpolations.is_file() else {}


def find_section(config: Any, path: KeyPath) -> Any:
    """Returns the mapping or list of a plain config that contains the value at a path; {} if there is no such value."""
    section: Any = {}
    for part in path:
        section = config
        is_index = isinstance(config, list) and isinstance(part, int) and part < len(config)
        is_key = isinstance(config, Mapping) and part in config
        if not (is_index or is_key):
            return {}
        config = config[part]
    return section
