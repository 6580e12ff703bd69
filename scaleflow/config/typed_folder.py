"""Makes calls inside another Hydra app resolve relative paths in its original folder, even with
`hydra.job.chdir=true`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def in_typed_folder(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of the Python API to run in the folder where the command of a Hydra app was typed."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        with use_typed_folder():
            return function(*arguments, **options)

    return call


@contextlib.contextmanager
def use_typed_folder() -> Iterator[None]:
    """Changes the current folder during the block, if Hydra has changed it to the job's folder."""
    folder = find_typed_folder()
    if folder is None:
        yield
        return
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def find_typed_folder() -> Path | None:
    """Returns the folder where the command of a Hydra app was typed; None if it is the current folder or there is no
    app.

    If the current folder is not the job's folder, the app chose it, and it stays.
    """
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    from omegaconf import OmegaConf  # Hydra has imported it

    runtime = module.HydraConfig.get().runtime
    if OmegaConf.is_missing(runtime, "output_dir"):  # the config of a sweep, not of a job
        return None
    typed = Path(str(runtime.cwd))
    job = Path(str(runtime.output_dir))
    try:
        is_in_job = job.samefile(Path.cwd()) and not typed.samefile(job)
    except OSError:
        return None
    return typed if is_in_job else None
