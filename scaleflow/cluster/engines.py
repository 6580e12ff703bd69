"""Defines what a cluster engine is, and finds the engine of each option of `cluster`.

An engine says what starts the processes of a run. Each is one object, `ENGINE`, in a module of this package or of a
feature, and one file in its conf/cluster/. No other module compares `cluster.name`: it asks the engine.
"""

import functools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from scaleflow import cluster as package
from scaleflow.interfaces import Cluster, Plan, Rule
from scaleflow.interfaces.features import import_named, list_features, tell_problem


@dataclass(frozen=True, kw_only=True)
class ClusterEngine:
    """What starts the processes of a run, and where."""

    name: str  # the option of `cluster`
    section: type[Cluster] = Cluster  # the keys of `cluster`; those that `Cluster` lacks are only for this engine
    place: str = ""  # where its processes run, for the message about these keys
    rules: Sequence[Rule] = ()  # which other options do not work with this engine
    variables: Sequence[str] = ()  # environment variables that show that the engine is there, for `scaleflow doctor`
    is_local: bool = False  # whether the command starts all processes on this machine
    #: If it starts them on others: MODULE:NAME of what makes a `ProcessHost` of the launcher from a `RunMonitor`.
    remote_host: str | None = None
    assigns_resources: bool = False  # whether it takes `cluster.cpus` and `cluster.gpus`
    restarts_failed_only: bool = False  # whether it restarts no process that has succeeded before the end of the run
    #: Returns the TF_CONFIG of this command's task. Raises ConfigError if something else has started the command.
    read_tf_config: Callable[[Plan, Mapping[str, str]], str | None] = lambda plan, variables: variables.get("TF_CONFIG")
    check_reachable: Callable[[Any], None] = lambda cluster: None  # raises ConfigError if nothing can be started
    #: For `cluster.submit`: returns the file that starts a run. Takes the plan, the number of its processes, the
    #: arguments after `python -m scaleflow`, the run's folder or None, and the seconds to save the state in.
    render_job: Callable[[Plan, int, Sequence[str], str | None, int], str] | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the command starts all processes on other machines."""
        return self.remote_host is not None

    @property
    def is_started_elsewhere(self) -> bool:
        """Whether something else starts one command for each process, and its environment gives the command's task."""
        return not (self.is_local or self.is_remote)

    @property
    def own_keys(self) -> Sequence[str]:
        return [field.name for field in fields(self.section) if not hasattr(Cluster, field.name)]


@functools.cache
def list_engines() -> Mapping[str, ClusterEngine]:
    """Returns the engines of this package and of the features by their options, those with the fewest keys first."""
    modules = [import_module(f"{package.__name__}.{module.name}") for module in pkgutil.iter_modules(package.__path__)]
    engines = [module.ENGINE for module in modules if hasattr(module, "ENGINE")]
    for feature in list_features().values():
        for place in feature.engines:
            try:
                engine = import_named(place)
                if not isinstance(engine, ClusterEngine):
                    raise TypeError(f"{place} is no ClusterEngine")
                if engine.name in [each.name for each in engines]:
                    raise ValueError(f"there is an engine {engine.name} already")
            except Exception as error:  # the code of another package
                tell_problem(feature.name, f"its engine {place} is skipped: {type(error).__name__}: {error}")
                continue
            engines.append(engine)
    return {engine.name: engine for engine in sorted(engines, key=lambda engine: (len(engine.own_keys), engine.name))}


def find_engine(cluster: Cluster) -> ClusterEngine:
    return list_engines()[cluster.name]
