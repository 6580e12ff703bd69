"""Private names of Hydra."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hydra._internal.callbacks import Callbacks  # what Hydra passes to launchers, besides the loader
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser as make_flag_parser  # refuses flags; a shell completes its usage
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.config_source import ConfigSource

#: Applies overrides to a composed config, so that the jobs of a sweep do not read the YAML files again.
apply_overrides = ConfigLoaderImpl._apply_overrides_to_config


@contextlib.contextmanager
def skip_mode() -> Iterator[None]:
    """Skips Hydra's first composition of the config, which only reads `hydra.mode`."""
    find_mode = Hydra.get_mode
    Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = find_mode  # type: ignore[method-assign]


def read_return(returned: JobReturn) -> object:
    """Returns a job's result, or raises its error. Hydra's own property would also print a line about the error."""
    if returned.status is JobStatus.COMPLETED:
        return returned._return_value
    raise returned._return_value


def find_package_source() -> type[ConfigSource]:
    """Returns the class that reads config files from packages. An import gives another class: Hydra loads it twice."""
    Plugins.instance()
    return SourcesRegistry.instance().resolve("pkg")


def find_plugins_again() -> None:
    """Makes Hydra search for plugins again, in a forked process that inherited its parent's plugins."""
    Plugins.instance()._initialize()


def import_basic_sweeper() -> Any:
    """Returns the module of Hydra's basic sweeper. Hydra imports it twice, and classes of the first import fail."""
    from hydra._internal.core_plugins import basic_sweeper

    return basic_sweeper
