"""Turns a command into a `PreparedRun`, or refuses it. Every command that starts a run calls `prepare_run`.

    command --resolve_config--> config --parse_plan--> Plan --resolve_environment--> Plan
    Plan --check_plan, check_outside--> RunSpec

This module resolves everything that depends on the machine: environment variables, a TPU, free ports, the tracking
store, and the folder of a run to resume. The spec holds the results, so that no process must look again.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaleflow.cluster.engines import find_engine
from scaleflow.cluster.network import port_is_free
from scaleflow.cluster.tasks import describe_copies
from scaleflow.cluster.tf_config import TF_CONFIG, parse_tf_config
from scaleflow.cluster.tpu import explain_no_tpu, explain_unreachable, find_tpu, is_sure
from scaleflow.config.compose import ComposedConfig
from scaleflow.config.own_code import check_own_names
from scaleflow.config.parse import parse_section
from scaleflow.config.plan import check_plan, parse_plan, set_values
from scaleflow.config.policies import TRAIN, Policy
from scaleflow.config.words import quote_override
from scaleflow.errors import ConfigError, RunMissing
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import Plan, Tracking, name_command
from scaleflow.interfaces.features import (
    Feature,
    find_feature_task,
    find_own_runs,
    find_untrained_runs,
    import_named,
    list_features,
    report_problems,
)
from scaleflow.launcher.recording.description import read_overrides
from scaleflow.runs import RunFolder, RunSpec, RunState, Task
from scaleflow.runs.folder import read_json
from scaleflow.runs.provenance.collect import refuse_changed_code
from scaleflow.runs.resume import make_resumed_config
from scaleflow.runs.run import Run
from scaleflow.runs.run_name import label_overrides
from scaleflow.tracking.model_uris import RUN_OR_MODEL
from scaleflow.tracking.tensorboard import check_tensorboard
from scaleflow.tracking.uri import resolve_store
from scaleflow.worker.tasks import TrainModel

Config = dict[str, Any]


def find_folder_to_resume(named: str, composed: Config) -> Path:
    """Returns the folder of a run that is named by its path, its id in the store, or the URI of its model."""
    folder = Path(named).expanduser()
    if RunFolder(folder).ledger.is_file():
        raise ConfigError(
            f"resume={named}: this is the folder of a sweep; to continue it, repeat its command with "
            f"{quote_override('hydra.sweep.dir', named)}"
        )
    if RunFolder(folder).events.is_file():
        return folder.absolute()
    if not RUN_OR_MODEL.fullmatch(named):
        if folder.is_dir():
            raise ConfigError(
                f"resume={named}: this is not the folder of a run: it has no {RunFolder(folder).events.name}"
            )
        raise ConfigError(
            f"resume={named}: expected the folder of a run, which the run prints at its end, the id of a run, "
            "or the URI of its model, such as models:/NAME@ALIAS"
        )
    options = resolve_store(parse_section(Tracking, composed.get("tracking", {}), "tracking"))
    if options.name == "none":
        raise ConfigError(
            f"resume={named}: run ids need a tracking store, and this command has tracking=none; use the run's folder"
        )
    try:
        folder = Run.find(named, options).path
    except RunMissing as missing:
        raise RunMissing(f"{missing}; `{name_command('sync')} FOLDER --again` records a deleted run again") from missing
    if not RunFolder(folder).events.is_file():
        raise ConfigError(
            f"resume={named}: its folder {folder} is not on this machine; resume it where its folder is, or copy the "
            "folder and use resume=FOLDER"
        )
    return folder


#: The variable with the tags, as JSON, that a pipeline passes to the commands of its stages.
STAGE_TAGS = "SCALEFLOW_STAGE_TAGS"


@dataclass(frozen=True)
class PreparedRun:
    """A run that can be launched.

    Commands add to the spec values that nothing else depends on: tags, the run that this one repeats, the folder of a
    sweep.
    """

    spec: RunSpec  # the first process that this command starts
    composed: ComposedConfig  # its config is for `config.yaml`, its words for `overrides.yaml` or `resume-N.yaml`
    resume_number: int = 0  # how often the run was resumed, including now; 0: the run begins
    is_finished: bool = False  # whether the run to resume is finished, and this command does not make it longer
    has_weights: bool = False  # whether the run to resume has checkpoints, so that `model.init_from` is not needed


def prepare_run(
    composed: ComposedConfig,
    *,
    started: float | None = None,
    resume: str | None = None,
    policy: Policy = TRAIN,
) -> PreparedRun:
    """Checks a config, and finds the run that it resumes.

    Args:
        composed: the config, with the folder of the run.
        started: when the command began, in seconds since the epoch; None: now.
        resume: the folder or the id of the run to resume; None: the config's `resume`.
        policy: the checks of a new run.

    Raises ConfigError if the command cannot work. The message names the key, the value and a fix.
    """
    started = time.time() if started is None else started
    resume = resume or composed.resolved.get("resume")
    if resume is not None:
        return prepare_resume(composed, str(resume), started)
    plan = make_plan(composed, policy)
    return PreparedRun(make_spec(plan, composed.folder, started, composed.words.overrides), composed)


def make_spec(plan: Plan, folder: Path, started: float, typed: Sequence[str]) -> RunSpec:
    """Makes the spec of the first process. `typed` are the overrides of all commands of the run."""
    if plan.cluster.submit is None and not find_engine(plan.cluster).is_remote:
        check_own_names(plan.config, plan.search)
    check_dataset_files(plan, folder)
    check_folder_names(plan, folder)
    worker = plan.task.worker if plan.task else 0
    label = "" if plan.tracking.run_name else label_overrides(typed, plan.config)
    return RunSpec(
        plan, folder.absolute(), started, make_task(plan), worker=worker, label=label, tags=read_stage_tags()
    )


def make_task(plan: Plan) -> Task:
    """Returns what the processes of a run do: train a model, or the task of a feature that the plan uses."""
    name = find_feature_task(plan)
    task: Task = import_named(name)() if name else TrainModel()
    return task


def read_stage_tags() -> dict[str, str]:
    """Returns the tags that this command's pipeline, if there is one, gives to its runs."""
    return {str(key): str(value) for key, value in json.loads(os.environ.get(STAGE_TAGS) or "{}").items()}


def check_folder_names(plan: Plan, folder: Path) -> None:
    """Raises ConfigError for folders whose names TensorFlow reads as globs: it could not read its files there."""
    for key, path in (("hydra.run.dir", folder.absolute()), ("checkpoint.folder", plan.checkpoint.folder)):
        if {"[", "\\"} & {*str(path or "")}:
            raise ConfigError(
                f"{key}={path}: TensorFlow cannot read checkpoints and models below a folder with [ or \\ in its name; "
                "rename it, or choose another one"
            )


def check_dataset_files(plan: Plan, folder: Path) -> None:
    """Checks the files of a built-in dataset, if workers on this machine read them.

    Raises the source's ConfigError. A file in the run's folder is written later (`scaleflow.run(data=...)`).
    """
    target = plan.dataset.target
    is_here = plan.cluster.submit is None and not find_engine(plan.cluster).is_remote
    data_dir = target.arguments.get("data_dir")
    if not is_here or data_dir is None or not target.path.startswith("scaleflow.dataset."):
        return
    if not Path(str(data_dir)).is_relative_to(folder.absolute()):
        from scaleflow.dataset.launch_check import check_source_files  # it imports numpy; most commands do not need it

        check_source_files(target, plan.dataset.split)


def prepare_resume(typed: ComposedConfig, named: str, started: float) -> PreparedRun:
    """Prepares a run that continues in its own folder, with its own config.

    Args:
        typed: the config of this command.
        named: the value of `resume`: a folder, a run's id, or the URI of a model.
        started: when this command began, in seconds since the epoch.

    Raises ConfigError if there is no such run, or if an override may not change.
    """
    files = RunFolder(find_folder_to_resume(named, typed.resolved))
    state = RunState.read(files.path)
    if state.ready is None:
        raise ConfigError(f"resume={named}: the run in {files.path} ended before training began; start a new run")
    untrained = find_untrained_runs(state.params)
    if untrained is not None:
        raise ConfigError(
            f"resume={named}: this run {untrained.work} and trained no model; repeat its command, "
            f"{name_command(untrained.command)} {state.params[untrained.param]}"
        )
    own = find_own_runs(state.params)
    if own is not None and not own.is_resumable:
        raise ConfigError(f"resume={named}: {own.reason}")
    resumed = make_resumed_config(typed, state, files, has_length=own is None)
    composed = resumed.composed
    is_finished = state.last_status == "FINISHED" and not resumed.is_longer
    had_checkpoints = state.checkpoint is not None and composed.config["checkpoint"].get("folder") is None
    has_checkpoints = any(files.checkpoints.glob("step-*"))
    if own is None and had_checkpoints and not has_checkpoints and state.last_status == "FINISHED" and not is_finished:
        raise ConfigError(
            f"resume={named}: its checkpoints were deleted, so it cannot be trained longer; start a new run with "
            f"model.init_from={files.path}"
        )
    plan = replace(make_plan(composed), answers=read_json(files.answers))
    if not is_finished:
        refuse_changed_code(plan, files)
    has_weights = has_checkpoints or (is_store_address(plan.checkpoint.folder) and state.checkpoint is not None)
    overrides = [*read_overrides(files), *typed.words.overrides]
    spec = replace(make_spec(plan, files.path, started, overrides), length=resumed.length)
    return PreparedRun(spec, composed, 1 + files.count_resumes(), is_finished=is_finished, has_weights=has_weights)


#: Strategies that run in one process.
ONE_PROCESS = ("auto", "one_device", "mirrored")


def make_plan(composed: ComposedConfig, policy: Policy = TRAIN) -> Plan:
    """Parses a config and checks it without TensorFlow. Every plan is made here.

    Raises the errors of `prepare_run`.
    """
    asked = parse_plan(composed.resolved, composed.choices, composed.search)
    plan = resolve_environment(asked, os.environ)
    check_plan(plan, policy.may_submit)
    is_one = plan.strategy.name in ONE_PROCESS and plan.hardware.name != "tpu"
    if policy.work and not is_one:
        raise ConfigError(
            f"strategy={plan.strategy.name}: {policy.work} are computed in one process, on GPUs or a CPU; use "
            f"strategy={' or '.join(ONE_PROCESS[1:])}"
        )
    looks_outside = policy.looks_outside and not policy.work and plan.cluster.submit is None
    return check_outside(plan, asked.hardware.tpu) if looks_outside else plan


def resolve_environment(plan: Plan, environment: Mapping[str, str]) -> Plan:
    """Adds values from the environment: the task of this process, and the strategy for `strategy=auto`.

    Raises ConfigError if TF_CONFIG, a task of Slurm or Kubernetes or a TPU is required, and is missing or wrong.
    """
    plan = apply_tf_config(apply_tpu(plan), environment)
    engine = find_engine(plan.cluster)
    starts_elsewhere = engine.is_started_elsewhere and plan.cluster.submit is None
    if not starts_elsewhere:
        return plan
    text = engine.read_tf_config(plan, environment)
    return replace(plan, task=parse_tf_config(text), tf_config=text)


def apply_tf_config(plan: Plan, environment: Mapping[str, str]) -> Plan:
    """Replaces `strategy=auto` with multi_worker or parameter_server, if TF_CONFIG names several processes."""
    cluster = plan.cluster
    engine = find_engine(plan.cluster)
    if cluster.submit is not None or engine.is_remote:
        has_several = cluster.workers != 1 if cluster.submit is not None else (cluster.workers or 1) > 1
        if has_several and plan.strategy.is_auto:
            return set_values(plan, {"strategy.name": "multi_worker"})
        return plan
    if engine.is_local and not (plan.strategy.is_auto and environment.get(TF_CONFIG)):
        return plan
    task = parse_tf_config(engine.read_tf_config(plan, environment))
    if not plan.strategy.is_auto or len(task.peers) == 1:
        return plan
    values = {"strategy.name": "parameter_server" if task.servers else "multi_worker"}
    if engine.is_local:
        values["cluster.name"] = "tf_config"
    return set_values(plan, values)


def apply_tpu(plan: Plan) -> Plan:
    """Replaces `strategy=auto` with tpu if there is a TPU, and adds the TPU's address.

    Raises ConfigError if `hardware.tpu` or the environment names a TPU in an invalid form.
    """
    if not (plan.strategy.is_auto or plan.strategy.is_tpu) or plan.hardware.name in ("cpu", "gpu"):
        return plan
    if plan.strategy.is_auto and not find_engine(plan.cluster).is_local:
        return plan
    is_wanted = not plan.strategy.is_auto or plan.hardware.name == "tpu" or plan.hardware.tpu is not None
    address = find_tpu(plan.hardware.tpu)
    if not is_wanted and (address is None or not is_sure(address)):
        return plan
    values = {
        "strategy.name": "tpu",
        "hardware.name": "tpu",
        "hardware.tpu": address.address if address else None,
    }
    return set_values(plan, values)


def check_outside(plan: Plan, tpu: str | None) -> Plan:
    """Checks everything that the run needs outside this process. Returns the plan with the tracking store's address.

    `tpu` is the requested TPU. Raises ConfigError, which names the missing part.
    """
    note_copies(plan)
    check_tpu(plan, tpu)
    find_engine(plan.cluster).check_reachable(plan.cluster)
    check_tensorboard(plan.tracking.tensorboard)
    for feature in list_features().values():
        if feature.check and feature.is_used_by(plan):
            run_feature_check(feature, plan)
    if plan.task and not port_is_free(plan.task.peers[plan.task.worker]):
        raise ConfigError(
            f"TF_CONFIG: the port of {plan.task.peers[plan.task.worker]}, the address of this process, is in use; "
            "choose a free one"
        )
    return replace(plan, tracking=resolve_store(plan.tracking))


def run_feature_check(feature: Feature, plan: Plan) -> None:
    """Calls a feature's check. If the check itself fails, a message reports it, and the run continues.

    Raises ConfigError if the check refuses the plan.
    """
    with report_problems(feature.name, f"its check {feature.check} is skipped", may_refuse=True):
        import_named(feature.check)(plan)


def note_copies(plan: Plan) -> str | None:
    """Returns a warning if this command is one of several independent copies; otherwise None.

    Raises ConfigError if each copy would start several processes.
    """
    return describe_copies(plan, os.environ) if find_engine(plan.cluster).is_local else None


def check_tpu(plan: Plan, asked: str | None) -> None:
    """Raises ConfigError unless the requested TPU answers: TensorFlow would wait for it forever."""
    if not plan.strategy.is_tpu:
        return
    address = find_tpu(asked)
    if address is None:
        key = "hardware" if plan.choices.get("hardware") == "tpu" else "strategy"
        raise ConfigError(f"{key}=tpu: {explain_no_tpu()}")
    reason = explain_unreachable(address)
    if reason is not None:
        raise ConfigError(f"{address}: {reason}")
