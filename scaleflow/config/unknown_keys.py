"""Makes the errors for unknown keys and options, which suggest the intended word."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from scaleflow.config.synonyms import ABSENT, DEVICES, simplify, translate_key, translate_option
from scaleflow.errors import ConfigError, find_similar
from scaleflow.interfaces.features import list_sections
from scaleflow.interfaces.secret_masking import mask_override

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

#: Core keys whose value is null by default, and otherwise a mapping.
EMPTY_MAPPINGS = (
    "model.freeze",
    "model.lora",
    "objective.loss",
    "objective.loss_weights",
    "objective.class_weight",
    "optimizer.plateau",
    "optimizer.rate_factors",
    "training.early_stopping",
    "training.step",
    "checkpoint.best",
    "tracking.tags",
)


def list_empty_mappings() -> list[str]:
    """Returns the keys whose value is null by default and otherwise a mapping, including keys of features."""
    keys = list(EMPTY_MAPPINGS)
    for group, sections in list_sections().items():
        for section in sections:
            for name, hint in get_type_hints(section).items():
                if has_mapping(get_args(hint)):
                    keys.append(f"{group}.{name}")
    return keys


def has_mapping(types: Iterable[Any]) -> bool:
    """Whether one of several types is a mapping in the config."""
    return any(get_origin(hint) is dict or dataclasses.is_dataclass(hint) for hint in types)


def unknown_key_error(key: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown key, with the most similar known key."""
    known = list(known)
    parent, _, leaf = key.rpartition(".")
    if parent in list_empty_mappings() and parent in known:
        return ConfigError(f"{key}: {parent} is null; write '{parent}={{{leaf}: ...}}'")
    return ConfigError(f"{key}: there is no such key{suggest(key, known, '; --cfg job lists all keys')}")


#: At this similarity to a key of the same group, a word is a misspelling of it rather than a word of another tool.
MIN_MISSPELLED_RATIO = 0.8


def dotted_key_error(key: str, name: str) -> ConfigError:
    """Returns the error for a name with dots in a file: `optimizer.learning_rate: 0.1`."""
    parts = name.split(".")
    nested = "".join(f"{part}: {{" for part in parts[:-1]) + f"{parts[-1]}: ..." + "}" * (len(parts) - 1)
    return ConfigError(f"{key}: a file names keys one below the other; write {nested}")


def unknown_word_error(
    override: Override,
    known: Sequence[str],
    groups: Sequence[str],
    *,
    loader: Any,
    accepts: Callable[[str], bool],
) -> ConfigError:
    """Returns the error for an override of an unknown key. It says what to type.

    Args:
        known: the keys of the config.
        groups: the config groups.
        loader: Hydra's config loader.
        accepts: whether a run accepts suggested words.
    """
    key = override.key_or_group
    value = mask_override(override.input_line or "").partition("=")[2]
    absent = find_absent(key)
    if absent:
        return ConfigError(f"{key}: there is no such key: {absent}")
    names = [*known, *groups]
    similar = find_similar_known(key, names)
    for words in list_suggestions(key, value, names):
        if not accepts(words):
            continue
        if words == f"{similar}={value}":
            return ConfigError(f"{key}: there is no such key; did you mean {words}?")
        return ConfigError(f"{key}: there is no such key; type {words}")
    if similar:
        return ConfigError(f"{key}: there is no such key; did you mean {similar}? It does not take the value {value}")
    return ConfigError(f"{unknown_key_error(key, names)}{describe_other_options(key, groups, loader)}")


def find_absent(key: str) -> str:
    """Returns the alternative to a key of other tools that scaleflow does not have; "" if the key
    is not in the table.
    """
    parent, _, leaf = key.rpartition(".")
    if key in ABSENT:
        return ABSENT[key]
    return ABSENT.get(simplify(leaf), "") if parent in ("", "dataset", "objective") else ""


def find_similar_known(key: str, names: Sequence[str]) -> str:
    """Returns the most similar key or group; "" for a key in a mapping that is null by default."""
    parent = key.rpartition(".")[0]
    if parent in list_empty_mappings() and parent in names:
        return ""
    return find_similar_key(key, names)


def list_suggestions(key: str, value: str, names: Sequence[str]) -> list[str]:
    """Lists words that `KEY=VALUE` may mean, the most likely first."""
    parent, _, leaf = key.rpartition(".")
    similar = find_similar_known(key, names)
    misspelled = f"{similar}={value}" if similar else ""
    translated = translate_key(key, value)
    is_other_form = translated.count("=") > 1 or translated.startswith(("'", "-", "strategy=", "hydra."))
    if translated and not is_other_form and translated.partition("=")[0] not in names:
        translated = ""
    if parent == "evaluation":  # its key names resemble other groups' keys but have another meaning
        translated = ""
    own_name = similar.rpartition(".")[2]
    is_device = simplify(leaf) in DEVICES
    ratio = difflib.SequenceMatcher(None, leaf, own_name).ratio()
    is_misspelled = similar.rpartition(".")[0] == parent != "" and ratio >= MIN_MISSPELLED_RATIO and not is_device
    is_key_elsewhere = own_name == leaf and not is_other_form
    suggestions = [misspelled, translated] if is_misspelled or is_key_elsewhere else [translated, misspelled]
    return [words for words in suggestions if words]


def describe_other_options(key: str, groups: Sequence[str], loader: Any) -> str:
    """Describes which options of a group have a key that the chosen ones lack; "" if no option has it."""
    from hydra.core.object_type import ObjectType

    group, _, leaf = key.rpartition(".")
    for name in [group] if group in groups else groups:
        options = []
        for option in loader.get_group_options(name, ObjectType.CONFIG):
            config = loader.repository.load_config(f"{name}/{option}").config
            if leaf in config.keys():  # noqa: SIM118  (`in config` is false for a key that is ???)
                options.append(option)
        if options and leaf:
            return f"; {name}.{leaf} is a key of {name}={', '.join(options)}"
    return ""


def unknown_option_error(group: str, option: str, available: Sequence[str]) -> ConfigError:
    """Returns the error for an unknown option, with the available options or a suggestion."""
    if option in ("null", "~", "None") and "none" in available:
        meant = f"{group}=none"
    else:
        meant = translate_option(group, option) or find_own_option(group, option)
    hint = f"; type {meant}" if meant else f"{suggest(option, available)} ({', '.join(available)})"
    return ConfigError(f"{group}={option}: there is no such option{hint}")


def find_own_option(group: str, option: str) -> str:
    """Returns the words for an option of the user's in a folder here; "" if there is no such file."""
    base = Path()
    name = option.removesuffix(".yaml")
    if re.fullmatch(r"[\w-]+", name):
        for file in (*base.glob(f"{group}/{name}.yaml"), *base.glob(f"*/{group}/{name}.yaml")):
            return f"--config-dir {shlex.quote(str(file.parents[1]))} {group}={name}"
    if option.endswith(".py") and Path(option).is_file():
        line = f"_target_: {Path(option).stem}.FUNCTION"
        return f"--config-dir DIR {group}=NAME, where DIR/{group}/NAME.yaml has the line {line}"
    return ""


def suggest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Returns `; did you mean X?` with the most similar known word; otherwise the text `otherwise`."""
    similar = find_similar_key(word, known)
    return f"; did you mean {similar}?" if similar else otherwise


def find_similar_key(word: str, known: Iterable[str]) -> str:
    """Returns the most similar known word; "" if no word is similar. Keys with the same parent come first.

    For a word without a parent, a key of that name in any group comes first.
    """
    words = list(known)
    parent, dot, leaf = word.rpartition(".")
    siblings = {}  # the keys with the same parent, by their last part
    for other in words:
        other_parent, _, other_leaf = other.rpartition(".")
        if other_parent == parent:
            siblings[other_leaf] = other
    leaves = {}  # the first `GROUP.KEY` with each name, by this name
    for other in reversed(words):
        if other.count(".") == 1:
            leaves[other.rpartition(".")[2]] = other
    similar = leaves.get(word) or siblings.get(find_similar(leaf, siblings) or "")
    if similar:
        return similar
    if dot:
        return find_similar(word, words, 0.85) or ""
    similar_leaf = find_similar(word, leaves, 0.8)
    return leaves.get(similar_leaf or "", "")
