"""`training.batch_size=auto`: a search before the run, as a run of its own, and the number that it gives the run."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
import time
from dataclasses import replace
from pathlib import Path

from scaleflow.config.plan import set_batch_size
from scaleflow.events import SettingFound
from scaleflow.launcher.prepare import PreparedRun
from scaleflow.trials import BatchSearch

#: What is added to the name of the run's folder for that of the search.
SUFFIX = "-batch-size"


def make_search(run: PreparedRun) -> PreparedRun:
    """Returns the run that finds the batch size of another. Its folder is beside that run's."""
    return replace(run, spec=replace(run.spec, trial=BatchSearch(), folder=name_search_folder(run.spec.folder)))


def name_search_folder(folder: Path) -> Path:
    """Returns a new folder: an earlier command may have searched, and its run was refused."""
    names = itertools.chain([SUFFIX], (f"{SUFFIX}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder.with_name(folder.name + name)).exists())


def use_batch_size(run: PreparedRun, search: PreparedRun, found: SettingFound) -> PreparedRun:
    """Returns the run with the batch size that was found, which is the number in its config from now on.

    Its tags say how it was found. Its folder gets a copy of the figures.
    """
    size = int(found.value)
    config = copy.deepcopy(run.config)
    config["training"]["batch_size"] = size
    tags = {**run.spec.tags, "scaleflow.batch_size": f"auto: {found.word}, {found.reason}"}
    if run_id := search.spec.files.read_record().get("run_id"):
        tags["scaleflow.batch_size.run"] = run_id
    with contextlib.suppress(OSError):  # the search has them, too
        shutil.copyfile(search.spec.files.batch_sizes, run.spec.files.batch_sizes)
    spec = replace(run.spec, plan=set_batch_size(run.spec.plan, size), tags=tags, started=time.time())
    return replace(run, spec=spec, config=config)
