"""Makes a config from the config of a tracked run, for a new run or another command about that run.

Others may write to the store that the config comes from. So the code that it names is checked (`trust.py`), its
interpolations resolve only within itself, and files and addresses outside the current folder must be typed. Masked
secrets are filled in from this machine's options. `resume.py` has the rules of `resume=RUN`.
"""

import copy
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
    options = list_options(words.config_dirs)
    groups = choose_groups(words.parsed, options)
    used: Config = {}
    unused: Config = {}
    for key, value in tracked_config.items():
        if key not in groups and (sections is None or key in sections):
            used[key] = copy.deepcopy(value)
        else:
            unused[key] = value
    clear_keys(used, sorted(words.keys))
    set_paths(used, files or {})
    if sections is not None:
        params = drop_ignored_keys(params)
    base = compose_base(params, groups, words, options=options)
    default = base.raw
    if sections is not None:
        default = drop_missing(default, {*used, *groups})

    # `local_keys`: keys whose values come from this command or machine, and not from the store. They need no check.
    tracked, local_keys = resolve_separately(used, default, unused, list_typed_values(words.parsed))
    local_keys.update(groups)
    local_keys.update(files or ())
    local_keys.update(key for key in default if key not in tracked)
    same_keys, notes = compare_environment(tracked, base, interpolations)
    local_keys |= same_keys
    config = copy.deepcopy({**default, **tracked})
    local_keys |= clear_machine_keys(config)
    reused = OmegaConf.create(config)
    local_keys |= apply_overrides(reused, words.parsed, default, ignored=(*groups, "experiment", RUN_DIR))
    reused.trusted_modules = list_trusted_modules(reused, words, has_own="trusted_modules" in local_keys)
    local_keys.add("trusted_modules")
    reused.resume = None

    check_code(to_container(reused), reused.trusted_modules, words, search=base.search)
    restore_secrets(reused, default, local_keys)
    check_values(to_container(reused), local_keys, words.trusted)
    return replace(
        base,
        config=reused,
        choices={**base.choices, **select_tracked_choices(params, base.choices, used), **groups},
        folder=find_typed_folder(words) or base.folder,
        words=words,
        notes=notes,
    )


def set_paths(config: Config, files: Mapping[str, Path]) -> None:
    """Sets the keys of the run's files to their present paths."""
    for key, path in files.items():
        section, _, name = key.partition(".")
        config[section][name] = str(path)


def drop_ignored_keys(params: Mapping[str, str]) -> dict[str, str]:
    """Returns params without the options of groups that a command about a run ignores.

    The base uses this machine's default option for these groups: another option may have keys without a value.
    """
    ignored = list_ignored_keys()
    return {key: value for key, value in params.items() if key not in ignored}


def clear_machine_keys(config: Config) -> set[str]:
    """Clears the values that belong to the machine of the tracked run. Returns their keys."""
    cleared = set()
    for section, key in MACHINE_KEYS:
        if isinstance(config.get(section), dict) and key in config[section]:
            config[section][key] = None
            cleared.add(f"{section}.{key}")
    return cleared


def list_trusted_modules(config: DictConfig, words: CommandWords, has_own: bool) -> list[str]:
    """Returns the modules whose code may run: those of `--trust`, and those of the config if this command set them.

    Args:
        has_own: whether `trusted_modules` comes from this command or machine. The tracked value is never used.
    """
    flagged = [name for name in words.trusted if "/" not in name]
    typed = (config.get("trusted_modules") or []) if has_own else []
    return list(dict.fromkeys([*flagged, *typed]))


def select_tracked_choices(params: Mapping[str, str], groups: Collection[str], used: Config) -> dict[str, str]:
    """Returns the run's option of each group whose tracked section is used."""
    choices = {}
    for group in groups:
        option = params.get(group, "")
        if group in used and NAME.fullmatch(option):
            choices[group] = option
    return choices


def find_typed_folder(words: CommandWords) -> Path | None:
    """Returns the last typed `hydra.run.dir`; None if there is none."""
    folder = None
    for override in words.parsed:
        if override.key_or_group == RUN_DIR:
            folder = Path(str(override.value()))
    return folder


def choose_groups(overrides: Sequence[Override], options: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the typed option of each group. Raises ConfigError for an unknown option."""
    typed = {str(override.key_or_group): override for override in overrides}
    chosen = {}
    for group, override in typed.items():
        if group not in options:
            continue
        if override.is_delete():
            known = ", ".join(options[group])
            raise ConfigError(f"~{group}: a config group cannot be removed; write {group}=OPTION ({known})")
        if group == "experiment":  # a recipe is no option; `check_rerun_overrides` allows only `experiment=null`
            continue
        option = str(override.value())
        if option not in options[group]:
            raise unknown_option_error(group, option, options[group])
        chosen[group] = option
    return chosen


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
    flags = []
    for folder in words.missing_dirs:
        flags += ["--config-dir", folder]
    for module in list_own_modules(config, trusted):
        flags += ["--trust", module]
    if not flags:
        return ""
    return shlex.join([*words.line, *flags])


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
        section, leaf = find_leaf(config, key)
        if leaf in section and not isinstance(section[leaf], dict | list):
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
    choices = {}
    for group, names in options.items():
        option = params.get(group)
        if group != "experiment" and option in names:
            choices[group] = str(option)
    choices |= groups
    overrides = [make_override(group, option) for group, option in choices.items()]
    return compose_config(overrides, words.config_dirs)


def list_typed_values(overrides: Sequence[Override]) -> dict[str, Any]:
    """Returns the typed values to which a tracked config may refer: those without interpolations."""
    values = {}
    for override in overrides:
        if not override.is_delete():
            values[str(override.key_or_group)] = override.value()
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
    section, leaf = find_leaf(config, key)
    return leaf in section and not isinstance(section[leaf], dict)


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
        name = path[-1]
        if not section or not local or local[name] != text or section[name] is None:
            continue
        key = ".".join(map(str, path))
        begun = section[name]
        if path in base.values and base.values[path] == begun:
            same_keys.add(key)
        elif depends_on_environment(text):
            state = "cannot be resolved here"
            if path in base.values:
                state = f"is {format_value(base.values[path])} here"
            notes.append(f"note: {key}={format_value(begun)} as when the run began; {text} {state}")
    return same_keys, notes


def apply_overrides(
    config: DictConfig, overrides: Sequence[Override], default: Mapping[str, Any], ignored: Collection[str]
) -> set[str]:
    """Applies overrides to a config, except for some keys. Returns the keys that it applied."""
    keys = set()
    for override in overrides:
        if override.key_or_group not in ignored:
            apply_override(config, override, default)
            keys.add(str(override.key_or_group))
    return keys


def apply_override(config: DictConfig, override: Override, default: Mapping[str, Any]) -> None:
    """Applies an override to a config, as Hydra does."""
    key = str(override.key_or_group)
    exists = key in list_keys(config)
    if override.is_delete():
        if not exists:
            raise unknown_key_error(key, list_keys(config))
        parent, _, leaf = key.rpartition(".")
        section = OmegaConf.select(config, parent) if parent else config
        del section[leaf]
        return
    is_known = exists or get_at(default, key) is not None
    if not (is_known or override.is_add() or override.is_force_add()):
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


def find_leaf(config: Config, key: str) -> tuple[Config, str]:
    """Returns the section of a plain config that holds a dotted key, and the key's last part.

    The section is {} if there is none.
    """
    parent, _, leaf = key.rpartition(".")
    section = get_at(config, parent) if parent else config
    return (section if isinstance(section, dict) else {}), leaf


def load_interpolations(text: str) -> dict[KeyPath, str]:
    """Parses an interpolations.yaml: the interpolations whose values are in config.yaml."""
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        return {}
    return list_interpolations(content)


def read_interpolations(files: RunFolder) -> dict[KeyPath, str]:
    """Reads the interpolations whose values are in the run's config.yaml; {} if it has none."""
    if not files.interpolations.is_file():
        return {}
    return load_interpolations(files.interpolations.read_text())


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
