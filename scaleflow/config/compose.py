"""Composes a config without a Hydra app: for the Python API, `rerun` and `evaluate`.

It also works in any thread and inside another Hydra app, whose state it restores.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from hydra.version import VersionBase, setbase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scaleflow.config.folders import check_current_folder
from scaleflow.config.hydra_errors import (
    CONF,
    check_config_dirs,
    explain_error,
    parse_overrides,
    search_path_overrides,
    shorten_error,
)
from scaleflow.config.parse import format_value
from scaleflow.config.words import prepare_words
from scaleflow.errors import ConfigError
from scaleflow.interfaces import name_command
from scaleflow.interfaces.secret_masking import find_secrets, find_typed_secrets, register_resolver, remember_secrets

#: Hydra's state is global: one thread at a time may compose.
HYDRA_LOCK = threading.RLock()


@dataclass(frozen=True)
class ComposedConfig:
    """The composed config of a command."""

    config: DictConfig  # the config, with its interpolations
    choices: dict[str, str]  # the option chosen in each config group
    search: list[str]  # the folders in which modules of `_target_` are looked for, first match first
    folder: Path  # the folder of the run. `compose_config` does not create it.


def compose_config(overrides: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> ComposedConfig:
    """Composes the config of one run from overrides, without flags and sweeps, as the command line does.

    `config_dirs` are folders with further options. Raises ConfigError, naming the override that is wrong, and what
    would work.
    """
    words = prepare_words(overrides)
    remember_secrets(find_typed_secrets(words))
    register_resolver()
    flags = config_dir_flags(config_dirs)
    check_overrides_only(words, flags)
    with preserve_hydra_state():
        try:
            with hydra.initialize_config_module(CONF, version_base="1.3"):
                config = hydra.compose(
                    "config", overrides=[*search_path_overrides(flags), *words], return_hydra_config=True
                )
            folder = Path(config.hydra.run.dir)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain_error(error, [*flags, *words])) from error
    choices = select_group_choices(config.hydra.runtime.choices)
    if config.hydra.mode is RunMode.MULTIRUN:
        raise ConfigError(
            f"experiment={choices.get('experiment')}: this recipe is a sweep, and only one run can be started "
            f"here; run {name_command()} experiment={choices.get('experiment')}"
        )
    check_current_folder(config)
    check_single_run(config)
    with open_dict(config):
        del config["hydra"]
    return ComposedConfig(config, choices, list_own_folders(config_dirs), folder)


def compose_sweep(overrides: Sequence[str], config_dirs: Sequence[str | Path]) -> tuple[HydraContext, DictConfig]:
    """Composes the config of a sweep, with Hydra's own part; returns Hydra's context, too.

    Raises ConfigError as `compose_config` does.
    """
    words = prepare_words(overrides)
    remember_secrets(find_typed_secrets(words))
    register_resolver()
    flags = config_dir_flags(config_dirs)
    refuse_flags(words)
    check_config_dirs(flags)
    with (
        preserve_hydra_state(),
        as_command(words, config_dirs),
        hydra.initialize_config_module(CONF, version_base="1.3"),
    ):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", [*search_path_overrides(flags), *words], RunMode.MULTIRUN)
        return HydraContext(loader, Callbacks(config)), config


@contextlib.contextmanager
def as_command(words: Sequence[str], config_dirs: Sequence[str | Path]) -> Iterator[None]:
    """Makes Hydra behave as in a command. Raises ConfigError in place of the errors of Hydra, OmegaConf and YAML."""
    before = VersionBase.instance().getbase()
    setbase("1.3")
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        with preserve_hydra_state():
            message = explain_error(error, ["-m", *config_dir_flags(config_dirs), *words])
        raise ConfigError(message) from error
    finally:
        VersionBase.instance().version_base = before


def refuse_flags(words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("-"):
            raise ConfigError(
                f"{word}: expected an override KEY=VALUE, not a flag; pass folders of options as config_dir"
            )


def check_single_run(config: DictConfig) -> None:
    """Raises `ConfigError` if a single run sets an option that is only for the jobs of a sweep."""
    defaults: dict[str, Any] = {"repeat": 1, "warm_up": 0, "same_losses": False}
    options = config.get("sweep")
    for key, default in defaults.items():
        if isinstance(options, DictConfig) and (value := options.get(key, default)) != default:
            raise ConfigError(
                f"sweep.{key}={format_value(value)}: applies only to the jobs of a sweep, and this is a single run; "
                "add -m, with hydra/launcher=isolated"
            )


def check_job(config: DictConfig) -> None:
    """Raises `ConfigError` if a job of a sweep sets an option that is only for a single run."""
    promotion = config.get("promotion")
    if isinstance(promotion, DictConfig) and promotion.get("name") == "champion":
        raise ConfigError(
            "promotion=champion: of many jobs the best may be better by chance; leave it out, and promote the best job "
            f"afterwards with {name_command('promote')} RUN_ID"
        )


def check_overrides_only(words: Sequence[str], flags: Sequence[str]) -> None:
    """Raises `ConfigError` for a flag among the words, an override with several values, or a missing folder."""
    refuse_flags(words)
    check_config_dirs(flags)
    for override in parse_overrides(words):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.key_or_group}: several values make a sweep, and this is a single run; write a list as [a,b]"
            )


def config_dir_flags(config_dirs: Sequence[str | Path]) -> list[str]:
    return [word for folder in config_dirs for word in ("--config-dir", str(folder))]


def select_group_choices(chosen: Any) -> dict[str, str]:
    """Returns the option of each config group, also of one that an app has moved (`strategy@train.strategy`)."""
    choices = {str(group).partition("@")[0]: option for group, option in chosen.items() if option is not None}
    return {group: str(option) for group, option in choices.items() if "/" not in group}


def list_own_folders(config_dirs: Sequence[str | Path]) -> list[str]:
    """Lists the folders with a user's modules, those of `--config-dir` last."""
    return [*user_module_folders(), *(str(Path(folder).absolute()) for folder in config_dirs)]


def user_module_folders() -> list[str]:
    """Lists the folders with a user's modules: the current one, and that of the script that this process runs."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
    folders = [Path.cwd(), *([] if script is None else [Path(script).absolute().parent])]
    return list(dict.fromkeys(map(str, folders)))


@contextlib.contextmanager
def find_own_modules(config_dirs: Sequence[str | Path]) -> Iterator[None]:
    """Lets Hydra find the modules of its callbacks where modules of a run are found, after the installed ones."""
    added = [folder for folder in list_own_folders(config_dirs) if folder not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        sys.path[:] = [folder for folder in sys.path if folder not in added]


def list_options(config_dirs: Sequence[str | Path] = ()) -> dict[str, list[str]]:
    search = search_path_overrides(config_dir_flags(config_dirs))
    with preserve_hydra_state(), hydra.initialize_config_module(CONF, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = loader.get_group_options("", ObjectType.GROUP, "config", search)
        return {group: list(loader.get_group_options(group, ObjectType.CONFIG, "config", search)) for group in groups}


def resolve_config(config: DictConfig) -> dict[str, Any]:
    """Resolves the interpolations of a config to plain containers, and remembers its secrets so that they are masked.

    Raises ConfigError if a key without a default has no value, or if an interpolation cannot be resolved.
    """
    try:
        if missing := sorted(OmegaConf.missing_keys(config)):
            has, hint = "has" if len(missing) == 1 else "have", " ".join(f"{key}=..." for key in missing)
            raise ConfigError(f"{', '.join(missing)}: {has} no default; write {hint}")
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(shorten_error(error)) from error
    assert isinstance(resolved, dict)
    remember_secrets(find_secrets(OmegaConf.to_container(config, resolve=False), resolved))
    return {str(key): value for key, value in resolved.items()}


def keep_hydra_values(raw: Any, resolved: Any) -> Any:
    """Returns a config with its interpolations, except those of Hydra's own part, which only its command knows."""
    if isinstance(raw, Mapping) and isinstance(resolved, Mapping):
        return {key: keep_hydra_values(value, resolved.get(key, value)) for key, value in raw.items()}
    if isinstance(raw, list) and isinstance(resolved, list) and len(raw) == len(resolved):
        return [keep_hydra_values(*both) for both in zip(raw, resolved, strict=True)]
    return resolved if "${hydra:" in str(raw) else raw


def read_app_choices() -> dict[str, str]:
    """Returns the choices of the Hydra app that calls this; empty if there is none."""
    return select_group_choices(HydraConfig.get().runtime.choices) if HydraConfig.initialized() else {}


@contextlib.contextmanager
def preserve_hydra_state() -> Iterator[None]:
    """Restores Hydra's global state after the block. Only one thread at a time can be in such a block."""
    with HYDRA_LOCK:
        version, app = VersionBase.instance().getbase(), GlobalHydra.instance().hydra
        GlobalHydra.instance().hydra = None
        try:
            yield
        finally:
            VersionBase.instance().version_base, GlobalHydra.instance().hydra = version, app
