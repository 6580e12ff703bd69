"""Composes the configs of stages and decides which stages run again, and why.

A stage about a tracked run uses that run's config with its own overrides. Composed configs are kept, so each is
composed once. A stage is unchanged if its settings, code, data and packages are. Modification times, comments and
formatting do not count, nor do options that only decide how a run is recorded.
"""

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf

from scaleflow.cluster.engines import find_engine
from scaleflow.config.compose import (
    CommandWords,
    ComposedConfig,
    check_job,
    compose_config,
    list_options,
    list_own_folders,
    override_key,
)
from scaleflow.config.parse import flatten_config, is_under, parse_section
from scaleflow.config.policies import DATA, Policy
from scaleflow.config.trust import list_own_modules, list_targets
from scaleflow.errors import ConfigError
from scaleflow.features.pipelines.definition import DeclaredPipeline, Stage
from scaleflow.features.pipelines.ledger import PipelineLedger, StageKey, StageRecord, StoredRuns
from scaleflow.features.pipelines.references import select_output
from scaleflow.features.pipelines.stage_commands import SWEEP
from scaleflow.interfaces import Plan, Tracking
from scaleflow.interfaces.features import list_conf_folders, list_ignored_keys
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.interfaces.stages import UNKNOWN
from scaleflow.launcher.prepare import make_plan
from scaleflow.runs import RunFolder
from scaleflow.runs.code_digest import find_code
from scaleflow.runs.data_digest import digest_files, find_data_files, group_by_folder, list_data_files
from scaleflow.runs.identity import compare, record_parts
from scaleflow.runs.provenance.machine import list_packages
from scaleflow.runs.reuse import find_store_options
from scaleflow.runs.run import Run

#: Sections and keys that do not change a stage's result, and the keys of `tracking` that count nevertheless.
IGNORED = ("hydra", "debug", "resume", "resume_data", "resume_code", "sweep.on_change")
KEPT_OF_TRACKING = ("tracking.name", "tracking.uri", "tracking.experiment")

#: Maximum number of configs composed for a sweep: the first job's, then configs that differ from it in one key.
MAX_COMPOSED = 12

#: Overrides that the pipeline sets itself.
SET_HERE = ("hydra.run.dir", "hydra.sweep.dir", "resume")


@dataclass(frozen=True)
class Composition:
    """The composed configs of a stage, reduced to what identifies its result."""

    settings: Mapping[str, str]  # all values that count, as text, by dotted key
    configs: Sequence[Mapping[str, Any]]  # the parts that name code and data
    #: `path` and `arguments` of the first local dataset; {} for a stage about a run
    source: Mapping[str, Any] = field(default_factory=dict)


class StageComposer:
    """Composes the configs of one command's stages.

    Args:
        config_dirs: folders with the user's options.
        kept: compositions of earlier commands, by a digest of their inputs. This command adds those that it uses to
            `used`.

    Attributes:
        config_dirs: folders with the user's options.
        store: address of the pipeline's store, where runs are looked up; None until known.
    """

    def __init__(self, config_dirs: Sequence[str], kept: Mapping[str, Any]) -> None:
        self.store: str | None = None
        self.config_dirs = config_dirs
        self._kept = kept
        self._options = digest_options(config_dirs)
        self.used: dict[str, Any] = {}

    def compose(self, stage: Stage, words: Sequence[str], run: str = "", folder: Path | None = None) -> Composition:
        """Composes and checks the configs of a stage.

        Args:
            run: the run that the stage is about; empty: the stage composes a config.
            folder: that run's folder; None: look the run up in the store.

        Raises ConfigError if the config cannot work.
        """
        variables = [*os.environ.items()] if "oc.env" in f"{self._options}{words}" else []
        ingredients = json.dumps([stage.command.name, words, run, self._options, sorted(variables)])
        digest = hashlib.sha256(ingredients.encode()).hexdigest()[:32]
        values = self.used.get(digest) or self._kept.get(digest)
        if values is None:
            values = vars(self._compose_run(words, run, folder) if run else self._compose_new(stage, words))
        self.used[digest] = values
        return Composition(**values)

    def _compose_new(self, stage: Stage, words: Sequence[str]) -> Composition:
        settings: dict[str, str] = {}
        configs: list[Mapping[str, Any]] = []
        source: dict[str, Any] = {}
        jobs = expand_sweep(words) if stage.command is SWEEP else [words]
        for number, job_words in enumerate(jobs):
            composed = compose_known(job_words, self.config_dirs)
            config = composed.resolved
            plan = check_stage_rules(stage, composed)
            target = plan.dataset.target
            if not find_engine(plan.cluster).is_remote:  # then the files are on this machine
                source = source or {"path": target.path, "arguments": mask_secrets(dict(target.arguments))}
            settings |= {f"{key} ({number})" if number else key: text for key, text in list_settings(config).items()}
            configs.append(select_inputs(config))
        swept = [word for word in words if is_swept(word)] if stage.command is SWEEP else []
        settings |= {f"values of {word.partition('=')[0]}": word.partition("=")[2] for word in swept}
        return Composition(settings, configs, source)

    def _compose_run(self, words: Sequence[str], run: str, folder: Path | None) -> Composition:
        if folder is not None and RunFolder(folder).config.is_file():
            tracked = Run(folder)
        else:
            options = find_store_options(CommandWords(words))
            tracked = Run.find(run, options if options.uri else replace(options, uri=self.store))
        trusted = list_own_modules(tracked.config)
        command = CommandWords(words, self.config_dirs, run_id=run, trusted=trusted)
        config = tracked.reuse_config(command, make_stage_policy()).resolved
        settings = {word.partition("=")[0]: str(mask_secrets(word.partition("=")[2])) for word in words}
        return Composition(settings, [select_inputs(config)])


def make_stage_policy() -> Policy:
    """Returns the sections that a stage about a run takes from that run, for any command."""
    return Policy((*DATA, "evaluation", *list_ignored_keys()), needs_files=False)


def check_stage_rules(stage: Stage, composed: ComposedConfig) -> Plan:
    """Checks a config by the rules of the stage's command and returns its plan.

    Raises ConfigError if it cannot work.
    """
    resume = composed.resolved.get("resume")
    if resume is not None:
        raise ConfigError(f"resume={resume}: a pipeline continues its own runs; leave it out")
    plan = make_plan(composed, Policy(work=stage.command.work))
    if stage.command is SWEEP:
        check_job(composed.config)
    return plan


def compose_known(words: Sequence[str], config_dirs: Sequence[str]) -> ComposedConfig:
    """Composes a config from the words without UNKNOWN. Required keys with unknown values get UNKNOWN."""
    composed = compose_config([word for word in words if UNKNOWN not in word], config_dirs)
    missing = OmegaConf.missing_keys(composed.config)
    open_keys = [override_key(word) for word in words if UNKNOWN in word]
    return composed.set({key: UNKNOWN for key in open_keys if key in missing})


def is_open(words: Sequence[str], config_dirs: Sequence[str]) -> bool:
    """Returns whether an unknown word may select options, so that the config's keys are not known yet."""
    keys = [override_key(word) for word in words if UNKNOWN in word]
    return UNKNOWN in keys or any("." not in key and key in list_options(config_dirs) for key in keys)


def refuse_own_keys(words: Sequence[str]) -> None:
    """Raises ConfigError for an override that the pipeline sets itself."""
    for override in CommandWords(words).parsed:
        if str(override.key_or_group) in SET_HERE:
            raise ConfigError(
                f"overrides: {override.input_line}: the pipeline sets {override.key_or_group}; leave it out"
            )


def is_swept(word: str) -> bool:
    return bool(CommandWords([word]).parsed[0].is_sweep_override())


def list_swept_values(override: Override) -> list[str]:
    """Returns the values of a swept key as words. A range or interval gives only its first value."""
    sweep = override.value()
    if isinstance(sweep, RangeSweep | IntervalSweep):
        return [str(sweep.start)]
    values = list(map(str, override.sweep_string_iterator()))
    return values if override.is_choice_sweep() else values[:1]


def expand_sweep(words: Sequence[str]) -> Iterator[list[str]]:
    """Yields the words of jobs: first with the first value of each swept key, then with one other value at a time."""
    values = {}
    for n, override in enumerate(CommandWords(words).parsed):
        if override.is_sweep_override():
            values[n] = [f"{override.key_or_group}={value}" for value in list_swept_values(override)]
    first = list(words)
    for n, choices in values.items():
        first[n] = choices[0]
    jobs = [first]
    for n, choices in values.items():
        for choice in choices[1:]:
            jobs.append([*first[:n], choice, *first[n + 1 :]])
    yield from jobs[:MAX_COMPOSED]


def list_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values that can change a stage's result, as text with secrets masked."""
    settings = {}
    for key, value in flatten_config(config).items():
        if key in KEPT_OF_TRACKING or not is_under(key, ("tracking", *IGNORED)):
            settings[key] = json.dumps(mask_secrets(value), default=str)
    return settings


def select_inputs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a config that names its code and data files."""
    targets = [{"_target_": path} for _, path in list_targets(config)]
    weights = (config.get("model") or {}).get("init_from")
    return {"targets": targets, "dataset": mask_secrets(config.get("dataset") or {}), "weights": weights}


def read_tracking(words: Sequence[str], config_dirs: Sequence[str]) -> Tracking:
    """Returns the options of the store for a stage with these overrides, secrets included."""
    plain = [word for word in words if not is_swept(word)]
    if is_open(plain, config_dirs):
        plain = [word for word in plain if override_key(word).startswith(("tracking", "experiment"))]
    return parse_section(Tracking, compose_known(plain, config_dirs).resolved["tracking"], "tracking")


def digest_options(config_dirs: Sequence[str]) -> str:
    """Returns a digest of all config files. It contains "oc.env" if one of them reads environment variables."""
    digest = hashlib.sha256()
    reads_environment = False
    for folder in (*list_conf_folders(), *map(Path, config_dirs)):
        for path in sorted(folder.rglob("*.yaml")):
            content = path.read_bytes()
            reads_environment = reads_environment or b"oc.env" in content
            digest.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:32] + (" oc.env" if reads_environment else "")


#: The versions of these packages, and of packages that the user's code imports, count for every stage. For a Python
#: function only the latter do.
PACKAGES = ("scaleflow", "tensorflow", "keras", "numpy", "pyarrow")

#: Categories of a stage's key, and the matching parts of a record, in the order of comparison.
CATEGORIES = ("settings", "data", "code", "packages")
PARTS = ("settings", "files", "code", "packages")


def make_key(
    stage: Stage, values: Mapping[str, Any], composition: Composition | None, config_dirs: Sequence[str]
) -> StageKey:
    """Returns the present ingredients of a stage.

    Args:
        stage: the stage.
        values: its resolved keys, with the outputs of other stages filled in.
        composition: its composed configs; None for a Python function.
        config_dirs: folders with the user's options. Modules are looked up there as well.
    """
    search = list_own_folders(config_dirs)
    own = {key: repr(value) for key, value in values.items() if key != "overrides"}
    configs: Any = composition.configs if composition else [{"targets": [{"_target_": values["target"]}]}]
    code: dict[str, str] = {}
    names: set[str] = set()
    data: list[str] = []
    for config in configs:
        for name, file in find_code(config, search).items():
            code[name] = file.digest
            names |= {module.partition(".")[0] for module in file.imports}
        data += find_data_files(config.get("dataset") or {})
        weights = config.get("weights")
        if isinstance(weights, str) and Path(weights).is_file():
            data.append(weights)
    for flag in stage.command.data_flags:
        if flag in values:
            data += list_data_files(str(values[flag]))
    settings = {"command": stage.command.name, **own}
    own_modules = {name.partition("/")[0].removesuffix(".py") for name in code}
    wanted = find_packages(names - own_modules)
    if composition:
        settings |= composition.settings
        wanted |= set(PACKAGES)
    packages = {}
    for name, package in read_packages().items():
        if name.lower() in wanted:
            packages[name] = package.identity
    parts = (settings, group_by_folder(digest_files(data)), code, packages)
    return dict(zip(CATEGORIES, parts, strict=True))


#: Installed packages by name, and package names by module, each read once.
read_packages = cache(list_packages)
list_distributions = cache(packages_distributions)


def find_packages(modules: Iterable[str]) -> set[str]:
    """Returns the installed packages that provide these top-level modules, in lower case."""
    installed = {name.lower() for name in read_packages()}
    packages = set()
    for module in modules:
        if module in sys.stdlib_module_names or module == "scaleflow":
            continue
        if module.lower() in installed:
            packages.add(module.lower())
        else:  # the package has another name
            packages |= {name.lower() for name in list_distributions().get(module, ())}
    return packages


def explain_change(before: StageKey, now: StageKey) -> str:
    """Returns the first difference between two keys as text; empty if they are equal."""
    for difference in compare(to_record(before), to_record(now), PARTS):
        return str(difference)
    return ""


def to_record(key: StageKey) -> Any:
    """Returns a key as a record of provenance, which can be compared."""
    return record_parts(key.get("code", {}), key.get("data", {}), key.get("settings", {}), key.get("packages", {}))


#: Decisions about a stage: reuse its result, run it, skip it (its condition is false), leave it out (by `--only`).
REUSE = "reuse"
RUN = "run"
SKIP = "skip"
LEAVE = "leave"


@dataclass(frozen=True)
class StageDecision:
    """The decision about a stage."""

    action: str = ""  # `reuse`, `run`, `skip` or `leave`; empty: not decided yet
    why: str = ""  # reason; empty for `reuse`
    key: StageKey | None = None  # its ingredients; None: not known yet
    values: Mapping[str, Any] = field(default_factory=dict)  # its resolved keys
    continues: bool = False  # whether it continues an interrupted execution


@dataclass
class StageProgress:
    """The progress of a stage in this command."""

    stage: Stage
    record: StageRecord  # its last execution, or an empty record
    decision: StageDecision = StageDecision()  # the decision about it
    #: RUNNING, FINISHED, FAILED, KILLED, `reused`, `skipped`, `left out` or `not run`; empty: not yet decided
    state: str = ""
    reason: str = ""  # why it did not finish

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def is_over(self) -> bool:
        return self.state not in ("", "RUNNING")

    @property
    def is_good(self) -> bool:
        """Whether stages that need this one can run."""
        return self.state in ("FINISHED", "reused")

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Its outputs; {} if it has not finished."""
        return self.record.outputs if self.is_good else {}


@dataclass(frozen=True)
class Decider:
    """Decides which of a command's stages run."""

    pipeline: DeclaredPipeline
    ledger: PipelineLedger
    composer: StageComposer
    stored: StoredRuns  # knows whether runs still exist, and which model an alias names
    forced: Collection[str] = ()  # stages to run although nothing changed
    only: Collection[str] = ()  # stages that may run; empty: all

    def decide(self, stage: Stage) -> StageDecision:
        """Decides about a stage after the stages that it needs have ended.

        Raises ConfigError if a reference has no value.
        """
        if not self.pipeline.holds(stage, self._read):
            return StageDecision(SKIP, "its condition is false")
        values = self.pipeline.resolve(stage, self._read)
        key = self._make_key(stage, values)
        record = self.ledger.records.get(stage.name)
        why = self._find_reason(stage, record, key)
        if not why:
            return StageDecision(REUSE, "", key, values=values)
        if not self.is_wanted(stage.name):
            return StageDecision(LEAVE, f"--only leaves it out ({why})", key, values=values)
        is_begun = record is not None and record.status != "FINISHED" and record.key == key
        continues = is_begun and not self._is_forced(stage, record)
        return StageDecision(RUN, why, key, values=values, continues=continues)

    def is_wanted(self, name: str) -> bool:
        """Returns whether a stage may run: `--only` names it or is not used."""
        return not self.only or name in self.only

    def _find_reason(self, stage: Stage, record: StageRecord | None, key: StageKey) -> str:
        """Returns why a stage has to run; empty if its recorded result can be reused."""
        if record is None:
            return "has not run"
        if self._is_forced(stage, record):
            return "is forced"
        change = explain_change(record.key, key)
        if change:
            return change
        if record.status != "FINISHED":
            return {"FAILED": "failed before", "KILLED": "was interrupted"}.get(record.status, "was interrupted")
        return self.stored.find_loss(record)

    def _is_forced(self, stage: Stage, record: StageRecord | None) -> bool:
        """Returns whether a flag forces the stage. A continued command forces no stage twice."""
        is_done = record is not None and record.is_forced and record.execution == self.ledger.execution
        return stage.name in self.forced and not (is_done and self.ledger.status != "FINISHED")

    def _make_key(self, stage: Stage, values: Mapping[str, Any]) -> StageKey:
        composition = None
        if stage.command.composes:
            composition = self.composer.compose(stage, values["overrides"])
        elif stage.command.takes_run:
            run = self.stored.fix_aliases(str(values["run"]))
            words = values.get("overrides", [])
            folder = self.find_folder_of_run(run)
            composition = self.composer.compose(stage, words, run, folder=folder)
        key = make_key(stage, values, composition, config_dirs=self.pipeline.config_dirs)
        settings = {name: self.stored.fix_aliases(text) for name, text in key["settings"].items()}
        return {**key, "settings": settings}

    def find_folder_of_run(self, run: str) -> Path | None:
        """Returns the folder of the run that this pipeline recorded under a run id or model; None for other runs."""
        for record in self.ledger.records.values():
            for outputs in (record.outputs, record.outputs.get("best") or {}):
                if run in (outputs.get("run_id"), outputs.get("model")) and outputs.get("folder"):
                    folder = Path(outputs["folder"])
                    if RunFolder(folder).config.is_file() and RunFolder(folder).events.is_file():
                        return folder
        return None

    def _read(self, name: str, path: Sequence[str]) -> Any:
        return select_output(self.ledger.records[name].outputs, name, path)
