"""Launches a run: locks its folder, starts the recorder and the supervisor, and prints how it ended.

Features may act before the run: `Feature.before_run`.
"""

import contextlib
import math
import os
import pkgutil
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from scaleflow.cluster.engines import find_engine
from scaleflow.cluster.tasks import count_processes
from scaleflow.config.compose import (
    CommandWords,
    check_job,
    check_single_run,
    list_hydra_names,
    override_key,
    read_composed_config,
)
from scaleflow.config.interpolations import keep_values, nest_paths
from scaleflow.config.policies import NEW, TRAIN
from scaleflow.config.words import quote_override, show_words, split_flags
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan, Tracker, name_command
from scaleflow.interfaces.clock import CLOCK
from scaleflow.interfaces.events import Event
from scaleflow.interfaces.features import (
    Feature,
    find_own_runs,
    find_placeholders,
    import_named,
    list_features,
    report_problems,
)
from scaleflow.interfaces.secret_masking import (
    find_environment_secrets,
    find_secrets,
    mask_override,
    mask_secrets,
    remember_secrets,
)
from scaleflow.launcher.command_exit import REFUSED, Outcome, to_printable
from scaleflow.launcher.display import Display, display_for
from scaleflow.launcher.objects import keep_model_file, list_size_notes
from scaleflow.launcher.prepare import PreparedRun, note_copies, prepare_run
from scaleflow.launcher.processes.local_host import InlineRun, LocalHost
from scaleflow.launcher.processes.server_start import start_fork_server
from scaleflow.launcher.processes.stop import GRACE_SECONDS, StopRequest, catch_stop_signals
from scaleflow.launcher.processes.supervisor import ProcessHost, Supervisor
from scaleflow.launcher.recording.monitor import RunMonitor
from scaleflow.launcher.recording.recorder import Recorder
from scaleflow.launcher.recording.recovery import finalize_run, repair_quietly
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.launcher.run_end import finish_run
from scaleflow.runs import RunSpec, RunState
from scaleflow.runs.data_digest import digest_files, find_data_files
from scaleflow.runs.folder import replace_json
from scaleflow.runs.folder_use import check_folder, remove_created
from scaleflow.runs.provenance.collect import LaunchFacts, record_provenance
from scaleflow.runs.provenance.record import remove_launch_state
from scaleflow.tracking import RUN_ID, TensorBoardWriter, locate_weights, make_tracker
from scaleflow.tracking.active_run import ActiveRun, find_active_run
from scaleflow.tracking.connection import format_store_error

#: Keys that the script sets itself, or that concern only this command.
SCRIPT_KEYS = ("cluster.submit", "cluster.workers", "hydra.run.dir")

#: Seconds added to a pod's termination grace period, after the run has ended and its last events are sent.
FLUSH_MARGIN_SECONDS = 30.0


def render_submission(plan: Plan, words: Sequence[str]) -> str:
    """Renders the script or the manifest of a run. `words` are the typed words after `scaleflow`.

    Raises ConfigError if a word contains a secret, which must not be written to a file, or if the engine rejects a
    name.
    """
    for word in words:
        if mask_override(word) != word:
            raise ConfigError(
                f"cluster.submit={plan.cluster.submit}: {mask_override(word)}: this secret would be written into the "
                "script; put it into an environment variable NAME, and write '${oc.env:NAME}'"
            )
    arguments = [word for word in words if override_key(word) not in SCRIPT_KEYS]
    settings = {"cluster.submit": plan.cluster.submit, "cluster.workers": plan.cluster.workers}
    typed = {override_key(word) for word in words}  # the script must not contain values from a recipe
    arguments += [f"{key}=null" for key, value in settings.items() if value is not None and key not in typed]
    tasks = sum(count_processes(plan).values())  # each process has its own launcher
    typed_folder = CommandWords(split_flags(words)[1]).find("hydra.run.dir")
    folder = None if typed_folder is None else str(typed_folder)
    if folder is not None and "'" in folder:
        raise ConfigError(f"hydra.run.dir={folder}: the script cannot hold an apostrophe here; choose another folder")
    seconds = math.ceil(GRACE_SECONDS + plan.tracking.flush_seconds + FLUSH_MARGIN_SECONDS)
    render_job = find_engine(plan.cluster).render_job
    assert render_job is not None  # a rule refuses `cluster.submit` otherwise
    return render_job(plan, tasks, arguments, folder, seconds)


class ProvenanceCollector(threading.Thread):
    """Collects the run's provenance. Writes nothing in processes whose events are not the run's."""

    def __init__(self, spec: RunSpec, facts: LaunchFacts) -> None:
        super().__init__(name="provenance", daemon=True)
        self._spec = spec
        self._facts = facts
        self.error = ""  # why the record is missing or incomplete

    def run(self) -> None:
        if not self._spec.records:
            return
        try:
            record_provenance(self._spec, self._facts)
        except Exception as error:  # the run continues without the record
            self.error = format_store_error(error)


#: Seconds that a refused command waits until the store that it has begun to create is complete.
MIGRATION_SECONDS = 180.0


def run_job(config: DictConfig, started: float) -> Outcome:
    """Prepares and launches a config composed by Hydra: a command, or a job of one of Hydra's own launchers.

    The config contains its interpolations. `started` is when the command began, in seconds since the epoch. Raises
    ConfigError if the command cannot work.
    """
    composed = read_composed_config(config)
    is_job = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        if is_job:
            check_job(config)
        if config.get("resume") is None:
            check_single_run(config)
        run = prepare_run(composed, started=started, policy=TRAIN if is_job else NEW)
        if run.spec.plan.cluster.submit is not None:
            print(render_submission(run.spec.plan, sys.argv[1:]), end="")
            remove_created(composed.folder)
            return Outcome()
        if run.resume_number:
            remove_created(composed.folder)  # the run has its own folder
        if run.is_finished:
            repair_quietly(run.spec.folder)  # sends events that the command that finished it could not record
            print(f"{run.spec.folder}: the run is finished; {describe_longer(run.spec)}")
            return Outcome(read=partial(answer_run, run.spec.folder))
        check_folder(run.spec.folder, ignored=list_hydra_names())
    except ConfigError:
        remove_created(composed.folder)
        raise
    return launch_run(run)


def describe_longer(spec: RunSpec) -> str:
    """Explains how to train a finished run longer. After early stopping, more epochs would end at once."""
    state = RunState.read(spec.folder)
    if find_own_runs(state.params) is not None:
        return f"{name_command('rerun')} {shlex.quote(os.path.relpath(spec.folder))} runs it again"
    training = spec.plan.training
    steps = state.length.get("max_steps", 0)
    if training.early_stopping is not None and state.step < steps:
        again = f"{name_command('rerun')} {shlex.quote(os.path.relpath(spec.folder))} training.early_stopping=null"
        kept = "a longer run keeps training.early_stopping, which may end it at once"
        return f"it ended at step {state.step} of {steps}; {kept}; to train without, run {again}"
    key = "max_steps" if training.max_steps else "epochs"
    trained = max(getattr(training, key), state.length.get(key, 0))
    return f"to train longer, add training.{key}=N, more than {trained}"


def answer_run(folder: Path) -> dict[str, Any]:
    """Returns a run's values for `--json`: its id, status, last metrics, model, folder and error; {} without a run."""
    run = RunState.read(folder)
    if not run.has_begun:
        return {}
    values = {"run_id": run.run_id, "status": run.status, "metrics": run.metrics, "model": run.model_uri}
    result: Mapping[str, Any] = {}
    if run.result is not None:
        with report_problems(run.result.event, "its values for --json are left out"):
            result = dict(run.result.to_values())
    return {**values, **result, "folder": str(folder.absolute()), "error": run.error or None}


def launch_run(
    run: PreparedRun,
    *,
    adopts: bool = True,
    stop: StopRequest | None = None,
    display: Display | None = None,
    on_event: Callable[[Event], None] | None = None,
    facts: LaunchFacts | None = None,
) -> Outcome:
    """Runs a prepared run from start to end, after the features' work before it. Its folder must exist and be writable.

    Args:
        adopts: whether the run continues one that the environment names.
        stop: receives the signals, if this command already catches them.
        display: shows the run; None: the terminal of this command.
        on_event: receives each event.
        facts: the provenance that all runs of this command share.

    Returns:
        The outcome of the command. It has an error if the store or a worker refused the run; then there is no run.

    Raises:
        ConfigError: if the run cannot begin.
    """
    features = find_features_before(run.spec)
    with contextlib.ExitStack() as resources:
        if features or (run.spec.task.trains and find_placeholders(run.spec.plan.config)):
            if stop is None:
                stop = resources.enter_context(catch_stop_signals())
            try:
                if not run.resume_number:
                    refuse_used_folder(run.spec)
                if run.spec.server is None and not run.spec.plan.debug.inline:
                    server = resources.enter_context(start_fork_server())  # shared by all runs of this command
                    run = replace(run, spec=replace(run.spec, server=server))
                completed = complete_run(run, features, stop)
            except ConfigError:
                remove_created(run.spec.folder)
                raise
            if isinstance(completed, Outcome):
                remove_created(run.spec.folder)
                return completed
            run = completed
        return launch_completed_run(run, adopts=adopts, stop=stop, display=display, on_event=on_event, facts=facts)


def launch_completed_run(
    run: PreparedRun,
    *,
    adopts: bool,
    stop: StopRequest | None,
    display: Display | None = None,
    on_event: Callable[[Event], None] | None = None,
    facts: LaunchFacts | None = None,
) -> Outcome:
    """Runs a run that features have completed. The arguments are those that `launch_run` takes."""
    spec = run.spec
    remember_secrets([*find_environment_secrets(), *find_secrets(run.composed.raw, spec.plan.config)])
    if spec.parent is None:
        CLOCK.begin(at_least=spec.started)
    display = display or display_for(is_plain=spec.plan.debug.inline, is_chief=spec.records)
    display.begin_phase("reading the config", since=spec.started)
    with contextlib.ExitStack() as resources:
        resources.callback(display.close)  # even after an exception, so that the cursor is shown again
        try:
            if not run.has_weights:
                spec = replace(spec, plan=resources.enter_context(locate_weights(spec.plan)))
            if spec.records:
                resources.enter_context(spec.files.lock_recording())
                resources.enter_context(spec.files.track_files())
                write_configs(run)
        except ConfigError:
            if not run.resume_number:
                remove_created(spec.folder)
            raise
        is_resumed = run.resume_number > 0
        can_have_parent = spec.records and spec.parent is None and not is_resumed
        active = find_active_run(spec.plan.tracking) if can_have_parent else None
        if active is not None:
            adopts = False
            spec = replace(spec, tags={**spec.tags, **active.tags})
        collector = ProvenanceCollector(spec, facts or LaunchFacts())
        recorder = make_recorder(spec, is_resumed, adopts and not is_resumed, wait_for_files=collector.join)
        with catch_stop_signals() if stop is None else contextlib.nullcontext(stop) as stop:
            digesting = threading.Thread(target=digest_data, args=(spec,), daemon=True)
            monitor = RunMonitor(spec, recorder, display, stop=stop, on_event=on_event, helpers=[collector, digesting])
            for note in list_notes(run, active) if spec.task.trains else ():
                display.print_line(to_printable(note))
            return supervise_run(monitor, collector, is_resumed)


def list_notes(run: PreparedRun, active: ActiveRun | None) -> list[str]:
    """Returns the notes to print before a run begins. `active` is the MLflow run that is active in this thread."""
    return [*run.composed.notes, *(active.notes if active is not None else ())]


def find_features_before(spec: RunSpec) -> list[Feature]:
    """Returns the features that act before a run that trains."""
    if not spec.task.trains:
        return []
    return [feature for feature in list_features().values() if feature.before_run and feature.is_used_by(spec.plan)]


def complete_run(run: PreparedRun, features: Sequence[Feature], stop: StopRequest) -> PreparedRun | Outcome:
    """Returns the run completed by features, or the outcome of the command if a feature ends it.

    Raises ConfigError if a feature refuses the run, or if its config still has a placeholder.
    """

    def launch_other(other: PreparedRun) -> Outcome:
        return launch_completed_run(other, adopts=False, stop=stop)

    for feature in features:
        completed: PreparedRun | Outcome = run
        with report_problems(feature.name, "before the run", may_refuse=True):
            returned = import_named(feature.before_run)(run, launch_other, stop)
            if not isinstance(returned, PreparedRun | Outcome):
                raise TypeError(f"{feature.before_run} returns neither a PreparedRun nor an Outcome")
            completed = returned
        if isinstance(completed, Outcome):
            return completed
        run = completed
    for placeholder in find_placeholders(run.spec.plan.config):
        raise ConfigError(
            f"{placeholder.key}={placeholder.word}: no value was found before the run; type one, such as that of "
            f"{name_command(placeholder.command)}"
        )
    return run


def supervise_run(monitor: RunMonitor, collector: ProvenanceCollector, is_resumed: bool) -> Outcome:
    """Runs a run whose folder is locked. Returns the outcome of the command."""
    spec = monitor.spec
    recorder = monitor.recorder
    for line in describe_part(spec, is_resumed):
        monitor.display.print_line(line)
    run_processes = InlineRun(monitor) if spec.plan.debug.inline else Supervisor(monitor, make_host(monitor))
    code = run_processes.run()
    collector.join()
    if monitor.refusal is None:
        if collector.error:
            monitor.display.print_line(f"note: what the run is made of is not recorded: {collector.error}")
        finish_run(monitor)
        if monitor.hooks is not None:
            monitor.hooks.after_run({"exit_code": code, **answer_run(spec.folder)})
        return Outcome(code, partial(answer_run, spec.folder))
    message = str(mask_secrets(str(monitor.refusal)))
    folder = os.path.relpath(spec.folder)
    step = monitor.state.step
    if step and spec.task.trains:
        message += f"\nthe training until step {step} is in {folder}; "
        message += f"to record it, run {name_command('sync')} {shlex.quote(folder)}"
    discard_refused(monitor)
    return Outcome(REFUSED if recorder.refusal is not None else code, error=message)


def digest_data(spec: RunSpec) -> None:
    """Digests the data files while TensorFlow is imported, so that the worker finds the digests in the cache."""
    if spec.records:
        digest_files(find_data_files(spec.plan.dataset.target.arguments))


def make_host(monitor: RunMonitor) -> ProcessHost:
    name = find_engine(monitor.spec.plan.cluster).remote_host
    host: ProcessHost = pkgutil.resolve_name(name)(monitor) if name else LocalHost(monitor.spec.server)
    return host


def make_recorder(spec: RunSpec, is_resumed: bool, adopts: bool, wait_for_files: Callable[[], object]) -> Recorder:
    """Makes the recorder of the run. It has no store if the events of this process are not the run's."""
    plan = spec.plan
    tracker = make_tracker(plan.tracking, adopts=adopts) if spec.records else Tracker()
    board = TensorBoardWriter(spec.files.tensorboard) if plan.tracking.tensorboard and spec.records else None
    offset = spec.events.stat().st_size if spec.events.exists() else 0
    transfer = EventTransfer(
        tracker, spec.events, board=board, keeps_record=spec.records, wait_for_files=wait_for_files
    )
    return Recorder(transfer, offset, is_resumed=is_resumed, offline=plan.tracking.offline)


def describe_part(spec: RunSpec, is_resumed: bool) -> list[str]:
    """Returns lines about this command's part of the run, and about the run in the store that it continues."""
    lines = list_size_notes(spec.files) if spec.records else []
    requested = os.environ.get(RUN_ID)
    if is_resumed and requested:
        tracked = spec.files.read_record().get("run_id")
        if requested != tracked:
            run = tracked or "the one in its folder"
            lines.append(f"note: {RUN_ID}={requested} is not used: the resumed run is {run}")
    note = note_copies(spec.plan) if spec.parent is None else None
    if note:
        lines.append(note)
    task = spec.plan.task
    if task and task.worker:
        lines.append(f"{spec.name} of {len(task.peers)} processes; the chief, {task.peers[0]}, records the run")
    return lines


def write_configs(run: PreparedRun) -> None:
    """Writes the config and the overrides, with secrets masked. Only the command that records the run calls it.

    Raises ConfigError if the folder contains another run, or if a worker still writes to it.
    """
    files = run.spec.files
    overrides = OmegaConf.to_yaml(show_words(run.composed.words.overrides))
    if run.resume_number:
        lock = files.take_write_lock()
        finalize_run(files.path)
        lock.release()  # the worker takes it
        files.resume_overrides(run.resume_number).write_text(overrides)
        return
    refuse_used_folder(run.spec)
    config, replaced = keep_values(run.composed.raw, run.spec.plan.config)
    files.config.write_text(OmegaConf.to_yaml(OmegaConf.create(mask_secrets(config))))
    if replaced:
        files.interpolations.write_text(OmegaConf.to_yaml(OmegaConf.create(mask_secrets(nest_paths(replaced)))))
    if run.spec.plan.answers:
        replace_json(files.answers, run.spec.plan.answers)
    files.overrides.write_text(overrides)
    if run.spec.task.trains:
        keep_model_file(run.spec.plan, files)


def refuse_used_folder(spec: RunSpec) -> None:
    """Raises ConfigError if the folder contains another run."""
    if RunState.read(spec.folder).has_begun:
        folder = os.path.relpath(spec.folder)
        raise ConfigError(
            f"hydra.run.dir={folder}: contains a run already; use {quote_override('resume', folder)} to continue "
            "it, or choose another folder"
        )


def discard_refused(monitor: RunMonitor) -> None:
    """Removes the files of a refused run, unless a log explains more, or something was trained."""
    spec = monitor.spec
    state = monitor.state
    recorder = monitor.recorder
    if recorder.is_alive() and str(spec.plan.tracking.uri).startswith("sqlite:"):
        recorder.finish(1.0)
        if recorder.is_alive():  # ending now would leave an incomplete store
            monitor.display.print_line("waiting until the tracking store is complete")
            recorder.join(MIGRATION_SECONDS)
    recorder.stop()
    if spec.records and spec.plan.resume is not None:
        remove_launch_state(spec.files, spec.files.count_resumes())
        if not state.has_begun:  # the run is not resumed, so these overrides do not count
            spec.files.resume_overrides(spec.files.count_resumes()).unlink(missing_ok=True)
    has_log = getattr(state.last, "keep", False)
    if not (spec.is_resumed or state.step > 0) and (recorder.refusal is not None or not has_log):
        discard_folder(spec)


def discard_folder(spec: RunSpec) -> None:
    """Removes the files that this command wrote, and then the empty folders that it created."""
    paths = [spec.log, spec.events]
    if spec.records:
        if spec.plan.task is None:  # with several machines, others may still write to the folder
            paths = spec.files.list_process_files()
        paths += spec.files.list_launcher_files()
    for path in paths:
        path.unlink(missing_ok=True)
    if spec.records:
        shutil.rmtree(spec.files.provenance_folder, ignore_errors=True)
    remove_created(spec.folder)
