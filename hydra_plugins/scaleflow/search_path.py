"""Adds the config options of scaleflow's features and of installed packages: datasets, models, optimizers.

A package declares the module with its config groups in an entry point:

    [project.entry-points."scaleflow.conf"]
    my_models = "my_models.conf"

Then `scaleflow model=my_net` finds `my_models/conf/model/my_net.yaml`. Hydra calls every plugin for every app
in an environment; this one ignores other apps.
"""

import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

from scaleflow.interfaces.features import list_features

OURS = "pkg://scaleflow.conf"
ENTRY_POINTS = "scaleflow.conf"

#: The config with the defaults of all features, which conf/config.yaml includes.
FEATURE_DEFAULTS = "feature_defaults"


class ScaleflowSearchPath(SearchPathPlugin):
    """Appends the config packages of features and of installed entry points to scaleflow's own search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends the packages if the app is scaleflow. Hydra calls this method once per app."""
        if not any(element.path == OURS for element in search_path.get_path()):
            return
        defaults: list[str | Mapping[str, str]] = []
        for feature in list_features().values():
            if feature.conf:
                search_path.append(provider=feature.name, path=f"pkg://{feature.conf}")
            defaults += feature.defaults
        entries = [dict(entry) if isinstance(entry, Mapping) else entry for entry in defaults]
        node = {"defaults": entries}
        ConfigStore.instance().store(FEATURE_DEFAULTS, node, package="_global_", provider="scaleflow")
        for point in entry_points(group=ENTRY_POINTS):
            if is_package(point.value):
                search_path.append(provider=point.name, path=f"pkg://{point.value}")
            else:
                print(
                    f"scaleflow: the entry point {point.name} names the config package {point.value}, which cannot be "
                    "imported; it is skipped",
                    file=sys.stderr,
                )


def is_package(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
