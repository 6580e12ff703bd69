"""The jobs that a sweeper asks for, and their repeats."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from scaleflow.config.hydra_errors import override_key
from scaleflow.interfaces.secret_masking import mask_override
from scaleflow.sweep.ledger import LedgerEntry, compute_identity, is_under

#: Config groups whose option appears in a run's name without the group.
GROUPS_NAMED_BY_OPTION = ("dataset", "model", "strategy", "precision")


@dataclass(frozen=True)
class JobRequest:
    """A job that a sweeper asks for. A sweep keeps one for each of its jobs, so it holds no composed config."""

    words: Sequence[str]  # the overrides that make the job, as the launcher got them
    overrides: Sequence[str]  # those of the job's own config, as Hydra's sweeper wrote them
    number: int  # the job's `hydra.job.num`
    config: dict[str, Any]  # the resolved config, as plain containers; jobs share the sections in which they agree
    environment: dict[str, str]  # the variables of `hydra.job.env_set`, for the job's processes
    references: frozenset[str] = frozenset()  # the keys whose values refer to other keys
    refusal: str = ""  # why it cannot be composed
    repeat: int = 0  # the index of this run among the runs of the same job, warm-ups included

    @functools.cached_property
    def identity(self) -> str:
        """What identifies the job in the ledger; see `compute_identity`."""
        return compute_identity(self.config)

    @property
    def is_inline(self) -> bool:
        """Whether the job runs in the process of the command."""
        section = self.config.get("debug")
        return isinstance(section, Mapping) and bool(section.get("inline"))

    @property
    def options(self) -> Mapping[str, Any]:
        """The section `sweep`. If it is not a mapping, `parse_plan` raises later."""
        section = self.config.get("sweep")
        return section if isinstance(section, Mapping) else {}

    @property
    def metric(self) -> str:
        """The metric that is the job's result."""
        return str(self.options.get("metric") or "val/loss")

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


@dataclass
class SweepJob:
    """A job of a sweep."""

    request: JobRequest  # the job as it was asked for
    entry: LedgerEntry  # the entry in the ledger
    is_waiting: bool = False  # whether the job is to run: it is neither finished nor refused
    is_resumed: bool = False  # whether it continues a run that an earlier command began
    is_pruned: bool = False  # whether a sweeper stopped it
    #: The positions in the batch that ask for it; several if the sweeper proposes a config twice
    indices: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: the job finished, or the sweeper pruned it."""
        return self.entry.is_finished


def expand_repeats(request: Sequence[JobRequest]) -> list[tuple[int, JobRequest]]:
    """Repeats the jobs: all of them once, then all of them again, until each has all of its repeats.

    In this order, other load on the machine and its temperature affect all jobs alike. Returns (index in `request`,
    job) for each run.
    """
    rounds = max((each.repeats for each in request), default=0)
    turns = ((repeat, index) for repeat in range(rounds) for index in range(len(request)))
    return [
        (index, replace(request[index], repeat=repeat) if repeat else request[index])
        for repeat, index in turns
        if repeat < request[index].repeats
    ]


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
