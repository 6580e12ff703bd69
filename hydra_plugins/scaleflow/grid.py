"""The Hydra sweeper `hydra/sweeper=grid`, the default of scaleflow: a job for each combination of values.

It is Hydra's basic sweeper, with one difference: if the launcher composes and checks jobs itself, the sweeper does not
compose all jobs first. That would take 0.1 s per job.
"""

from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from scaleflow.compat.hydra import import_basic_sweeper

#: Hydra's config class, so that the keys have Hydra's types.
NODE = import_basic_sweeper().BasicSweeperConf(_target_="hydra_plugins.scaleflow.grid.GridSweeper")

ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=NODE, provider="scaleflow")


class GridSweeper(Sweeper):
    """Runs a job for each combination of values.

    Args:
        max_batch_size: maximum number of jobs that the launcher gets at once; None: all.
        params: config key -> values, as typed in an override.
    """

    def __init__(self, max_batch_size: int | None, params: Mapping[str, str] | None) -> None:
        self._basic = import_basic_sweeper().BasicSweeper(max_batch_size, dict(params or {}))

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Makes the launcher. Hydra calls this method once per sweep."""
        self._basic.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if getattr(self._basic.launcher, "checks_jobs", False):
            self._basic.validate_batch_is_legal = lambda batch: None  # the launcher checks it

    def sweep(self, arguments: list[str]) -> Any:
        """Runs the jobs. Returns the launcher's result for each batch."""
        return self._basic.sweep(arguments)
