"""The task function that Hydra, or `scaleflow.run_sweep`, calls for a job or a sweep.

Modules that only a job needs are imported when it starts, so that `--cfg`, `--help` and wrong overrides answer quickly.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from scaleflow.commands.frame import to_outcome
from scaleflow.compat.hydra import read_return, skip_mode
from scaleflow.errors import ConfigError
from scaleflow.interfaces.collector import pause_collector
from scaleflow.launcher.command_exit import FAILED, FINISHED, Outcome, find_interruption, write_error
from scaleflow.launcher.display import greet
from scaleflow.runs.folder_use import remove_created

if TYPE_CHECKING:
    from scaleflow.sweep import SweepRunner


class JobFailed(Exception):
    """A run, or a job of a sweep, did not finish. The command prints the reason."""


class HydraTask:
    """The task function. Hydra calls it for each job. scaleflow's own Hydra launchers call `sweep` instead.

    Args:
        began: when the command began, in seconds since the epoch.
        greeting: the first line on the terminal; empty: no line.

    Attributes:
        has_begun: whether a job or a sweep has started. Before that, every error is an error in composing the config.
    """

    def __init__(self, began: float, greeting: str = "") -> None:
        self._began = began
        self._greeting = greeting
        self._outcome: Outcome | None = None
        self._jobs: list[Outcome] = []  # jobs of another package's Hydra launcher that runs them in this process
        self._sweep: SweepRunner | None = None
        self.has_begun = False

    def _greet(self) -> None:
        if self._greeting:
            greet(self._greeting)

    def __enter__(self) -> HydraTask:
        return self

    def __exit__(self, *error: object) -> None:
        if self._sweep is not None:
            self._outcome = self._sweep.end()

    def __call__(self, config: DictConfig) -> None:
        try:
            self._run_job(config)
        except BaseException as error:
            if find_interruption(error):  # before there is a run; later an interruption is a request to stop
                remove_created(Path(HydraConfig.get().runtime.output_dir))
            raise

    def _run_job(self, config: DictConfig) -> None:
        is_job = HydraConfig.get().mode is RunMode.MULTIRUN  # under another package's Hydra launcher
        # With `cluster.submit` the command prints a script and nothing else.
        if not is_job and OmegaConf.select(config, "cluster.submit") is None:
            self._greet()
        with pause_collector():
            from scaleflow.config.compose import mask_sweep_config
            from scaleflow.launcher.launch import run_job
            from scaleflow.runs import RunFolder

        began = time.time() if self.has_begun else self._began
        self.has_begun = True
        if is_job:
            mask_sweep_config(RunFolder(Path(HydraConfig.get().sweep.dir)).sweep_config)
        try:
            outcome = run_job(config, began)
        except ConfigError as refusal:
            if not is_job or find_interruption(refusal):
                raise
            outcome = to_outcome(refusal)
        code = outcome.code
        if not is_job:
            self._outcome = outcome
        else:
            self._jobs.append(outcome)
            if outcome.error:
                write_error(outcome.error)
        if code:  # Hydra's callbacks get it; every launcher passes on exceptions, even from another process
            raise JobFailed(f"{'a job of the sweep' if is_job else 'the run'} ended with exit code {code}")

    def sweep(self, context: HydraContext, config: DictConfig) -> SweepRunner:
        """Returns the runner of the sweep's jobs. The first call creates it."""
        if self._sweep is None:
            self._greet()
        from scaleflow.sweep import SweepRunner

        self.has_begun = True
        if self._sweep is None:
            self._sweep = SweepRunner(context, config, self._began, task=self)
        return self._sweep

    @property
    def limit(self) -> str:
        """The limit that ended the sweep; empty without such a limit."""
        return "" if self._sweep is None else self._sweep.limit

    @property
    def outcome(self) -> Outcome:
        """The outcome of the command.

        If another package's launcher ran the jobs here, it has the values of the last job and the error of the last
        failed job.
        """
        if self._outcome is not None or not self._jobs:
            return self._outcome or Outcome()
        failed = [job for job in self._jobs if job.code]

        def read() -> dict[str, Any]:
            errors = [job.error or job.read().get("error") for job in failed]
            return {**self._jobs[-1].read(), "error": errors[-1] if errors else None}

        return Outcome(FAILED if failed else FINISHED, read)


#: Words that may set `hydra.mode`: flags, a recipe, and Hydra's own keys except those about folders and logs.
MAY_SET_MODE = re.compile(r"-|\+*(experiment|hydra(?!\.(run|sweep|job|output_subdir|verbose)\b))\b")


def compose_once(words: Sequence[str]) -> AbstractContextManager[None]:
    """Keeps Hydra from composing the config an extra time for `hydra.mode`, if no word can make it a sweep."""
    return contextlib.nullcontext() if any(map(MAY_SET_MODE.match, words)) else skip_mode()


@contextlib.contextmanager
def raise_hydra_errors() -> Iterator[None]:
    """Makes Hydra raise its errors instead of printing them and exiting with 1."""
    if "HYDRA_FULL_ERROR" in os.environ:
        yield
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"
    returned = JobReturn.return_value
    JobReturn.return_value = property(read_return, returned.fset)  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        JobReturn.return_value = returned  # type: ignore[method-assign]
