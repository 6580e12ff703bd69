"""Runs one worker: builds everything, reports `ready`, trains, exports."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from scaleflow.cluster.tasks import count_synchronous_workers, process_names
from scaleflow.errors import ConfigError
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import LearnedState
from scaleflow.interfaces.clock import measure_since
from scaleflow.interfaces.events import Emit, ModelExported, Note, PhaseBegan, RunEnded
from scaleflow.runs import RunSpec, RunState, WorkerProcess
from scaleflow.runs.event_log import DeduplicatingEmitter
from scaleflow.runs.learned_state import to_files, write_learned_state
from scaleflow.runs.user_metrics import user_metrics
from scaleflow.worker.analysis_thread import import_ahead, start_analysis
from scaleflow.worker.build import build_training
from scaleflow.worker.export import LoadCheck, export_model
from scaleflow.worker.failures import guard, is_loss_of_peer
from scaleflow.worker.hooks import (
    call_after_build,
    call_after_export,
    call_at_end,
    call_at_ready,
    call_finish_test,
    close_hooks,
    make_after_epoch,
)
from scaleflow.worker.metadata import explain_changed_data, explain_other_data, report_changes, report_confusion
from scaleflow.worker.ready import list_params, report_ready
from scaleflow.worker.runtime import make_startup_timer
from scaleflow.worker.trainer import Trainer

if TYPE_CHECKING:
    from scaleflow.checkpoint import CheckpointManager
    from scaleflow.profiler.tracer import StepTracer
    from scaleflow.training import Session, WorkerSync


def train_model(process: WorkerProcess) -> None:
    """Builds everything, reports `ready`, trains and exports."""
    process.lock_folder()
    process.emit = wrap_emit(process)
    trainer = Trainer(process, make_startup_timer(process.spec))
    check_object_store(trainer)
    build_setup(trainer)
    call_after_build(trainer.setup.hooks, trainer.run, partial(trainer.setup.export, is_trial=True))
    trainer.worker_sync = make_worker_sync(trainer)
    data_changes = check_resumed_data(trainer)
    trainer.session = make_session(trainer)
    process.explain = trainer.setup.explain
    process.after_failure = partial(finish_failed, trainer.session)
    params = list_params(trainer.plan, trainer.setup)
    report_ready(process, trainer.setup, trainer.spec.label, params, step=trainer.session.step)
    report_resumed_data(trainer, data_changes)
    if trainer.plan.debug.placement:
        where = "above" if trainer.plan.debug.inline else f"in {trainer.spec.log}"
        trainer.emit(Note(f"debug.placement: the device of each operation is {where}, as 'MatMul: (MatMul): /job:...'"))
    import_ahead(trainer.setup)
    try:
        call_at_ready(trainer.setup.hooks, trainer.run)
        train_and_export(trainer)
    finally:
        close_hooks(trainer.setup.hooks, trainer.emit)


def wrap_emit(process: WorkerProcess) -> Emit:
    """Returns an `emit` that drops repeated metrics if the run may repeat steps."""
    spec = process.spec
    if spec.is_resumed or spec.plan.training.on_nan == "rollback":
        return DeduplicatingEmitter(spec.events, process.emit)
    return process.emit


def build_setup(trainer: Trainer) -> None:
    """Builds the setup, and updates the spec with its plan. Raises ConfigError if the plan cannot work."""
    spec = trainer.spec
    resumed = spec.folder if spec.is_resumed else None
    trainer.setup = build_training(spec.plan, trainer.emit, trainer.timer, resumed=resumed)
    trainer.process.spec = replace(spec, plan=trainer.setup.plan)


def make_worker_sync(trainer: Trainer) -> WorkerSync:
    """Makes the object that stops all workers together, after a request or after `checkpoint.max_seconds`."""
    from scaleflow import training

    limit = trainer.plan.checkpoint.max_seconds
    workers = count_synchronous_workers(trainer.plan)

    def read_seconds() -> float:
        return measure_since(trainer.spec.started)

    def must_stop() -> bool:
        return trainer.should_stop() or (limit is not None and read_seconds() > limit)

    return training.WorkerSync(trainer.setup.runtime.strategy, workers, must_stop, read_seconds=read_seconds)


def finish_failed(session: Session, error: Exception) -> None:
    """Waits for the upload of checkpoints after a failure. Does not wait before a restart, which would be delayed."""
    if not is_loss_of_peer(error):
        session.finish_checkpoints()


def check_resumed_data(trainer: Trainer) -> str | None:
    """Describes how the data changed since the run's last command; None if this command does not resume a run.

    Raises ConfigError on all workers if the data changed without `resume_data=changed`, or if it differs from the data
    of a run that must be repeated exactly.
    """
    spec = trainer.spec
    worker_sync = trainer.worker_sync
    metadata = trainer.setup.facts.metadata
    if (spec.plan.resume is None and not spec.repeats.is_exact) or spec.attempt:
        return None
    explain_data = explain_other_data if spec.repeats.is_exact else explain_changed_data

    def explain() -> str:  # on the chief, which has the metadata
        return "" if metadata is None else explain_data(spec, metadata.data.splits)

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


def report_resumed_data(trainer: Trainer, data_changes: str | None) -> None:
    """Reports how the data and the code changed since the run's last command, if this command resumes it."""
    metadata = trainer.setup.facts.metadata
    if data_changes is not None and trainer.spec.records and metadata is not None:
        report_changes(trainer.spec, metadata.data, data_changes, emit=trainer.emit)


def check_object_store(trainer: Trainer) -> None:
    """Raises ConfigError if `checkpoint.folder` is in an object store that cannot be written. Call it before reading
    data.

    Later attempts of a command skip the check: training continues while the store is unavailable.
    """
    spec = trainer.spec
    if spec.records and spec.attempt == 0 and is_store_address(spec.plan.checkpoint.folder):
        make_checkpoint_manager(spec, trainer.emit).check_writable()


def make_checkpoint_manager(spec: RunSpec, emit: Emit, learned: LearnedState | None = None) -> CheckpointManager:
    """Makes the object that keeps the checkpoints, each with the learned state."""
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


def make_session(trainer: Trainer) -> Session:
    """Makes the session, at its first step or at its newest checkpoint.

    Raises ConfigError if the run cannot continue from its checkpoints.
    """
    from scaleflow import training

    spec = trainer.spec
    setup = trainer.setup
    emit = trainer.emit
    options = spec.plan.checkpoint
    tracking = spec.plan.tracking
    histogram_epochs = tracking.histograms_every_epochs if tracking.tensorboard and spec.records else None
    manager = make_checkpoint_manager(spec, emit, setup.facts.learned)
    session = training.Session(
        setup.engine,
        spec.plan.training,
        setup.feeds,
        log=training.MetricsLog(
            setup.engine, emit, trainer.timer, peak_flops=setup.facts.peak_flops, histograms_every=histogram_epochs
        ),
        sync=trainer.worker_sync,
        checkpointing=training.Checkpointing(
            None if options.name == "none" else manager,
            options.criterion,
            ends_as_best=options.export == "best",
            modes=setup.engine.objective.modes,
        ),
        callbacks=setup.callbacks,
        tracer=make_tracer(trainer),
        has_new_data=spec.plan.resume_data == "changed",
        after_epoch=make_after_epoch(setup.hooks if spec.records else {}, trainer.run),
    )
    if not is_store_address(options.folder):
        manager.check_writable()
    check_shared_checkpoints(trainer, manager)
    if spec.is_resumed:
        emit(PhaseBegan("reading the last checkpoint"))
        restore_newest(trainer, session, manager)
    else:
        manager.check_empty()
        if spec.records:
            write_learned_state(spec.folder, setup.facts.learned)
    return session


def restore_newest(trainer: Trainer, session: Session, manager: CheckpointManager) -> None:
    """Restores the newest checkpoint. Raises ConfigError if there is none and the run cannot continue without it."""
    spec = trainer.spec
    worker_sync = trainer.worker_sync
    manager.publish()
    worker_sync(0.0)  # a worker must not read before the chief has published
    snapshot = manager.load_newest()
    folder = spec.plan.checkpoint.folder or spec.checkpoints
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
        trainer.emit(Note(f"{folder} has no usable checkpoint: the run begins again at step 0"))


def check_shared_checkpoints(trainer: Trainer, manager: CheckpointManager) -> None:
    """Raises ConfigError if the machines do not share the checkpoint folder."""
    spec = trainer.spec
    worker_sync = trainer.worker_sync
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


def make_tracer(trainer: Trainer) -> StepTracer | None:
    spec = trainer.spec
    facts = trainer.setup.facts
    options = spec.plan.profiler
    if not options.windows:
        return None
    from scaleflow import training
    from scaleflow.profiler.tracer import StepTracer

    emit = trainer.emit if spec.records else None
    # A GPU cannot be traced in a child process.
    is_in_child = len(process_names(spec.plan)) > 1 and facts.resolved["hardware"] == "cpu"

    def read_facts() -> dict[str, Any]:
        return {**facts.profile, "memory": training.measure_peaks()}

    return StepTracer(options, spec.files.profile, spec.file_name, emit=emit, facts=read_facts, in_child=is_in_child)


def train_and_export(trainer: Trainer) -> None:
    """Trains until the end or a stop, exports the model, and reports the end."""
    spec = trainer.spec
    session = trainer.session
    worker_sync = trainer.worker_sync
    emit = trainer.emit
    with user_metrics(session.log_metric):
        result = session.run(lambda: trainer.setup.learn_answers(worker_sync, spec.worker, emit))
    if result.stopped:
        session.finish_checkpoints()
        limit = spec.plan.checkpoint.max_seconds
        over = limit is not None and measure_since(spec.started) > limit
        why = f"checkpoint.max_seconds={limit:g} reached: " if over else ""
        emit(RunEnded("KILLED", f"{why}stopped at step {result.steps}"))
        worker_sync.leave()
        return
    setup = trainer.setup = trainer.setup.take_answers(spec)
    thread = None
    with guard("the kept predictions and the figures of the test", emit):
        thread = start_analysis(trainer, result)
    emit(PhaseBegan("exporting the model"))
    if spec.records:
        with guard("the confusion matrix", emit):
            report_confusion(setup.engine, setup.feeds.by_name(), setup.source.outputs, files=spec.files, emit=emit)
    weights = export_model(trainer)
    load_check = LoadCheck(spec.files.model) if spec.records else None
    if spec.records:
        call_after_export(setup.hooks, trainer.run, result.model_step)
    if thread is not None:
        call_finish_test(setup.hooks, emit)
        with guard("the figures of the test", emit):
            thread.finish(result.model_step, result.test, thread.prefix, emit=emit)
    if load_check is not None:
        load_check.finish(emit)
    emit(ModelExported(str(spec.files.model), result.model_step, weights))
    session.finish_checkpoints()
    if spec.records:
        call_at_end(trainer.setup.hooks, trainer.run)
    emit(RunEnded("FINISHED"))
    # No worker may end before the chief has finished: it would look like a worker that died.
    worker_sync.leave()
