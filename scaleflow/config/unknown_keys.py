"""The errors for keys and options that do not exist, with what was meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.config.synonyms import ABSENT, DEVICES, simplify, translate_key, translate_option
from scaleflow.errors import ConfigError, find_similar
from scaleflow.interfaces.secret_masking import mask_override

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

#: Keys that are null by default, and otherwise a mapping.
EMPTY_MAPPINGS = (
    *("dataset.augment", "dataset.balance", "model.freeze", "model.lora"),
    *("objective.loss", "objective.loss_weights", "objective.class_weight"),
    *("optimizer.plateau", "optimizer.rate_factors", "training.early_stopping", "training.step"),
    *("promotion.at_least", "checkpoint.best", "tracking.tags"),
)


def unknown_key_error(key: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for a key that does not exist; suggests the most similar known key."""
    known = list(known)
    parent, _, leaf = key.rpartition(".")
    if parent in EMPTY_MAPPINGS and parent in known:
        return ConfigError(f"{key}: {parent} is null; write '{parent}={{{leaf}: ...}}'")
    return ConfigError(f"{key}: there is no such key{suggest(key, known, '; --cfg job lists all keys')}")


def unknown_word_error(override: Override, known: Sequence[str], groups: Sequence[str], loader: Any) -> ConfigError:
    """Returns the error for an override of a key that does not exist, with what to type."""
    key, value = override.key_or_group, mask_override(override.input_line or "").partition("=")[2]
    parent, _, leaf = key.rpartition(".")
    absent = ABSENT.get(key) or (ABSENT.get(simplify(leaf)) if parent in ("", "dataset", "objective") else None)
    if absent:
        return ConfigError(f"{key}: there is no such key: {absent}")
    names = [*known, *groups]
    similar = "" if parent in EMPTY_MAPPINGS and parent in names else find_similar_key(key, names)
    is_misspelled = similar.rpartition(".")[0] == parent and bool(parent)
    is_device = simplify(leaf) in DEVICES
    meant = translate_key(key, value)
    if parent == "evaluation" or (is_misspelled and not is_device and not meant.startswith(f"'{parent}.")):
        meant = ""
    is_other_form = meant.count("=") > 1 or meant.startswith(("'", "strategy=", "hydra."))
    if is_other_form or (meant and not similar.endswith(f".{leaf}") and meant.partition("=")[0] in names):
        return ConfigError(f"{key}: there is no such key; type {meant}")
    if similar:
        return ConfigError(f"{key}: there is no such key; did you mean {similar}={value}?")
    return ConfigError(f"{unknown_key_error(key, names)}{describe_other_options(key, groups, loader)}")


def describe_other_options(key: str, groups: Sequence[str], loader: Any) -> str:
    """Returns which options of a group have a key that the chosen ones lack; "" if none has."""
    from hydra.core.object_type import ObjectType

    group, _, leaf = key.rpartition(".")
    for name in [group] if group in groups else groups:
        options = loader.get_group_options(name, ObjectType.CONFIG)
        configs = {option: loader.repository.load_config(f"{name}/{option}").config for option in options}
        having = [option for option, config in configs.items() if leaf in config.keys()]  # noqa: SIM118  (also ???)
        if having and leaf:
            return f"; {name}.{leaf} is a key of {name}={', '.join(having)}"
    return ""


def unknown_option_error(group: str, option: str, available: Sequence[str]) -> ConfigError:
    """Returns the error for an option that does not exist; lists the available ones."""
    meant = translate_option(group, option) or find_own_option(group, option)
    hint = f"; type {meant}" if meant else f"{suggest(option, available)} ({', '.join(available)})"
    return ConfigError(f"{group}={option}: there is no such option{hint}")


def find_own_option(group: str, option: str) -> str:
    """Returns what to type for an option of the user's that is in a folder here; "" if there is none."""
    base, name = Path(), option.removesuffix(".yaml")
    if re.fullmatch(r"[\w-]+", name):
        for found in (*base.glob(f"{group}/{name}.yaml"), *base.glob(f"*/{group}/{name}.yaml")):
            return f"--config-dir {shlex.quote(str(found.parents[1]))} {group}={name}"
    if option.endswith(".py") and Path(option).is_file():
        line = f"_target_: {Path(option).stem}.FUNCTION"
        return f"--config-dir DIR {group}=NAME, where DIR/{group}/NAME.yaml has the line {line}"
    return ""


def suggest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Returns `; did you mean X?` for the most similar known word."""
    similar = find_similar_key(word, known)
    return f"; did you mean {similar}?" if similar else otherwise


def find_similar_key(word: str, known: Iterable[str]) -> str:
    """Returns the most similar known word, first among keys with the same parent; "" if none is similar.

    For a word without a parent, a key of that name in a group comes first.
    """
    words = list(known)
    parent, dot, leaf = word.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in words if k.rpartition(".")[0] == parent}
    leaves = {k.rpartition(".")[2]: k for k in reversed(words) if k.count(".") == 1}
    if similar := leaves.get(word) or siblings.get(find_similar(leaf, siblings) or ""):
        return similar
    return (find_similar(word, words, 0.85) if dot else leaves.get(find_similar(word, leaves, 0.8) or "")) or ""
