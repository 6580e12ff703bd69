"""Applies words to the config of an earlier run: one that is resumed, or one whose config a new command uses.

Others may write to the store that the config comes from. So the code that it names is checked (`trust.py`), its
interpolations resolve only within itself, and files and addresses outside the current folder must be typed. Masked
secrets are filled in from this machine's options.

With `resume=RUN` the base is the run's saved config. Typed overrides replace its values; the defaults of this command
are ignored. The steps that the run has already taken must keep their meaning, so only some keys may change.
"""

import copy
import itertools
import json
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    resolve_config,
    shorten_error,
)
from scaleflow.config.interpolations import (
    KeyPath,
    depends_on_environment,
    find_dependents,
    find_parent,
    list_interpolations,
    to_plain,
)
from scaleflow.config.parse import every_key, flatten_config, format_value, is_under, parse_section
from scaleflow.config.trust import (
    KEY_INTERPOLATION,
    check_trusted_targets,
    check_values,
    list_own_modules,
    list_own_targets,
    unresolvable_error,
)
from scaleflow.config.unknown_keys import suggest, unknown_key_error, unknown_option_error
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces import BY_SIZE, Tracking, name_command
from scaleflow.interfaces.features import find_placeholders, list_ignored_keys
from scaleflow.interfaces.secret_masking import MASK, mask_secrets
from scaleflow.runs.folder import RunFolder
from scaleflow.runs.objects import list_object_keys
from scaleflow.runs.state import RunState

Config = dict[str, Any]

#: (section, key) of values that belong to the tracked run's machine. They are cleared.
MACHINE_KEYS = (("checkpoint", "folder"), ("tracking", "uri"))

RUN_DIR = "hydra.run.dir"

#: A valid option: options are shown, and become part of a run's name.
NAME = re.compile(r"[\w.-]+")


def find_store_options(words: CommandWords) -> Tracking:
    """Returns the options of the store with the run: a typed `tracking.uri`, otherwise the defaults."""
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
        interpolations: those of which the tracked config has the values.
        files: where files of the run are now, by the keys that name them. Their places are not checked.

    Raises ConfigError, naming the key that is wrong or not trusted.
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
        # The base has the default option of these groups: another one may have keys without a value.
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
    typed_modules = reused.get("trusted_modules") if "trusted_modules" in local_keys else None  # not the tracked ones
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
    """Returns the typed option of each group. Raises ConfigError if there is no such option."""
    groups = {str(o.key_or_group): o for o in overrides if o.key_or_group in options}
    for key, override in groups.items():
        if override.is_delete():
            known = ", ".join(options[key])
            raise ConfigError(f"~{key}: a config group cannot be removed; write {key}=OPTION ({known})")
        if key != "experiment" and str(override.value()) not in options[key]:  # that is null
            raise unknown_option_error(key, str(override.value()), options[key])
    return {key: str(override.value()) for key, override in groups.items() if key != "experiment"}


def drop_missing(config: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
    """Returns a config without the keys that have no value, in the sections that a command does not use."""
    kept = dict(config)
    for name, section in config.items():
        if name not in used and isinstance(section, Mapping):
            kept[name] = {key: value for key, value in section.items() if value != MISSING}
    return kept


def find_config_dirs(command: str) -> list[str]:
    """Returns the folders of `--config-dir` in a command line; none if it cannot be parsed."""
    try:
        return parse_config_dirs(shlex.split(command))
    except ValueError:  # it was cut inside of quotes
        return []


def check_code(config: Mapping[str, Any], trusted: Sequence[str], words: CommandWords, search: Sequence[str]) -> None:
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


def complete_command(config: Mapping[str, Any], trusted: Sequence[str], words: CommandWords) -> str:
    """Returns the command with a `--trust` for each module of the user's code, and the tracked run's `--config-dir`.

    It is empty if the command has all of them.
    """
    flags = [("--config-dir", each) for each in words.missing_dirs] + [
        ("--trust", each) for each in list_own_modules(config, trusted)
    ]
    return shlex.join([*words.line, *itertools.chain.from_iterable(flags)]) if flags else ""


def check_rerun_overrides(words: CommandWords) -> None:
    """Raises `ConfigError` for an override that a tracked run does not support."""
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
    params: Mapping[str, str], groups: Mapping[str, str], words: CommandWords, options: Mapping[str, Sequence[str]]
) -> ComposedConfig:
    """Composes this machine's options: those that are typed, otherwise those of the run that exist here."""
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
    """Resolves the interpolations of a tracked config within the tracked config and the typed values alone.

    An interpolation that this machine's options have too stays unresolved. Returns the config, and the keys of these.

    Args:
        raw: the sections of the tracked config that the command uses.
        default: this machine's options.
        unused: the other sections of the tracked config, which the used ones may refer to.
        typed: the values of typed keys, which the tracked keys that refer to them follow.
    """
    local_keys = find_local_interpolations(raw, default)
    isolated = OmegaConf.create({**hide_resolvers(unused), **copy.deepcopy(raw)})
    for key, value in typed.items():
        if has_leaf(raw, key):
            OmegaConf.update(isolated, key, value)
    for key in local_keys:
        OmegaConf.update(isolated, key, MASK)  # another key cannot refer to this machine's value
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
    """Returns the keys whose interpolations this machine's options have too.

    Raises ConfigError for another interpolation that is more than a reference to a key.
    """
    local_keys: set[str] = set()
    for key, value in iterate_leaves(raw):
        if not (isinstance(value, str) and "${" in value):
            continue
        if value == get_at(default, key):
            local_keys.add(key)
        elif "${" in KEY_INTERPOLATION.sub("", value) or "\\${" in value:  # not only another key
            raise unresolvable_error(key, value)
    return local_keys


def hide_resolvers(config: Mapping[str, Any]) -> Config:
    """Returns a tracked config with masks in place of interpolations that would call a resolver."""
    hidden = copy.deepcopy(dict(config))
    for path, text in list_interpolations(hidden).items():
        if "${" in KEY_INTERPOLATION.sub("", text):
            find_section(hidden, path)[path[-1]] = MASK
    return hidden


def has_leaf(config: Config, key: str) -> bool:
    """Whether a plain config has a key, with a value that is no section."""
    parent, _, leaf = key.rpartition(".")
    section = get_at(config, parent) if parent else config
    return isinstance(section, dict) and leaf in section and not isinstance(section[leaf], dict)


def compare_environment(
    tracked: Config, base: ComposedConfig, interpolations: Mapping[KeyPath, str]
) -> tuple[set[str], list[str]]:
    """Compares the values with which a run began with those that this machine's options would have now.

    Only interpolations that are in these options are resolved: a tracked one may be written by others. Returns the keys
    with the same value, and a note for each key with another one.
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


#: Keys about the command that resumes a run.
RESUME_KEYS = ("resume", "resume_data", "resume_code")

#: Sections of the core, and keys of `training`, that may change when a run is resumed. Docs name all of them.
CHANGEABLE = ("profiler", "tracking", "strategy", "hardware", "cluster", "debug", "sweep")
LENGTH_KEYS = ("epochs", "max_steps")

#: Keys that decide which variables are trained. A checkpoint has the optimizer's state for these variables only.
TRAINED = ("model.freeze", "model.lora")


def load_saved_config(files: RunFolder, composed: Config) -> Config:
    """Loads the run's config.yaml, with the references between its keys. Masked values are replaced by those of this
    command's config.
    """
    try:
        loaded = to_container(OmegaConf.load(files.config))  # type: ignore[arg-type]
    except (OSError, ValueError, AssertionError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"resume={files.path}: its config.yaml can't be read: {error}") from error
    for each in list_object_keys(loaded):
        copied = files.path / each.name
        if not Path(each.value).exists() and copied.exists():  # the file is gone, or the folder was moved
            loaded[each.section][each.key] = str(copied)
    return dict(unmask_secrets(loaded, composed))


def parse_param(text: str) -> Any:
    """Returns the value of a param: text stands as it is, other values as JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def load_interpolations(text: str) -> dict[KeyPath, str]:
    """Parses an interpolations.yaml: what config.yaml has the values of."""
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        return {}
    return list_interpolations(content)


def read_interpolations(files: RunFolder) -> dict[KeyPath, str]:
    """Reads the interpolations of which a run's config.yaml has the values; {} if there are none."""
    return load_interpolations(files.interpolations.read_text()) if files.interpolations.is_file() else {}


def find_section(config: Any, path: KeyPath) -> Any:
    """Returns the mapping or the list of a plain config that has a value at a path; {} if there is none."""
    section: Any = {}
    for part in path:
        section = config
        is_index = isinstance(config, list) and isinstance(part, int) and part < len(config)
        is_key = isinstance(config, Mapping) and part in config
        if not (is_index or is_key):
            return {}
        config = config[part]
    return section


def restore_interpolations(config: Config, interpolations: Mapping[KeyPath, str], typed: Sequence[str]) -> Config:
    """Returns a config with those interpolations in place of their values that depend on a typed key."""
    restored = copy.deepcopy(config)
    for path, text in interpolations.items():
        section = find_section(restored, path)
        if section:
            section[path[-1]] = text
    dependents = find_dependents(restored, typed)
    for path in {*interpolations} - dependents:
        if section := find_section(restored, path):
            section[path[-1]] = find_section(config, path)[path[-1]]
    return restored


def note_environment(config: Config, interpolations: Mapping[KeyPath, str], typed: Sequence[str]) -> list[str]:
    """Returns a note for each value from the environment that would be another one now.

    Args:
        config: the run's config, with the values with which it began.
        interpolations: those that it has the values of.
        typed: the keys and groups that the command sets itself.
    """
    notes = []
    for path, text in interpolations.items():
        key = ".".join(map(str, path))
        section = find_section(config, path)
        if not depends_on_environment(text) or not section or is_under(key, typed):
            continue
        begun = section[path[-1]]
        raw = copy.deepcopy(config)
        find_section(raw, path)[path[-1]] = text
        try:
            now = to_plain(find_parent(OmegaConf.create(raw), path)[path[-1]])
        except OmegaConfBaseException:
            state = "cannot be resolved here"
        else:
            state = f"is {format_value(now)} here"
        if state != f"is {format_value(begun)} here":
            notes.append(f"note: {key}={format_value(begun)} as when the run began; {text} {state}")
    return notes


def unmask_secrets(saved: Any, composed: Any) -> Any:
    if isinstance(saved, Mapping):
        there = composed if isinstance(composed, Mapping) else {}
        return {str(key): unmask_secrets(value, there.get(key)) for key, value in saved.items()}
    return composed if isinstance(saved, str) and MASK in saved else saved


def merge_config(saved: Config, composed: Config, keys: Sequence[str]) -> Config:
    """Returns the saved config with this command's values for the typed keys, which can be whole groups.

    Both have the references between their keys, so that these follow the typed values.
    """
    result = copy.deepcopy(saved)
    for key in keys:
        if key == "experiment":
            raise ConfigError(
                "resume with experiment: a recipe cannot be applied to an existing run; type the keys to change"
            )
        if key.startswith("hydra"):
            continue
        *parents, leaf = key.split(".")
        target = result
        source = composed
        for parent in parents:
            if not isinstance(target.get(parent), dict):
                target[parent] = {}
            inner = source.get(parent)
            target = target[parent]
            source = inner if isinstance(inner, dict) else {}
        if leaf in source:
            target[leaf] = copy.deepcopy(source[leaf])
        else:
            target.pop(leaf, None)
    return result


def list_changeable() -> Sequence[str]:
    """Returns the sections, and keys of features, that may change when a run is resumed, as messages name them."""
    return ("checkpoint", "evaluation", *list_ignored_keys(), *CHANGEABLE)


def is_changeable(key: str) -> bool:
    """Whether a command that resumes a run may change a key of its config."""
    section, _, rest = key.partition(".")
    is_length = section == "training" and rest in LENGTH_KEYS
    return is_length or is_under(key, (*list_changeable(), *RESUME_KEYS))


def keep_fixed_values(saved: Config, config: Config, typed: Sequence[str]) -> list[str]:
    """Gives the keys their saved values that refer to a typed key and may not change. Returns a note for each."""
    notes = []
    for key, before, now in list(find_differences(saved, config)):
        is_typed = is_under(key, typed) or any(is_under(word, [key]) for word in typed)
        parent, _, leaf = key.rpartition(".")
        section = get_at(config, parent) if parent else config
        if is_changeable(key) or is_typed or not isinstance(section, dict) or leaf not in section:
            continue
        section[leaf] = copy.deepcopy(before)
        notes.append(
            f"note: {key}={format_value(before)} as when the run began: it refers to a key that was typed, and would "
            f"be {format_value(now)}"
        )
    return notes


def check_changes(saved: Config, config: Config, typed: Sequence[str], folder: Path) -> None:
    """Rejects changes that would give the steps already taken another meaning."""
    known = every_key(saved)
    for key, before, now in find_differences(saved, config):
        if is_changeable(key):
            continue
        if key not in known and any(f"{word}.".startswith(f"{key}.") for word in typed):
            raise ConfigError(f"{key}: the run's config has no such key{suggest(key, known)}")
        if key.startswith(TRAINED):
            raise ConfigError(
                f"{key}={format_value(now)}: the run was begun with {key}={format_value(before)}; what is trained is "
                f"fixed when a run begins, so start a new run with model.init_from={folder}"
            )
        raise ConfigError(
            f"{key}={format_value(now)}: the run was started with {key}={format_value(before)}; a resumed run may "
            f"change only its length ({', '.join(f'training.{name}' for name in LENGTH_KEYS)}) and "
            f"{', '.join(list_changeable())}; start a new run for other changes: {name_command('rerun')}"
        )


def check_length(config: Config, typed: Sequence[str], state: RunState) -> None:
    """Rejects a length that is less than what the run has trained: its model would be that of more steps."""
    per_epoch = int(state.params["resolved.steps_per_epoch"])
    for name, steps in (("epochs", per_epoch), ("max_steps", 1)):
        wanted = config["training"].get(name)
        done = state.checkpoint or 0
        if f"training.{name}" in typed and isinstance(wanted, int) and 0 < wanted * steps < done:
            raise ConfigError(
                f"training.{name}={wanted}: the run has trained {done:,} steps ({wanted * steps:,} are asked for); "
                f"name at least {-(-done // steps):,}, or leave it out"
            )


def find_differences(saved: Any, config: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, saved value, new value) of each leaf that differs."""
    if isinstance(saved, Mapping) and isinstance(config, Mapping):
        saved, config = ({str(name): value for name, value in each.items()} for each in (saved, config))
        for name in {**saved, **config}:
            yield from find_differences(saved.get(name), config.get(name), f"{key}.{name}" if key else str(name))
    elif saved != config:
        yield key, saved, config


def keep_sizes(config: Config, params: Mapping[str, str]) -> None:
    """Replaces `by_size` by the values that the number of training examples gave when the run began."""
    for key, value in flatten_config(config).items():
        if value == BY_SIZE and (known := params.get(f"resolved.{key}")) is not None:
            parent, _, leaf = key.rpartition(".")
            get_at(config, parent)[leaf] = json.loads(known)


def keep_batching(config: Config, params: Mapping[str, str]) -> None:
    """Fixes the global batch size and the caching in a resumed run's config to those of its `params`, so that they do
    not depend on the replicas and the memory here.
    """
    training = config["training"]
    dataset = config["dataset"]
    if training.get("global_batch_size") is None:
        training["global_batch_size"] = int(params["resolved.global_batch_size"])
    if dataset.get("cache") == "auto":  # a stream that is cached is shuffled in another way
        dataset["cache"] = params["resolved.cache"]


def keep_store(config: Config, files: RunFolder) -> None:
    """Fixes the store that the run is recorded in, so that it does not depend on the current folder and environment."""
    tracking = config["tracking"]
    known = files.read_record().get("uri")
    if tracking.get("uri") is None and known and mask_secrets(known) == known and MASK not in known:
        tracking["uri"] = known


def is_longer(saved: Config, config: Config, state: RunState) -> bool:
    """Returns whether a config asks for more than a finished run, and commands that made it longer, have trained."""
    trained = {} if state.is_open else state.length

    def size(training: Mapping[str, Any], name: str) -> float:
        value = training.get(name)
        return value if isinstance(value, int | float) else float("inf")  # `parse_plan` rejects other values

    return any(
        size(config["training"], name) > max(size(saved["training"], name), trained.get(name, 0))
        for name in LENGTH_KEYS
    )


def apply_length(config: Config, length: Mapping[str, Any], params: Mapping[str, str]) -> Config:
    """Returns the config of a run with the length that a later command gave it.

    Keys that refer to the length follow it if a resumed run may change them. Others keep the values of the `params`.
    """
    if not length:
        return config
    changed = copy.deepcopy(config)
    for path in find_dependents(config, length):
        known = params.get(".".join(map(str, path)), MASK)
        if not is_changeable(".".join(map(str, path))) and MASK not in known:
            find_section(changed, path)[path[-1]] = parse_param(known)
    for key, value in length.items():
        section, _, name = key.partition(".")
        changed.setdefault(section, {})[name] = value
    return changed


@dataclass(frozen=True)
class ResumedConfig:
    """The config of a run that a command resumes."""

    composed: ComposedConfig
    is_longer: bool  # whether it asks for more than the run has trained
    length: Mapping[str, Any]  # the keys of the length that differ from those with which the run began


def reuse_to_resume(composed: ComposedConfig, state: RunState, files: RunFolder) -> ResumedConfig:
    """Returns the saved config of a run, with its length of now and the typed keys of a command that resumes it.

    Raises ConfigError if a typed key may not change.
    """
    typed = [each for each in composed.words.parsed if each.key_or_group != "resume"]
    keys = [str(each.key_or_group) for each in typed]
    begun = load_saved_config(files, composed.resolved)
    if "training" not in begun:
        raise ConfigError(
            f"resume={files.path}: this folder belongs to a pipeline, or to a stage that trains no model; repeat the "
            f"pipeline's command, {name_command('pipeline')} NAME, or name the folder of a run that trained"
        )
    saved = resolve_config(OmegaConf.create(begun))
    interpolations = read_interpolations(files)
    changed_keys = [*keys, *state.resumed_length]
    restored = restore_interpolations(begun, interpolations, changed_keys)
    current = apply_length(restored, state.resumed_length, state.params)
    config = resolve_config(OmegaConf.create(merge_config(current, composed.raw, keys)))
    notes = [*note_environment(begun, interpolations, changed_keys), *keep_fixed_values(saved, config, keys)]
    for placeholder in find_placeholders(config):  # the run keeps the value that was found when it began
        section, _, key = placeholder.key.partition(".")
        config[section][key] = saved[section][key]
    check_changes(saved, config, keys, folder=files.path)
    check_length(config, keys, state)
    for each in (saved, config):
        keep_sizes(each, state.params)
    keep_batching(config, state.params)
    keep_store(config, files)
    # Each command says anew whether data and code may have changed.
    config |= {"resume": str(files.path), **{key: "same" for key in RESUME_KEYS[1:] if key not in keys}}
    params = {**state.params, **{group: composed.choices[group] for group in keys if group in composed.choices}}
    choices = {group: option for group, option in params.items() if group in composed.choices}
    assert state.ready is not None  # `prepare_resume` refuses a run without it
    search = list(dict.fromkeys((*composed.search, *state.ready.search)))
    words = CommandWords([str(each.input_line).removeprefix("++") for each in typed])
    resumed = ComposedConfig(config, choices, search, folder=files.path, words=words, notes=notes)
    lengths = {f"training.{name}": config["training"].get(name) for name in LENGTH_KEYS}
    length = {
        key: value for key, value in lengths.items() if key in state.resumed_length or value != get_at(saved, key)
    }
    return ResumedConfig(resumed, is_longer(saved, config, state), length)
