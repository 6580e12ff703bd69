"""Before a run, finds its settings that are `auto`. Each search is a separate run."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scaleflow.errors import ConfigError
from scaleflow.features.search.checks import is_searched, leave_schedule_out
from scaleflow.features.search.events import SettingFound
from scaleflow.features.search.trial_kinds import AUTO, BatchSearch, RateTest, Trial
from scaleflow.features.search.trial_task import FindSetting
from scaleflow.interfaces import Plan
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import FINISHED, Outcome, to_printable
from scaleflow.launcher.prepare import PreparedRun, make_plan
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.runs import RunState
from scaleflow.runs.folder_use import create_folder


def find_settings(
    run: PreparedRun, launch: Callable[[PreparedRun], Outcome], stop: StopRequest
) -> PreparedRun | Outcome:
    """Returns the run with all `auto` settings replaced, or the outcome of the command if a search failed.

    Raises ConfigError if a search cannot begin, or if the config does not work with a found value.
    """
    while True:
        trial = choose_trial(run.spec.plan)
        if trial is None:
            return run
        search = make_search(run, trial)
        outcome = launch(search)
        state = RunState.read(search.spec.folder)
        setting = state.result
        if not isinstance(setting, SettingFound) or outcome.code != FINISHED or stop.is_set():
            return end_without_setting(search, trial, state, outcome, stop)
        run = use_setting(run, search, setting)


def choose_trial(plan: Plan) -> Trial | None:
    """Returns the next trial that a run needs, the batch size first, or None if it needs no more."""
    if is_searched(plan, BatchSearch.key):
        return BatchSearch()
    if is_searched(plan, RateTest.key):
        return RateTest()
    return None


def make_search(run: PreparedRun, trial: Trial) -> PreparedRun:
    """Returns the run that searches a setting, and creates its folder next to the folder of the run.

    Raises ConfigError if the folder cannot be created.
    """
    try:
        folder = name_search_folder(run.spec.folder, trial)
        create_folder(folder)
    except (OSError, ValueError) as error:  # no permission, or a bad name
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"hydra.run.dir={run.spec.folder}: {trial.key}={AUTO} needs a folder beside it, which cannot be made "
            f"({why}); choose another folder"
        ) from error
    plan = leave_schedule_out(run.spec.plan) if isinstance(trial, RateTest) else run.spec.plan
    return replace(run, spec=replace(run.spec, plan=plan, task=FindSetting(trial), folder=folder))


def name_search_folder(folder: Path, trial: Trial) -> Path:
    """Returns an unused path next to the run's folder. An earlier search may have left its own folder there."""
    setting = trial.key.partition(".")[2].replace("_", "-")
    path = folder.with_name(f"{folder.name}-{setting}")
    number = 1
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-{setting}-{number}")
    return path


def use_setting(run: PreparedRun, search: PreparedRun, setting: SettingFound) -> PreparedRun:
    """Returns the run with the found value in its config.

    The run's tags say how the value was found. Its folder gets a copy of the search's table. Raises ConfigError if keys
    that refer to the setting do not work with the value.
    """
    trial = RateTest if setting.key == RateTest.key else BatchSearch
    value = setting.value if trial is RateTest else int(setting.value)
    composed = run.composed.set({setting.key: value})
    plan = make_plan(composed)
    name = setting.key.partition(".")[2]
    tag = f"scaleflow.{name}"
    tags = {**run.spec.tags, tag: f"{AUTO}: {setting.word}, {setting.reason}"}
    run_id = search.spec.files.read_record().get("run_id")
    if run_id:
        tags[f"{tag}.run"] = run_id
    with contextlib.suppress(OSError):  # the search's folder keeps the original
        shutil.copyfile(search.spec.folder / trial.table, run.spec.folder / trial.table)
    word = setting.word.partition(".")[2]
    label = run.spec.label.replace(f"{name}={AUTO}", word)
    spec = replace(run.spec, plan=plan, label=label, tags=tags, started=time.time())
    return replace(run, spec=spec, composed=composed)


def end_without_setting(
    search: PreparedRun, trial: Trial, state: RunState, outcome: Outcome, stop: StopRequest
) -> Outcome:
    """Returns the outcome of the command if a search found nothing, was refused or was stopped."""
    error = outcome.error
    if state.has_begun and not error:
        how = f"stopped by {stop.signal_name}" if stop.is_set() else f"{state.status}: {state.error}"
        folder = os.path.relpath(search.spec.folder)
        text = f"{trial.key}={AUTO}: the search in {folder} ended as {how}"
        error = to_printable(str(mask_secrets(text)))
    code = stop.exit_code if stop.is_set() else outcome.code
    return Outcome(code, error=error)
