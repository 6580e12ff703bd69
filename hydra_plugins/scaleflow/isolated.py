"""`hydra/launcher=isolated`: the jobs of a sweep in processes of their own, so many at a time.

Of our own command it is the workers that are processes, and one launcher records all of them. The task function of
another app runs as a whole in a process that is forked from a server with TensorFlow imported. With
`hydra/launcher=ray` the workers are on the machines of a Ray cluster, where there is room for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

NODE = {"_target_": "hydra_plugins.scaleflow.isolated.IsolatedLauncher", "n_jobs": 1}

RAY = {"_target_": "hydra_plugins.scaleflow.isolated.RayLauncher", "n_jobs": 8}

for name, node in (("isolated", NODE), ("ray", RAY)):
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="scaleflow")


class IsolatedLauncher(Launcher):
    """Runs jobs in processes of their own.

    Args:
        n_jobs: how many at a time.
    """

    def __init__(self, n_jobs: int) -> None:
        self._n_jobs = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra once for each sweep."""
        self._context = hydra_context
        self._task = task_function
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of jobs, and waits for them.

        Args:
            job_overrides: of each.
            initial_job_idx: the number of the first.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        if hasattr(self._task, "sweep"):
            jobs: Sequence[JobReturn] = self._task.sweep(self._context, self._config).launch(job_overrides)
            return jobs
        from scaleflow.launcher.hydra_jobs import run_jobs

        return run_jobs(self._context, self._task, self._config, job_overrides, initial_job_idx, self._n_jobs)


class RayLauncher(IsolatedLauncher):
    """Has a Ray cluster run jobs: each with `cluster=ray`, unless it says another one.

    Args:
        n_jobs: how many at a time are run, or wait for room.
    """

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of jobs, and waits for them.

        Args:
            job_overrides: of each.
            initial_job_idx: the number of the first.
        """
        if not hasattr(self._task, "sweep"):
            raise HydraException("hydra/launcher=ray: only runs jobs of scaleflow's own command; use isolated")
        return super().launch([placed(words) for words in job_overrides], initial_job_idx)


def placed(words: Sequence[str]) -> Sequence[str]:
    """A job's overrides, with Ray for its cluster where they name none."""
    from scaleflow.config.hydra_errors import override_key

    return words if any(override_key(word) == "cluster" for word in words) else ["cluster=ray", *words]
