"""Builds everything that a plan describes, in the order that TensorFlow requires. Only here the groups meet."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.cluster.gpus import assigned_hardware, gpu_memory_bytes
from scaleflow.cluster.members import count_synchronous_workers, count_workers, process_names
from scaleflow.cluster.tf_config import TF_CONFIG, parse_tf_config
from scaleflow.config.plan import make_batching
from scaleflow.config.rules import check_rules, resolve_choices
from scaleflow.config.targets import bind_target, is_class_target, locate_target
from scaleflow.config.trust import check_origins
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Batching,
    Examples,
    Feed,
    ForwardBackward,
    InputStructure,
    LearnedChanges,
    LearnedState,
    MakeOptimizer,
    Objective,
    OutputStructure,
    Plan,
    Source,
    Stream,
    Training,
)
from scaleflow.interfaces.events import Emit, Note, PeersMet, StageBegan, Waiting
from scaleflow.runs.learned_state import LEARNED_FILES, write_learned_state
from scaleflow.worker.earlier import find_changes, find_earlier, get_origin, open_source
from scaleflow.worker.metadata import RunMetadata, collect_metadata, describe_data_name
from scaleflow.worker.startup_timer import StartupTimer

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from scaleflow.dataset import Splits
    from scaleflow.training import Engine, FitEngine, Length, Loop, WorkerSync

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

#: Minimum number of examples per step of an evaluation on CPUs, over all replicas.
EVALUATION_BATCH = 256

#: What identifies a split, of its description in the event `data`.
DIGEST_KEYS = ("examples", "digest", "covers", "version")

#: A global batch of up to this many examples may be mostly padding.
SMALL_BATCH = 4096


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that a run needs, checked and traced.

    Attributes:
        train, validation, test: the feeds of the splits; None if there is no such split.
        export: writes the trained model to a folder.
        callbacks: the user's callbacks.
        explain: turns an error of the training into one that names the example that caused it, if one did.
        resolved: the values that replace `auto` and the like, for the `resolved.` params.
        counts: the number of examples, by split.
        metadata: the description of the data and the model; None in processes other than the chief.
        facts: values that the analysis of a profile uses.
        peak_flops: floating-point operations per second that the devices of all workers can do at most; None if
            unknown.
        is_drawn_as_read: whether the validation split is drawn from a stream while its records are read.
        learned: what was learned from the data before training.
    """

    strategy: tf.distribute.Strategy
    engine: Engine
    train: Feed
    validation: Feed | None
    test: Feed | None
    export: Callable[[Path], None]
    callbacks: Sequence[Any]
    explain: Callable[[Exception], Exception]
    resolved: dict[str, Any]
    counts: dict[str, int]
    outputs: OutputStructure
    metadata: RunMetadata | None
    facts: dict[str, Any]
    peak_flops: float | None
    is_drawn_as_read: bool
    learned: LearnedState


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


@dataclass(frozen=True)
class PreparedData:
    """The devices and the examples of a run, which do not depend on its batch size."""

    runtime: Runtime
    source: Source
    splits: Splits
    changes: LearnedChanges | None = None  # what the run learned otherwise than the one whose weights it takes

    def divide(self, training: Training) -> PreparedData:
        """Returns the same with global batches of another size."""
        batching = make_batching(training, self.runtime.batching.replicas)
        return dataclasses.replace(self, runtime=dataclasses.replace(self.runtime, batching=batching))


def prepare_data(plan: Plan, emit: Emit, startup_timer: StartupTimer, resumed: Path | None = None) -> PreparedData:
    """Sets up TensorFlow and reads the dataset. A process does that once. Raises what `build_training` raises."""
    sys.path[:0] = [folder for folder in plan.search if folder not in sys.path]
    from scaleflow import dataset

    startup_timer.end_part("import")
    emit(StageBegan("setting up the devices"))
    runtime = setup_runtime(plan, emit)
    startup_timer.end_part("build")
    if plan.trusted_modules is not None:
        check_origins(plan.config, plan.trusted_modules)
    emit(StageBegan(f"reading {describe_data_name(plan)}"))
    earlier = find_earlier(plan, resumed, runtime.worker_sync)
    source = open_source(plan, earlier)
    splits = dataset.prepare_splits(source, plan.dataset, plan.seed, runtime.worker_sync, emit, earlier=earlier)
    assert splits.learned is not None
    return PreparedData(runtime, source, splits, find_changes(plan, splits.learned, emit))


def build_engine(plan: Plan, data: PreparedData, emit: Emit, startup_timer: StartupTimer) -> TrainingSetup:
    """Builds and traces what depends on the batch size, too. Raises what `build_training` raises."""
    from scaleflow import dataset, model, objective, optimizer, training

    runtime, source = data.runtime, data.source
    check_batch_size(plan.training, runtime.batching, len(data.splits.train))
    if plan.evaluator != "here":  # it does not train, and its batch is not the run's
        dataset.check_shards(plan.dataset, plan.training, data.splits.train, runtime.batching.global_size)
    splits = apply_debug_subset(data.splits, plan, runtime)
    train, validation, test = make_feeds(splits, runtime, plan)
    startup_timer.end_part("data")

    emit(StageBegan("building the model"))
    length = training.compute_length(plan.training, train)
    goal = make_run_objective(plan, splits, runtime, emit)
    monitors = {"training.early_stopping": plan.training.early_stopping, "checkpoint.best": plan.checkpoint.sought}
    validates = validation is not None and plan.evaluator != "elsewhere"
    for key, monitor in monitors.items():
        training.check_monitor(key, monitor, goal, validates)
    make_model = make_model_maker(plan, splits.inputs, source.outputs, emit, data.changes)
    engine, stage_notes = make_engine(plan, runtime, make_model, source.outputs, goal, length, train)
    if plan.hardware.xla is True:
        training.check_xla(engine.model, splits.inputs, runtime.strategy)
    startup_timer.end_part("build")
    emit(StageBegan("compiling the training step"))
    engine.trace(train, validation, test)
    startup_timer.end_part("trace")
    warnings = (
        *stage_notes,
        model.find_logits_warning(engine.model, source.outputs),
        model.keras_file_doubt(engine.model),
        objective.find_mask_note(engine.model, splits.outputs),
        *model.find_batch_norm_warnings(engine.model, runtime.read_batching(runtime.batching)),
        *find_new_weights_warnings(plan, engine.model, length, runtime.batching),
        optimizer.find_warm_up_warning(plan.optimizer, length.total),
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
        "trainable_parameters": sum(math.prod(each.shape) for each in engine.model.trainable_variables),
    }

    def export(folder: Path) -> None:
        arguments = source.inputs, source.outputs, splits.sample, runtime.policy, folder
        model.write_model(
            model.merge_lora(engine.finish_model()),
            *arguments,
            on_host=runtime.is_divided,
            preprocessing_layers=splits.preprocessing_layers,
        )
        write_learned_state(folder, learned)

    metadata = collect_metadata(plan, source.outputs, splits, engine.model, goal) if is_chief(plan) else None
    learned = add_digests(data.splits.learned, metadata)
    callbacks = [training.make_callback(bind_target(each), each.path) for each in plan.training.callbacks or ()]
    explain = functools.partial(dataset.explain_read_error, splits=splits.by_name())
    parts = runtime.strategy, engine, train, validation, test, export, callbacks
    facts = list_profile_facts(resolved, splits) | {"shards": plan.dataset.shards}
    rest = dict(splits.counts()), source.outputs, metadata, facts, compute_peak(plan, runtime), splits.is_drawn_as_read
    return TrainingSetup(*parts, explain, resolved, *rest, learned=learned)


def add_digests(learned: LearnedState | None, metadata: RunMetadata | None) -> LearnedState:
    """Returns the record with the digests of the splits, which only the chief knows."""
    assert learned is not None
    described = {} if metadata is None else metadata.data.splits
    digests = {name: {key: each[key] for key in DIGEST_KEYS} for name, each in described.items()}
    return dataclasses.replace(learned, splits=digests)


def make_run_objective(plan: Plan, splits: Splits, runtime: Runtime, emit: Emit) -> Objective:
    """Makes the loss and the metrics of a run. The chief counts the classes of the training split, if that is needed.

    Raises:
        ConfigError: if a loss, a metric or a class weight does not fit the outputs of the dataset.
    """
    from scaleflow import dataset, objective

    def count(names: list[str]) -> dict[str, list[int]]:
        def count_here() -> str:
            targets = dataset.read_targets("train", splits.train)
            return json.dumps(objective.count_classes(splits.outputs, names, targets))

        counts: dict[str, list[int]] = json.loads(runtime.worker_sync.from_chief(count_here))
        return counts

    weights = objective.find_class_weights(splits.outputs, plan.objective.class_weight, count)
    for note in objective.describe_class_weights(splits.outputs, weights):
        emit(Note(note))
    loader = objective.Loader(locate_target, bind_target)
    return objective.make_objective(
        splits.outputs, plan.objective, is_weighted=splits.is_weighted, loader=loader, class_weights=weights
    )


def make_model_maker(
    plan: Plan,
    inputs: InputStructure,
    outputs: OutputStructure,
    emit: Emit,
    changes: LearnedChanges | None = None,
) -> Callable[[], keras.Model]:
    """Returns a function that makes the model with its initial weights, frozen layers and LoRA.

    Call it in the strategy's scope.
    """
    from scaleflow import model

    make = model.keep_names(
        functools.partial(model.make_model, bind_target(plan.model.target, given=2), inputs, outputs)
    )
    saved = None
    if plan.model.init_from is not None:
        import keras

        saved = model.read_weights(
            plan.model.init_from, get_origin(plan), () if changes is None else changes.grown_inputs
        )
        keras.utils.set_random_seed(plan.seed)  # reading the weights has used random numbers
    reported: set[str] = set()  # a coordinator makes its model twice

    def make_prepared() -> keras.Model:
        new_model = make()
        if saved is not None and (note := model.initialize_from(new_model, saved, changes)) not in reported:
            reported.add(note)
            emit(Note(note))
        model.fine_tune(new_model, plan.model)
        return new_model

    return make_prepared


def make_engine(
    plan: Plan,
    runtime: Runtime,
    make_model: Callable[[], keras.Model],
    outputs: OutputStructure,
    goal: Objective,
    run: Length,
    feed: Feed,
) -> tuple[Engine, list[str]]:
    """Makes the engine, a loop or Keras's `fit`, and the model in the strategy's scope.

    Returns:
        The engine, and notes for the user on how the model is divided into stages.
    """
    from scaleflow import strategy

    engine: Engine
    notes: list[str] = []
    if runtime.strategy_name == "parameter_server":
        engine = make_parameter_server_loop(plan, runtime, make_model, outputs, goal, run)
        engine.remat = apply_remat(plan, runtime, engine.model) or engine.remat
        return engine, notes
    with runtime.strategy.scope():
        with strategy.variable_scope(runtime.strategy_name):
            net = make_model()
        remat = apply_remat(plan, runtime, net)
        if plan.training.step is not None and is_class_target(plan.training.step):
            engine = make_custom_update_loop(plan, runtime, net, outputs, goal, run)
        elif plan.training.engine == "fit":
            engine = make_fit_engine(plan, runtime, net, goal, run)
        else:
            engine, notes = make_loop(plan, runtime, net, outputs, goal, run, feed)
    engine.remat = remat or engine.remat
    return engine, notes


def apply_remat(plan: Plan, runtime: Runtime, net: keras.Model) -> str:
    """Makes training compute parts of a model again, as `hardware.remat` says. A pipeline divides its stages itself.

    Returns:
        What is computed again; empty if nothing is.

    Raises:
        ConfigError: if a pattern matches no layer, or if the model cannot be divided like that.
    """
    from scaleflow import model, strategy

    setting = plan.hardware.remat
    if setting is False or (setting is True and runtime.is_divided):
        return ""
    if setting is True:
        return count_of(len(strategy.recompute_segments(net)), "segment")
    key = f"hardware.remat=[{', '.join(setting)}]"
    layers = [layer for pattern in setting for layer in model.find_layers(net, pattern, key)]
    return count_of(strategy.recompute_layers(layers, key, is_divided=runtime.is_divided), "layer")


def count_of(count: int, noun: str) -> str:
    """Returns a number with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def make_loop(
    plan: Plan, runtime: Runtime, net: keras.Model, outputs: OutputStructure, goal: Objective, run: Length, feed: Feed
) -> tuple[Loop, list[str]]:
    """Makes the loop for a whole model, or for one in stages. Returns it with notes for the user."""
    from scaleflow import optimizer, strategy, training

    model_optimizer = make_optimizer(plan, runtime, run.total, net, takes_rows=not runtime.is_divided)
    passes: ForwardBackward
    if runtime.is_divided:
        optimizer.update_in_place(model_optimizer)
        is_recomputed = plan.hardware.remat is True
        pipeline, notes = strategy.build_pipeline(
            net, goal, runtime.devices, plan.strategy, runtime.batching.share, is_recomputed
        )
        passes = pipeline
    else:
        by_rows = can_update_by_rows(net, model_optimizer)
        loss = choose_step(plan, outputs, goal)
        passes, notes = training.TapeForwardBackward(net, loss, keeps_rows=by_rows), []
    facts = runtime.strategy_name, runtime.kind, runtime.policy
    choice = training.choose_xla(plan, facts, net, feed, keeps_rows=passes.keeps_rows, steps=run.total)
    options = plan.training.clip_norm, plan.hardware.xla is True
    make = training.XlaLoop if choice.mode == "loop" else training.Loop
    loop = make(runtime.strategy, net, model_optimizer, goal, *options, passes=passes)
    loop.xla = choice
    if runtime.is_divided and plan.hardware.remat is True:
        loop.remat = count_of(pipeline.count_recomputed(), "segment")
    return loop, notes


def make_parameter_server_loop(
    plan: Plan,
    runtime: Runtime,
    make_model: Callable[[], keras.Model],
    outputs: OutputStructure,
    goal: Objective,
    run: Length,
) -> Loop:
    """Makes the loop of a coordinator, which has the model twice: on the servers, and unpartitioned in its process.

    Raises:
        ConfigError: if `training.step` is a class: its optimizers would not update the variables on the servers.
    """
    import keras

    from scaleflow import training

    step = plan.training.step
    if step is not None and is_class_target(step):
        raise ConfigError(
            f"training.step._target_={step.path} with strategy=parameter_server: a class applies its own optimizers, "
            "which does not work with parameter servers; use a function (model, batch, weights) -> (loss, outputs)"
        )
    with runtime.evaluation_strategy.scope():
        local = make_model()
    keras.utils.set_random_seed(plan.seed)  # so that both models have the same initial weights
    with runtime.strategy.scope():
        served = make_model()
        check_no_constraints(served)
        model_optimizer = make_optimizer(plan, runtime, run.total, served, takes_rows=True)
        return training.ParameterServerLoop(
            runtime.strategy,
            served,
            model_optimizer,
            goal,
            plan.training.clip_norm,
            passes=training.TapeForwardBackward(
                served,
                choose_step(plan, outputs, goal),
                training.list_shards(served.trainable_variables),
                keeps_rows=can_update_by_rows(served, model_optimizer),
            ),
            workers=count_workers(plan),
            whole=local,
            here=runtime.evaluation_strategy,
        )


def can_update_by_rows(net: keras.Model, model_optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether updates may touch only the rows of embedding tables that a batch uses."""
    from scaleflow import model, optimizer

    return bool(model.list_tables(net)) and optimizer.find_dense_cause(model_optimizer) is None


def check_no_constraints(net: keras.Model) -> None:
    """Rejects constraints of weights, which Keras applies to its own variables only, not to those on the servers."""
    for variable in net.trainable_variables:
        if variable.constraint is not None:
            raise ConfigError(
                f"model: {variable.path} has a constraint ({type(variable.constraint).__name__}), which "
                "strategy=parameter_server does not apply; use another strategy, or remove the constraint"
            )


def find_new_weights_warnings(plan: Plan, net: keras.Model, run: Length, batching: Batching) -> list[str | None]:
    """Returns warnings about layers that need trained weights or a longer run, if the config loads no weights."""
    from scaleflow import model

    if model.loads_weights(plan.model, plan.config.get("model") or {}):
        return []
    return [
        model.find_freeze_warning(net, plan.model),
        model.find_moving_average_warning(net, run.total, batching.accumulate),
    ]


def find_table_warning(plan: Plan, runtime: Runtime, engine: Engine) -> str | None:
    """Returns a warning if each step updates all rows of a large embedding table, else None."""
    from scaleflow import model, optimizer

    table = model.describe_large_table(engine.model)
    cause = "training.step" if engine.optimizer is None else optimizer.find_dense_cause(engine.optimizer)
    if plan.training.engine == "fit" or runtime.is_divided:
        cause = "training.engine=fit" if plan.training.engine == "fit" else "strategy=pipeline"
    if table is None or cause is None:
        return None
    return (
        f"{cause}: each step updates {table}, not only those of its batch; optimizer=adagrad, and optimizer=sgd "
        "optimizer.momentum=0, update only those, with training.engine=loop on other strategies than pipeline"
    )


def make_custom_update_loop(
    plan: Plan, runtime: Runtime, net: keras.Model, outputs: OutputStructure, goal: Objective, run: Length
) -> Loop:
    """Makes the loop for a training step of the user that applies its own optimizers."""
    from scaleflow import training

    step = plan.training.step
    assert step is not None
    training.check_own_updates(plan.training, plan.optimizer, runtime.policy, plan.hardware.xla is True, step.path)
    return training.CustomUpdateLoop(
        strategy=runtime.strategy,
        model=net,
        objective=goal,
        outputs=outputs,
        own=bind_target(step)(),
        name=step.path,
        make_optimizer=make_optimizer_maker(plan, runtime, run.total),
    )


def make_fit_engine(plan: Plan, runtime: Runtime, net: keras.Model, goal: Objective, run: Length) -> FitEngine:
    from scaleflow import training

    per_execution = training.choose_steps_per_execution(plan.training.steps_per_loop, run.steps_per_epoch, run.total)
    return training.FitEngine(
        strategy=runtime.strategy,
        model=net,
        optimizer=make_optimizer(plan, runtime, run.total, net, takes_summed=False),
        objective=goal,
        steps_per_execution=per_execution,
    )


def choose_step(plan: Plan, outputs: OutputStructure, goal: Objective) -> Any:
    """Returns the function that computes the loss of a batch: the user's, or the one for the kind of target."""
    from scaleflow import training

    step = plan.training.step
    if step is not None:
        return training.add_checks(bind_target(step, given=3), step.path, outputs)
    return training.make_loss_step(goal)


def make_optimizer(
    plan: Plan, runtime: Runtime, steps: int, net: keras.Model, takes_summed: bool = True, takes_rows: bool = False
) -> keras.optimizers.Optimizer:
    """Makes the config's optimizer for a run of `steps` steps, which updates the variables of `net` or their shards.

    Args:
        takes_summed: whether its gradients are summed over the replicas already.
        takes_rows: whether gradients of embedding tables come as `tf.IndexedSlices`, each row once.
    """
    from scaleflow import model, optimizer, training

    options = plan.optimizer
    rate = optimizer.make_learning_rate(options, runtime.batching.global_size, steps)
    scaled = runtime.policy == "mixed_float16"
    new_optimizer = optimizer.create_optimizer(
        bind_target(options.target), rate, loss_scaling=scaled, takes_summed=takes_summed, ema=options.ema
    )
    if takes_rows and can_update_by_rows(net, new_optimizer):
        optimizer.update_by_rows(new_optimizer)  # before the factors, which are to scale these updates, too
    if options.rate_factors is not None:
        factors = model.find_rate_factors(net, options.rate_factors)
        shards = zip(factors, net.trainable_variables, strict=True)
        optimizer.scale_rates(new_optimizer, [f for f, v in shards for _ in training.list_shards([v])])
    return new_optimizer


def make_optimizer_maker(plan: Plan, runtime: Runtime, steps: int) -> MakeOptimizer:
    """Returns the function for user training steps that makes optimizers. These sum gradients over the replicas."""
    from scaleflow import optimizer

    def make(variables: Sequence[Any], rate_factor: float = 1.0) -> keras.optimizers.Optimizer:
        options = dataclasses.replace(plan.optimizer, learning_rate=plan.optimizer.learning_rate * rate_factor)
        rate = optimizer.make_learning_rate(options, runtime.batching.global_size, steps)
        new_optimizer = optimizer.create_optimizer(
            bind_target(plan.optimizer.target), rate, loss_scaling=False, takes_summed=False
        )
        new_optimizer.build(list(variables))
        return new_optimizer

    return make


@dataclass(frozen=True)
class Runtime:
    """The basis of everything else: devices, the strategy over them, the precision, the division of a batch.

    Attributes:
        kind: the kind of the devices, such as `CPU`.
        devices: the names of the devices of this process.
        strategy_name: the resolved option of `strategy`.
        evaluation_strategy: the strategy for evaluations; a coordinator evaluates in its own process.
        policy: the name of the Keras dtype policy.
    """

    kind: str
    devices: Sequence[str]
    strategy_name: str
    strategy: tf.distribute.Strategy
    evaluation_strategy: tf.distribute.Strategy
    policy: str
    batching: Batching
    worker_sync: WorkerSync

    @property
    def is_divided(self) -> bool:
        """Whether the model is divided into stages on several devices."""
        return self.strategy_name == "pipeline"

    def read_batching(self, batching: Batching) -> Batching:
        """Returns how the loop reads such global batches: a pipeline divides them among its replicas itself."""
        if not self.is_divided:
            return batching
        return Batching(batching.batch_size * batching.replicas, batching.accumulate, replicas=1)

    def to_values(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy_name,
            "precision": self.policy,
            "hardware": self.kind.lower(),
            "replicas": self.batching.replicas,
            "batch_size": self.batching.batch_size,
            "global_batch_size": self.batching.global_size,
        }


def setup_runtime(plan: Plan, emit: Emit) -> Runtime:
    """Sets up TensorFlow and Keras in this process. No operation of TensorFlow may have run before."""
    import keras

    from scaleflow import hardware, model, precision, strategy, training

    model.correct_keras_add()
    model.read_rows_in_take()
    training.apply_debug(plan.debug)
    with guard_tpu_connection(plan, emit):
        devices = hardware.configure_devices(assigned_hardware(plan.hardware, os.environ))
    name = strategy.resolve_strategy(plan.strategy, devices.names)
    policy = precision.resolve_policy(plan.precision, devices.kind)
    warnings = check_rules(resolve_choices(plan, name, devices.kind.lower(), policy))
    with guard_rendezvous(plan, emit):
        tf_strategy, strategy_note = strategy.create_strategy(name, devices.names, plan.strategy, devices.tpu)
        worker_sync = training.WorkerSync(tf_strategy, count_synchronous_workers(plan), bool)
        if not worker_sync.is_same(digest_plan(plan)):
            worker_sync.leave()
            raise ConfigError(
                "strategy=multi_worker: the workers were not all started with the same config, TensorFlow version "
                "and model.init_from; start each with the same command"
            )
    keras.utils.set_random_seed(plan.seed)
    precision.apply_policy(policy)
    for note in filter(None, (strategy_note, *warnings)):
        emit(Note(note))
    local = strategy.create_strategy("one_device", devices.names)[0] if name == "parameter_server" else tf_strategy
    replicas = plan.strategy.replicas if name == "pipeline" else tf_strategy.num_replicas_in_sync
    batching = make_batching(plan.training, replicas, is_resumed=plan.resume is not None)
    return Runtime(devices.kind, devices.names, name, tf_strategy, local, policy, batching, worker_sync)


def check_batch_size(options: Training, batching: Batching, examples: int) -> None:
    """Rejects a global batch of which most is padding, because it would take the memory of real examples."""
    if batching.global_size <= max(SMALL_BATCH, 2 * examples):
        return
    key = "batch_size" if options.global_batch_size is None else "global_batch_size"
    raise ConfigError(
        f"training.{key}={getattr(options, key)}: makes a global batch of {batching.global_size:,} examples, but the "
        f"training split has {examples:,}; use a smaller one"
    )


def apply_debug_subset(splits: Splits, plan: Plan, runtime: Runtime) -> Splits:
    """Reduces the splits for `debug=overfit` and `debug=fast`."""
    from scaleflow import dataset

    if plan.debug.overfit:
        splits = dataset.repeat_first_batch(splits, runtime.batching)
    if plan.debug.fast:
        splits = dataset.limit_evaluation(splits, divide_evaluation(runtime, plan).global_size)
    return splits


def make_feeds(splits: Splits, runtime: Runtime, plan: Plan) -> tuple[Feed, Feed | None, Feed | None]:
    """Makes the feeds: training shuffled by the seed, validation and test in order and without micro-batches."""
    from scaleflow import dataset

    batching = runtime.read_batching(runtime.batching)
    evaluation_batching = runtime.read_batching(divide_evaluation(runtime, plan))
    device_bytes = gpu_memory_bytes(runtime.kind, plan.hardware)
    read = functools.partial(
        dataset.make_feed,
        transforms=splits.transforms,
        threads=plan.dataset.threads,
        device_bytes=device_bytes,
        shards=plan.dataset.shards,
    )

    def in_order(examples: Examples | None) -> Feed | None:
        return None if examples is None else read(examples, evaluation_batching, runtime.evaluation_strategy)

    seed = None if plan.debug.overfit else plan.seed  # all its batches are the same
    train = read(splits.train, batching, runtime.strategy, seed, buffer=plan.dataset.shuffle)
    train = dataset.augment_feed(train, plan.dataset.augment, plan.seed, splits.inputs, splits.outputs)
    validation = in_order(splits.validation)
    return train, validation, validation if splits.test is splits.validation else in_order(splits.test)


@contextlib.contextmanager
def guard_rendezvous(plan: Plan, emit: Emit) -> Iterator[None]:
    """Wraps the code in which processes wait for each other. The launcher may kill a process that waits too long."""
    if len(process_names(plan)) == 1:
        yield
        return
    with allow_kill(emit, peers=parse_tf_config(os.environ.get(TF_CONFIG)).peers, seconds=plan.cluster.start_seconds):
        yield


@contextlib.contextmanager
def guard_tpu_connection(plan: Plan, emit: Emit) -> Iterator[None]:
    """Wraps the connection to a TPU, which waits forever if something else answers at the address."""
    if plan.hardware.name != "tpu":
        yield
        return
    seconds = plan.cluster.start_seconds
    vain = f"hardware.tpu={plan.hardware.tpu}: no TPU answers there within cluster.start_seconds={seconds:g}"
    with allow_kill(emit, vain=vain, seconds=seconds):
        yield


@contextlib.contextmanager
def allow_kill(emit: Emit, **what: Any) -> Iterator[None]:
    """Wraps a call of TensorFlow that may never return, and during which no Python thread of this process runs."""
    emit(Waiting(**what))
    end_with_parent(signal.SIGKILL)  # the thread that watches the launcher does not run either
    yield
    end_with_parent(0)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # TensorFlow's runtime has replaced the handler
    emit(PeersMet())


def end_with_parent(number: int) -> None:
    """Makes the kernel send this process a signal when its parent ends; 0 for none. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def is_chief(plan: Plan) -> bool:
    """Returns whether the events of this process are those of the run."""
    return len(process_names(plan)) == 1 or parse_tf_config(os.environ.get(TF_CONFIG)).worker == 0


def digest_plan(plan: Plan) -> str:
    """Returns a text that must be the same on all workers: the config, TensorFlow's version, the initial weights."""
    excluded = ("tracking", "cluster", "resume", "resume_data", "resume_code")
    config = {key: value for key, value in plan.config.items() if key not in excluded}
    weights = plan.model.init_from
    files = [] if weights is None else [weights, *(str(Path(weights).with_name(each)) for each in LEARNED_FILES)]
    return json.dumps([config, version("tensorflow"), [digest_file(each) for each in files]], sort_keys=True)


def digest_file(file: str) -> str | None:
    if not Path(file).exists():
        return None
    with Path(file).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def resolve_cache(plan: Plan, splits: Splits) -> str:
    """Returns `dataset.cache`, with `auto` replaced by what the training split uses."""
    if plan.dataset.shards > 1:  # also where a debug option keeps some batches in memory
        return "none"
    if plan.dataset.cache != "auto":
        return plan.dataset.cache
    return {"stream": "none", "memory": "memory", "file": "file"}[place_of_split(splits.train)]


def compute_peak(plan: Plan, runtime: Runtime) -> float | None:
    """Computes the peak of all workers' devices in floating-point operations per second; None if unknown."""
    from scaleflow import hardware

    if runtime.strategy_name == "parameter_server":
        return None  # the coordinator does not see the devices of its workers
    workers = count_synchronous_workers(plan)
    devices = len(runtime.devices) if runtime.is_divided else runtime.batching.replicas // workers
    local_peak = hardware.process_peak(runtime.kind, runtime.policy, -(-devices // plan.hardware.logical_devices))
    return None if local_peak is None else local_peak * workers


def list_profile_facts(resolved: Mapping[str, Any], splits: Splits) -> dict[str, Any]:
    """Returns the values that the analysis of a profile uses, as plain data."""
    names = ("strategy", "precision", "hardware", "replicas", "global_batch_size", "cache")
    return {name: resolved[name] for name in names} | {"input": find_example_location(splits.train)}


def find_example_location(examples: Examples) -> str:
    """Returns where the steps find their examples: in `memory`, or in a `stream`."""
    return "memory" if place_of_split(examples) == "memory" else "stream"


def place_of_split(examples: Examples) -> str:
    """Returns `stream`, `file` for memory-mapped arrays, or `memory`."""
    from scaleflow import dataset

    if isinstance(examples, Stream):
        return "stream"
    return "file" if dataset.is_mapped(examples) else "memory"


def divide_evaluation(runtime: Runtime, plan: Plan) -> Batching:
    """Returns the division of the run's evaluation batches."""
    multiple = plan.strategy.micro_batches if runtime.is_divided else 1
    return make_evaluation_batching(runtime.batching, runtime.kind, multiple)


def make_evaluation_batching(batching: Batching, kind: str, multiple: int = 1) -> Batching:
    """Returns the division of evaluation batches on devices of a kind (`CPU`, `GPU` or `TPU`).

    A replica's share is divisible by `multiple`, as it is in training.

    In a device's own memory a replica takes as many examples at once as in training: more may not fit. In the host's
    memory there are no micro-batches, since there are no gradients to hold.
    """
    share = max(batching.share, EVALUATION_BATCH // batching.replicas) if kind == "CPU" else batching.batch_size
    return Batching(-(-share // multiple) * multiple, 1, batching.replicas)
