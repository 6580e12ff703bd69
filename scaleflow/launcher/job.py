"""One job of the command: its composed config is checked, and launched or gone on with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scaleflow.command import refuse
from scaleflow.config.composed import plan_of, resolved, typed, writable
from scaleflow.config.composing import check_is_one
from scaleflow.config.explain import in_a_line
from scaleflow.config.folders import remove_created
from scaleflow.errors import Refusal
from scaleflow.launcher.launch import launch
from scaleflow.launcher.resume import resumed
from scaleflow.launcher.submit import submission
from scaleflow.sync import mend
from scaleflow.tracking import located


def run(config: DictConfig, started: float) -> int:
    """Checks a composed config and launches it."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    overrides = typed()
    with contextlib.ExitStack() as until_it_ended:
        try:
            if config.get("resume") is not None:
                return go_on(config, overrides, folder, started)
            check_is_one(config)
            plan = plan_of(config)
            if plan.cluster.submit is not None:
                print(submission(plan, sys.argv[1:]), end="")
                remove_created(folder)
                return 0
            folder = writable(folder)
            plan = until_it_ended.enter_context(located(plan))
        except (Refusal, OmegaConfBaseException) as error:
            remove_created(folder)
            return refuse(str(error) if isinstance(error, Refusal) else in_a_line(error))
        return launch(plan, OmegaConf.to_container(config, resolve=False), overrides, folder, started)


def go_on(config: DictConfig, overrides: Sequence[str], made: Path, started: float) -> int:
    """Goes on with an earlier run, in its folder; the one that Hydra made for this command is not needed."""
    composed, choices, search = resolved(config)
    run = resumed(str(composed["resume"]), composed, choices, overrides)
    plan = run.plan(search)
    remove_created(made)
    if run.is_through:
        mend(run.folder)  # what the command that finished it could not record
        print(f"{run.folder}: the run is finished; training.epochs=N with more epochs would go on with it")
        return 0
    with located(plan) as plan:
        return launch(plan, run.config, run.changes, writable(run.folder), started, life=run.number)
