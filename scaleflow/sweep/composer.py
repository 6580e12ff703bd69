"""Composes the configs of the jobs that a sweeper requests, without reading the config files again for each job.

It also calls Hydra's callbacks for the jobs. Hydra itself calls them only for single runs and for the sweep.
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
from scaleflow.config.parse import flatten_config, parse_section
from scaleflow.config.words import show_keys
from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import Sweep, name_command
from scaleflow.interfaces.features import find_placeholders
from scaleflow.interfaces.secret_masking import mask_override
from scaleflow.launcher.command_exit import find_interruption
from scaleflow.launcher.prepare import PreparedRun, prepare_run
from scaleflow.runs.identity import is_ignored
from scaleflow.runs.run_name import resolve_override
from scaleflow.sweep.ledger import FOLD, LedgerEntry, compute_identity, read_job_state, select_swept

#: Config groups whose option appears in a run's name without the group.
GROUPS_NAMED_BY_OPTION = ("dataset", "model", "strategy", "precision")


@dataclass(frozen=True)
class JobRequest:
    """A job that a sweeper requests. A sweep keeps all requests in memory, so they have no composed config."""

    words: Sequence[str]  # the overrides of the job, as the launcher received them
    overrides: Sequence[str]  # the overrides of the job's own config, as Hydra's sweeper wrote them
    number: int  # the job's `hydra.job.num`
    config: dict[str, Any]  # the resolved config, as plain containers; jobs share their equal sections
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of its processes: `hydra.job.env_set`
    references: frozenset[str] = frozenset()  # the keys whose values refer to other keys
    #: The values of interpolations that call a resolver. The run of the job uses them as well
    values: Mapping[KeyPath, Any] = field(default_factory=dict)
    options: Sweep = field(default_factory=Sweep)  # the section `sweep`
    refusal: str = ""  # why it cannot be composed
    repeat: int = 0  # the index of this run among the runs of the same job, warm-ups included

    @functools.cached_property
    def identity(self) -> str:
        """The digest that identifies the job in the ledger, with all of its folds; see `compute_identity`."""
        if self.folds:
            return compute_identity({**self.config, "folds": self.folds})
        return compute_identity(self.config)

    @property
    def is_inline(self) -> bool:
        """Whether the job runs in the process of the command."""
        section = self.config.get("debug")
        return isinstance(section, Mapping) and bool(section.get("inline"))

    @property
    def folds(self) -> int:
        """The number of folds. Each fold is a run; 0 without folds."""
        return self.options.folds or 0

    def take_turn(self, repeat: int) -> "JobRequest":
        """Returns the request of one of the runs of the job. A fold is an additional override."""
        if self.folds:
            word = f"{FOLD}={repeat + 1}/{self.folds}"
            return replace(self, repeat=repeat, words=[*self.words, word], overrides=[*self.overrides, word])
        return replace(self, repeat=repeat) if repeat else self

    @property
    def repeats(self) -> int:
        """How often the job runs, warm-ups included."""
        return self.folds or self.options.repeat + self.options.warm_up

    @property
    def counted_repeats(self) -> range:
        """The indices of the runs that count: all but the warm-ups."""
        warm_ups = 0 if self.folds else self.options.warm_up
        return range(warm_ups, self.repeats)

    @property
    def turn(self) -> str:
        """The name of this run among the runs of the job: `warm-up`, `repeat 2`, `fold 1`; empty for a single run."""
        if self.repeats == 1:
            return ""
        number = self.repeat - self.counted_repeats.start
        if number < 0:
            return "warm-up"
        return f"fold {number + 1}" if self.folds else f"repeat {number + 1}"

    def describe(self, swept: Sequence[str]) -> list[str]:
        """Lists the overrides that distinguish the job from the others, with secrets masked."""
        words = []
        for override in select_swept(self.overrides, swept):
            words.append(show_keys(resolve_override(mask_override(override), self.config)))
        return words

    def label(self, swept: Sequence[str]) -> str:
        """Returns a short text that distinguishes the job from the others: `mirrored units=128`."""
        last_words = Counter(key.rpartition(".")[2] for key in swept)
        words = [abbreviate_override(override, last_words) for override in self.describe(swept)]
        if self.turn:
            words.append(self.turn)
        return " ".join(words)


@dataclass
class SweepJob:
    """A job of a sweep."""

    request: JobRequest
    entry: LedgerEntry
    is_waiting: bool = False  # whether the job must run: it is neither finished nor refused
    is_resumed: bool = False  # whether it continues a run that an earlier command began
    is_pruned: bool = False  # whether a sweeper stopped it
    #: The positions in the batch that request it; several if the sweeper proposes a config twice
    indices: list[int] = field(default_factory=list)


def expand_repeats(requests: Sequence[JobRequest]) -> list[tuple[int, JobRequest]]:
    """Repeats the jobs: all jobs once, then all jobs again, until each has all of its repeats.

    In this order, other load on the machine and its temperature affect all jobs alike. Returns (index in `requests`,
    job) for each run.
    """
    rounds = max((request.repeats for request in requests), default=0)
    runs = []
    for repeat in range(rounds):
        for index, request in enumerate(requests):
            if repeat < request.repeats:
                runs.append((index, request.take_turn(repeat)))
    return runs


def find_swept_keys(config: DictConfig) -> list[str]:
    """Lists the keys and groups that a command varies, with several values or with the sweeper's `params`."""
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    params: Any = OmegaConf.to_container(config.hydra.sweeper.get("params") or OmegaConf.create({}), resolve=False)
    words = [f"{key}={value}" for key, value in params.items()]
    words += map(str, typed)
    overrides = CommandWords(words).parsed
    keys = [str(override.key_or_group) for override in overrides if override.is_sweep_override()]
    return list(dict.fromkeys(keys))


def abbreviate_override(override: str, last_words: Mapping[str, int]) -> str:
    """Shortens an override to the last word of its key, unless another swept key ends with the same word.

    Args:
        last_words: how many swept keys end with each word.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return override
    if override_key(key) in GROUPS_NAMED_BY_OPTION:
        return value
    word = override_key(key).rpartition(".")[2]
    name = word if last_words[word] <= 1 else key
    return f"{name}={value}"


#: The maximum number of composed configs that are kept.
MAX_CACHED_CONFIGS = 32

#: The maximum number of parsed overrides that are kept.
MAX_CACHED_OVERRIDES = 4096

#: A reference to another key, and not to an environment variable.
REFERENCE = re.compile(r"\$\{[^}:]*\}")

#: A reference to the text that Hydra makes of all overrides of a job.
OVERRIDE_DIRNAME = re.compile(r"override_dirname\s*}")


@dataclass(frozen=True)
class CachedConfig:
    """A config that Hydra composed from some overrides, for all jobs with these."""

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
        self._load_cached = functools.lru_cache(MAX_CACHED_CONFIGS)(self._compose_anew)
        self._parse = functools.lru_cache(MAX_CACHED_OVERRIDES)(lambda word: CommandWords([word]).parsed[0])
        self._sections: dict[str, Any] = {}

    @functools.cached_property
    def _groups(self) -> frozenset[str]:
        """The config groups, including groups in folders that the command adds."""
        name = self._sweep.hydra.job.config_name
        # Read without interpolations, because Hydra needs `hydra.sweep.subdir=${...}` as typed.
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
            return JobRequest(
                tuple(words), words, number, config={"words": list(words)}, refusal=self._explain_refusal(error, words)
            )
        shared = {}
        for key, section in resolved.items():
            shared[key] = self._share_section(key, section)
        return JobRequest(
            tuple(words),
            overrides,
            number,
            config=shared,
            environment=environment,
            references=list_references(cached, words),
            values=values,
            options=options,
        )

    def _explain_refusal(self, error: Exception, words: Sequence[str]) -> str:
        """Returns the reason why a job cannot be composed, as for a single run."""
        if isinstance(error, ConfigError):
            return str(error)
        sources = self._sweep.hydra.runtime.config_sources
        folders = [source.path for source in sources if source.schema == "file"]
        return explain_error(error, CommandWords(words, folders))

    def _share_section(self, key: str, section: Any) -> Any:
        """Returns the section of an earlier job if it is equal."""
        first = self._sections.setdefault(key, section)
        is_same = repr(first) == repr(section)  # 1, 1.0 and true are equal, but make different jobs
        return first if is_same else section

    def name_folder(self, request: JobRequest, number: int) -> Path:
        """Returns the folder that Hydra would use for a job with this `hydra.job.num`."""
        if request.refusal:
            return Path(self._sweep.hydra.sweep.dir, str(number)).absolute()
        with self.compose(request.words, number) as (config, _):
            return Path(config.hydra.runtime.output_dir)

    def prepare(self, request: JobRequest, folder: Path, is_resumed: bool) -> PreparedRun:
        """Checks a job and prepares its run in a folder. If `is_resumed`, the run in the folder continues.

        Raises ConfigError, which names the key, the value and a fix.
        """
        refuse_resume(request)
        with self.compose(request.words, request.number) as (config, _):
            words = list(request.overrides)
            if is_resumed:
                words = [word for word in words if is_ignored(override_key(word))]
            composed = read_composed_config(drop_hydra(config))
            composed = replace(composed, folder=folder, words=CommandWords(words), known=request.values)
            refuse_placeholders(request)
            check_job(config)
            return prepare_run(composed, resume=str(folder) if is_resumed else None)

    @contextmanager
    def compose(self, words: Sequence[str], number: int) -> Iterator[tuple[DictConfig, CachedConfig]]:
        """Yields the config of a job with Hydra's own part, and the cached config that it is a copy of.

        During the block Hydra's global config is the config of the job. So only one thread at a time can be in it.
        """
        with HYDRA_LOCK:
            parsed = [self._parse(word) for word in words]
            cached, others = self._load(words, parsed)
            config = copy.deepcopy(cached.config)
            apply_overrides(others, config)
            own_words = [str(override.input_line) for override in parsed if not override.is_hydra_override()]
            with use_hydra_config(config):
                set_job(config, own_words, number)
                yield config, cached

    def _load(self, words: Sequence[str], parsed: Sequence[Override]) -> tuple[CachedConfig, list[Override]]:
        """Returns the cached config for a job, and the overrides to apply to a copy of it.

        If an interpolation needs the text of all overrides, Hydra composes the config with all of them.
        """
        others = []
        options = []
        for override in parsed:
            if self._is_key(override):
                others.append(override)
            else:
                options.append(str(override.input_line))
        cached = self._load_cached(tuple(options))
        needs_all = cached.names_overrides or any(OVERRIDE_DIRNAME.search(word) for word in words)
        if others and needs_all:
            return self._load_cached(tuple(words)), []
        return cached, others

    def _is_key(self, override: Override) -> bool:
        """Whether an override sets a key of the config, and neither chooses an option nor sets Hydra's own part."""
        if override.is_hydra_override() or override.package or override.is_sweep_override():
            return False
        key = str(override.key_or_group)
        is_option = "/" in key or (key in self._groups and not isinstance(override.value(), dict))
        return not is_option

    def _compose_anew(self, words: tuple[str, ...]) -> CachedConfig:
        config = self._loader.load_sweep_config(self._sweep, list(words))
        self._check_sweep_options(config)
        OmegaConf.set_readonly(config.hydra, False)
        config.hydra.sweep.dir = self._sweep.hydra.sweep.dir  # a job's recipe may name another folder
        plain: Any = OmegaConf.to_container(drop_hydra(config), resolve=False)
        references = set()
        for key, value in flatten_config(plain).items():
            if REFERENCE.search(str(value)):
                references.add(key)
        everything = str(OmegaConf.to_container(config, resolve=False))
        names_overrides = OVERRIDE_DIRNAME.search(everything) is not None
        return CachedConfig(config, frozenset(references), names_overrides)

    def _check_sweep_options(self, config: DictConfig) -> None:
        """Raises ConfigError if a job has another launcher or sweeper than the sweep."""
        for key in ("launcher", "sweeper"):
            own = OmegaConf.to_container(config.hydra[key], resolve=False)
            common = OmegaConf.to_container(self._sweep.hydra[key], resolve=False)
            if own != common:
                raise ConfigError(
                    f"hydra.{key}: the recipe of this job sets other values than the sweep has; type them in the "
                    f"command, such as hydra/{key}={config.hydra.runtime.choices[f'hydra/{key}']}"
                )


def refuse_resume(request: JobRequest) -> None:
    """Raises ConfigError if a job would continue a single run."""
    resume = request.config.get("resume")
    if resume is not None:
        raise ConfigError(
            f"resume={resume}: continues a single run, and this is a sweep; remove -m, or continue a sweep by "
            "repeating its command with hydra.sweep.dir=FOLDER"
        )


def refuse_placeholders(request: JobRequest) -> None:
    """Raises ConfigError if a job would search for a value, such as its batch size."""
    for placeholder in find_placeholders(request.config):
        raise ConfigError(
            f"{placeholder.key}={placeholder.word}: each job of a sweep would find its own; run "
            f"{name_command(placeholder.command)} with the words of a job, and add the word that it prints"
        )


def list_references(cached: CachedConfig, words: Sequence[str]) -> frozenset[str]:
    """Returns the keys of a job whose values refer to other keys. Its words replace values of the composed config."""
    references = set(cached.references)
    for word in words:
        references.discard(override_key(word))
    for word in words:
        if REFERENCE.search(word):
            references.add(override_key(word))
    return frozenset(references)


def set_job(config: DictConfig, overrides: Sequence[str], number: int) -> None:
    """Sets a job's overrides, number and folder in Hydra's own part of a config."""
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
        composer: composes the configs to pass to them.
        task: the task function to pass to them.
    """

    def __init__(self, context: HydraContext, composer: JobComposer, task: Any) -> None:
        self._callbacks = context.callbacks
        self._composer = composer
        self._task = task
        self._begun: dict[Path, Any] = {}

    def begin(self, request: JobRequest, folder: Path) -> None:
        """Calls `on_job_start` for a job whose folder exists."""
        if not self._callbacks.callbacks:
            return
        with self._composer.compose(request.words, request.number) as (config, _):
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.runtime.output_dir = str(folder)
            self._begun[folder] = config
            self._callbacks.on_job_start(config=config, task_function=self._task)

    def end(self, request: JobRequest, folder: Path, status: str, reason: str) -> None:
        """Calls `on_job_end` with the result of a job, if the job has begun."""
        config = self._begun.pop(folder, None)
        if config is None:
            return
        is_finished = status == "FINISHED"
        value: object = RunError(f"{status}: {reason}")
        if is_finished:
            value = read_job_state(folder).metrics.get(request.options.metric)
        returned = make_return(request.overrides, is_finished, value)
        returned.cfg = drop_hydra(config)
        returned.hydra_cfg = config
        with HYDRA_LOCK, use_hydra_config(config):
            self._callbacks.on_job_end(config=config, job_return=returned)


def make_return(overrides: Sequence[str], is_completed: bool, value: object) -> JobReturn:
    """Returns a job's result in Hydra's form: a value, or the error if the job failed."""
    returned = JobReturn(overrides, working_dir=str(Path.cwd()), task_name="scaleflow")
    returned.return_value = value
    returned.status = JobStatus.COMPLETED if is_completed else JobStatus.FAILED
    return returned
