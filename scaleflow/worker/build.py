"""Builds everything that a plan describes, in the order that TensorFlow requires. Only here the groups meet."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.cluster.members import count_synchronous_workers, count_workers
from scaleflow.config.targets import bind_target
from scaleflow.interfaces import (
    LearnedState,
    OutputStructure,
    Plan,
    Source,
)
from scaleflow.interfaces.events import Emit, Note, StageBegan
from scaleflow.runs import RunFolder
from scaleflow.runs.learned_state import write_learned_state
from scaleflow.worker.baseline_data import write_baseline_data
from scaleflow.worker.data import (
    PreparedData,
    apply_debug_subset,
    check_batch_size,
    complete_record,
    list_profile_facts,
    make_feeds,
    make_run_objective,
    prepare_data,
    resolve_cache,
)
from scaleflow.worker.engine import (
    find_late_phases,
    find_table_warning,
    find_weight_doubts,
    make_engine,
    make_model_maker,
)
from scaleflow.worker.kept_predictions import KeptSplit, choose_kept_split
from scaleflow.worker.metadata import RunMetadata, collect_metadata
from scaleflow.worker.runtime import Runtime, compute_peak, is_chief
from scaleflow.worker.sizes import choose_best_checkpoint, describe_sizes, fill_sizes, list_model_sizes
from scaleflow.worker.startup_timer import StartupTimer

if TYPE_CHECKING:
    import tensorflow as tf

    from scaleflow.dataset import Splits
    from scaleflow.training import Engine, Feeds


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run before its first step.

    Attributes:
        resolved: the values that replace `auto` and the like, for the `resolved.` params.
        counts: the number of examples, by split.
        metadata: the description of the data and the model; None in processes other than the chief.
        profile: values that the analysis of a profile uses.
        peak_flops: floating-point operations per second that the devices of all workers can do at most; None if
            unknown.
        learned: what was learned from the data before training.
        doubts: warnings about the model, by their rule.
    """

    resolved: dict[str, Any]
    counts: dict[str, int]
    metadata: RunMetadata | None
    profile: dict[str, Any]
    peak_flops: float | None
    learned: LearnedState
    doubts: Mapping[str, str]


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that a run needs, checked and traced.

    Attributes:
        plan: of the run, with numbers in place of what its data decides.
        outputs: of the dataset.
        export: writes the trained model, or with a second argument the model as it is now, to a folder, and returns
            the digest of its weights.
        callbacks: the user's callbacks.
        explain: turns an error of the training into one that names the example that caused it, if one did.
        write_baseline_data: writes what baselines are fitted to into the run's folder.
        kept: the split whose predictions are kept; None if none are.
    """

    plan: Plan
    strategy: tf.distribute.Strategy
    engine: Engine
    feeds: Feeds
    outputs: OutputStructure
    export: Callable[..., str]
    callbacks: Sequence[Any]
    explain: Callable[[Exception], Exception]
    write_baseline_data: Callable[[RunFolder], None]
    facts: RunFacts
    kept: KeptSplit | None = None


def build_training(
    plan: Plan, emit: Emit, startup_timer: StartupTimer | None = None, resumed: Path | None = None
) -> TrainingSetup:
    """Builds and traces everything, so that errors of a model or a dataset occur before there is a run.

    Args:
        plan: of the run.
        emit: receives stages and notes.
        startup_timer: of the command.
        resumed: the folder of the run that is resumed; None for a new run.

    Raises ConfigError if something in the plan cannot work.
    """
    startup_timer = startup_timer or StartupTimer(time.time())
    return build_engine(plan, prepare_data(plan, emit, startup_timer, resumed), emit, startup_timer)


def build_engine(plan: Plan, data: PreparedData, emit: Emit, startup_timer: StartupTimer) -> TrainingSetup:
    """Builds and traces what depends on the batch size, too. Raises what `build_training` raises."""
    from scaleflow import dataset, model, objective, optimizer, training

    plan, data, sizes = fill_sizes(plan, data)
    if note := describe_sizes(plan, sizes, data.splits):
        emit(Note(note))
    runtime, source = data.runtime, data.source
    check_batch_size(plan.training, runtime.batching, len(data.splits.train))
    if plan.evaluator != "here":  # it does not train, and its batch is not the run's
        dataset.check_shards(plan.dataset, plan.training, data.splits.train, runtime.batching.global_size)
    splits = apply_debug_subset(data.splits, plan, runtime)
    feeds = make_feeds(splits, runtime, plan)
    startup_timer.end_part("data")

    emit(StageBegan("building the model"))
    length = training.compute_length(plan.training, feeds.train)
    model.check_preset_words(plan.model.target, source.inputs, getattr(source, "reading", None) or {})
    goal = objective.refuse_probabilities(make_run_objective(plan, splits, runtime, emit), splits.outputs)
    validates = feeds.validation is not None and plan.evaluator != "elsewhere"
    plan = choose_best_checkpoint(plan, validates)
    monitors = {"training.early_stopping": plan.training.early_stopping, "checkpoint.best": plan.checkpoint.sought}
    for key, monitor in monitors.items():
        training.check_monitor(key, monitor, goal, validates, bool(plan.training.callbacks))
    make_model = make_model_maker(plan, splits.inputs, source.outputs, emit, data.changes)
    engine, stage_notes = make_engine(
        plan, runtime, make_model, source.outputs, goal, length, feeds.train, splits.folds
    )
    if plan.hardware.xla is True:
        training.check_xla(engine.model, splits.inputs, runtime.strategy)
    kept = keep_outputs(plan, runtime, engine, feeds, source, splits, emit)
    startup_timer.end_part("build")
    emit(StageBegan("compiling the training step"))
    if not engine.begin_phase(0, feeds.train, feeds.validation, feeds.test):
        engine.trace(feeds.train, feeds.validation, feeds.test)
    engine.end_phase()
    startup_timer.end_part("trace")
    doubts = find_weight_doubts(plan, engine.model, length, runtime.batching)
    warnings = (
        *stage_notes,
        model.keras_file_doubt(engine.model),
        objective.find_mask_note(engine.model, splits.outputs),
        *model.find_batch_norm_warnings(engine.model, runtime.read_batching(runtime.batching)),
        *doubts.values(),
        optimizer.find_warm_up_warning(plan.optimizer, length.total),
        find_late_phases(plan, length),
        find_table_warning(plan, runtime, engine),
        dataset.describe_shards(plan.dataset.shards, splits.train, count_synchronous_workers(plan)),
    )
    for note in filter(None, warnings):
        emit(Note(note))
    resolved = {
        **runtime.to_values(),
        "workers": count_workers(plan),
        "learning_rate": optimizer.scale_to_batch(plan.optimizer, runtime.batching.global_size),
        "cache": resolve_cache(plan, splits),
        "xla": str(engine.xla),
        "remat": engine.remat,
        "steps": length.total,
        "steps_per_epoch": length.steps_per_epoch,
        "epochs": length.epochs,
        "parameters": engine.model.count_params(),
        **sizes,
        "trainable_parameters": sum(math.prod(each.shape) for each in engine.model.trainable_variables),
    }

    if engine.freezing is not None:
        resolved["trainable_parameters_by_epoch"] = json.dumps(engine.freezing.parameters)

    def export(folder: Path, is_trial: bool = False) -> str:
        arguments = source.inputs, source.outputs, splits.sample, runtime.policy, folder
        trained = engine.gather_model() if is_trial else model.merge_lora(engine.finish_model())
        model.write_model(
            trained,
            *arguments,
            on_host=runtime.is_divided,
            raw=model.RawInputs(splits.preprocessing_layers, getattr(source, "decoders", {})),
        )
        write_learned_state(folder, learned)
        return model.digest_weights(trained)

    metadata = collect_metadata(plan, source.outputs, splits, engine.model, goal) if is_chief(plan) else None
    learned = complete_record(data.splits.learned, metadata, list_model_sizes(plan, data))
    facts = RunFacts(
        resolved,
        dict(splits.counts()),
        metadata,
        list_profile_facts(resolved, splits) | {"shards": plan.dataset.shards},
        compute_peak(plan, runtime),
        learned,
        doubts,
    )
    return TrainingSetup(
        plan,
        runtime.strategy,
        engine,
        feeds,
        source.outputs,
        export,
        callbacks=[training.make_callback(bind_target(each), each.path) for each in plan.training.callbacks or ()],
        explain=functools.partial(dataset.explain_read_error, splits=splits.by_name()),
        write_baseline_data=functools.partial(write_baseline_data, splits, source.outputs, plan.evaluation.baselines),
        facts=facts,
        kept=kept,
    )


def keep_outputs(
    plan: Plan, runtime: Runtime, engine: Engine, feeds: Feeds, source: Source, splits: Splits, emit: Emit
) -> KeptSplit | None:
    """Makes the evaluation of the test split keep the values for predictions, as `evaluation` says."""
    if plan.evaluation.name == "none" or plan.evaluator == "here":
        return None
    if runtime.strategy_name == "tpu":
        emit(Note("strategy=tpu: predictions are not kept, and there is no report of them; evaluate the model later"))
        return None
    kept = choose_kept_split(feeds, splits, source, plan.evaluation)
    if kept is not None:
        engine.keep_outputs(kept.feed, kept.keeper)
    return kept
