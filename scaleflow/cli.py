"""The command: Hydra composes, and then the job, or the sweep, is run. `main` gives the exit code.

What a job takes is imported when there is one: `--cfg`, `--help` and a word that is wrong are answered without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from scaleflow import __version__
from scaleflow.command import FAILED, leave, options_as_text, refuse, split_overrides, take_keys_of_run
from scaleflow.config.explain import CONF, check_config_dirs, check_overrides, explain
from scaleflow.errors import Refusal
from scaleflow.masking import register_resolver, remember, secrets_of_environment, secrets_typed

if TYPE_CHECKING:
    from scaleflow.sweep import Sweep

#: Of Hydra's flags those that take the next word.
FLAGS_WITH_VALUE = (
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--cfg", "-c", "--package", "-p"),
    *("--info", "-i", "--experimental-rerun"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words behind `scaleflow`; `sys.argv` where None.

    Returns:
        0 finished, 1 failed, 2 refused, 130 or 143 interrupted.
    """
    words = flags_first(split_overrides(list(sys.argv[1:] if argv is None else argv)))
    if "--version" in words:  # Hydra would print its own
        print(f"scaleflow {__version__}")
        return 0
    words = take_keys_of_run(options_as_text(words))
    remember([*secrets_of_environment(), *secrets_typed(words)])
    register_resolver()
    task = Task(time.time())
    app = hydra.main(version_base="1.3", config_path=f"pkg://{CONF}", config_name="config")(task)
    sys.argv = ["scaleflow", *words]
    try:
        check_config_dirs(words)
        if {"-m", "--multirun"} & set(words):
            check_overrides(words)  # before Hydra makes a folder for the sweep
        with errors_unabridged(), task:
            app()
    except Refusal as refusal:
        return refuse(str(refusal))
    except JobFailed:
        return FAILED
    except Exception as error:  # of a word that it did not expect Hydra raises whatever comes
        is_hydras = isinstance(error, HydraException | OmegaConfBaseException) or not task.has_begun
        if "HYDRA_FULL_ERROR" in os.environ or not is_hydras:
            raise  # asked for, or none of Hydra's
        return refuse(explain(error, words))
    return task.code


class JobFailed(Exception):
    """A job of a sweep did not finish; why it did not is on standard error."""


class Task:
    """What Hydra calls: with the config of one job, or, by our launcher, with all jobs of a sweep.

    Args:
        began: when the command began, in seconds since the epoch.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._codes: list[int] = []
        self._sweep: Sweep | None = None
        self.has_begun = False

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *error: object) -> None:
        if self._sweep is not None:
            self._codes.append(self._sweep.end())

    def __call__(self, config: DictConfig) -> None:
        from scaleflow.config.composed import mask_sweep
        from scaleflow.launcher.job import run

        began, self.has_begun = time.time() if self.has_begun else self._began, True
        is_job = HydraConfig.get().mode is RunMode.MULTIRUN  # of another launcher than ours
        if is_job:
            mask_sweep(Path(HydraConfig.get().sweep.dir))
        code = run(config, began)
        self._codes.append(code)
        if is_job and code:  # in another process, it may be: an exception is what every launcher hands on
            raise JobFailed(f"a job of the sweep ended with exit code {code}")

    def sweep(self, context: HydraContext, config: DictConfig) -> Sweep:
        """What runs the jobs of a sweep."""
        from scaleflow.sweep import Sweep

        self.has_begun = True
        if self._sweep is None:
            self._sweep = Sweep(context, config, self._began)
        return self._sweep

    @property
    def code(self) -> int:
        """The command's exit code."""
        return self._codes[0] if len(self._codes) == 1 else int(any(self._codes))


def entry() -> None:
    """The console script, and `python -m scaleflow`: a process of its own."""
    leave(main())


def flags_first(words: Sequence[str]) -> list[str]:
    """Moves flags, with their values, before the overrides: Hydra's parser takes no flag between two of them."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        (flags if word.startswith("-") else overrides).append(word)
        if word in FLAGS_WITH_VALUE:
            flags += islice(rest, 1)
    return flags + overrides


@contextlib.contextmanager
def errors_unabridged() -> Iterator[None]:
    """Has Hydra raise its errors instead of printing them and exiting with 1."""
    if "HYDRA_FULL_ERROR" in os.environ:
        yield
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
