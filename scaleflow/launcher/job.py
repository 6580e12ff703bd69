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
from scaleflow.config.compose import check_single_run
from scaleflow.config.folders import remove_created
from scaleflow.config.hydra_config import check_folder_writable, plan_from_hydra, read_typed_overrides, resolve_hydra
from scaleflow.config.hydra_errors import shorten_error
from scaleflow.errors import ConfigError
from scaleflow.launcher.resume import find_resumed_run
from scaleflow.launcher.submit import render_submission
from scaleflow.launcher.supervisor import launch_run
from scaleflow.sync import repair_quietly
from scaleflow.tracking import locate_weights


def run_job(config: DictConfig, started: float) -> int:
    """Checks a composed config and launches it."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    overrides = read_typed_overrides()
    with contextlib.ExitStack() as until_it_ended:
        try:
            if config.get("resume") is not None:
                return resume_job(config, overrides, folder, started)
            check_single_run(config)
            plan = plan_from_hydra(config)
            if plan.cluster.submit is not None:
                print(render_submission(plan, sys.argv[1:]), end="")
                remove_created(folder)
                return 0
            folder = check_folder_writable(folder)
            plan = until_it_ended.enter_context(locate_weights(plan))
        except (ConfigError, OmegaConfBaseException) as error:
            remove_created(folder)
            return refuse(str(error) if isinstance(error, ConfigError) else shorten_error(error))
        return launch_run(plan, OmegaConf.to_container(config, resolve=False), overrides, folder, started)


def resume_job(config: DictConfig, overrides: Sequence[str], made: Path, started: float) -> int:
    """Goes on with an earlier run, in its folder; the one that Hydra made for this command is not needed."""
    composed, choices, search = resolve_hydra(config)
    run = find_resumed_run(str(composed["resume"]), composed, choices, overrides)
    plan = run.plan(search)
    remove_created(made)
    if run.is_through:
        repair_quietly(run.folder)  # what the command that finished it could not record
        print(f"{run.folder}: the run is finished; training.epochs=N with more epochs would go on with it")
        return 0
    with locate_weights(plan) as plan:
        return launch_run(plan, run.config, run.changes, check_folder_writable(run.folder), started, attempt=run.number)
