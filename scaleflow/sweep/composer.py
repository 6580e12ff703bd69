"""The jobs that a sweeper asks for, and their configs, composed without reading the config files again for each.

Hydra calls the callbacks of single runs and of a sweep itself; those of a sweep's jobs are called here.
"""

import copy
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from scaleflow.compat.hydra import apply_overrides
from scaleflow.config.compose import (
    HYDRA_LOCK,
    CommandWords,
    check_job,
    explain_error,
    override_key,
    read_composed_config,
    resolve_config,
)
from scaleflow.config.interpolations import KeyPath, resolve_once
from scaleflow.config.parse import flatten_config, is_under, parse_section
from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import Sweep, name_command
from scaleflow.interfaces.features import find_placeholders
from scaleflow.interfaces.secret_masking import mask_override
from scaleflow.launcher.command_exit import find_interruption
from scaleflow.launcher.prepare import PreparedRun, prepare_run
from scaleflow.runs.identity import IGNORED_KEYS
from scaleflow.runs.run_name import resolve_override
from scaleflow.sweep.ledger import FOLD, LedgerEntry, compute_identity, read_job_state, select_swept

#: Config groups whose option appears in a run's name without the group.
GROUPS_NAMED_BY_OPTION = ("dataset", "model", "strategy", "precision")


@dataclass(frozen=True)
class JobRequest:
    """A job that a sweeper asks for. A sweep keeps one for each of its jobs, so it holds no composed config."""

    words: Sequence[str]  # the overrides that make the job, as the launcher got them
    overrides: Sequence[str]  # those of the job's own config, as Hydra's sweeper wrote them
    number: int  # the job's `hydra.job.num`
    config: dict[str, Any]  # the resolved config, as plain containers; jobs share the sections in which they agree
    environment: Mapping[str, str] = field(default_factory=dict)  # of the job's processes: `hydra.job.env_set`
    references: frozenset[str] = frozenset()  # the keys whose values refer to other keys
    #: The values of interpolations that call a resolver, which are those of its run, too
    values: Mapping[KeyPath, Any] = field(default_factory=dict)
    options: Sweep = field(default_factory=Sweep)  # the section `sweep`
    refusal: str = ""  # why it cannot be composed
    repeat: int = 0  # the index of this run among the runs of the same job, warm-ups included

    @functools.cached_property
    def identity(self) -> str:
        """What identifies the job in the ledger, with all of its folds; see `compute_identity`."""
        return compute_identity({**self.config, **({"folds": self.folds} if self.folds else {})})

    @property
    def is_inline(self) -> bool:
        """Whether the job runs in the process of the command."""
        section = self.config.get("debug")
        return isinstance(section, Mapping) and bool(section.get("inline"))

    @property
    def folds(self) -> int:
        """How many folds the job has, each a run of its own; 0 for none."""
        return self.options.folds or 0

    def take_turn(self, repeat: int) -> "JobRequest":
        """Returns one of the runs of the job."""
        if not self.folds:
            return replace(self, repeat=repeat) if repeat else self
        word = f"{FOLD}={repeat + 1}/{self.folds}"
        return replace(self, repeat=repeat, words=[*self.words, word], overrides=[*self.overrides, word])

    @property
    def repeats(self) -> int:
        """How often the job runs, warm-ups included."""
        return self.folds or self.options.repeat + self.options.warm_up

    @property
    def counted_repeats(self) -> range:
        """The numbers of the runs that count: all but the warm-ups."""
        return range(0 if self.folds else self.options.warm_up, self.repeats)

    @property
    def turn(self) -> str:
        """The name of this run among those of the job: `warm-up`, `repeat 2`; empty if there is only one."""
        if self.repeats == 1:
            return ""
        number = self.repeat - self.counted_repeats.start
        return "warm-up" if number < 0 else f"{'fold' if self.folds else 'repeat'} {number + 1}"

    def describe(self, swept: Sequence[str]) -> list[str]:
        """Lists the overrides that distinguish the job from the others, with secrets masked."""
        chosen = select_swept(self.overrides, swept)
        return [resolve_override(mask_override(each), self.config) for each in chosen]

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


def expand_repeats(request: Sequence[JobRequest]) -> list[tuple[int, JobRequest]]:
    """Repeats the jobs: all of them once, then all of them again, until each has all of its repeats.

    In this order, other load on the machine and its temperature affect all jobs alike. Returns (index in `request`,
    job) for each run.
    """
    rounds = max((each.repeats for each in request), default=0)
    turns = ((repeat, index) for repeat in range(rounds) for index in range(len(request)))
    return [(index, request[index].take_turn(repeat)) for repeat, index in turns if repeat < request[index].repeats]


def find_swept_keys(config: DictConfig) -> list[str]:
    """Lists the keys and groups that a command varies, with several values or with the sweeper's `params`."""
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    params: Any = OmegaConf.to_container(config.hydra.sweeper.get("params") or OmegaConf.create({}), resolve=False)
    words = [*(f"{key}={value}" for key, value in params.items()), *map(str, typed)]
    overrides = CommandWords(words).parsed
    return [*dict.fromkeys(str(each.key_or_group) for each in overrides if each.is_sweep_override())]


def abbreviate_override(override: str, last: Mapping[str, int]) -> str:
    """Shortens an override to the last word of its key, unless another swept key ends with the same word."""
    key, equals, value = override.partition("=")
    if not equals:
        return override
    if override_key(key) in GROUPS_NAMED_BY_OPTION:
        return value
    word = override_key(key).rpartition(".")[2]
    return f"{word if last[word] <= 1 else key}={value}"


#: The most composed configs that are kept.
MAX_CACHED = 32

#: A reference to another key, and not to an environment variable.
REFERENCE = re.compile(r"\$\{[^}:]*\}")

#: A reference to the text that Hydra makes of all overrides of a job.
OVERRIDE_DIRNAME = re.compile(r"override_dirname\s*}")


@dataclass(frozen=True)
class CachedConfig:
    """What Hydra composed from some overrides, for all jobs that have these."""

    config: DictConfig  # the composed config with Hydra's own part
    references: frozenset[str]  # the dotted keys, without Hydra's part, whose values refer to other keys
    names_overrides: bool  # whether an interpolation needs the text of all overrides


class JobComposer:
    """Composes the jobs of a command with the config `sweep`.

    Hydra takes 0.1 s for a job, because it reads the files of all config groups. So Hydra composes once for each
    combination of options, and the composer applies the other words to a copy, as Hydra does.
    """

    def __init__(self, context: HydraContext, sweep: DictConfig) -> None:
        self._loader = context.config_loader
        self._sweep = sweep
        self._load_cached = functools.lru_cache(MAX_CACHED)(self._compose_anew)
        self._parse = functools.lru_cache(4096)(lambda word: CommandWords([word]).parsed[0])
        self._sections: dict[str, Any] = {}

    @functools.cached_property
    def _groups(self) -> frozenset[str]:
        """The config groups, also those of folders that the command adds."""
        name = self._sweep.hydra.job.config_name
        # Read without interpolations: of `hydra.sweep.subdir=${...}` Hydra takes the word as it was typed.
        overrides: Any = OmegaConf.to_container(self._sweep.hydra.overrides.hydra, resolve=False)
        return frozenset(self._loader.get_group_options("", ObjectType.GROUP, name, overrides))

    def read_request(self, words: Sequence[str], number: int) -> JobRequest:
        """Composes a job. `words` are its overrides, `number` is its `hydra.job.num`.

        If it cannot be composed, the request has the reason as its `refusal`.
        """
        try:
            with self.compose(words, number) as (config, cached):
                own_config = drop_hydra(config)
                values = resolve_once(own_config, {})
                resolved = resolve_config(own_config, values)
                options = parse_section(Sweep, resolved.get("sweep"), "sweep")
                environment = {str(k): str(v) for k, v in config.hydra.job.env_set.items()}
                overrides = read_composed_config(config).words.overrides
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            if find_interruption(error):
                raise
            folders = [each.path for each in self._sweep.hydra.runtime.config_sources if each.schema == "file"]
            refusal = (
                str(error) if isinstance(error, ConfigError) else explain_error(error, CommandWords(words, folders))
            )
            return JobRequest(tuple(words), words, number, config={"words": list(words)}, refusal=refusal)
        shared = {key: self._share_section(key, value) for key, value in resolved.items()}
        typed = {override_key(word) for word in words}
        references = (cached.references - typed) | {override_key(word) for word in words if REFERENCE.search(word)}
        known = JobRequest(tuple(words), overrides, number, config=shared, environment=environment, options=options)
        return replace(known, references=references, values=values)

    def _share_section(self, key: str, section: Any) -> Any:
        """Returns the section of an earlier job if it is equal."""
        first = self._sections.setdefault(key, section)
        return first if repr(first) == repr(section) else section  # 1, 1.0 and true are equal, and different jobs

    def name_folder(self, request: JobRequest, number: int) -> Path:
        """Returns the folder in which Hydra would run a job as the one with this `hydra.job.num`."""
        if request.refusal:
            return Path(self._sweep.hydra.sweep.dir, str(number)).absolute()
        with self.compose(request.words, number) as (config, _):
            return Path(config.hydra.runtime.output_dir)

    def prepare(self, request: JobRequest, folder: Path, is_resumed: bool) -> PreparedRun:
        """Checks a job and prepares its run in a folder, which has a run that continues if `is_resumed`.

        Raises ConfigError, naming the key, the value and what would work.
        """
        if (resume := request.config.get("resume")) is not None:
            raise ConfigError(
                f"resume={resume}: continues a single run, and this is a sweep; remove -m, or continue a sweep by "
                "repeating its command with hydra.sweep.dir=FOLDER"
            )
        with self.compose(request.words, request.number) as (config, _):
            words = request.overrides
            if is_resumed:
                words = [override for override in words if is_under(override_key(override), IGNORED_KEYS)]
            composed = read_composed_config(drop_hydra(config))
            composed = replace(composed, folder=folder, words=CommandWords(words), known=request.values)
            for placeholder in find_placeholders(request.config):
                raise ConfigError(
                    f"{placeholder.key}={placeholder.word}: each job of a sweep would find its own; run "
                    f"{name_command(placeholder.command)} with the words of a job, and add the word that it prints"
                )
            check_job(config)
            return prepare_run(composed, resume=str(folder) if is_resumed else None)

    @contextmanager
    def compose(self, words: Sequence[str], number: int) -> Iterator[tuple[DictConfig, CachedConfig]]:
        """Yields the config of a job with Hydra's own part, and what it is a copy of. During the block Hydra's global
        config is this one, so one thread at a time can be in it.
        """
        with HYDRA_LOCK:
            parsed = [self._parse(word) for word in words]
            others = [each for each in parsed if self._is_key(each)]
            cached = self._load_cached(tuple(str(each.input_line) for each in parsed if each not in others))
            if others and (cached.names_overrides or any(OVERRIDE_DIRNAME.search(word) for word in words)):
                others, cached = [], self._load_cached(tuple(words))
            config = copy.deepcopy(cached.config)
            apply_overrides(others, config)
            with use_hydra_config(config):
                set_job(config, [str(each.input_line) for each in parsed if not each.is_hydra_override()], number)
                yield config, cached

    def _is_key(self, override: Override) -> bool:
        """Whether an override is of a key of the config, and not of Hydra's own part or of a group's option."""
        key = str(override.key_or_group)
        is_option = "/" in key or (key in self._groups and not isinstance(override.value(), dict))
        return not (is_option or override.is_hydra_override() or override.package or override.is_sweep_override())

    def _compose_anew(self, words: tuple[str, ...]) -> CachedConfig:
        config = self._loader.load_sweep_config(self._sweep, list(words))
        for key in ("launcher", "sweeper"):
            own, common = (OmegaConf.to_container(each.hydra[key], resolve=False) for each in (config, self._sweep))
            if own != common:
                raise ConfigError(
                    f"hydra.{key}: the recipe of this job sets other values than the sweep has; type them in the "
                    f"command, such as hydra/{key}={config.hydra.runtime.choices[f'hydra/{key}']}"
                )
        OmegaConf.set_readonly(config.hydra, False)
        config.hydra.sweep.dir = self._sweep.hydra.sweep.dir  # that of a job's recipe is not where the sweep is
        plain: Any = OmegaConf.to_container(drop_hydra(config), resolve=False)
        everything = str(OmegaConf.to_container(config, resolve=False))
        references = frozenset(key for key, value in flatten_config(plain).items() if REFERENCE.search(str(value)))
        return CachedConfig(config, references, OVERRIDE_DIRNAME.search(everything) is not None)


def set_job(config: DictConfig, overrides: Sequence[str], number: int) -> None:
    """Sets what Hydra's own part of a config says about a job: its overrides, its number and its folder."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.id = config.hydra.job.num = number
        config.hydra.overrides.task = list(overrides)
        folder = Path(config.hydra.sweep.dir, str(config.hydra.sweep.subdir)).absolute()
        config.hydra.runtime.output_dir = str(folder)


@contextmanager
def use_hydra_config(config: DictConfig) -> Iterator[None]:
    """Replaces Hydra's global `HydraConfig` during the block."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = config  # type: ignore[assignment]  # `set_config` would copy it
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def drop_hydra(config: DictConfig) -> DictConfig:
    """Returns a copy of a config without Hydra's own part."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


class JobCallbacks:
    """Calls `on_job_start` and `on_job_end` around each run of a job, one at a time.

    Args:
        context: Hydra's context, with the callbacks.
        composer: composes the configs that they get.
        task: the task function that they get.
    """

    def __init__(self, context: HydraContext, composer: JobComposer, task: Any) -> None:
        self._callbacks, self._composer, self._task = context.callbacks, composer, task
        self._begun: dict[Path, Any] = {}

    def begin(self, request: JobRequest, folder: Path) -> None:
        """Says that a job begins in its folder, which exists."""
        if self._callbacks.callbacks:
            with self._composer.compose(request.words, request.number) as (config, _):
                with read_write(config.hydra), open_dict(config.hydra):
                    config.hydra.runtime.output_dir = str(folder)
                self._begun[folder] = config
                self._callbacks.on_job_start(config=config, task_function=self._task)

    def end(self, request: JobRequest, folder: Path, status: str, reason: str) -> None:
        """Says how a job has ended; nothing if it has not begun."""
        if (config := self._begun.pop(folder, None)) is None:
            return
        error, metrics = RunError(f"{status}: {reason}"), read_job_state(folder).metrics
        value = metrics.get(request.options.metric) if status == "FINISHED" else error
        returned = make_return(request.overrides, status == "FINISHED", value)
        returned.cfg, returned.hydra_cfg = drop_hydra(config), config
        with HYDRA_LOCK, use_hydra_config(config):
            self._callbacks.on_job_end(config=config, job_return=returned)


def make_return(overrides: Sequence[str], is_completed: bool, value: object) -> JobReturn:
    """Returns what Hydra's launchers return for a job: its result, or the error with which it failed."""
    returned = JobReturn(overrides, working_dir=str(Path.cwd()), task_name="scaleflow")
    returned.return_value = value
    returned.status = JobStatus.COMPLETED if is_completed else JobStatus.FAILED
    return returned
