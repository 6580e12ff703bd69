"""Composes the jobs of a sweep, and repeats them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from scaleflow.config.compose import ComposedConfig, resolve_config
from scaleflow.config.hydra_config import composed_from_hydra, read_typed_overrides
from scaleflow.config.hydra_errors import override_key
from scaleflow.errors import ConfigError
from scaleflow.launcher.prepare import PreparedRun, RunCommand, prepare_run
from scaleflow.secret_masking import mask_override
from scaleflow.sweep.ledger import IGNORED_KEYS, is_under

#: Config groups whose option appears in a run's name without the group.
GROUPS_NAMED_BY_OPTION = ("dataset", "model", "strategy", "precision")


@dataclass(frozen=True)
class JobRequest:
    """A job that a sweeper asks for."""

    overrides: Sequence[str]  # the overrides that make the job, as Hydra's sweeper wrote them
    #: The composed config with its interpolations, and the folder in which Hydra would run the job
    composed: ComposedConfig
    hydra: DictConfig  # the composed config with Hydra's own part
    config: dict[str, Any]  # the resolved config, as plain containers
    environment: dict[str, str]  # the variables of `hydra.job.env_set`, for the job's processes
    repeat: int = 0  # the index of this run among the runs of the same job, warm-ups included

    def prepare(self, folder: Path, is_resumed: bool) -> PreparedRun:
        """Checks the job and prepares its run in a folder, which has a run that continues if `is_resumed`.

        Raises ConfigError, naming the key, the value and what would work.
        """
        if (resume := self.config.get("resume")) is not None:
            raise ConfigError(
                f"resume={resume}: continues a single run, and this is a sweep; remove -m, or continue a sweep by "
                "repeating its command with hydra.sweep.dir=FOLDER"
            )
        composed = replace(self.composed, folder=folder)
        if not is_resumed:
            return prepare_run(RunCommand(composed, self.overrides, time.time()))
        changes = [override for override in self.overrides if is_under(override_key(override), IGNORED_KEYS)]
        return prepare_run(RunCommand(composed, changes, time.time(), resume=str(folder)))

    @property
    def options(self) -> Mapping[str, Any]:
        """The section `sweep`. If it is not a mapping, `parse_plan` raises later."""
        section = self.config.get("sweep")
        return section if isinstance(section, Mapping) else {}

    @property
    def repeats(self) -> int:
        """How often the job runs, warm-ups included; 1 if a count is no integer (`parse_plan` raises later)."""
        counts = [self.options.get("repeat", 1), self.warm_ups]
        return max(1, sum(counts)) if all(type(count) is int for count in counts) else 1

    @property
    def warm_ups(self) -> Any:
        """How many runs come before those that count. Not checked yet, so it may be of any type."""
        return self.options.get("warm_up", 0)

    @property
    def counted_repeats(self) -> range:
        """The numbers of the runs that count: all but the warm-ups."""
        return range(self.warm_ups if self.repeats > 1 else 0, self.repeats)

    @property
    def turn(self) -> str:
        """The name of this run among those of the job: `warm-up`, `repeat 2`; empty if there is only one."""
        if self.repeats == 1:
            return ""
        number = self.repeat - self.warm_ups
        return "warm-up" if number < 0 else f"repeat {number + 1}"

    def describe(self, swept: Sequence[str]) -> list[str]:
        """Lists the overrides that distinguish the job from the others, with secrets masked."""
        return [mask_override(o) for o in self.overrides if is_under(override_key(o), swept)]

    def label(self, swept: Sequence[str]) -> str:
        """Returns a short text that distinguishes the job from the others: `mirrored units=128`."""
        last = Counter(key.rpartition(".")[2] for key in swept)
        words = [abbreviate_override(override, last) for override in self.describe(swept)]
        return " ".join([*words, *([self.turn] if self.turn else [])])


def compose_job(context: HydraContext, sweep: DictConfig, overrides: Sequence[str], number: int) -> JobRequest:
    """Composes a job of the command with the config `sweep`; `number` is its `hydra.job.num`.

    Raises ConfigError if a key has no value, or an interpolation cannot be resolved.
    """
    config = context.config_loader.load_sweep_config(sweep, list(overrides))
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    with use_hydra_config(config):
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(
                Path(config.hydra.sweep.dir, str(config.hydra.sweep.subdir)).absolute()
            )
        HydraConfig.instance().set_config(config)  # it holds a copy
        composed = composed_from_hydra(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
        resolved = resolve_config(composed.config)
        environment = {str(k): str(v) for k, v in config.hydra.job.env_set.items()}
        typed = read_typed_overrides()
    return JobRequest(typed, composed, config, resolved, environment)


def expand_repeats(request: Sequence[JobRequest]) -> list[tuple[int, JobRequest]]:
    """Repeats the jobs: all of them once, then all of them again, until each has all of its repeats.

    In this order, other load on the machine and its temperature affect all jobs alike. Returns (index in `request`,
    job) for each run.
    """
    rounds = max((each.repeats for each in request), default=0)
    turns = ((repeat, index) for repeat in range(rounds) for index in range(len(request)))
    return [
        (index, replace(request[index], repeat=repeat)) for repeat, index in turns if repeat < request[index].repeats
    ]


@contextmanager
def use_hydra_config(config: DictConfig) -> Iterator[None]:
    """Replaces Hydra's global `HydraConfig` during the block."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def find_swept_keys(config: DictConfig) -> list[str]:
    """Lists the keys and groups that a command varies, with several values or with the sweeper's `params`."""
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    params: Any = OmegaConf.to_container(config.hydra.sweeper.get("params") or OmegaConf.create({}), resolve=False)
    words = [*(f"{key}={value}" for key, value in params.items()), *map(str, typed)]
    overrides = OverridesParser.create().parse_overrides(words)
    return [*dict.fromkeys(override.key_or_group for override in overrides if override.is_sweep_override())]


def abbreviate_override(override: str, last: Mapping[str, int]) -> str:
    """Shortens an override to the last word of its key, unless another swept key ends with the same word."""
    key, equals, value = override.partition("=")
    if not equals:
        return override
    if override_key(key) in GROUPS_NAMED_BY_OPTION:
        return value
    word = override_key(key).rpartition(".")[2]
    return f"{word if last[word] <= 1 else key}={value}"
