"""Finds keys that a user's option declares as `???`, which means that a value must be typed.

OmegaConf keeps an earlier value when a later file has `???`. So a recipe that requires a value would silently train
with the default.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scaleflow.config.interpolations import iterate_paths
from scaleflow.config.parse import every_key, is_under
from scaleflow.errors import ConfigError

#: The header of an option's file with which Hydra chooses its package.
PACKAGE = re.compile(r"^# *@package +(\S+)", re.MULTILINE)


def check_missing_values(hydra: Any) -> None:
    """Raises ConfigError if a user's option has `???` for a key that neither a word nor a later option sets.

    Args:
        hydra: Hydra's own part of the composed config.
    """
    sources = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    if not sources:
        return
    typed = list_typed_keys(hydra)
    for key, option in find_missing_keys(sources, hydra.runtime.choices).items():
        if not is_under(key, typed):
            raise ConfigError(f"{key}: {option} has no default for it; write {key}=...")


def find_missing_keys(sources: Sequence[Path], choices: Mapping[Any, Any]) -> dict[str, str]:
    """Returns the keys that the user's options declare as `???`, and the option of each: `GROUP=OPTION`."""
    missing: dict[str, str] = {}
    for group, option in choices.items():
        file = find_option_file(sources, str(group), str(option))
        if file is None:
            continue
        for key, is_missing in read_option(file, str(group), file.stat().st_mtime_ns).items():
            if is_missing:
                missing[key] = f"{str(group).partition('@')[0]}={option}"
            else:
                missing.pop(key, None)
    return missing


def list_typed_keys(hydra: Any) -> list[str]:
    """Returns the keys that the words of the command set. Choosing another option of a group sets no key."""
    keys = []
    for word in read_words(hydra):
        key = str(word).lstrip("+~").partition("=")[0]
        if key not in hydra.runtime.choices:
            keys.append(key)
    return keys


def read_words(hydra: Any) -> Sequence[Any]:
    words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return list(words)


def find_option_file(sources: Sequence[Path], group: str, option: str) -> Path | None:
    """Returns the file of an option in the user's folders; None if the option comes from a package."""
    folder = group.partition("@")[0]
    for source in sources:
        file = source / folder / f"{option}.yaml"
        if file.is_file():
            return file
    return None


@functools.lru_cache(maxsize=256)
def read_option(file: Path, group: str, changed: int) -> Mapping[str, bool]:
    """Returns the dotted keys that an option's file sets in the whole config, and whether each is `???`.

    Args:
        group: the option's group, possibly with its package: `strategy@train.strategy`.
        changed: when the file was last changed. It invalidates the cache.
    """
    text = file.read_text(encoding="utf-8")
    config = OmegaConf.create(text)
    if not isinstance(config, DictConfig):
        return {}
    package = find_package(text, group)
    prefix = f"{package}." if package else ""
    plain = OmegaConf.to_container(config, resolve=False)  # interpolations may refer to keys of other files
    keys = {}
    for key in every_key(plain):
        keys[prefix + key] = False
    for path, value in iterate_paths(plain):
        if value == "???":
            keys[prefix + ".".join(map(str, path))] = True
    return keys


def find_package(text: str, group: str) -> str:
    """Returns the dotted key where Hydra puts an option with this text; "" for the whole config."""
    folder, _, package = group.partition("@")
    own = folder.replace("/", ".")
    header = PACKAGE.search(text)
    if not package:
        package = header[1] if header else own
    return "" if package == "_global_" else package.replace("_group_", own)
