"""Hydra composes the same configs in half of the processor time, for tests that compose hundreds."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from hydra._internal import defaults_list
from omegaconf import DictConfig, OmegaConf, grammar_parser
from omegaconf.base import Metadata

from hydra_plugins.scaleflow import search_path


def list_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yields (owner, attribute, value): what to set, as `monkeypatch.setattr(owner, attribute, value)` does."""
    yield Metadata, "__deepcopy__", copy_metadata
    yield defaults_list, "_create_interpolation_map", skip_unused(defaults_list._create_interpolation_map)
    yield search_path, "entry_points", functools.cache(entry_points)
    for module in find_parsers():
        yield module, "parse", functools.cache(grammar_parser.parse)


def find_parsers() -> Iterator[Any]:
    """The modules that have the name of OmegaConf's parser of interpolations."""
    import omegaconf._utils
    import omegaconf.base

    for module in (omegaconf.base, omegaconf._utils):
        if getattr(module, "parse", None) is grammar_parser.parse:
            yield module


def copy_metadata(metadata: Metadata, memo: dict[int, Any]) -> Metadata:
    """A deep copy: of its fields only two can change in place."""
    made = object.__new__(type(metadata))
    made.__dict__.update(metadata.__dict__)
    if made.flags is not None:
        made.flags = dict(made.flags)
    cache = metadata.resolver_cache
    made.resolver_cache = copy.deepcopy(cache, memo) if cache else defaultdict(dict)
    return made


def skip_unused(create: Any) -> Any:
    """Makes the map of the chosen options only where a default of the list refers to it."""

    def create_if_used(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
        if any(not default.is_self() and default.is_interpolation() for default in defaults):
            return create(overrides, defaults, self_added)  # type: ignore[no-any-return]
        return OmegaConf.create({})

    return create_if_used
