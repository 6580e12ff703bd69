"""Composes a config where no Hydra app is: for the Python API, for `rerun` and `evaluate`.

It may be called inside another Hydra app, whose state it leaves as it was, and in any thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from scaleflow.command import quote_nan_option, take_keys_of_run
from scaleflow.config.hydra_errors import CONF, check_config_dirs, explain_error, parse_overrides, search_path_overrides
from scaleflow.config.parse import format_value
from scaleflow.errors import ConfigError
from scaleflow.secret_masking import find_secrets, find_typed_secrets, register_resolver, remember_secrets

#: Hydra's state is the process's.
HYDRA_LOCK = threading.RLock()


@dataclass(frozen=True)
class ComposedConfig:
    """A command line's config.

    Attributes:
        config: interpolations kept.
        choices: the option chosen in each config group.
        search: the folders in which `_target_` modules are looked for, first match first.
        folder: the run's, as `hydra.run.dir` says; not made.
    """

    config: DictConfig
    choices: dict[str, str]
    search: list[str]
    folder: Path


def compose_config(overrides: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> ComposedConfig:
    """The config of a command line's overrides.

    Raises:
        ConfigError: naming the word that is wrong, and what would work.
    """
    words = take_keys_of_run(quote_nan_option(overrides))
    remember_secrets(find_typed_secrets(words))
    register_resolver()
    flags = config_dir_flags(config_dirs)
    check_overrides_only(words, flags)
    with preserve_hydra_state():
        try:
            with hydra.initialize_config_module(CONF, version_base="1.3"):
                whole = hydra.compose(
                    "config", overrides=[*search_path_overrides(flags), *words], return_hydra_config=True
                )
            folder = Path(whole.hydra.run.dir)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain_error(error, [*flags, *words])) from error
    choices = select_group_choices(whole.hydra.runtime.choices)
    if whole.hydra.mode is RunMode.MULTIRUN:
        raise ConfigError(
            f"experiment={choices.get('experiment')}: is a sweep, several runs; python -m scaleflow runs it"
        )
    check_single_run(whole)
    with open_dict(whole):
        del whole["hydra"]
    own = [str(Path(folder).absolute()) for folder in config_dirs]
    return ComposedConfig(whole, choices, [*user_module_folders(), *own], folder)


def check_single_run(config: DictConfig) -> None:
    """Refuses what is said of the jobs of a sweep where there is one run.

    Raises:
        ConfigError: naming the key.
    """
    defaults: dict[str, Any] = {"repeat": 1, "warm_up": 0, "same_losses": False}
    said = config.get("sweep")
    for key, default in defaults.items():
        if isinstance(said, DictConfig) and (value := said.get(key, default)) != default:
            raise ConfigError(
                f"sweep.{key}={format_value(value)}: this is one run; of a sweep's jobs (-m) "
                "hydra/launcher=isolated makes that"
            )


def check_overrides_only(words: Sequence[str], flags: Sequence[str]) -> None:
    """Refuses what is no override of one run."""
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word}: expected overrides, KEY=VALUE; folders with options are named by config_dir")
    check_config_dirs(flags)
    for override in parse_overrides(words):
        if override.is_sweep_override():
            raise ConfigError(f"{override.key_or_group}: several values are a sweep; a list is written [a,b]")


def config_dir_flags(config_dirs: Sequence[str | Path]) -> list[str]:
    return [word for folder in config_dirs for word in ("--config-dir", str(folder))]


def select_group_choices(chosen: Any) -> dict[str, str]:
    """Of Hydra's choices those of config groups; `strategy@train.strategy`, in another app, is the group's too."""
    found = {str(group).partition("@")[0]: option for group, option in chosen.items() if option is not None}
    return {group: str(option) for group, option in found.items() if "/" not in group}


def user_module_folders() -> list[str]:
    """Where a user's modules are: the current folder, and that of the script that this process runs."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    is_script = script is not None and getattr(sys.modules["__main__"], "__spec__", None) is None
    folders = [Path.cwd(), *([Path(script).absolute().parent] if script is not None and is_script else [])]
    return list(dict.fromkeys(map(str, folders)))


def list_options(config_dirs: Sequence[str | Path] = ()) -> dict[str, list[str]]:
    """The options that there are in each config group."""
    search = search_path_overrides(config_dir_flags(config_dirs))
    with preserve_hydra_state(), hydra.initialize_config_module(CONF, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = loader.get_group_options("", ObjectType.GROUP, "config", search)
        return {group: list(loader.get_group_options(group, ObjectType.CONFIG, "config", search)) for group in groups}


def to_plain(config: DictConfig) -> dict[str, Any]:
    """A config as plain containers, interpolations resolved.

    Raises:
        ConfigError: if a key without a default has no value.
        OmegaConfBaseException: if an interpolation leads nowhere.
    """
    if missing := sorted(OmegaConf.missing_keys(config)):
        has = "has" if len(missing) == 1 else "have"
        raise ConfigError(f"{', '.join(missing)}: {has} no default; write {' '.join(f'{key}=...' for key in missing)}")
    found = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(found, dict)
    remember_secrets(find_secrets(OmegaConf.to_container(config, resolve=False), found))
    return {str(key): value for key, value in found.items()}


def read_app_choices() -> dict[str, str]:
    """The choices of the Hydra app that this is called in; none where there is none."""
    return select_group_choices(HydraConfig.get().runtime.choices) if HydraConfig.initialized() else {}


@contextlib.contextmanager
def preserve_hydra_state() -> Iterator[None]:
    """Gives Hydra's state back as it was; one thread at a time."""
    with HYDRA_LOCK:
        version, app = VersionBase.instance().getbase(), GlobalHydra.instance().hydra
        GlobalHydra.instance().hydra = None
        try:
            yield
        finally:
            VersionBase.instance().version_base, GlobalHydra.instance().hydra = version, app
