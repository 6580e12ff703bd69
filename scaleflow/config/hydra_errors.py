"""Turns errors of Hydra and OmegaConf into one-line messages that name the override that is wrong."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from scaleflow.config.parse import EMPTY_MAPPINGS, every_key, unknown_key_error, unknown_option_error
from scaleflow.config.synonyms import close_brackets, translate_key
from scaleflow.config.words import make_override, quote_override, quote_value, split_flags
from scaleflow.errors import ConfigError
from scaleflow.interfaces import name_command
from scaleflow.interfaces.secret_masking import mask_override, mask_secrets

CONF = "scaleflow.conf"


def explain_error(error: Exception, words: Sequence[str]) -> str:
    """Describes an error of Hydra, OmegaConf, YAML or the run's folder in one line: the key, the value, what would
    work.

    `words` are those of the command, with its flags.
    """
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"hydra.run.dir={error.filename}: {error.strerror}; choose a folder that can be written"
    try:
        check_overrides(words)
    except ConfigError as refusal:
        return str(refusal)
    except Exception:
        pass  # `error`, which came first, says more
    if isinstance(error, OverrideParseException):
        return f"{mask_override(error.override)}: cannot be read as KEY=VALUE; {suggest_word(error.override, words)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return str(unknown_option_error(group, option, error.options))
    if text := explain_mapping(error, words):
        return text
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    return shorten_error(error)


def suggest_word(word: str, words: Sequence[str]) -> str:
    """Says what to type instead of a word that Hydra cannot read, one of the `words` of a command."""
    key, is_override, value = word.partition("=")
    if not is_override:
        before = list(itertools.takewhile(lambda other: other != word, words))
        after = itertools.takewhile(lambda other: "=" not in other, words[len(before) :])
        if before and "=" in before[-1] and not before[-1].startswith("-"):  # a value with spaces without quotes
            key, _, value = before[-1].partition("=")
            return f"type {mask_override(quote_override(key, ' '.join([value, *after])))}"
        return f"type {word}=VALUE in one word"
    if closed := close_brackets(word):
        return f"a bracket is missing; type {mask_override(closed)}"
    return f"type {mask_override(quote_override(key, value))}"


def explain_mapping(error: Exception, words: Sequence[str]) -> str:
    """Says how to replace a mapping that a recipe sets. Returns "" if this is another error."""
    found = re.match(r"(?:Could not override '|Error merging override )([\w.]+)", str(error))
    key = found[1] if found else ""
    typed = next((word for word in words if word.startswith(f"{key}=")), "")
    if not typed:
        return ""
    if key not in EMPTY_MAPPINGS:  # of a sweep, what not every option has that it names
        word = shlex.quote(f"{key}=choice({mask_override(typed).partition('=')[2]})")
        return f"{key}: there is no such key with each option of the sweep; type {word}"
    return f"{mask_override(typed)}: a recipe sets this mapping, which Hydra cannot replace; type {key}=null before it"


def shorten_error(error: Exception) -> str:
    """Shortens a library's message. Puts the key first if it has one, or the class if the error is not from Hydra,
    OmegaConf or YAML."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    if key and lines:
        return f"{key}: {lines[0]}"
    text = "; ".join(line.rstrip(".") for line in lines[:2])
    is_known = isinstance(error, HydraException | OmegaConfBaseException | YAMLError)
    return text if text and is_known else f"{type(error).__name__}: {text}".removesuffix(": ")


def check_overrides(words: Sequence[str]) -> None:
    """Raises `ConfigError` for the first override that names an option or a key that does not exist."""
    is_sweep = bool({"-m", "--multirun"} & set(words))
    search = search_path_overrides(words)
    typed = OverridesParser.create().parse_overrides([word for word in split_flags(words)[1] if "=" in word])
    with initialize_config_module(CONF, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = loader.get_group_options("", ObjectType.GROUP, "config", search)
        for override in typed:
            key = override.key_or_group
            if not key:
                raise ConfigError(
                    f"{mask_override(override.input_line or '')}: cannot be read as KEY=VALUE; name a key"
                )
            if key == "pipeline":
                line = mask_override(override.input_line or key)
                raise ConfigError(f"{line}: a pipeline is no option of a run; write {name_command('pipeline')} NAME")
            options = loader.get_group_options(key, ObjectType.CONFIG, "config", search)
            if override.is_sweep_override() and not is_sweep:
                line = mask_override(override.input_line or key)
                raise ConfigError(f"{line}: several values need -m, which runs one job for each; write a list as [a,b]")
            for option in parse_options(override) if options else ():
                if option not in options:
                    raise unknown_option_error(key, option, options)
        known: list[str] = []
        for override in typed:
            key = override.key_or_group
            is_option = bool(loader.get_group_options(key, ObjectType.CONFIG, "config", search))
            if is_option or key.startswith("hydra") or override.is_add():
                continue
            known = known or list_keys_for(find_choices(typed, groups), search, in_all=not is_sweep)
            if key not in known:
                raise explain_unknown_key(override, known, groups, loader)


def explain_unknown_key(override: Override, known: Sequence[str], groups: Sequence[str], loader: Any) -> ConfigError:
    """Returns the error for an override of a key that does not exist, with what to type."""
    key, value = override.key_or_group, mask_override(override.input_line or "").partition("=")[2]
    error = str(unknown_key_error(key, [*known, *groups]))
    text, is_similar, similar = error.partition("; did you mean ")
    parent, _, leaf = key.rpartition(".")
    is_misspelled = similar.rstrip("?").rpartition(".")[0] == parent and bool(parent)
    is_leaf = bool(is_similar) and similar.rstrip("?").endswith(f".{leaf}")
    meant = "" if is_misspelled else translate_key(key, value)
    is_other_form = meant.count("=") > 1 or meant.startswith(("'", "strategy=", "hydra."))
    if is_other_form or (meant and not is_leaf and meant.partition("=")[0] in [*known, *groups]):
        return ConfigError(f"{key}: there is no such key; type {meant}")
    if is_similar:
        return ConfigError(f"{text}; did you mean {similar.rstrip('?')}={value}?")
    return ConfigError(f"{error}{describe_other_options(key, groups, loader)}")


def describe_other_options(key: str, groups: Sequence[str], loader: Any) -> str:
    """Returns which options of a group have a key that the chosen ones lack; "" if none has."""
    group, _, leaf = key.rpartition(".")
    for name in [group] if group in groups else groups:
        options = loader.get_group_options(name, ObjectType.CONFIG)
        configs = {option: loader.repository.load_config(f"{name}/{option}").config for option in options}
        having = [option for option, config in configs.items() if leaf in config.keys()]  # noqa: SIM118  (also ???)
        if having and leaf:
            return f"; {name}.{leaf} is a key of {name}={', '.join(having)}"
    return ""


def override_key(override: str) -> str:
    """Returns the key or group of an override without parsing it, since it may be incomplete."""
    return override.lstrip("+~").partition("=")[0]


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Parses overrides. Raises ConfigError if one cannot be parsed."""
    try:
        return list(OverridesParser.create().parse_overrides(list(words)))
    except HydraException as error:
        raise ConfigError(explain_error(error, words)) from error


def list_keys_for(choices: Sequence[Sequence[str]], search: Sequence[str], in_all: bool) -> list[str]:
    """Lists the keys that exist with every one of several combinations of options, or with any of them."""
    keys_of_choices = [list_keys(compose("config", overrides=[*search, *choice])) for choice in choices]
    every = dict.fromkeys(itertools.chain.from_iterable(keys_of_choices))
    return [key for key in every if not in_all or all(key in keys for keys in keys_of_choices)]


def parse_options(override: Override) -> list[str]:
    """Returns the options that an override of a group names, as they were typed."""
    if override.is_delete():
        return []
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    if isinstance(value, list | dict):  # Hydra cannot format every list, such as one with a sweep in it
        return [(override.input_line or "").partition("=")[2]]
    return [value if isinstance(value, str) else override.get_value_element_as_str()]


def check_flags(words: Sequence[str]) -> None:
    """Raises `ConfigError` for flags that Hydra does not accept. Hydra would print its usage and end the process.

    `words` are those of the command, its flags first.
    """
    parser = get_args_parser()
    parser.error = raise_flag_error  # type: ignore[method-assign]
    parser.parse_args(words)


def raise_flag_error(message: str) -> NoReturn:
    raise ConfigError(f"{mask_secrets(message)}; see {name_command()} --help")


def check_config_dirs(words: Sequence[str]) -> None:
    """Raises `ConfigError` if a `--config-dir` is no folder. Hydra only warns about it."""
    for folder in parse_config_dirs(words):
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder")


def parse_config_dirs(words: Sequence[str]) -> list[Path]:
    after = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--config-dir", "-cd")]
    joined = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    return [Path(folder) for folder in (*after, *joined)]


def search_path_overrides(words: Sequence[str]) -> list[str]:
    """Returns overrides that put the folders of `--config-dir` on Hydra's search path."""
    folders = [quote_value(f"file://{folder.absolute()}") for folder in parse_config_dirs(words)]
    return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []


def find_choices(typed: Sequence[Override], groups: Sequence[str]) -> list[list[str]]:
    """Lists the overrides that choose options, which decide which keys exist. A sweep has one list per combination."""
    choices_of_groups = [
        [make_override(str(o.key_or_group), c) for c in parse_options(o)]
        for o in typed
        if o.key_or_group in groups and parse_options(o)
    ]
    return [list(combination) for combination in itertools.product(*choices_of_groups)]


def list_keys(config: DictConfig) -> list[str]:
    """Lists the dotted keys of a config, those of inner mappings too."""
    return every_key(OmegaConf.to_container(config, resolve=False))
