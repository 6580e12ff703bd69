"""Another Hydra app's jobs under our launcher: each in a process of its own, forked with TensorFlow imported.

What a job needs goes to the process pickled, through its standard input; what comes of it, through a file.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from scaleflow.errors import WorkerDied
from scaleflow.launcher.worker_process import ForkedProcess, describe_exit, start_fork_server


def run_jobs(
    context: HydraContext,
    task: TaskFunction,
    config: DictConfig,
    overrides: Sequence[Sequence[str]],
    first: int,
    parallel: int,
) -> list[JobReturn]:
    """Runs an app's task function once for each job.

    Args:
        context: Hydra's.
        task: the app's.
        config: the command's, from which those of the jobs are made.
        overrides: of each job.
        first: the first one's number.
        parallel: how many run at a time.

    Returns:
        To each job what `hydra.core.utils.run_job` gives; a process that died is a job that failed.
    """
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    jobs = [compose_app_job(context, config, each, first + i) for i, each in enumerate(overrides)]
    with start_fork_server() as server, ThreadPoolExecutor(max(1, parallel)) as pool:
        return list(pool.map(lambda job: run_in_process(server, context, task, job), jobs))


def compose_app_job(context: HydraContext, config: DictConfig, overrides: Sequence[str], number: int) -> DictConfig:
    """A job's config, with the number by which Hydra names its folder."""
    job = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(job):
        job.hydra.job.id = job.hydra.job.num = number
    HydraConfig.instance().set_config(config)
    return job


def run_in_process(server: str, context: HydraContext, task: TaskFunction, job: DictConfig) -> JobReturn:
    """Runs one job in a process of its own, with this one's output."""
    with tempfile.TemporaryDirectory(prefix="scaleflow-") as folder:
        answer = Path(folder, "answer")
        pickled = cloudpickle.dumps((Singleton.get_state(), context, task, job))
        told = cloudpickle.dumps((str(answer), sys.path, pickled))
        log = Path(folder, "log")
        process = ForkedProcess(server, log, os.environ, __name__, (1, 2))
        process.send(len(told).to_bytes(8, "big") + told)
        try:
            process.wait()
        finally:
            process.signal(signal.SIGKILL)
            process.close()
        if answer.exists():
            found = cloudpickle.loads(answer.read_bytes())
            assert isinstance(found, JobReturn)
            return found
        how = describe_exit(process.returncode or 0)
        return make_failed_return(
            job, WorkerDied(how, log.read_text() if log.exists() else "", f"job {job.hydra.job.num}")
        )


def make_failed_return(job: DictConfig, error: Exception) -> JobReturn:
    """What is returned of a job whose process died."""
    returned = JobReturn()
    returned.overrides = list(job.hydra.overrides.task)
    returned.return_value, returned.status = error, JobStatus.FAILED
    return returned


def main() -> None:
    """The process: reads its job, runs it, and leaves what came of it."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    told = sys.stdin.buffer.read(size)
    threading.Thread(target=exit_with_launcher, daemon=True).start()
    answer, places, pickled = cloudpickle.loads(told)
    sys.path[:] = places  # where the app's modules are
    setup_globals()
    singletons, context, task, job = cloudpickle.loads(pickled)
    Singleton.set_state(singletons)
    returned: Any = run_job(
        hydra_context=context,
        task_function=task,
        config=job,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    Path(answer).write_bytes(cloudpickle.dumps(returned))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def exit_with_launcher() -> None:
    """Ends the process when the launcher is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)
