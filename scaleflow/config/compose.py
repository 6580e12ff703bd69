"""Composes a config without a Hydra app (for the Python API, `rerun` and `evaluate`), and reads configs that Hydra
composed.

It also works in any thread and inside another Hydra app, whose state it restores. Errors of Hydra and OmegaConf become
one-line messages that name the wrong override.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import HydraContext, RunMode
from hydra.version import VersionBase, setbase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from scaleflow.compat.hydra import Callbacks, make_flag_parser
from scaleflow.config.interpolations import KeyPath, find_dependents, put_values, resolve_once
from scaleflow.config.missing_values import check_missing_values
from scaleflow.config.parse import every_key, format_value
from scaleflow.config.synonyms import close_brackets, translate_key
from scaleflow.config.unknown_keys import (
    list_empty_mappings,
    unknown_key_error,
    unknown_option_error,
    unknown_word_error,
)
from scaleflow.config.words import (
    list_needed_groups,
    make_override,
    need_group,
    prepare_words,
    quote_override,
    quote_value,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Split, name_command
from scaleflow.interfaces.features import Feature, import_named, list_features, report_problems
from scaleflow.interfaces.secret_masking import (
    find_secrets,
    find_typed_secrets,
    mask_override,
    mask_secrets,
    register_resolver,
    remember_secrets,
)

CONF = "scaleflow.conf"


@dataclass(frozen=True)
class CommandWords:
    """The words of a command, parsed once. All checks of a command's words use this class."""

    overrides: Sequence[str] = ()
    config_dirs: Sequence[str | Path] = ()  # the folders of `--config-dir`
    is_sweep: bool = False  # whether a key may have several values
    run_id: str = ""  # the run that the command is about; empty: the command composes a new config
    #: The `--trust` values: modules whose code may run, and folders (with a `/`) whose files may be used
    trusted: Sequence[str] = ()
    line: Sequence[str] = ()  # the whole command as typed
    tracked_dirs: Sequence[str] = ()  # the `--config-dir` folders of the tracked run's command

    @cached_property
    def parsed(self) -> list[Override]:
        """The overrides. Raises ConfigError if one cannot be parsed."""
        try:
            return list(OverridesParser.create().parse_overrides(list(self.overrides)))
        except HydraException as error:
            raise ConfigError(explain_error(error, self)) from error

    @property
    def keys(self) -> set[str]:
        """The typed keys and groups."""
        return {str(override.key_or_group) for override in self.parsed}

    def find(self, key: str) -> Any:
        """Returns the last value of a key; None if no override sets it."""
        for override in reversed(self.parsed):
            has_value = not (override.is_sweep_override() or override.is_delete())
            if override.key_or_group == key and has_value:
                return override.value()
        return None

    def refuse_sweep(self, why: str) -> None:
        """Raises ConfigError for a key with several values. `why` is the reason why the command cannot be a sweep."""
        for override in self.parsed:
            if override.is_sweep_override():
                key = override.key_or_group
                raise ConfigError(f"{key}: several values make a sweep, and {why}; write a list as [a,b]")

    @property
    def missing_dirs(self) -> list[str]:
        """The `--config-dir` folders that the tracked run had and this command lacks."""
        return [folder for folder in dict.fromkeys(self.tracked_dirs) if folder not in self.config_dirs]

    @property
    def search(self) -> list[str]:
        """The override that adds the option folders to Hydra's search path."""
        folders = [quote_value(f"file://{Path(folder).absolute()}") for folder in self.config_dirs]
        return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []

    def prepare(self) -> CommandWords:
        """Returns the words in the form that Hydra needs. Raises ConfigError for a flag, and for a missing folder.

        Secrets in the words are masked from now on.
        """
        remember_secrets(find_typed_secrets(self.overrides))
        register_resolver()
        for word in self.overrides:
            if word.startswith("-"):
                raise ConfigError(
                    f"{word}: expected an override KEY=VALUE, not a flag; pass folders of options as config_dir"
                )
        for folder in self.config_dirs:  # Hydra would only warn
            if not Path(folder).is_dir():
                raise ConfigError(f"--config-dir {folder}: there is no such folder")
        return replace(self, overrides=prepare_words(self.overrides))


@contextlib.contextmanager
def open_hydra() -> Iterator[Any]:
    """Yields Hydra's loader of scaleflow's configs, and restores Hydra's global state after the block."""
    with preserve_hydra_state(), hydra.initialize_config_module(CONF, version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def explain_error(error: Exception, words: CommandWords) -> str:
    """Describes an error of Hydra, OmegaConf, YAML or the run's folder in one line: the key, the value and a fix."""
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"hydra.run.dir={error.filename}: {error.strerror}; choose a folder that can be written"
    try:
        check_overrides(words)
    except ConfigError as refusal:
        return str(refusal)
    except Exception:
        pass  # the original `error` is more useful
    if isinstance(error, OverrideParseException):
        hint = suggest_word(error.override, words.overrides)
        return f"{mask_override(error.override)}: cannot be read as KEY=VALUE; {hint}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return str(unknown_option_error(group, option, error.options))
    text = explain_mapping(error, words.overrides)
    if text:
        return text
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return explain_yaml(error)
    return shorten_error(error)


def explain_yaml(error: MarkedYAMLError) -> str:
    """Describes a YAML error in one line: the file, the line, and a fix if a colon or a space is missing."""
    mark = error.problem_mark
    assert mark is not None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = Path(mark.name).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines[: mark.line + 1], start=1):
            words = re.fullmatch(r"\s*([\w.]+)\s+([^:#'\"{\[]*)", line)
            if words:
                return f"{mark.name}, line {number}: a colon is missing; write {words[1]}: {words[2].strip()}"
            words = re.fullmatch(r"\s*([\w.]+):([^\s:].*)", line)
            if words:
                return f"{mark.name}, line {number}: a space is missing after the colon; write {words[1]}: {words[2]}"
    return f"{mark.name}, line {mark.line + 1}: {error.problem}"


def suggest_word(word: str, words: Sequence[str]) -> str:
    """Suggests a replacement for a word that Hydra cannot read. `words` are all words of the command."""
    key, is_override, value = word.partition("=")
    if not is_override:
        return suggest_joined_word(word, words)
    if "[" in value and close_brackets(word):
        whole = close_with(word, words)
        if whole:
            return f"type {mask_override(shlex.quote(whole))}"
    if re.fullmatch(r"\(.*\)", value):
        return f"type {mask_override(shlex.quote(f'{key}=[{value[1:-1]}]'))}"
    if re.fullmatch(r"[\w.-]+,", value):
        return f"type {mask_override(quote_override(key, value.rstrip(',')))}"
    closed = close_brackets(word)
    if closed:
        return f"a bracket is missing; type {mask_override(closed)}"
    return f"type {mask_override(quote_override(key, value))}"


def suggest_joined_word(word: str, words: Sequence[str]) -> str:
    """Suggests a replacement for a word without `=`, which may be the rest of a value with spaces."""
    index = words.index(word) if word in words else len(words)
    previous = words[index - 1] if index else ""
    if "=" not in previous or previous.startswith("-"):
        return f"type {word}=VALUE in one word"
    rest = list(itertools.takewhile(lambda other: "=" not in other, words[index:]))
    key, _, value = previous.partition("=")
    if not value and len(rest) == 1:  # a space after the equals sign
        return f"type {mask_override(shlex.quote(f'{key}={rest[0]}'))}"
    return f"type {mask_override(quote_override(key, ' '.join([value, *rest])))}"


def close_with(word: str, words: Sequence[str]) -> str:
    """Joins a word with the following words until its brackets are closed; "" if they never are."""
    if word not in words:
        return ""
    joined = ""
    for following in words[words.index(word) :]:
        joined = f"{joined} {following}" if joined else following
        if not close_brackets(joined):
            return re.sub(r", +", ",", joined)
    return ""


def explain_mapping(error: Exception, words: Sequence[str]) -> str:
    """Returns how to replace a mapping that a recipe sets; "" for any other error."""
    match = re.match(r"(?:Could not override '|Error merging override )([\w.]+)", str(error))
    key = match[1] if match else ""
    typed = next((mask_override(word) for word in words if word.startswith(f"{key}=")), "")
    if not typed:
        return ""
    value = typed.partition("=")[2]
    inner = getattr(error.__cause__, "key", None)
    if key == "dataset.split" and inner:
        split_keys = [f"{key}.{field.name}" for field in fields(Split)]
        return str(unknown_key_error(f"{key}.{inner}", split_keys))
    if key.startswith("hydra.sweeper."):
        hint = ""
        meant = translate_key(key, value)
        if meant.startswith("training.max_seconds="):
            hint = f"; type {meant.replace('training', 'sweep', 1)}"
        return f"{key}: the sweeper has no such key{hint}"
    if key not in list_empty_mappings():  # in a sweep over options, not every option has the key
        word = shlex.quote(f"{key}=choice({value})")
        return f"{key}: there is no such key with each option of the sweep; type {word}"
    return f"{typed}: a recipe sets this mapping, which Hydra cannot replace; type {key}=null before it"


def shorten_error(error: Exception) -> str:
    """Shortens a library's message. Puts the key first if it has one.

    If the error is not from Hydra, OmegaConf or YAML, its class comes first.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    if key and lines:
        return f"{key}: {lines[0]}"
    text = "; ".join(line.rstrip(".") for line in lines[:2])
    is_known = isinstance(error, HydraException | OmegaConfBaseException | YAMLError)
    return text if text and is_known else f"{type(error).__name__}: {text}".removesuffix(": ")


def refuse_file_of_command(override: Override) -> None:
    """Raises ConfigError if an override names a group whose files are for a command and not for a run."""
    for feature in list_features().values():
        for command in feature.commands:
            if command.config_group and command.config_group == override.key_or_group:
                line = mask_override(override.input_line or command.config_group)
                typed = f"{name_command(command.name)} {command.usage}".strip()
                raise ConfigError(f"{line}: a {command.config_group} is no option of a run; write {typed}")


def check_overrides(words: CommandWords) -> None:
    """Raises ConfigError for the first override that names an unknown option or key."""
    typed = OverridesParser.create().parse_overrides([word for word in words.overrides if "=" in word])
    with open_hydra() as loader:
        for override in typed:
            check_override(override, words, loader)
        check_typed_keys(typed, words, loader)


def check_override(override: Override, words: CommandWords, loader: Any) -> None:
    """Raises ConfigError for an override without a key, of an unknown option, or with several values in a run."""
    key = override.key_or_group
    if not key:
        raise ConfigError(f"{mask_override(override.input_line or '')}: cannot be read as KEY=VALUE; name a key")
    refuse_file_of_command(override)
    if override.is_sweep_override() and not words.is_sweep:
        line = mask_override(override.input_line or key)
        raise ConfigError(f"{line}: several values need -m, which runs one job for each; write a list as [a,b]")
    options = loader.get_group_options(key, ObjectType.CONFIG, "config", words.search)
    if options:
        for option in parse_options(override):
            if option not in options:
                raise unknown_option_error(key, option, options)


def check_typed_keys(typed: Sequence[Override], words: CommandWords, loader: Any) -> None:
    """Raises ConfigError for the first override of a key that no chosen option has."""
    search = words.search
    groups = loader.get_group_options("", ObjectType.GROUP, "config", search)
    known: list[str] = []
    for override in typed:
        key = override.key_or_group
        is_group = bool(loader.get_group_options(key, ObjectType.CONFIG, "config", search))
        if is_group or key.startswith("hydra") or override.is_add() or override.is_force_add():
            continue
        choices = find_choices(typed, groups)
        if not known:  # composing the configs takes a while
            known = list_keys_for(choices, search, in_all=not words.is_sweep)
        if key not in known:
            accepts = functools.partial(is_accepted, context=[*search, *choices[0]])
            raise unknown_word_error(override, known, groups, loader=loader, accepts=accepts)


def is_accepted(words: str, context: Sequence[str]) -> bool:
    """Returns whether a run accepts words, as typed in a shell, together with the words of a context.

    Call it while Hydra is open. It does not check whether this machine can run it.
    """
    from scaleflow.config.plan import parse_plan  # a command without mistakes does not need it here

    typed = shlex.split(words)
    try:
        overrides = OverridesParser.create().parse_overrides(typed)
    except HydraException:
        overrides = []
    has_flag = any(word.startswith("-") for word in typed)
    is_sweep = any(override.is_sweep_override() for override in overrides)
    if has_flag or is_sweep:  # flags and sweeps are not composed into one config
        return True
    try:
        config = hydra.compose("config", overrides=[*context, *typed])
        plain: Any = OmegaConf.to_container(config, resolve=True)
        parse_plan(plain, {})
    except (ConfigError, HydraException, OmegaConfBaseException):
        return False
    return True


def override_key(override: str) -> str:
    """Returns the key or group of an override without parsing it, since it may be incomplete."""
    return override.lstrip("+~").partition("=")[0]


def list_keys_for(choices: Sequence[Sequence[str]], search: Sequence[str], in_all: bool) -> list[str]:
    """Lists the keys that exist with all combinations of options (`in_all`), or with at least one."""
    counts: Counter[str] = Counter()  # the number of combinations that have a key
    for choice in choices:
        config = hydra.compose("config", overrides=[*search, *choice])
        counts.update(dict.fromkeys(list_keys(config), 1))
    if in_all:
        return [key for key, count in counts.items() if count == len(choices)]
    return list(counts)


def parse_options(override: Override) -> list[str]:
    """Returns the options that an override of a group names, as typed."""
    if override.is_delete():
        return []
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    if isinstance(value, list | dict):  # Hydra cannot format every list, such as one with a sweep in it
        return [(override.input_line or "").partition("=")[2]]
    return [value if isinstance(value, str) else override.get_value_element_as_str()]


def check_flags(flags: Sequence[str]) -> None:
    """Raises ConfigError for flags that Hydra does not accept. Hydra would print its usage and exit."""
    parser = make_flag_parser()
    parser.error = raise_flag_error  # type: ignore[method-assign]
    parser.parse_args(flags)


def raise_flag_error(message: str) -> NoReturn:
    raise ConfigError(f"{mask_secrets(message)}; see {name_command()} --help")


def parse_config_dirs(flags: Sequence[str]) -> list[str]:
    """Returns the `--config-dir` folders in the flags of a command."""
    after_flag = [folder for flag, folder in itertools.pairwise(flags) if flag in ("--config-dir", "-cd")]
    joined = [flag.partition("=")[2] for flag in flags if flag.startswith("--config-dir=")]
    return [*after_flag, *joined]


def find_choices(typed: Sequence[Override], groups: Sequence[str]) -> list[list[str]]:
    """Lists the overrides that choose options, and so decide which keys exist; in a sweep, one list per combination."""
    choices_of_groups = []
    for override in typed:
        group = str(override.key_or_group)
        options = parse_options(override) if group in groups else []
        if options:
            choices_of_groups.append([make_override(group, option) for option in options])
    return [list(combination) for combination in itertools.product(*choices_of_groups)]


def list_keys(config: DictConfig) -> list[str]:
    """Lists the dotted keys of a config, including keys of inner mappings."""
    return every_key(OmegaConf.to_container(config, resolve=False))


#: Hydra's state is global, so only one thread may compose at a time.
HYDRA_LOCK = threading.RLock()


@dataclass(frozen=True)
class ComposedConfig:
    """The composed config of a command."""

    config: Any  # with interpolations; or plain containers, without interpolations
    choices: Mapping[str, str] = field(default_factory=dict)  # the option chosen in each config group
    search: Sequence[str] = ()  # folders to search for the modules of `_target_`; the first match counts
    folder: Path = Path()  # the folder of the run. `compose_config` does not create it.
    words: CommandWords = field(default_factory=CommandWords)  # the words of the command
    #: The values of interpolations that call a resolver, if they were already resolved
    known: Mapping[KeyPath, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()  # notes for the user about the config of an earlier run

    @property
    def raw(self) -> Any:
        """The config as plain containers, with its interpolations."""
        if isinstance(self.config, DictConfig):
            return OmegaConf.to_container(self.config, resolve=False)
        return self.config

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The config as plain containers, without interpolations; see `resolve_config`."""
        if isinstance(self.config, DictConfig):
            return resolve_config(self.config, self.values)
        return dict(self.config)

    @cached_property
    def values(self) -> dict[KeyPath, Any]:
        """The values of interpolations that call a resolver. Each is resolved once."""
        if isinstance(self.config, DictConfig):
            return resolve_once(self.config, self.known)
        return {}

    def set(self, values: Mapping[str, Any]) -> ComposedConfig:
        """Returns a copy with other values for some keys. Keys that refer to these keys follow them."""
        config = OmegaConf.create(self.raw)
        for key, value in values.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        dependents = find_dependents(self.raw, values)
        known = {path: value for path, value in self.values.items() if path not in dependents}
        return replace(self, config=config, known=known)


def compose_config(overrides: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> ComposedConfig:
    """Composes the config of one run from overrides, as the command line does. Flags and sweeps are refused.

    `config_dirs` are folders with more options. Raises ConfigError, which names the wrong override and a fix.
    """
    words = CommandWords(overrides, config_dirs).prepare()
    words.refuse_sweep("this is a single run")
    with open_hydra(), as_command(words):  # the version of Hydra's rules is global, and other threads may compose
        config = hydra.compose("config", overrides=[*words.search, *words.overrides], return_hydra_config=True)
        folder = Path(config.hydra.run.dir)
    choices = select_group_choices(config.hydra.runtime.choices)
    if config.hydra.mode is RunMode.MULTIRUN:
        raise ConfigError(
            f"experiment={choices.get('experiment')}: this recipe is a sweep, and only one run can be started "
            f"here; run {name_command()} experiment={choices.get('experiment')}"
        )
    check_missing_values(config.hydra)
    check_current_folder(config)
    check_single_run(config)
    with open_dict(config):
        del config["hydra"]
    return ComposedConfig(config, choices, list_own_folders(config_dirs), folder=folder, words=words)


def compose_sweep(words: CommandWords) -> tuple[HydraContext, DictConfig]:
    """Composes the config of a sweep, with Hydra's own part. Returns it with Hydra's context.

    Raises the errors of `compose_config`.
    """
    words = words.prepare()
    with as_command(words), open_hydra() as loader:
        config = loader.load_configuration("config", [*words.search, *words.overrides], RunMode.MULTIRUN)
        return HydraContext(loader, Callbacks(config)), config


@contextlib.contextmanager
def as_command(words: CommandWords) -> Iterator[None]:
    """Makes Hydra behave as in a command. Errors of Hydra, OmegaConf and YAML become ConfigErrors."""
    before = VersionBase.instance().getbase()
    setbase("1.3")
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain_error(error, words)) from error
    finally:
        VersionBase.instance().version_base = before


def check_single_run(config: DictConfig) -> None:
    """Raises ConfigError if a single run sets an option that only applies to jobs of a sweep."""
    defaults: dict[str, Any] = {"repeat": 1, "warm_up": 0, "folds": None, "max_seconds": None, "same_losses": False}
    options = config.get("sweep")
    if not isinstance(options, DictConfig):
        return
    for key, default in defaults.items():
        value = options.get(key, default)
        if value != default:
            raise ConfigError(
                f"sweep.{key}={format_value(value)}: applies only to the jobs of a sweep, and this is a single run; "
                "add -m, with hydra/launcher=isolated"
            )


def check_job(config: DictConfig) -> None:
    """Raises ConfigError if a job of a sweep sets an option that only applies to a single run."""
    options = config.get("sweep")
    folds = options.get("folds") if isinstance(options, DictConfig) else None
    if folds and (options.get("repeat", 1), options.get("warm_up", 0)) != (1, 0):
        raise ConfigError(
            f"sweep.folds={folds} with sweep.repeat or sweep.warm_up: a job trains once for each fold; leave them out"
        )
    for feature in list_features().values():
        keys = config.get(feature.config_group)
        if feature.check_job and isinstance(keys, DictConfig):
            check_job_of_feature(feature, keys)


def check_job_of_feature(feature: Feature, keys: DictConfig) -> None:
    """Calls a feature's check of jobs. If the check itself fails, a message reports it, and the job continues.

    Raises ConfigError if the check refuses the keys of the feature's group.
    """
    with report_problems(feature.name, f"its check {feature.check_job} is skipped", may_refuse=True):
        import_named(feature.check_job)(keys)


#: One or more folders with the user's own options.
Folders = str | Path | Sequence[str | Path]


def to_folders(config_dir: Folders) -> list[str]:
    if isinstance(config_dir, str | Path):
        return [str(config_dir)]
    return [str(folder) for folder in config_dir]


def config_dir_flags(config_dirs: Sequence[str | Path]) -> list[str]:
    """Returns `--config-dir FOLDER` for each folder."""
    flags = []
    for folder in config_dirs:
        flags += ["--config-dir", str(folder)]
    return flags


def select_group_choices(chosen: Any) -> dict[str, str]:
    """Returns the option of each config group. A group that an app moved (`strategy@train.strategy`) is also found.

    Raises ConfigError if a recipe chooses `null` for a group that a run needs: the group would silently use its
    defaults.
    """
    choices: dict[str, str] = {}
    for name, option in chosen.items():
        group = str(name).partition("@")[0]
        if "/" in group:
            continue
        if option is not None:
            choices[group] = str(option)
        elif group in ("tracking", "checkpoint", "evaluation"):  # the other optional groups are simply off
            raise ConfigError(f"{group}: null: this group has no such option; write 'override /{group}: none'")
        elif group in list_needed_groups():
            raise ConfigError(need_group(f"{group}: null", group))
    return choices


def list_own_folders(config_dirs: Sequence[str | Path]) -> list[str]:
    """Lists the folders with a user's modules. The `--config-dir` folders come last."""
    typed = [str(Path(folder).absolute()) for folder in config_dirs]
    return [*user_module_folders(), *typed]


def user_module_folders() -> list[str]:
    """Lists the folders with a user's modules: the current folder, and the folder of the running script."""
    folders = [str(Path.cwd())]
    main = sys.modules.get("__main__")
    is_module = getattr(main, "__spec__", None) is not None  # python -m
    script = getattr(main, "__file__", None)
    if script is not None and not is_module:
        folders.append(str(Path(script).absolute().parent))
    return list(dict.fromkeys(folders))


@contextlib.contextmanager
def find_own_modules(config_dirs: Sequence[str | Path]) -> Iterator[None]:
    """Lets Hydra find the modules of its callbacks in the same folders as a run's modules, after the installed ones."""
    added = [folder for folder in list_own_folders(config_dirs) if folder not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        sys.path[:] = [folder for folder in sys.path if folder not in added]


def list_options(config_dirs: Sequence[str | Path] = ()) -> dict[str, list[str]]:
    """Returns the options of each config group, including the user's."""
    search = CommandWords(config_dirs=config_dirs).search
    options = {}
    with open_hydra() as loader:
        for group in loader.get_group_options("", ObjectType.GROUP, "config", search):
            options[group] = list(loader.get_group_options(group, ObjectType.CONFIG, "config", search))
    return options


def resolve_config(config: DictConfig, values: Mapping[KeyPath, Any] | None = None) -> dict[str, Any]:
    """Resolves the interpolations of a config to plain containers, and remembers its secrets so that they are masked.

    Args:
        values: known values of interpolations that call a resolver; None: resolve them here.

    Raises ConfigError if a key without a default has no value, or if an interpolation cannot be resolved.
    """
    try:
        fixed = put_values(config, resolve_once(config, {}) if values is None else values)
        missing = sorted(OmegaConf.missing_keys(fixed))
        if missing:
            has = "has" if len(missing) == 1 else "have"
            hint = " ".join(f"{key}=..." for key in missing)
            raise ConfigError(f"{', '.join(missing)}: {has} no default; write {hint}")
        resolved = OmegaConf.to_container(fixed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(shorten_error(error)) from error
    assert isinstance(resolved, dict)
    remember_secrets(find_secrets(OmegaConf.to_container(config, resolve=False), resolved))
    return {str(key): value for key, value in resolved.items()}


def read_app_choices() -> dict[str, str]:
    """Returns the choices of the Hydra app that calls this; empty without an app."""
    return select_group_choices(HydraConfig.get().runtime.choices) if HydraConfig.initialized() else {}


@contextlib.contextmanager
def preserve_hydra_state() -> Iterator[None]:
    """Restores Hydra's global state after the block. Only one thread at a time can be inside."""
    with HYDRA_LOCK:
        version = VersionBase.instance().getbase()
        app = GlobalHydra.instance().hydra
        GlobalHydra.instance().hydra = None
        try:
            yield
        finally:
            VersionBase.instance().version_base = version
            GlobalHydra.instance().hydra = app


def read_composed_config(config: DictConfig) -> ComposedConfig:
    """Returns the config that Hydra composed for the current job. `config` has interpolations and
    no `hydra` section.
    """
    own = HydraConfig.get()
    check_missing_values(own)
    typed: Any = OmegaConf.to_container(own.overrides.task, resolve=False)
    words = CommandWords(list(map(str, typed)))
    choices = select_group_choices(own.runtime.choices)
    search = list_module_folders(own.runtime)
    folder = Path(own.runtime.output_dir)
    return ComposedConfig(config, choices, search, folder=folder, words=words)


def list_module_folders(runtime: Any) -> list[str]:
    """Lists the folders to search for the modules of `_target_`, from `hydra.runtime`."""
    return [str(Path.cwd()), *(source.path for source in runtime.config_sources if source.schema == "file")]


def list_hydra_names() -> list[str]:
    """Lists the names of files and folders that Hydra itself writes to the job's folder before the job begins."""
    hydra = HydraConfig.get()
    return [str(hydra.output_subdir).partition("/")[0], f"{hydra.job.name}.log"]


def mask_sweep_config(path: Path) -> None:
    """Masks the secrets in a sweep's `multirun.yaml`, which Hydra writes, if it exists."""
    if path.is_file():
        config: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        overrides = config["hydra"]["overrides"]
        for part, words in overrides.items():
            overrides[part] = [mask_override(word) for word in words]
        config["hydra"]["job"].pop("override_dirname", None)  # it repeats all overrides in one line
        OmegaConf.save(OmegaConf.create(mask_secrets(config)), path)


def check_current_folder(config: DictConfig) -> None:
    """Raises ConfigError if Hydra would change the current folder: relative paths are relative to the typed folder."""
    if OmegaConf.select(config, "hydra.job.chdir"):
        raise ConfigError(
            "hydra.job.chdir=true: relative paths are those of the folder where the command was typed, and it stays "
            "the current one; leave this key out, and name files in the run's folder as "
            "${hydra:runtime.output_dir}/FILE"
        )
