"""Makes the config of a run that is resumed, with `resume=RUN`, and says what may change.

The base is the config that the run saved. Typed overrides replace its values; the defaults of this command are ignored.
The steps that the run has already taken must keep their meaning, so only some keys may change.
"""

import copy
import json
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
from scaleflow.runs.reuse import Config, find_section, get_at, read_interpolations, to_container
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
    for each in list_object_keys(loaded):
        copied = files.path / each.name
        if not Path(each.value).exists() and copied.exists():  # the file is gone, or the folder was moved
            loaded[each.section][each.key] = str(copied)
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
    for path in {*interpolations} - dependents:
        section = find_section(restored, path)
        if section:
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
    """Rejects changes that would alter the meaning of the steps already taken."""
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
    """Rejects a length below the steps already trained: the model would have more steps than its config says."""
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
    """Replaces `by_size` with the values that were chosen by the number of training examples when the run began."""
    for key, value in flatten_config(config).items():
        if value == BY_SIZE and (known := params.get(f"resolved.{key}")) is not None:
            parent, _, leaf = key.rpartition(".")
            get_at(config, parent)[leaf] = json.loads(known)


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
    known = files.read_record().get("uri")
    if tracking.get("uri") is None and known and mask_secrets(known) == known and MASK not in known:
        tracking["uri"] = known


def is_longer(saved: Config, config: Config, state: RunState) -> bool:
    """Returns whether a config asks for more training than the run and earlier resumes were set to."""
    trained = {} if state.is_open else state.length

    def size(training: Mapping[str, Any], name: str) -> float:
        value = training.get(name)
        return value if isinstance(value, int | float) else float("inf")  # `parse_plan` rejects other values

    return any(
        size(config["training"], name) > max(size(saved["training"], name), trained.get(name, 0))
        for name in LENGTH_KEYS
    )


def apply_length(config: Config, length: Mapping[str, Any], params: Mapping[str, str]) -> Config:
    """Returns the run's config with the length that a later command set.

    Keys that refer to the length follow it if a resumed run may change them. Other keys keep their values from
    `params`.
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
    is_longer: bool  # whether it asks for more training than before
    length: Mapping[str, Any]  # the length keys that differ from the run's first command


def make_resumed_config(composed: ComposedConfig, state: RunState, files: RunFolder) -> ResumedConfig:
    """Returns the saved config of a run with its current length and the typed keys of the resuming command.

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
    for placeholder in find_placeholders(config):  # the run keeps the values from its start
        section, _, key = placeholder.key.partition(".")
        config[section][key] = saved[section][key]
    check_changes(saved, config, keys, folder=files.path)
    check_length(config, keys, state)
    for each in (saved, config):
        keep_sizes(each, state.params)
    keep_batching(config, state.params)
    keep_store(config, files)
    # `resume_data` and `resume_code` are not inherited: each command decides again whether data and code may differ.
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
