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

from scaleflow.config.composed import resolved, typed
from scaleflow.config.explain import in_a_line, key_of
from scaleflow.config.plan import make_plan
from scaleflow.errors import Refusal
from scaleflow.interfaces import Plan
from scaleflow.launcher.resume import Resumed, resumed
from scaleflow.masking import masked_override
from scaleflow.sweep.ledger import NOT_THE_JOBS, is_under

#: Choices that a run's name says by their option alone.
IN_THE_NAME = ("dataset", "model", "strategy", "precision")


@dataclass(frozen=True)
class Asked:
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
            Refusal: naming the key, the value and what would work.
        """
        return make_plan(self.config, self.choices, self.search)

    def going_on(self, folder: Path) -> tuple[Plan, Resumed]:
        """The plan of a job that has begun, and what it goes on with."""
        said = [override for override in self.overrides if is_under(key_of(override), NOT_THE_JOBS)]
        run = resumed(str(folder), self.config, self.choices, said)
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

    def shown(self, swept: Sequence[str]) -> list[str]:
        """What makes it another job than the others, secrets masked."""
        return [masked_override(o) for o in self.overrides if is_under(key_of(o), swept)]

    def label(self, swept: Sequence[str]) -> str:
        """What makes it another job than the others, in few words: `mirrored units=128`."""
        last = Counter(key.rpartition(".")[2] for key in swept)
        words = [in_few_words(override, last) for override in self.shown(swept)]
        return " ".join([*words, *([self.turn] if self.turn else [])])


def compose(context: HydraContext, sweep: DictConfig, overrides: Sequence[str], number: int) -> Asked:
    """Composes a job.

    Raises:
        Refusal: if its config is not whole.
    """
    config = context.config_loader.load_sweep_config(sweep, list(overrides))
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    with current(config):
        subfolder = str(config.hydra.sweep.subdir)
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(Path(config.hydra.sweep.dir, subfolder).absolute())
        task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            plain, choices, search = resolved(task)
        except OmegaConfBaseException as error:
            raise Refusal(in_a_line(error)) from error
        environment = {str(k): str(v) for k, v in config.hydra.job.env_set.items()}
        words = typed()
    return Asked(words, config, task, plain, choices, search, subfolder, environment)


def in_turn(asked: Sequence[Asked]) -> list[tuple[int, Asked]]:
    """The jobs as often as they are to be run, each with its place: all of them once, then all of them again.

    What the machine does beside them, and how warm it is, falls on all alike.
    """
    times = max((each.repeats for each in asked), default=0)
    turns = ((repeat, place) for repeat in range(times) for place in range(len(asked)))
    return [(place, replace(asked[place], repeat=repeat)) for repeat, place in turns if repeat < asked[place].repeats]


@contextmanager
def current(config: DictConfig) -> Iterator[None]:
    """Hydra's own config, which is global, for a while."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def swept_by(config: DictConfig) -> list[str]:
    """The keys and groups that a command asks to vary: by several values, or by its sweeper's `params`."""
    words = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(words, list)
    typed = OverridesParser.create().parse_overrides([str(word) for word in words])
    params = OmegaConf.to_container(config.hydra.sweeper.get("params") or OmegaConf.create({}), resolve=False)
    assert isinstance(params, dict)
    own = OverridesParser.create().parse_overrides([f"{key!s}={value}" for key, value in params.items()])
    return [*dict.fromkeys(o.key_or_group for o in (*own, *typed) if o.is_sweep_override())]


def in_few_words(override: str, last: Mapping[str, int]) -> str:
    """An override by the last word of its key, where no other swept key ends in it."""
    key, equals, value = override.partition("=")
    if not equals:
        return override
    if key_of(key) in IN_THE_NAME:
        return value
    word = key_of(key).rpartition(".")[2]
    return f"{word if last[word] <= 1 else key}={value}"
