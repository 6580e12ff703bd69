"""`training.batch_size=auto`: searches the batch size in a run of its own, and sets it in the config of the run."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
import time
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from scaleflow.config.compose import resolve_config
from scaleflow.config.folders import create_folder
from scaleflow.errors import ConfigError
from scaleflow.interfaces.events import SettingFound
from scaleflow.interfaces.trials import BatchSearch
from scaleflow.launcher.prepare import PreparedRun, make_plan

#: The suffix that the name of the search's folder adds to that of the run's folder.
SUFFIX = "-batch-size"


def make_search(run: PreparedRun) -> PreparedRun:
    """Returns the run that searches the batch size for another run, and makes its folder beside that run's.

    Raises ConfigError if the folder cannot be made.
    """
    try:
        folder = name_search_folder(run.spec.folder)
        create_folder(folder)
    except (OSError, ValueError) as error:  # no permission, a name that is too long, no name
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"hydra.run.dir={run.spec.folder}: training.batch_size=auto needs a folder beside it, which cannot be made "
            f"({why}); choose another folder"
        ) from error
    return replace(run, spec=replace(run.spec, trial=BatchSearch(), folder=folder))


def name_search_folder(folder: Path) -> Path:
    """Returns a new folder: the run of an earlier search may have been refused, so its folder may still exist."""
    names = itertools.chain([SUFFIX], (f"{SUFFIX}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder.with_name(folder.name + name)).exists())


def use_batch_size(run: PreparedRun, search: PreparedRun, found: SettingFound) -> PreparedRun:
    """Returns the run with the found batch size in its config.

    Its tags say how it was found. Its folder gets a copy of the figures. Raises ConfigError if keys that refer to the
    batch size cannot work with the number.
    """
    config = copy.deepcopy(run.config)
    config["training"]["batch_size"] = int(found.value)
    before = run.spec.plan
    plan = make_plan(resolve_config(OmegaConf.create(config)), before.choices, before.search)
    tags = {**run.spec.tags, "scaleflow.batch_size": f"auto: {found.word}, {found.reason}"}
    if run_id := search.spec.files.read_record().get("run_id"):
        tags["scaleflow.batch_size.run"] = run_id
    with contextlib.suppress(OSError):  # the search has them, too
        shutil.copyfile(search.spec.files.batch_sizes, run.spec.files.batch_sizes)
    return replace(run, spec=replace(run.spec, plan=plan, tags=tags, started=time.time()), config=config)
