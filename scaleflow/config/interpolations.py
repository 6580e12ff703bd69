"""Resolves interpolations that call a resolver, such as `${oc.env:LR}` and `${now:%Y}`, once per key.

OmegaConf resolves them at each access. So a random or changing value would differ between a key and the keys that
refer to it. A run also keeps the values that it began with: see `keep_values`. References to other keys, such as
`${training.epochs}`, are not resolved here, so they follow words that are typed later.
"""

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from scaleflow.interfaces.secret_masking import mask_secrets, reads_secret

#: The path to a value: keys and list indices.
KeyPath = tuple[str | int, ...]

#: The start of an interpolation that calls a resolver; captures the resolver's name.
RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:")

#: A reference to another key, absolute or relative, that contains no other interpolation.
REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.\[\]/-]*)\s*\}")

#: The start of a reference whose key is the value of another interpolation.
NESTED_REFERENCE = re.compile(r"\$\{[^{}:]*\$\{")


def iterate_paths(config: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the path and the value of each leaf of nested mappings and lists."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from iterate_paths(value, (*path, key))
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from iterate_paths(value, (*path, index))
    else:
        yield path, config


def list_interpolations(raw: Any) -> dict[KeyPath, str]:
    """Returns the texts that contain interpolations in a config of plain containers, by path."""
    texts = {}
    for path, value in iterate_paths(raw):
        if isinstance(value, str) and "${" in value:
            texts[path] = value
    return texts


def depends_on_environment(text: str) -> bool:
    """Whether an interpolation's value changes only with the environment: it calls no clock and no custom resolver."""
    names = RESOLVER.findall(text)
    return "oc.env" in names and all(name.startswith("oc.") for name in names)


def resolve_once(config: DictConfig, known: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Returns the value of each key whose interpolation calls a resolver.

    Args:
        config: a config with interpolations.
        known: values that are already resolved; they are kept.

    Interpolations that cannot be resolved are left out; resolving the whole config reports the reason.
    """
    texts = list_interpolations(OmegaConf.to_container(config, resolve=False))
    if not any(RESOLVER.search(text) for text in texts.values()):
        return {}
    fixed = copy.deepcopy(config)
    values = {path: value for path, value in known.items() if path in texts}
    for path, value in values.items():
        put_value(fixed, path, value)
    for path in sort_by_references(texts):
        if path in values or not RESOLVER.search(texts[path]):
            continue
        try:
            value = to_plain(find_parent(fixed, path)[path[-1]])
            if can_be_put(value):
                put_value(fixed, path, value)
                values[path] = value
        except OmegaConfBaseException:
            continue
    return values


def put_values(config: DictConfig, values: Mapping[KeyPath, Any]) -> DictConfig:
    """Returns a config in which plain values replace interpolations."""
    if not values:
        return config
    changed = copy.deepcopy(config)
    for path, value in values.items():
        put_value(changed, path, value)
    return changed


def put_value(config: DictConfig, path: KeyPath, value: Any) -> None:
    """Replaces the value at a path of a config, even if the config is read-only."""
    with flag_override(config, ["readonly", "struct"], [False, False]):
        find_parent(config, path)[path[-1]] = value


def find_parent(config: DictConfig, path: KeyPath) -> Any:
    """Returns the mapping or list that contains the value at a path."""
    node: Any = config
    for part in path[:-1]:
        node = node[part]
    return node


def to_plain(value: Any) -> Any:
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value


def can_be_put(value: Any) -> bool:
    """Whether a resolved value can replace its interpolation: it contains no text that would be resolved again."""
    return not list_interpolations(value)


def sort_by_references(texts: Mapping[KeyPath, str]) -> list[KeyPath]:
    """Sorts keys so that each comes after the keys that its interpolation refers to."""
    ordered: list[KeyPath] = []
    visited: set[KeyPath] = set()

    def visit(path: KeyPath) -> None:
        if path in visited:
            return
        visited.add(path)
        for other in find_references(path, texts):
            visit(other)
        ordered.append(path)

    for path in texts:
        visit(path)
    return ordered


def find_references(path: KeyPath, texts: Mapping[KeyPath, str]) -> list[KeyPath]:
    """Returns the keys of `texts` whose values determine the value at a path."""
    text = texts[path]
    others = [other for other in texts if other != path]
    if NESTED_REFERENCE.search(text):  # its target is known only after the other keys are resolved
        return [other for other in others if not NESTED_REFERENCE.search(texts[other])]
    targets = list_targets_of(path, text)
    return [other for other in others if overlaps_any(other, targets)]


def list_targets_of(path: KeyPath, text: str) -> list[tuple[str, ...]]:
    """Returns the keys that an interpolation at a path refers to, each split into its parts."""
    targets = []
    for dots, key in REFERENCE.findall(text):
        section = [str(part) for part in path[: -len(dots)]] if dots else []
        parts = [part for part in re.split(r"[.\[\]]+", key) if part]
        targets.append((*section, *parts))
    return targets


def overlap(first: Sequence[str | int], second: Sequence[str | int]) -> bool:
    """Whether two keys are equal, or one is in the section of the other."""
    return all(str(one) == str(other) for one, other in zip(first, second, strict=False))


def overlaps_any(key: Sequence[str | int], others: Iterable[Sequence[str | int]]) -> bool:
    return any(overlap(key, other) for other in others)


def find_dependents(raw: Any, keys: Collection[str]) -> set[KeyPath]:
    """Returns the keys whose interpolations depend on some dotted keys, directly or through other keys."""
    texts = list_interpolations(raw)
    targets = {path: list_targets_of(path, text) for path, text in texts.items()}
    changed: list[KeyPath] = [tuple(key.split(".")) for key in keys]
    dependents: set[KeyPath] = set()
    is_growing = True
    while is_growing:
        is_growing = False
        for path in texts:
            if path in dependents:
                continue
            if any(overlaps_any(target, changed) for target in targets[path]):
                dependents.add(path)
                changed.append(path)
                is_growing = True
    return dependents


def keep_values(raw: Any, resolved: Any) -> tuple[Any, dict[KeyPath, str]]:
    """Returns the config that a run keeps, and the interpolations that it replaced by their values.

    Args:
        raw: the config of plain containers, with its interpolations.
        resolved: the same config without interpolations.

    It does not replace references to other keys, or interpolations of secrets, which must not be written.
    """
    kept = copy.deepcopy(raw)
    replaced: dict[KeyPath, str] = {}
    for path, text in list_interpolations(raw).items():
        if not RESOLVER.search(text) or reads_secret(text):
            continue
        parent = kept
        value = resolved
        try:
            for part in path[:-1]:
                parent = parent[part]
                value = value[part]
            value = value[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
        if can_be_put(value) and mask_secrets(value, str(path[-1])) == value:
            parent[path[-1]] = value
            replaced[path] = text
    return kept, replaced


def nest_paths(values: Mapping[KeyPath, str]) -> dict[str | int, Any]:
    """Returns nested mappings with the values at their paths, for a YAML file. List indices become keys."""
    nested: dict[str | int, Any] = {}
    for path, value in values.items():
        section = nested
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
    return nested
