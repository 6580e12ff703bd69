"""Defines `ClusterEngine`, and finds the engine of each option of `cluster`.

An engine describes how the processes of a run are started. It is an object `ENGINE` in a module of this package or of
a feature, and a YAML file in `conf/cluster/`. Other modules do not compare `cluster.name`; they ask the engine.
"""

import functools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from scaleflow import cluster as package
from scaleflow.interfaces import Cluster, Plan, Rule
from scaleflow.interfaces.features import import_named, list_features, report_problems


@dataclass(frozen=True, kw_only=True)
class ClusterEngine:
    """Describes how and where the processes of a run are started."""

    name: str  # the option of `cluster`
    section: type[Cluster] = Cluster  # the keys of `cluster`; keys that `Cluster` lacks are only for this engine
    place: str = ""  # the place where its processes run, for the message about these keys
    rules: Sequence[Rule] = ()  # options that do not work with this engine
    variables: Sequence[str] = ()  # environment variables that tell `scaleflow doctor` of the engine
    is_local: bool = False  # whether the command starts all processes on this machine
    #: If it starts them on other machines: MODULE:NAME of a function from a `RunMonitor` to a `ProcessHost`
    remote_host: str | None = None
    assigns_resources: bool = False  # whether it takes `cluster.cpus` and `cluster.gpus`
    restarts_failed_only: bool = False  # whether it does not restart a process that succeeded before the run's end
    #: Returns the TF_CONFIG of this command's task. Raises ConfigError if another system started the command.
    read_tf_config: Callable[[Plan, Mapping[str, str]], str | None] = lambda plan, variables: variables.get("TF_CONFIG")
    check_reachable: Callable[[Any], None] = lambda cluster: None  # raises ConfigError if it cannot start processes
    #: For `cluster.submit`: returns the contents of a job file. Takes the plan, the number of processes, the arguments
    #: after `python -m scaleflow`, the run's folder or None, and the seconds that the run has to save its state.
    render_job: Callable[[Plan, int, Sequence[str], str | None, int], str] | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the command starts all processes on other machines."""
        return self.remote_host is not None

    @property
    def is_started_elsewhere(self) -> bool:
        """Whether another system starts a command for each process, with the task in its environment."""
        return not (self.is_local or self.is_remote)

    @property
    def own_keys(self) -> Sequence[str]:
        """The keys of `cluster` that only this engine has."""
        return [field.name for field in fields(self.section) if not hasattr(Cluster, field.name)]


@functools.cache
def list_engines() -> Mapping[str, ClusterEngine]:
    """Returns all engines by their options, ordered by the number of their own keys.

    Skips broken engines of features with a message.
    """
    engines: dict[str, ClusterEngine] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "ENGINE"):
            engines[module.ENGINE.name] = module.ENGINE
    for feature in list_features().values():
        for place in feature.engines:
            with report_problems(feature.name, f"its engine {place} is skipped"):
                engine = import_named(place)
                check_engine(engine, place)
                if engine.name in engines:
                    raise ValueError(f"there is an engine {engine.name} already")
                engines[engine.name] = engine
    in_order = sorted(engines.values(), key=lambda engine: (len(engine.own_keys), engine.name))
    return {engine.name: engine for engine in in_order}


def check_engine(engine: Any, place: str) -> None:
    """Raises TypeError if an engine of a feature could not be listed with the others."""
    if not isinstance(engine, ClusterEngine):
        raise TypeError(f"{place} is no ClusterEngine")
    if not isinstance(engine.name, str) or not engine.name.isidentifier():
        raise TypeError(f"its name {engine.name!r} is no identifier")
    if not (isinstance(engine.section, type) and issubclass(engine.section, Cluster)):
        raise TypeError(f"its section {engine.section!r} is no subclass of Cluster")
    engine.section()
    for rule in engine.rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules has {rule!r}, which is no Rule")


def find_engine(cluster: Cluster) -> ClusterEngine:
    return list_engines()[cluster.name]
