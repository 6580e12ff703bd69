"""`resume=RUN`: the config of a run that goes on, and the folder it goes on in.

The saved config is the base, what is typed wins, and this command's defaults don't count. What the run has done so far
has to mean the same afterwards: so only some of it may change.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from scaleflow.config.parse import every_key, format_value, parse_section, suggest
from scaleflow.config.plan import make_plan
from scaleflow.errors import ConfigError
from scaleflow.events import EVENTS, Event, EventReader
from scaleflow.interfaces import Plan, Tracking
from scaleflow.launcher.recorder import STATE, read_recorder_state
from scaleflow.secret_masking import MASK, find_secrets, mask_secrets, remember_secrets
from scaleflow.tracking import make_tracker
from scaleflow.tracking.uri import resolve_store

#: Sections, and keys of `training`, that may change when a run goes on.
MAY_CHANGE = ("checkpoint", "profiler", "tracking", "strategy", "hardware", "cluster", "debug", "resume", "sweep")
LENGTH = ("epochs", "max_steps")

#: What only a sweep's folder holds.
SWEEP = "sweep.json"

RUN_ID = re.compile(r"[0-9a-f]{32}")

Config = dict[str, Any]


@dataclass(frozen=True)
class ResumedRun:
    """A run that goes on.

    Attributes:
        folder: the run's.
        config: the saved one with what was typed.
        choices: the option chosen in each config group.
        search: the folders in which the run's modules were looked for.
        changes: the typed overrides that make it another one than the saved.
        number: how often it has gone on by a command of its own, this time included.
        is_through: whether it is finished, and not asked to go further.
    """

    folder: Path
    config: Config
    choices: Mapping[str, str]
    search: Sequence[str]
    changes: Sequence[str]
    number: int
    is_through: bool

    def plan(self, search: Sequence[str]) -> Plan:
        """Its checked plan; its weights are in its checkpoints, if there are some.

        Args:
            search: the folders in which this command's modules are looked for.

        Raises:
            ConfigError: naming the key, the value and what would work.
        """
        plan = make_plan(self.config, self.choices, list(dict.fromkeys((*search, *self.search))))
        if any((self.folder / "checkpoints").glob("step-*")):
            plan = replace(plan, model=replace(plan.model, init_from=None))
        return plan


def find_resumed_run(named: str, composed: Config, choices: Mapping[str, str], overrides: Sequence[str]) -> ResumedRun:
    """Finds a run, and its config.

    Args:
        named: what `resume` says.
        composed: this command's config, interpolations resolved.
        choices: this command's.
        overrides: as typed.

    Raises:
        ConfigError: if there is no such run, or something was typed that may not change.
    """
    folder = find_run_folder(named, composed)
    events = list(EventReader(folder / EVENTS).read())
    ready = next((event for event in events if event["event"] == "ready"), None)
    if ready is None:
        raise ConfigError(f"resume={named}: {folder} holds no run: it was never ready to train; start it anew")
    saved = load_saved_config(folder, composed)
    saved_choices = {group: option for group, option in ready["params"].items() if group in choices}
    typed = [override for override in parse_typed_keys(overrides) if override.key_or_group != "resume"]
    keys = [override.key_or_group for override in typed]
    config = merge_config(saved, composed, keys)
    check_changes(saved, config, keys)
    keep_batching(config, ready)
    keep_store(config, folder)
    config["resume"] = str(folder)
    chosen = {**saved_choices, **{o.key_or_group: choices[o.key_or_group] for o in typed if o.key_or_group in choices}}
    changes = [str(override.input_line).removeprefix("++") for override in typed]
    number = 1 + len(list(folder.glob("resume-*.yaml")))
    search = tuple(ready.get("search", ()))
    is_through = read_last_status(events) == "FINISHED" and not is_longer(saved, config)
    return ResumedRun(folder, config, chosen, search, changes, number, is_through)


def find_run_folder(named: str, composed: Config) -> Path:
    """The folder of a run, by its path or by its id in the store."""
    folder = Path(named).expanduser()
    if (folder / SWEEP).is_file():
        raise ConfigError(
            f"resume={named}: that is a sweep's folder; its command goes on with it, with hydra.sweep.dir={named}"
        )
    if (folder / EVENTS).is_file():
        return folder.absolute()
    if not RUN_ID.fullmatch(named):
        if folder.is_dir():
            raise ConfigError(f"resume={named}: there is no {EVENTS} in that folder, so it is not a run's")
        raise ConfigError(f"resume={named}: expected a run's folder, as it is printed at the run's end, or a run's id")
    options = resolve_store(parse_section(Tracking, composed.get("tracking", {}), "tracking"))
    if options.name == "none":
        raise ConfigError(f"resume={named}: tracking=none knows no run ids; name the run's folder")
    tracker = make_tracker(options)
    tracker.connect()
    folder = Path(tracker.find_folder(named))
    if not (folder / EVENTS).is_file():
        raise ConfigError(f"resume={named}: its folder {folder} is not here; a run goes on where its folder is")
    return folder


def load_saved_config(folder: Path, composed: Config) -> Config:
    """The run's config.yaml, resolved; what was masked in it is as this command has it."""
    try:
        loaded = OmegaConf.load(folder / "config.yaml")
        saved = OmegaConf.to_container(loaded, resolve=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume={folder}: its config.yaml can't be read: {error}") from error
    assert isinstance(saved, dict)
    remember_secrets(find_secrets(OmegaConf.to_container(loaded, resolve=False), saved))
    return dict(restore_secrets(saved, composed))


def restore_secrets(saved: Any, composed: Any) -> Any:
    if isinstance(saved, Mapping):
        there = composed if isinstance(composed, Mapping) else {}
        return {str(key): restore_secrets(value, there.get(key)) for key, value in saved.items()}
    return composed if isinstance(saved, str) and MASK in saved else saved


def parse_typed_keys(overrides: Sequence[str]) -> list[Any]:
    return list(OverridesParser.create().parse_overrides(list(overrides)))


def merge_config(saved: Config, composed: Config, keys: Sequence[str]) -> Config:
    """The saved config with the typed keys, or whole groups, as this command has them."""
    result = copy.deepcopy(saved)
    for key in keys:
        if key == "experiment":
            raise ConfigError("resume with experiment: a recipe begins a run; type the keys that are to change")
        if key.startswith("hydra"):
            continue
        *parents, leaf = key.split(".")
        place, source = result, composed
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place, source = place[parent], source.get(parent) or {}
        if leaf in source:
            place[leaf] = copy.deepcopy(source[leaf])
        else:
            place.pop(leaf, None)
    return result


def check_changes(saved: Config, config: Config, typed: Sequence[str]) -> None:
    """Refuses what would make another run of it."""
    known = every_key(saved)
    for key, before, now in find_differences(saved, config):
        section, _, rest = key.partition(".")
        if section in MAY_CHANGE or (section == "training" and rest in LENGTH):
            continue
        if key not in known and any(f"{word}.".startswith(f"{key}.") for word in typed):
            raise ConfigError(f"{key}: the run's config has no such key{suggest(key, known, '')}")
        raise ConfigError(
            f"{key}={format_value(now)}: the run was begun with {key}={format_value(before)}; when it goes on, "
            "only its length "
            f"({', '.join(f'training.{name}' for name in LENGTH)}) and {', '.join(MAY_CHANGE[:6])} may change"
        )


def find_differences(saved: Any, config: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, before, now) of each leaf that is another one."""
    if isinstance(saved, Mapping) and isinstance(config, Mapping):
        for name in {**saved, **config}:
            yield from find_differences(saved.get(name), config.get(name), f"{key}.{name}" if key else str(name))
    elif saved != config:
        yield key, saved, config


def keep_batching(config: Config, ready: Event) -> None:
    """A step stays what it was: on more replicas or fewer, and with more memory free or less."""
    training, dataset = config["training"], config["dataset"]
    if training.get("global_batch_size") is None:
        training["global_batch_size"] = int(ready["params"]["resolved.global_batch_size"])
    if dataset.get("cache") == "auto":  # a stream that is kept is shuffled otherwise than one that is not
        dataset["cache"] = ready["params"]["resolved.cache"]


def keep_store(config: Config, folder: Path) -> None:
    """The store that the run is in, wherever this command is given."""
    tracking = config["tracking"]
    known = read_recorder_state(folder / STATE).get("uri")
    if tracking.get("uri") is None and known and mask_secrets(known) == known and MASK not in known:
        tracking["uri"] = known


def read_last_status(events: Sequence[Event]) -> str | None:
    return next((event["status"] for event in reversed(events) if event["event"] == "end"), None)


def is_longer(saved: Config, config: Config) -> bool:
    """Whether the run is asked to be longer than it was."""

    def size(training: Mapping[str, Any], name: str) -> float:
        value = training.get(name)
        return value if isinstance(value, int | float) else float("inf")  # another value is refused with the plan

    return any(size(config["training"], name) > size(saved["training"], name) for name in LENGTH)
