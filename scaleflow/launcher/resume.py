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

from scaleflow.config.plan import make_plan
from scaleflow.config.sections import did_you_mean, every_key, read, show
from scaleflow.errors import Refusal
from scaleflow.events import EVENTS, Event, Reader
from scaleflow.interfaces import Plan, Tracking
from scaleflow.launcher.record import STATE, state_of
from scaleflow.masking import MASK, masked, remember, secrets_in
from scaleflow.tracking import tracker_for
from scaleflow.tracking.uri import resolve

#: Sections, and keys of `training`, that may change when a run goes on.
MAY_CHANGE = ("checkpoint", "profiler", "tracking", "strategy", "hardware", "cluster", "debug", "resume", "sweep")
LENGTH = ("epochs", "max_steps")

#: What only a sweep's folder holds.
SWEEP = "sweep.json"

RUN_ID = re.compile(r"[0-9a-f]{32}")

Config = dict[str, Any]


@dataclass(frozen=True)
class Resumed:
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
            Refusal: naming the key, the value and what would work.
        """
        plan = make_plan(self.config, self.choices, list(dict.fromkeys((*search, *self.search))))
        if any((self.folder / "checkpoints").glob("step-*")):
            plan = replace(plan, model=replace(plan.model, init_from=None))
        return plan


def resumed(named: str, composed: Config, choices: Mapping[str, str], overrides: Sequence[str]) -> Resumed:
    """Finds a run, and its config.

    Args:
        named: what `resume` says.
        composed: this command's config, interpolations resolved.
        choices: this command's.
        overrides: as typed.

    Raises:
        Refusal: if there is no such run, or something was typed that may not change.
    """
    folder = find(named, composed)
    events = list(Reader(folder / EVENTS).read())
    ready = next((event for event in events if event["event"] == "ready"), None)
    if ready is None:
        raise Refusal(f"resume={named}: {folder} holds no run: it was never ready to train; start it anew")
    saved = saved_config(folder, composed)
    saved_choices = {group: option for group, option in ready["params"].items() if group in choices}
    typed = [override for override in parsed(overrides) if override.key_or_group != "resume"]
    keys = [override.key_or_group for override in typed]
    config = merged(saved, composed, keys)
    check_changes(saved, config, keys)
    keep_terms(config, ready)
    keep_store(config, folder)
    config["resume"] = str(folder)
    chosen = {**saved_choices, **{o.key_or_group: choices[o.key_or_group] for o in typed if o.key_or_group in choices}}
    changes = [str(override.input_line).removeprefix("++") for override in typed]
    number = 1 + len(list(folder.glob("resume-*.yaml")))
    search = tuple(ready.get("search", ()))
    is_through = last_status(events) == "FINISHED" and not grew(saved, config)
    return Resumed(folder, config, chosen, search, changes, number, is_through)


def find(named: str, composed: Config) -> Path:
    """The folder of a run, by its path or by its id in the store."""
    folder = Path(named).expanduser()
    if (folder / SWEEP).is_file():
        raise Refusal(
            f"resume={named}: that is a sweep's folder; its command goes on with it, with hydra.sweep.dir={named}"
        )
    if (folder / EVENTS).is_file():
        return folder.absolute()
    if not RUN_ID.fullmatch(named):
        if folder.is_dir():
            raise Refusal(f"resume={named}: there is no {EVENTS} in that folder, so it is not a run's")
        raise Refusal(f"resume={named}: expected a run's folder, as it is printed at the run's end, or a run's id")
    options = resolve(read(Tracking, composed.get("tracking", {}), "tracking"))
    if options.name == "none":
        raise Refusal(f"resume={named}: tracking=none knows no run ids; name the run's folder")
    tracker = tracker_for(options)
    tracker.connect()
    folder = Path(tracker.folder_of(named))
    if not (folder / EVENTS).is_file():
        raise Refusal(f"resume={named}: its folder {folder} is not here; a run goes on where its folder is")
    return folder


def saved_config(folder: Path, composed: Config) -> Config:
    """The run's config.yaml, resolved; what was masked in it is as this command has it."""
    try:
        loaded = OmegaConf.load(folder / "config.yaml")
        saved = OmegaConf.to_container(loaded, resolve=True)
    except (OSError, ValueError) as error:
        raise Refusal(f"resume={folder}: its config.yaml can't be read: {error}") from error
    assert isinstance(saved, dict)
    remember(secrets_in(OmegaConf.to_container(loaded, resolve=False), saved))
    return dict(unmasked(saved, composed))


def unmasked(saved: Any, composed: Any) -> Any:
    if isinstance(saved, Mapping):
        there = composed if isinstance(composed, Mapping) else {}
        return {str(key): unmasked(value, there.get(key)) for key, value in saved.items()}
    return composed if isinstance(saved, str) and MASK in saved else saved


def parsed(overrides: Sequence[str]) -> list[Any]:
    return list(OverridesParser.create().parse_overrides(list(overrides)))


def merged(saved: Config, composed: Config, keys: Sequence[str]) -> Config:
    """The saved config with the typed keys, or whole groups, as this command has them."""
    result = copy.deepcopy(saved)
    for key in keys:
        if key == "experiment":
            raise Refusal("resume with experiment: a recipe begins a run; type the keys that are to change")
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
    for key, before, now in differences(saved, config):
        section, _, rest = key.partition(".")
        if section in MAY_CHANGE or (section == "training" and rest in LENGTH):
            continue
        if key not in known and any(f"{word}.".startswith(f"{key}.") for word in typed):
            raise Refusal(f"{key}: the run's config has no such key{did_you_mean(key, known, '')}")
        raise Refusal(
            f"{key}={show(now)}: the run was begun with {key}={show(before)}; when it goes on, only its length "
            f"({', '.join(f'training.{name}' for name in LENGTH)}) and {', '.join(MAY_CHANGE[:6])} may change"
        )


def differences(saved: Any, config: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, before, now) of each leaf that is another one."""
    if isinstance(saved, Mapping) and isinstance(config, Mapping):
        for name in {**saved, **config}:
            yield from differences(saved.get(name), config.get(name), f"{key}.{name}" if key else str(name))
    elif saved != config:
        yield key, saved, config


def keep_terms(config: Config, ready: Event) -> None:
    """A step stays what it was: on more replicas or fewer, and with more memory free or less."""
    training, dataset = config["training"], config["dataset"]
    if training.get("global_batch_size") is None:
        training["global_batch_size"] = int(ready["params"]["resolved.global_batch_size"])
    if dataset.get("cache") == "auto":  # a stream that is kept is shuffled otherwise than one that is not
        dataset["cache"] = ready["params"]["resolved.cache"]


def keep_store(config: Config, folder: Path) -> None:
    """The store that the run is in, wherever this command is given."""
    tracking = config["tracking"]
    known = state_of(folder / STATE).get("uri")
    if tracking.get("uri") is None and known and masked(known) == known and MASK not in known:
        tracking["uri"] = known


def last_status(events: Sequence[Event]) -> str | None:
    return next((event["status"] for event in reversed(events) if event["event"] == "end"), None)


def grew(saved: Config, config: Config) -> bool:
    """Whether the run is asked to be longer than it was."""

    def size(training: Mapping[str, Any], name: str) -> float:
        value = training.get(name)
        return value if isinstance(value, int | float) else float("inf")  # another value is refused with the plan

    return any(size(config["training"], name) > size(saved["training"], name) for name in LENGTH)
