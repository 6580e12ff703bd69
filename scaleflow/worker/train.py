"""Runs one worker: builds everything, reports `ready`, trains, exports."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scaleflow.cluster.tasks import count_synchronous_workers, process_names
from scaleflow.config.parse import flatten_config
from scaleflow.errors import ConfigError
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import LearnedState
from scaleflow.interfaces.clock import CLOCK, measure_since
from scaleflow.interfaces.events import (
    ArtifactWritten,
    Emit,
    FaultReported,
    ModelExported,
    Note,
    PhaseBegan,
    RunEnded,
    RunReady,
    RunRefused,
    TagsSet,
)
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.interfaces.trials import to_params
from scaleflow.runs import DataCheckSpec, EvaluationSpec, RunSpec, RunState
from scaleflow.runs.event_log import DeduplicatingEmitter
from scaleflow.runs.learned_state import to_files, write_learned_state
from scaleflow.runs.provenance.tags import mark_process
from scaleflow.runs.run_name import make_run_name
from scaleflow.runs.state import make_length_tags
from scaleflow.runs.user_metrics import user_metrics
from scaleflow.worker import keras_import
from scaleflow.worker.augmented_sheet import write_sheet
from scaleflow.worker.baseline_data import report_baselines, write_baseline_data
from scaleflow.worker.baseline_process import FITTED_BASELINES, BaselineProcess, fit_meanwhile
from scaleflow.worker.build import TrainingSetup, build_training
from scaleflow.worker.evaluate import evaluate_model
from scaleflow.worker.export import export_model, report_formats, try_formats
from scaleflow.worker.failures import format_failure, guard, is_loss_of_peer, report_failure
from scaleflow.worker.metadata import (
    explain_changed_data,
    explain_other_data,
    report_changes,
    report_confusion,
    report_metadata,
    write_data_files,
)
from scaleflow.worker.report_thread import LoadCheck, begin_report, import_ahead
from scaleflow.worker.runtime import StartupTimer
from scaleflow.worker.trials import BatchSizeTrial, RateTrial, make_trial

if TYPE_CHECKING:
    from scaleflow.checkpoint import CheckpointManager
    from scaleflow.profiler.tracer import StepTracer
    from scaleflow.training import Session, WorkerSync


def run_worker(spec: RunSpec, emit: Emit, should_stop: Callable[[], bool]) -> bool:
    """Builds, trains and exports. The last event always says how it ended. Returns False if the run was refused or
    failed.
    """
    CLOCK.begin(at_least=spec.started)
    with mark_process(spec.folder), user_metrics():
        return train_run(spec, emit, should_stop)


def train_run(spec: RunSpec, emit: Emit, should_stop: Callable[[], bool]) -> bool:
    """Does the work of `run_worker`, which has set up the context for user code."""
    try:
        if spec.evaluation is not None:
            do_other_work(spec, emit)
            emit(RunEnded("FINISHED"))
            return True
        if spec.records:
            _lock = spec.files.take_write_lock()  # held until the process ends
        emit = wrap_emit(spec, emit) if spec.trial is None else emit
        startup_timer = make_startup_timer(spec)
        if spec.trial is not None:
            trial = make_trial(spec, emit, should_stop, startup_timer=startup_timer)
            report_ready(spec, trial.setup, 0, emit=emit)
            return run_trial(spec, trial, emit)
        check_object_store(spec, emit)
        setup = build_training(spec.plan, emit, startup_timer, resumed=spec.folder if spec.is_resumed else None)
        spec = replace(spec, plan=setup.plan)
        try_formats(spec, setup, emit, should_stop=should_stop)
        worker_sync = make_worker_sync(spec, setup, should_stop)
        data_changes = check_resumed_data(spec, setup, worker_sync)
        session = begin_training(spec, setup, worker_sync, emit=emit, startup_timer=startup_timer)
        write_baselines(spec, setup, emit)
    except ConfigError as refusal:
        emit(RunRefused(str(refusal)))
        return False
    except Exception as error:
        traceback.print_exc()
        message = f"{format_failure(error, spec.plan)}; the traceback is in {spec.log}"
        # A process that lost a peer does not know why the peer ended: the launcher does, if the peer refused the run.
        emit(FaultReported(message, lost_peer=True) if is_loss_of_peer(error) else RunRefused(message, keep=True))
        return False
    report_ready(spec, setup, session.step, emit=emit)
    if data_changes is not None and spec.records and setup.facts.metadata is not None:
        report_changes(spec, setup.facts.metadata.data, data_changes, emit=emit)
    if spec.plan.debug.placement:
        where = "above" if spec.plan.debug.inline else f"in {spec.log}"
        emit(Note(f"debug.placement: the device of each operation is {where}, as 'MatMul: (MatMul): /job:...'"))
    import_ahead(setup)
    try:
        with fit_meanwhile(spec, emit) as baselines:
            train_and_export(
                spec,
                setup,
                session,
                worker_sync=worker_sync,
                baselines=baselines,
                emit=emit,
                should_stop=should_stop,
            )
    except Exception as error:
        report_failure(spec, setup.explain(error), emit, setup=setup)
        finish_failed(session, error)
        return False
    return True


def do_other_work(spec: RunSpec, emit: Emit) -> None:
    """Does the work of a command that evaluates or converts a trained model, or looks at data."""
    if isinstance(spec.evaluation, EvaluationSpec):
        evaluate_model(spec.plan, spec.evaluation, spec.files, emit=emit)
    elif isinstance(spec.evaluation, DataCheckSpec):
        from scaleflow.worker.check import look_at_dataset

        look_at_dataset(spec.plan, spec.evaluation, emit)
    else:
        from scaleflow.worker.convert import convert_to_formats

        assert spec.evaluation is not None
        convert_to_formats(spec.plan, spec.evaluation, emit)


def wrap_emit(spec: RunSpec, emit: Emit) -> Emit:
    """Returns what emits the run's events, without repeated ones."""
    if spec.is_resumed or spec.plan.training.on_nan == "rollback":
        return DeduplicatingEmitter(spec.events, emit)
    return emit


def run_trial(spec: RunSpec, trial: RateTrial | BatchSizeTrial, emit: Emit) -> bool:
    """Runs a trial that is ready, and reports its end. Returns False if it failed."""
    try:
        with user_metrics(lambda name, value: None):  # user code may log during training
            trial.run()
    except Exception as error:
        report_failure(spec, trial.setup.explain(error), emit, setup=trial.setup)
        return False
    return True


def make_worker_sync(spec: RunSpec, setup: TrainingSetup, should_stop: Callable[[], bool]) -> WorkerSync:
    """Makes the object by which all workers stop together, after a request or after `checkpoint.max_seconds`."""
    from scaleflow import training

    limit, workers = spec.plan.checkpoint.max_seconds, count_synchronous_workers(spec.plan)

    def read_seconds() -> float:
        return measure_since(spec.started)

    def must_stop() -> bool:
        return should_stop() or (limit is not None and read_seconds() > limit)

    return training.WorkerSync(setup.runtime.strategy, workers, must_stop, read_seconds=read_seconds)


def make_startup_timer(spec: RunSpec) -> StartupTimer:
    """Makes the timer of the start, and ends its part `launch`.

    The import of Keras counts only if it was made for this command, and not earlier in a shared fork server.
    """
    seconds = keras_import.import_seconds if keras_import.imported_at > spec.started else 0.0
    startup_timer = StartupTimer(spec.started, **{"import": seconds})
    startup_timer.end_part("launch")
    return startup_timer


def finish_failed(session: Session, error: Exception) -> None:
    """Waits for the upload of checkpoints after a failure, unless a restart follows, which would wait for this."""
    if not is_loss_of_peer(error):
        session.finish_checkpoints()


def check_resumed_data(spec: RunSpec, setup: TrainingSetup, worker_sync: WorkerSync) -> str | None:
    """Says how the data changed since the run's last command, or returns None if this command does not resume one.

    Raises ConfigError on all workers if it changed, unless `resume_data=changed`, and if it is not that of the run that
    must be repeated exactly.
    """
    if (spec.plan.resume is None and not spec.repeats.is_exact) or spec.attempt:
        return None
    explain_data = explain_other_data if spec.repeats.is_exact else explain_changed_data

    def explain() -> str:  # on the chief, which has the metadata
        return "" if setup.facts.metadata is None else explain_data(spec, setup.facts.metadata.data.splits)

    changes = worker_sync.from_chief(explain)
    if changes and spec.repeats.is_exact:
        worker_sync.leave()
        raise ConfigError(
            f"--exact: the data is not what the run was trained on: {changes}; restore it, or add --despite data"
        )
    if spec.plan.resume is None:
        return None
    if changes and spec.plan.resume_data == "same":
        worker_sync.leave()
        raise ConfigError(
            f"resume={spec.plan.resume}: the data is not what the run was trained on: {changes}; restore it, or add "
            "resume_data=changed to continue with it"
        )
    return changes


def check_object_store(spec: RunSpec, emit: Emit) -> None:
    """Raises ConfigError if `checkpoint.folder` is in an object store that cannot be written, before data is read.

    Later attempts of a command do not ask again: training goes on while the store is away.
    """
    if spec.records and spec.attempt == 0 and is_store_address(spec.plan.checkpoint.folder):
        make_checkpoint_manager(spec, emit).check_writable()


def make_checkpoint_manager(spec: RunSpec, emit: Emit, learned: LearnedState | None = None) -> CheckpointManager:
    """Makes the object that keeps the checkpoints, each with the record of what was learned."""
    from scaleflow import checkpoint

    return checkpoint.CheckpointManager(
        spec.plan.checkpoint,
        spec.checkpoints,
        emit,
        writes=spec.worker == 0,
        has_readers=count_synchronous_workers(spec.plan) > 1,
        is_restart=spec.attempt > 0,
        records={} if learned is None else to_files(learned),
    )


def begin_training(
    spec: RunSpec, setup: TrainingSetup, worker_sync: WorkerSync, emit: Emit, startup_timer: StartupTimer | None = None
) -> Session:
    """Makes the session, at its first step or at its newest checkpoint.

    Raises ConfigError if the run cannot continue from its checkpoints.
    """
    from scaleflow import training

    options, tracking = spec.plan.checkpoint, spec.plan.tracking
    histogram_epochs = tracking.histograms_every_epochs if tracking.tensorboard and spec.records else None
    manager = make_checkpoint_manager(spec, emit, setup.facts.learned)
    session = training.Session(
        setup.engine,
        spec.plan.training,
        replace(setup.feeds, may_have_changed=spec.plan.resume_data == "changed"),
        log=training.MetricsLog(
            setup.engine, emit, startup_timer, peak_flops=setup.facts.peak_flops, histograms_every=histogram_epochs
        ),
        sync=worker_sync,
        checkpointing=training.Checkpointing(
            None if options.name == "none" else manager,
            options.sought,
            ends_as_best=options.export == "best",
            modes=setup.engine.objective.modes,
        ),
        callbacks=setup.callbacks,
        tracer=make_tracer(spec, setup, emit),
    )
    if not is_store_address(options.folder):
        manager.check_writable()
    check_shared_checkpoints(spec, manager, worker_sync)
    if spec.is_resumed:
        emit(PhaseBegan("reading the last checkpoint"))
        restore_newest(spec, session, manager, worker_sync=worker_sync, emit=emit)
    else:
        manager.check_empty()
        if spec.records:
            write_learned_state(spec.folder, setup.facts.learned)
    return session


def restore_newest(
    spec: RunSpec, session: Session, manager: CheckpointManager, worker_sync: WorkerSync, emit: Emit
) -> None:
    """Restores the newest checkpoint. Raises ConfigError if the run cannot continue without one that is not there."""
    manager.publish()
    worker_sync(0.0)  # no worker reads before the one that writes is done
    snapshot, folder = manager.load_newest(), spec.plan.checkpoint.folder or spec.checkpoints
    if not worker_sync.is_same(str(snapshot and snapshot.step)):
        worker_sync.leave()
        raise ConfigError(
            f"checkpoint.folder={folder}: the workers do not see the same checkpoints there; use a path that all of "
            "them see"
        )
    if snapshot is not None:
        session.restore(snapshot)
    elif spec.plan.weights is None and spec.plan.model.init_from:
        raise ConfigError(
            f"checkpoint.folder={folder}: there is no usable checkpoint, and the run began with model.init_from; start "
            "a new run, or name the folder of its checkpoints"
        )
    elif spec.records and spec.attempt == 0 and RunState.read(spec.folder).checkpoint is not None:
        emit(Note(f"{folder} has no usable checkpoint: the run begins again at step 0"))


def check_shared_checkpoints(spec: RunSpec, manager: CheckpointManager, worker_sync: WorkerSync) -> None:
    """Raises ConfigError if the machines do not share the folder of the checkpoints."""
    if (
        count_synchronous_workers(spec.plan) == 1
        or not spec.plan.task
        or manager.is_shared(worker_sync.from_chief, worker_sync.all)
    ):
        return
    worker_sync.leave()
    raise ConfigError(
        f"checkpoint={spec.plan.checkpoint.name}: the machines do not share "
        f"{spec.plan.checkpoint.folder or spec.checkpoints}, so the others could not resume from the chief's "
        "checkpoints; use checkpoint.folder=PATH that all of them see, or an object store's (s3://...), or "
        "checkpoint=none"
    )


def make_tracer(spec: RunSpec, setup: TrainingSetup, emit: Emit) -> StepTracer | None:
    options = spec.plan.profiler
    if not options.windows:
        return None
    from scaleflow import training
    from scaleflow.profiler.tracer import StepTracer

    emits = emit if spec.records else None
    # A trace of a GPU cannot be taken in a child process.
    is_in_child = len(process_names(spec.plan)) > 1 and setup.facts.resolved["hardware"] == "cpu"

    def read_facts() -> dict[str, Any]:
        return {**setup.facts.profile, "memory": training.measure_peaks()}

    return StepTracer(options, spec.files.profile, spec.file_name, emit=emits, facts=read_facts, in_child=is_in_child)


def report_ready(spec: RunSpec, setup: TrainingSetup, step: int, emit: Emit) -> None:
    """Reports `ready`: from here on there is a run, or it continues at `step`."""
    plan = spec.plan
    resolved = setup.facts.resolved
    config = flatten_config(mask_secrets(plan.config))
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
    params = {**plan.choices, **texts}
    params |= {f"resolved.{key}": str(value) for key, value in resolved.items()}
    params |= {f"resolved.examples.{split}": str(count) for split, count in setup.facts.counts.items()}
    params = params if spec.trial is None else to_params(spec.trial, params)
    emit(
        RunReady(
            name=make_run_name(plan, resolved, spec.trial.label if spec.trial else spec.label),
            began=int(spec.started * 1000),
            tags=plan.tracking.tags or {},
            params=params,
            steps=resolved["steps"],
            epochs=resolved["epochs"],
            modes=dict(setup.engine.objective.modes),
            search=list(plan.search),
            parent=spec.parent,
            resumed=step if spec.is_resumed else None,
        )
    )
    if spec.length and spec.records:  # params cannot change
        emit(TagsSet(make_length_tags(spec.length)))
    if is_first_report(spec, setup) and setup.facts.metadata is not None:
        with guard("the description of the data and of the model", emit):
            report_metadata(setup.facts.metadata, spec.files, emit)
        with guard("the list of the data's files", emit):
            write_data_files(plan, spec.files, setup.facts.metadata.data, emit=emit)
        if changes := explain_other_data(spec, setup.facts.metadata.data.splits):
            emit(Note(f"rerun: the data is not that of the first run: {changes}"))
        report_augmented(spec, setup, emit)


def write_baselines(spec: RunSpec, setup: TrainingSetup, emit: Emit) -> None:
    """Writes what baselines are fitted to, except for jobs of a sweep, which share their data.

    Raises ConfigError if it reads a row that cannot be used: the training would meet it.
    """
    plan = spec.plan
    if not is_first_report(spec, setup) or spec.parent is not None or plan.debug.fast or plan.evaluation.name == "none":
        return
    keeps = bool(plan.objective.metrics) and plan.objective.levels is None
    outputs, most = setup.source.outputs, plan.evaluation.baselines
    with guard_extra(FITTED_BASELINES, lambda text: emit(Note(text)), lambda error: isinstance(error, ConfigError)):
        write_baseline_data(setup.splits, outputs, most, files=spec.files, keeps_outputs=keeps)


def is_first_report(spec: RunSpec, setup: TrainingSetup) -> bool:
    """Returns whether this process reports the data of a run, and has not done so before."""
    return setup.facts.metadata is not None and spec.records and not spec.is_resumed


def report_augmented(spec: RunSpec, setup: TrainingSetup, emit: Emit) -> None:
    """Logs some augmented examples, to look at. A fault there does not end the run."""
    with guard("the sheet of augmented examples", emit):
        words = {name: each.learned for name, each in setup.facts.learned.preprocessing.items()}
        for path in write_sheet(setup.feeds.train, setup.splits, words, folder=spec.files.plots):
            emit(ArtifactWritten(str(path), spec.files.plots.name))


def train_and_export(
    spec: RunSpec,
    setup: TrainingSetup,
    session: Session,
    worker_sync: WorkerSync,
    baselines: BaselineProcess,
    emit: Emit,
    should_stop: Callable[[], bool],
) -> None:
    """Trains to the end, or until it has to stop, exports the model, and reports the end."""

    with user_metrics(session.log_metric):
        result = session.run(lambda: setup.learn_answers(worker_sync, spec.worker, emit))
    if result.stopped:
        session.finish_checkpoints()
        limit = spec.plan.checkpoint.max_seconds
        over = limit is not None and measure_since(spec.started) > limit
        why = f"checkpoint.max_seconds={limit:g} reached: " if over else ""
        emit(RunEnded("KILLED", f"{why}stopped at step {result.steps}"))
        worker_sync.leave()
        return
    setup = setup.take_answers(spec)
    report = None
    with guard("the kept predictions and the report of the test", emit):
        report = begin_report(spec, setup, result, worker_sync=worker_sync, emit=emit)
    emit(PhaseBegan("exporting the model"))
    if spec.records:
        evaluated = {"validation": setup.feeds.validation, "test": setup.feeds.test}
        with guard("the confusion matrix", emit):
            report_confusion(setup.engine, evaluated, setup.source.outputs, files=spec.files, emit=emit)
    weights = export_model(spec, setup)
    load_check = LoadCheck(spec.files.model) if spec.records else None
    if spec.records and spec.plan.export.formats:
        report_formats(spec, result.model_step, emit, should_stop=should_stop)
    if report is not None:
        emit(PhaseBegan("making the report"))
        with guard("the report of the test", emit):
            report.finish(result.model_step, result.test, report.prefix, emit=emit)
    if load_check is not None:
        load_check.finish(emit)
    emit(ModelExported(str(spec.files.model), result.model_step, weights))
    session.finish_checkpoints()
    if spec.records:
        with guard(FITTED_BASELINES, emit):
            report_baselines(spec.files, baselines, emit, should_stop, objective=setup.engine.objective)
    emit(RunEnded("FINISHED"))
    # No worker may end before the chief has finished: it would look like a worker that died.
    worker_sync.leave()
