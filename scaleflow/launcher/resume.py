"""`resume=RUN`: finds the run and makes its config.

The base is the saved config. Typed overrides replace its values; the defaults of this command are ignored. The steps
that the run has already taken must keep their meaning, so only some keys may change.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scaleflow.config.hydra_errors import parse_overrides
from scaleflow.config.parse import every_key, flatten_config, format_value, parse_section, suggest
from scaleflow.config.words import quote_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces import BY_SIZE, Tracking, name_command
from scaleflow.interfaces.secret_masking import MASK, find_secrets, mask_secrets, remember_secrets
from scaleflow.interfaces.trials import PARAM
from scaleflow.runs import RunFolder, RunState
from scaleflow.tracking import make_tracker
from scaleflow.tracking.model_uris import RUN_OR_MODEL, resolve_reference
from scaleflow.tracking.uri import resolve_store

#: Keys about the command that resumes a run.
RESUME_KEYS = ("resume", "resume_data", "resume_code")

#: Sections, and keys of `training`, that may change when a run is resumed.
CHANGEABLE = (
    "checkpoint",
    "evaluation",
    "export",
    "promotion",
    "profiler",
    "tracking",
    "strategy",
    "hardware",
    "cluster",
    "debug",
    "sweep",
    *RESUME_KEYS,
)
LENGTH_KEYS = ("epochs", "max_steps")

#: Keys that decide which variables are trained. A checkpoint has the optimizer's state for these variables only.
TRAINED = ("model.freeze", "model.lora")

Config = dict[str, Any]


@dataclass(frozen=True)
class ResumedRun:
    """A run that is resumed."""

    files: RunFolder  # the run's folder
    config: Config  # the saved config with the typed keys
    choices: Mapping[str, str]  # the option chosen in each config group
    search: Sequence[str]  # the folders in which the run's modules were looked for
    changes: Sequence[str]  # the typed overrides, without `resume`
    number: int  # how many commands have resumed the run, including this one
    is_finished: bool  # whether the run is finished, and the command does not make it longer


def find_resumed_run(named: str, composed: Config, choices: Mapping[str, str], overrides: Sequence[str]) -> ResumedRun:
    """Finds a run and makes its config.

    Args:
        named: the value of `resume`: a folder, a run's id, or the URI of a model.
        composed: this command's config, interpolations resolved.
        choices: the option that this command chose in each config group.
        overrides: the typed overrides.

    Raises ConfigError if there is no such run, or if a typed key may not change.
    """
    folder = find_run_folder(named, composed)
    files = RunFolder(folder)
    state = RunState.read(folder)
    if state.ready is None:
        raise ConfigError(f"resume={named}: the run in {folder} ended before training began; start a new run")
    if PARAM in state.params:
        raise ConfigError(
            f"resume={named}: this run looked for a setting and trained no model; repeat its command, "
            f"{name_command('find')} {state.params[PARAM]}"
        )
    saved = load_saved_config(folder, composed)
    saved_choices = {group: option for group, option in state.params.items() if group in choices}
    typed = [override for override in parse_overrides(overrides) if override.key_or_group != "resume"]
    keys = [override.key_or_group for override in typed]
    config = merge_config(saved, composed, keys)
    if config["training"].get("batch_size") == "auto":  # the run keeps the one that was found when it began
        config["training"]["batch_size"] = saved["training"]["batch_size"]
    check_changes(saved, config, keys, folder)
    for each in (saved, config):
        keep_sizes(each, state.params)
    keep_batching(config, state.params)
    keep_store(config, files)
    config["resume"] = str(folder)
    config |= {key: "same" for key in RESUME_KEYS[1:] if key not in keys}  # each command says it anew
    chosen = {**saved_choices, **{o.key_or_group: choices[o.key_or_group] for o in typed if o.key_or_group in choices}}
    changes = [str(override.input_line).removeprefix("++") for override in typed]
    is_finished = state.last_status == "FINISHED" and not is_longer(saved, config)
    had_checkpoints = state.checkpoint is not None and config["checkpoint"].get("folder") is None
    is_longer_now = state.last_status == "FINISHED" and not is_finished
    if had_checkpoints and is_longer_now and not any(files.checkpoints.glob("step-*")):
        raise ConfigError(
            f"resume={named}: its checkpoints were deleted, so it cannot be trained longer; start a new run with "
            f"model.init_from={folder}"
        )
    return ResumedRun(files, config, chosen, state.ready.search, changes, 1 + files.count_resumes(), is_finished)


def find_run_folder(named: str, composed: Config) -> Path:
    """Returns the folder of a run, given its path, its id in the store, or the URI of its model."""
    folder = Path(named).expanduser()
    if RunFolder(folder).ledger.is_file():
        raise ConfigError(
            f"resume={named}: this is the folder of a sweep; to continue it, repeat its command with "
            f"{quote_override('hydra.sweep.dir', named)}"
        )
    if RunFolder(folder).events.is_file():
        return folder.absolute()
    if not RUN_OR_MODEL.fullmatch(named):
        if folder.is_dir():
            raise ConfigError(
                f"resume={named}: this is not the folder of a run: it has no {RunFolder(folder).events.name}"
            )
        raise ConfigError(
            f"resume={named}: expected the folder of a run, which the run prints at its end, the id of a run, "
            "or the URI of its model, such as models:/NAME@ALIAS"
        )
    options = resolve_store(parse_section(Tracking, composed.get("tracking", {}), "tracking"))
    if options.name == "none":
        raise ConfigError(
            f"resume={named}: run ids need a tracking store, and this command has tracking=none; use the run's folder"
        )
    tracker = make_tracker(options)
    tracker.connect()
    run_id = named if options.uri is None else resolve_reference(named, options.uri).run_id
    folder = Path(tracker.find_folder(run_id))
    if not RunFolder(folder).events.is_file():
        raise ConfigError(
            f"resume={named}: its folder {folder} is not on this machine; resume it where its folder is, or copy the "
            "folder and use resume=FOLDER"
        )
    return folder


def load_saved_config(folder: Path, composed: Config) -> Config:
    """Loads the run's config.yaml, resolved. Masked values are replaced by those of this command's config."""
    try:
        loaded = OmegaConf.load(RunFolder(folder).config)
        saved = OmegaConf.to_container(loaded, resolve=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume={folder}: its config.yaml can't be read: {error}") from error
    assert isinstance(saved, dict)
    remember_secrets(find_secrets(OmegaConf.to_container(loaded, resolve=False), saved))
    return dict(unmask_secrets(saved, composed))


def unmask_secrets(saved: Any, composed: Any) -> Any:
    if isinstance(saved, Mapping):
        there = composed if isinstance(composed, Mapping) else {}
        return {str(key): unmask_secrets(value, there.get(key)) for key, value in saved.items()}
    return composed if isinstance(saved, str) and MASK in saved else saved


def merge_config(saved: Config, composed: Config, keys: Sequence[str]) -> Config:
    """Returns the saved config with this command's values for the typed keys, which can be whole groups."""
    result = copy.deepcopy(saved)
    for key in keys:
        if key == "experiment":
            raise ConfigError(
                "resume with experiment: a recipe cannot be applied to an existing run; type the keys to change"
            )
        if key.startswith("hydra"):
            continue
        *parents, leaf = key.split(".")
        target, source = result, composed
        for parent in parents:
            if not isinstance(target.get(parent), dict):
                target[parent] = {}
            target, source = target[parent], source.get(parent) or {}
        if leaf in source:
            target[leaf] = copy.deepcopy(source[leaf])
        else:
            target.pop(leaf, None)
    return result


def check_changes(saved: Config, config: Config, typed: Sequence[str], folder: Path) -> None:
    """Rejects changes that would give the steps already taken another meaning."""
    known = every_key(saved)
    for key, before, now in find_differences(saved, config):
        section, _, rest = key.partition(".")
        if section in CHANGEABLE or (section == "training" and rest in LENGTH_KEYS):
            continue
        if key not in known and any(f"{word}.".startswith(f"{key}.") for word in typed):
            raise ConfigError(f"{key}: the run's config has no such key{suggest(key, known, '')}")
        if key.startswith(TRAINED):
            raise ConfigError(
                f"{key}={format_value(now)}: the run was begun with {key}={format_value(before)}; what is trained is "
                f"fixed when a run begins, so start a new run with model.init_from={folder}"
            )
        raise ConfigError(
            f"{key}={format_value(now)}: the run was started with {key}={format_value(before)}; a resumed run may "
            f"change only its length ({', '.join(f'training.{name}' for name in LENGTH_KEYS)}) and "
            f"{', '.join(CHANGEABLE[:7])}; start a new run for other changes: {name_command('rerun')}"
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
            *parents, leaf = key.split(".")
            functools.reduce(lambda section, name: section[name], parents, config)[leaf] = json.loads(known)


def keep_batching(config: Config, params: Mapping[str, str]) -> None:
    """Fixes the global batch size and the caching in a resumed run's config to those of its `params`, so that they do
    not depend on the replicas and the memory here.
    """
    training, dataset = config["training"], config["dataset"]
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


def is_longer(saved: Config, config: Config) -> bool:
    def size(training: Mapping[str, Any], name: str) -> float:
        value = training.get(name)
        return value if isinstance(value, int | float) else float("inf")  # `parse_plan` rejects other values

    return any(size(config["training"], name) > size(saved["training"], name) for name in LENGTH_KEYS)
