"""A job of a sweep: composed, checked, and compared with what is in its folder already."""

from __future__ import annotations

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
from omegaconf.errors import OmegaConfBaseException

from scaleflow.config.hydra_config import read_typed_overrides, resolve_hydra
from scaleflow.config.hydra_errors import override_key, shorten_error
from scaleflow.config.plan import make_plan
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.launcher.resume import ResumedRun, find_resumed_run
from scaleflow.secret_masking import mask_override
from scaleflow.sweep.ledger import NOT_THE_JOBS, is_under

#: Choices that a run's name says by their option alone.
IN_THE_NAME = ("dataset", "model", "strategy", "precision")


@dataclass(frozen=True)
class JobRequest:
    """A job as it was asked for.

    Attributes:
        overrides: that make it, as Hydra's sweeper wrote them.
        hydra: the composed config with Hydra's own part.
        task: without it, interpolations kept.
        config: interpolations resolved, as plain containers.
        choices: the option chosen in each config group.
        search: folders in which `_target_` modules are looked for.
        subfolder: where Hydra puts it below the sweep's folder.
        environment: what `hydra.job.env_set` adds for its processes.
        repeat: which of several runs of the same it is, from 0.
    """

    overrides: Sequence[str]
    hydra: DictConfig
    task: DictConfig
    config: dict[str, Any]
    choices: dict[str, str]
    search: list[str]
    subfolder: str
    environment: dict[str, str]
    repeat: int = 0

    def plan(self) -> Plan:
        """Its checked plan.

        Raises:
            ConfigError: naming the key, the value and what would work.
        """
        return make_plan(self.config, self.choices, self.search)

    def resume_plan(self, folder: Path) -> tuple[Plan, ResumedRun]:
        """The plan of a job that has begun, and what it goes on with."""
        said = [override for override in self.overrides if is_under(override_key(override), NOT_THE_JOBS)]
        run = find_resumed_run(str(folder), self.config, self.choices, said)
        return run.plan(self.search), run

    @property
    def options(self) -> Mapping[str, Any]:
        """What it says of the sweep; what is no mapping is refused with its plan."""
        said = self.config.get("sweep")
        return said if isinstance(said, Mapping) else {}

    @property
    def repeats(self) -> int:
        """How often it is run, with those that are not counted; what is no number is refused with its plan."""
        counts = [self.options.get("repeat", 1), self.warm_ups]
        return max(1, sum(counts)) if all(type(count) is int for count in counts) else 1

    @property
    def warm_ups(self) -> Any:
        """How many of them come before those that count."""
        return self.options.get("warm_up", 0)

    @property
    def turn(self) -> str:
        """Which of them it is, in words; empty where there is one."""
        if self.repeats == 1:
            return ""
        number = self.repeat - self.warm_ups
        return "warm-up" if number < 0 else f"repeat {number + 1}"

    def describe(self, swept: Sequence[str]) -> list[str]:
        """What makes it another job than the others, secrets masked."""
        return [mask_override(o) for o in self.overrides if is_under(override_key(o), swept)]

    def label(self, swept: Sequence[str]) -> str:
        """What makes it another job than the others, in few words: `mirrored units=128`."""
        last = Counter(key.rpartition(".")[2] for key in swept)
        words = [abbreviate_override(override, last) for override in self.describe(swept)]
        return " ".join([*words, *([self.turn] if self.turn else [])])


def compose_job(context: HydraContext, sweep: DictConfig, overrides: Sequence[str], number: int) -> JobRequest:
    """Composes a job.

    Raises:
        ConfigError: if its config is not whole.
    """
    config = context.config_loader.load_sweep_config(sweep, list(overrides))
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    with use_hydra_config(config):
        subfolder = str(config.hydra.sweep.subdir)
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(Path(config.hydra.sweep.dir, subfolder).absolute())
        task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            plain, choices, search = resolve_hydra(task)
        except OmegaConfBaseException as error:
            raise ConfigError(shorten_error(error)) from error
        environment = {str(k): str(v) for k, v in config.hydra.job.env_set.items()}
        words = read_typed_overrides()
    return JobRequest(words, config, task, plain, choices, search, subfolder, environment)


def expand_repeats(request: Sequence[JobRequest]) -> list[tuple[int, JobRequest]]:
    """The jobs as often as they are to be run, each with its place: all of them once, then all of them again.

    What the machine does beside them, and how warm it is, falls on all alike.
    """
    times = max((each.repeats for each in request), default=0)
    turns = ((repeat, place) for repeat in range(times) for place in range(len(request)))
    return [
        (place, replace(request[place], repeat=repeat)) for repeat, place in turns if repeat < request[place].repeats
    ]


@contextmanager
def use_hydra_config(config: DictConfig) -> Iterator[None]:
    """Hydra's own config, which is global, for a while."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def find_swept_keys(config: DictConfig) -> list[str]:
    """The keys and groups that a command asks to vary: by several values, or by its sweeper's `params`."""
    words = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(words, list)
    typed = OverridesParser.create().parse_overrides([str(word) for word in words])
    params = OmegaConf.to_container(config.hydra.sweeper.get("params") or OmegaConf.create({}), resolve=False)
    assert isinstance(params, dict)
    own = OverridesParser.create().parse_overrides([f"{key!s}={value}" for key, value in params.items()])
    return [*dict.fromkeys(o.key_or_group for o in (*own, *typed) if o.is_sweep_override())]


def abbreviate_override(override: str, last: Mapping[str, int]) -> str:
    """An override by the last word of its key, where no other swept key ends in it."""
    key, equals, value = override.partition("=")
    if not equals:
        return override
    if override_key(key) in IN_THE_NAME:
        return value
    word = override_key(key).rpartition(".")[2]
    return f"{word if last[word] <= 1 else key}={value}"
