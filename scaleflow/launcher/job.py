"""Runs one job that Hydra has composed."""

from __future__ import annotations

import sys

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from scaleflow.command import refuse
from scaleflow.config.compose import check_single_run
from scaleflow.config.folders import remove_created
from scaleflow.config.hydra_config import check_folder_writable, composed_from_hydra, read_typed_overrides
from scaleflow.errors import ConfigError
from scaleflow.launcher.launch import launch_run
from scaleflow.launcher.prepare import PreparedRun, RunCommand, prepare_run
from scaleflow.launcher.recovery import repair_quietly
from scaleflow.launcher.submit import render_submission


def run_job(config: DictConfig, started: float) -> int:
    """Prepares and launches a job.

    Args:
        config: the composed config, interpolations kept.
        started: when the command began, in seconds since the epoch.

    Returns:
        The exit code of the command.
    """
    composed = composed_from_hydra(config)
    may_submit = HydraConfig.get().mode is not RunMode.MULTIRUN
    command = RunCommand(composed, read_typed_overrides(), started, may_submit=may_submit)
    is_resume = config.get("resume") is not None
    try:
        if not is_resume:
            check_single_run(config)
        run = prepare_run(command)
        if run.spec.plan.cluster.submit is not None:
            print(render_submission(run.spec.plan, sys.argv[1:]), end="")
            remove_created(composed.folder)
            return 0
        if is_resume:
            remove_created(composed.folder)  # the run has its own folder
        if run.is_finished:
            return report_finished(run)
        check_folder_writable(run.spec.folder)
    except ConfigError as refusal:
        remove_created(composed.folder)
        return refuse(str(refusal))
    return launch_run(run)


def report_finished(run: PreparedRun) -> int:
    """Sends what the command that finished the run could not record; returns the exit code."""
    folder = run.spec.folder
    repair_quietly(folder)
    print(f"{folder}: the run is finished; to train longer, add training.epochs=N with more epochs")
    return 0
