"""Makes the config of a run that is resumed, with `resume=RUN`, and says what may change.

The base is the config that the run saved. Typed overrides replace its values; the defaults of this command are ignored.
The steps that the run has already taken must keep their meaning, so only some keys may change.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scaleflow.config.compose import (
    CommandWords,
    ComposedConfig,
    resolve_config,
)
from scaleflow.config.interpolations import (
    KeyPath,
    depends_on_environment,
    find_dependents,
    find_parent,
    to_plain,
)
from scaleflow.config.parse import every_key, flatten_config, format_value, is_under
from scaleflow.config.unknown_keys import suggest
from scaleflow.errors import ConfigError
from scaleflow.interfaces import BY_SIZE, name_command
from scaleflow.interfaces.features import find_placeholders, list_ignored_keys
from scaleflow.interfaces.secret_masking import MASK, mask_secrets
from scaleflow.runs.folder import RunFolder
from scaleflow.runs.objects import list_object_keys
from scaleflow.runs.provenance.tags import read_run_tags
from scaleflow.runs.reuse import Config, find_leaf, find_section, get_at, read_interpolations, to_container
from scaleflow.runs.state import RunState

#: Keys that only concern the resuming command.
RESUME_KEYS = ("resume", "resume_data", "resume_code")

#: Core sections, and keys of `training`, that may change when a run is resumed. The docs list all of them.
CHANGEABLE = ("profiler", "tracking", "strategy", "hardware", "cluster", "debug", "sweep")
LENGTH_KEYS = ("epochs", "max_steps")

#: Keys that decide which variables are trained. A checkpoint has optimizer state only for these variables.
TRAINED = ("model.freeze", "model.lora")


def load_saved_config(files: RunFolder, composed: Config) -> Config:
    """Loads the run's config.yaml with the references between its keys.

    Masked secrets get the values of this command's config.
    """
    try:
        loaded = to_container(OmegaConf.load(files.config))  # type: ignore[arg-type]
    except (OSError, ValueError, AssertionError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"resume={files.path}: its config.yaml can't be read: {error}") from error
    for object_key in list_object_keys(loaded):
        copied = files.path / object_key.name
        if not Path(object_key.value).exists() and copied.exists():  # the file is gone, or the folder was moved
            loaded[object_key.section][object_key.key] = str(copied)
    return dict(unmask_secrets(loaded, composed))


def parse_param(text: str) -> Any:
    """Returns the value of a param. Text that is not valid JSON is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def restore_interpolations(config: Config, interpolations: Mapping[KeyPath, str], typed: Sequence[str]) -> Config:
    """Returns a config with its interpolations restored where their values depend on a typed key."""
    restored = copy.deepcopy(config)
    for path, text in interpolations.items():
        section = find_section(restored, path)
        if section:
            section[path[-1]] = text
    dependents = find_dependents(restored, typed)
    for path in interpolations:
        section = find_section(restored, path)
        if section and path not in dependents:
            section[path[-1]] = find_section(config, path)[path[-1]]
    return restored


def note_environment(config: Config, interpolations: Mapping[KeyPath, str], typed: Sequence[str]) -> list[str]:
    """Returns a note for each value from the environment that would be different now.

    Args:
        config: the run's config, with the values that it began with.
        interpolations: the interpolations whose values are in `config`.
        typed: the keys and groups that this command sets.
    """
    notes = []
    for path, text in interpolations.items():
        key = ".".join(map(str, path))
        section = find_section(config, path)
        if not depends_on_environment(text) or not section or is_under(key, typed):
            continue
        begun = format_value(section[path[-1]])
        raw = copy.deepcopy(config)
        find_section(raw, path)[path[-1]] = text
        try:
            now = to_plain(find_parent(OmegaConf.create(raw), path)[path[-1]])
        except OmegaConfBaseException:
            state = "cannot be resolved here"
        else:
            state = f"is {format_value(now)} here"
        if state != f"is {begun} here":
            notes.append(f"note: {key}={begun} as when the run began; {text} {state}")
    return notes


def unmask_secrets(saved: Any, composed: Any) -> Any:
    """Returns saved values with the composed values in place of masked secrets."""
    if isinstance(saved, Mapping):
        composed_section = composed if isinstance(composed, Mapping) else {}
        return {str(key): unmask_secrets(value, composed_section.get(key)) for key, value in saved.items()}
    if isinstance(saved, str) and MASK in saved:
        return composed
    return saved


def merge_config(saved: Config, composed: Config, keys: Sequence[str]) -> Config:
    """Returns the saved config with this command's values for the typed keys, which can be whole groups.

    Both configs still contain the references between their keys, so these references follow the typed values.
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
    """Returns the sections and feature keys that may change when a run is resumed, as messages name them."""
    return ("checkpoint", "evaluation", *list_ignored_keys(), *CHANGEABLE)


def is_changeable(key: str) -> bool:
    """Whether a command that resumes a run may change a key of its config."""
    section, _, rest = key.partition(".")
    is_length = section == "training" and rest in LENGTH_KEYS
    return is_length or is_under(key, (*list_changeable(), *RESUME_KEYS))


def keep_fixed_values(saved: Config, config: Config, typed: Sequence[str]) -> list[str]:
    """Restores fixed keys that changed only because they refer to a typed key. Returns a note for each."""
    notes = []
    for key, before, now in list(find_differences(saved, config)):
        is_typed = is_under(key, typed) or any(is_under(word, [key]) for word in typed)
        section, leaf = find_leaf(config, key)
        if is_changeable(key) or is_typed or leaf not in section:
            continue
        section[leaf] = copy.deepcopy(before)
        notes.append(
            f"note: {key}={format_value(before)} as when the run began: it refers to a key that was typed, and would "
            f"be {format_value(now)}"
        )
    return notes


def check_changes(saved: Config, config: Config, typed: Sequence[str], folder: Path) -> None:
    """Rejects changes that would alter the meaning of the steps already taken.

    Raises ConfigError for the first key that changed and may not.
    """
    known_keys = every_key(saved)
    for key, before, now in find_differences(saved, config):
        if is_changeable(key):
            continue
        is_typed = any(is_under(word, [key]) for word in typed)
        if is_typed and key not in known_keys:
            raise ConfigError(f"{key}: the run's config has no such key{suggest(key, known_keys)}")
        setting = f"{key}={format_value(now)}"
        begun = f"{key}={format_value(before)}"
        if key.startswith(TRAINED):
            raise ConfigError(
                f"{setting}: the run was begun with {begun}; what is trained is fixed when a run begins, so start a "
                f"new run with model.init_from={folder}"
            )
        length = ", ".join(f"training.{name}" for name in LENGTH_KEYS)
        raise ConfigError(
            f"{setting}: the run was started with {begun}; a resumed run may change only its length ({length}) and "
            f"{', '.join(list_changeable())}; start a new run for other changes: {name_command('rerun')}"
        )


def check_length(config: Config, typed: Sequence[str], state: RunState) -> None:
    """Rejects a length below the steps already trained: the model would have more steps than its config says."""
    steps_of_unit = {"epochs": int(state.params["resolved.steps_per_epoch"]), "max_steps": 1}
    trained = state.checkpoint or 0
    for name, unit in steps_of_unit.items():
        wanted = config["training"].get(name)
        if f"training.{name}" not in typed or not isinstance(wanted, int):
            continue
        wanted_steps = wanted * unit
        if 0 < wanted_steps < trained:
            raise ConfigError(
                f"training.{name}={wanted}: the run has trained {trained:,} steps ({wanted_steps:,} are asked for); "
                f"name at least {math.ceil(trained / unit):,}, or leave it out"
            )


def find_differences(saved: Any, config: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, saved value, new value) of each leaf that differs."""
    if isinstance(saved, Mapping) and isinstance(config, Mapping):
        saved_values = {str(name): value for name, value in saved.items()}
        values = {str(name): value for name, value in config.items()}
        for name in {**saved_values, **values}:
            path = f"{key}.{name}" if key else name
            yield from find_differences(saved_values.get(name), values.get(name), path)
    elif saved != config:
        yield key, saved, config


def keep_sizes(config: Config, params: Mapping[str, str]) -> None:
    """Replaces `by_size` with the values that were chosen by the number of training examples when the run began."""
    for key, value in flatten_config(config).items():
        chosen = params.get(f"resolved.{key}")
        if value == BY_SIZE and chosen is not None:
            section, leaf = find_leaf(config, key)
            section[leaf] = json.loads(chosen)


def keep_batching(config: Config, params: Mapping[str, str]) -> None:
    """Sets the global batch size and the cache of a resumed run to the values in its `params`.

    So they do not depend on the replicas and the memory of this machine.
    """
    training = config["training"]
    dataset = config["dataset"]
    if training.get("global_batch_size") is None:
        training["global_batch_size"] = int(params["resolved.global_batch_size"])
    if dataset.get("cache") == "auto":  # a cached stream is shuffled differently
        dataset["cache"] = params["resolved.cache"]


def keep_store(config: Config, files: RunFolder) -> None:
    """Sets the store to the run's recorded one, so that it does not depend on the current folder and environment."""
    tracking = config["tracking"]
    recorded = files.read_record().get("uri")
    if tracking.get("uri") is not None or not recorded:
        return
    has_secret = mask_secrets(recorded) != recorded or MASK in recorded
    if not has_secret:
        tracking["uri"] = recorded


def is_longer(saved: Config, config: Config, state: RunState) -> bool:
    """Returns whether a config asks for more training than the run and earlier resumes were set to."""
    trained = {} if state.is_open else state.length
    for name in LENGTH_KEYS:
        earlier = max(read_length(saved, name), trained.get(name, 0))
        if read_length(config, name) > earlier:
            return True
    return False


def read_length(config: Config, name: str) -> float:
    """Returns a length of the training; infinity if the config does not limit it."""
    value = config["training"].get(name)
    return value if isinstance(value, int | float) else float("inf")  # `parse_plan` rejects other values


def apply_length(config: Config, length: Mapping[str, Any], params: Mapping[str, str]) -> Config:
    """Returns the run's config with the length that a later command set.

    Keys that refer to the length follow it if a resumed run may change them. Other keys keep their values from
    `params`.
    """
    if not length:
        return config
    changed = copy.deepcopy(config)
    for path in find_dependents(config, length):
        key = ".".join(map(str, path))
        recorded = params.get(key, MASK)
        if not is_changeable(key) and MASK not in recorded:
            find_section(changed, path)[path[-1]] = parse_param(recorded)
    for key, value in length.items():
        section, _, name = key.partition(".")
        changed.setdefault(section, {})[name] = value
    return changed


@dataclass(frozen=True)
class ResumedConfig:
    """The config of a run that a command resumes."""

    composed: ComposedConfig
    is_longer: bool  # whether it asks for more training than before
    length: Mapping[str, Any]  # the length keys that differ from the run's first command


def make_resumed_config(
    composed: ComposedConfig, state: RunState, files: RunFolder, has_length: bool = True
) -> ResumedConfig:
    """Returns the saved config of a run with its current length and the typed keys of the resuming command.

    Args:
        has_length: whether the config decides how long the run trains and on which batches. A script decides it itself.

    Raises ConfigError if a typed key may not change.
    """
    typed = [override for override in composed.words.parsed if override.key_or_group != "resume"]
    keys = [str(override.key_or_group) for override in typed]
    begun = load_saved_config(files, composed.resolved)
    if "training" not in begun:
        command = read_run_tags(files.path).get("scaleflow.command", "")
        named = f", {command}," if command else ""
        raise ConfigError(
            f"resume={files.path}: this folder belongs to a command that trains no model; repeat that command{named} "
            "or name the folder of a run that trained"
        )
    saved = resolve_config(OmegaConf.create(begun))
    interpolations = read_interpolations(files)
    changed_keys = [*keys, *state.resumed_length]
    restored = restore_interpolations(begun, interpolations, changed_keys)
    current = apply_length(restored, state.resumed_length, state.params)
    config = resolve_config(OmegaConf.create(merge_config(current, composed.raw, keys)))
    notes = note_environment(begun, interpolations, changed_keys)
    notes += keep_fixed_values(saved, config, keys)
    for placeholder in find_placeholders(config):  # the run keeps the values from its start
        section, _, key = placeholder.key.partition(".")
        config[section][key] = saved[section][key]
    check_changes(saved, config, keys, folder=files.path)
    if has_length:
        check_length(config, keys, state)
        keep_sizes(saved, state.params)
        keep_sizes(config, state.params)
        keep_batching(config, state.params)
    keep_store(config, files)
    config["resume"] = str(files.path)
    for key in ("resume_data", "resume_code"):
        if key not in keys:  # not inherited: each command decides again whether data and code may differ
            config[key] = "same"
    assert state.ready is not None  # `prepare_resume` refuses a run without it
    resumed = ComposedConfig(
        config,
        select_choices(composed, state, typed=keys),
        search=list(dict.fromkeys((*composed.search, *state.ready.search))),
        folder=files.path,
        words=CommandWords([str(override.input_line).removeprefix("++") for override in typed]),
        notes=notes,
    )
    length = list_changed_lengths(saved, config, state)
    return ResumedConfig(resumed, has_length and is_longer(saved, config, state), length)


def select_choices(composed: ComposedConfig, state: RunState, typed: Sequence[str]) -> dict[str, str]:
    """Returns the option of each group: the run's option, unless this command has typed another."""
    choices = {group: option for group, option in state.params.items() if group in composed.choices}
    for group in typed:
        if group in composed.choices:
            choices[group] = composed.choices[group]
    return choices


def list_changed_lengths(saved: Config, config: Config, state: RunState) -> dict[str, Any]:
    """Returns the length keys that a later command changed, this one or an earlier one."""
    changed = {}
    for name in LENGTH_KEYS:
        key = f"training.{name}"
        value = config["training"].get(name)
        if key in state.resumed_length or value != get_at(saved, key):
            changed[key] = value
    return changed
