"""The Hydra launchers of scaleflow's own sweeps, `isolated` and `ray`.

With `hydra/launcher=isolated`, one process runs the jobs in worker processes, up to `n_jobs` at once, and records all
of them. With `hydra/launcher=ray`, the workers run on the machines of a Ray cluster. Hydra offers both launchers to
every app in the environment; they reject other apps.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

NODE = {"_target_": "hydra_plugins.scaleflow.isolated.IsolatedLauncher", "n_jobs": 1}

RAY = {"_target_": "hydra_plugins.scaleflow.isolated.RayLauncher", "n_jobs": 8}

for name, node in (("isolated", NODE), ("ray", RAY)):
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="scaleflow")


class IsolatedLauncher(Launcher):
    """Runs the jobs of a sweep in separate processes.

    Args:
        n_jobs: the number of jobs that run at once. Not used here: `SweepRunner` reads it from the config.
    """

    option = "isolated"
    checks_jobs = True  # tells `GridSweeper` that the launcher checks all jobs before it runs the first one

    def __init__(self, n_jobs: int) -> None:
        pass

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps the context of the sweep. Hydra calls this method once per sweep.

        Raises CompactHydraException if the app is not scaleflow. Hydra prints its message without a traceback.
        """
        if not hasattr(task_function, "sweep"):
            raise CompactHydraException(
                f"hydra/launcher={self.option}: runs only scaleflow's own sweeps (scaleflow -m ...); in "
                "another app use hydra/launcher=joblib (pip install hydra-joblib-launcher) or submitit_local (pip "
                "install hydra-submitit-launcher)"
            )
        self._context = hydra_context
        self._task: Any = task_function
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of jobs and waits for them.

        Args:
            job_overrides: the overrides of each job.
            initial_job_idx: not used. `SweepRunner` numbers the jobs.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        jobs: Sequence[JobReturn] = self._task.sweep(self._context, self._config).launch(job_overrides)
        return jobs


class RayLauncher(IsolatedLauncher):
    """Runs the jobs of a sweep on a Ray cluster. Jobs get `cluster=ray`, unless their overrides choose a cluster.

    Args:
        n_jobs: the number of jobs that run, or wait for free resources, at once.
    """

    option = "ray"

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of jobs and waits for them; see `IsolatedLauncher.launch`."""
        return super().launch([add_ray_cluster(overrides) for overrides in job_overrides], initial_job_idx)


def add_ray_cluster(overrides: Sequence[str]) -> Sequence[str]:
    """Adds `cluster=ray` to a job's overrides, unless they choose a cluster."""
    from scaleflow.config.compose import override_key

    return overrides if any(override_key(word) == "cluster" for word in overrides) else ["cluster=ray", *overrides]
