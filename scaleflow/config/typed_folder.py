"""Lets calls in another Hydra app find relative paths where its command was typed, also with `hydra.job.chdir=true`."""

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
    """Decorates a function of the Python API: it runs in the folder where the command of a Hydra app was typed."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        with use_typed_folder():
            return function(*arguments, **options)

    return call


@contextlib.contextmanager
def use_typed_folder() -> Iterator[None]:
    """Changes the current folder during the block, if Hydra has changed it to the folder of the current job."""
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
    """Returns the folder where the command of a Hydra app was typed; None if it is the current one, or without an app.

    Only a current folder that is the job's own is Hydra's choice. Another one was chosen by the app.
    """
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    from omegaconf import OmegaConf  # Hydra has imported it

    runtime = module.HydraConfig.get().runtime
    if OmegaConf.is_missing(runtime, "output_dir"):  # Hydra's config of a sweep, which is no job
        return None
    typed = Path(str(runtime.cwd))
    job = Path(str(runtime.output_dir))
    try:
        is_in_job = job.samefile(Path.cwd()) and not typed.samefile(job)
    except OSError:
        return None
    return typed if is_in_job else None
