"""From a plan to what trains it: the one place where the groups meet, in the order in which TensorFlow needs them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.cluster import (
    TF_CONFIG,
    assigned_hardware,
    count_synchronous_workers,
    count_workers,
    parse_tf_config,
    process_names,
)
from scaleflow.config.plan import make_batching
from scaleflow.config.rules import check_rules, resolve_choices
from scaleflow.config.targets import bind_target, is_class_target
from scaleflow.config.trust import check_origins
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Batching,
    Debug,
    Emit,
    Examples,
    Feed,
    ForwardBackward,
    Inputs,
    MakeOptimizer,
    Outputs,
    Plan,
    Stream,
)
from scaleflow.worker.metadata import RunMetadata, collect_metadata
from scaleflow.worker.startup_timer import StartupTimer

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from scaleflow.dataset import Splits
    from scaleflow.training import Engine, FitEngine, Length, Loop, WorkerSync

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

#: Examples to a step of an evaluation, over all replicas, if a training step does not have more.
EVALUATION_BATCH = 256


@dataclass(frozen=True)
class TrainingSetup:
    """Everything a run needs, checked and traced.

    Attributes:
        explain: an error that ended the training, or one that names the example it came from.
        facts: what the words about a profile need to know.
        peak_flops: the most operations a second that the devices of all workers can compute, where that is known.
        is_drawn_as_read: whether the validation split is drawn from a stream as its records are read.
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
    outputs: Outputs
    metadata: RunMetadata | None
    facts: dict[str, Any]
    peak_flops: float | None
    is_drawn_as_read: bool


def build_training(plan: Plan, emit: Emit, startup_timer: StartupTimer | None = None) -> TrainingSetup:
    """Makes everything, and compiles it: what is wrong with a model or a dataset shows here, before there is a run.

    Args:
        plan: checked.
        emit: takes notes.
        startup_timer: measures how long the parts of it take.

    Raises:
        ConfigError: where what was asked for can't work.
    """
    startup_timer = startup_timer or StartupTimer(time.time())
    sys.path[:0] = [folder for folder in plan.search if folder not in sys.path]
    from scaleflow import dataset, model, optimizer, training

    startup_timer.end_part("import")
    runtime = setup_runtime(plan, emit)
    startup_timer.end_part("build")
    if plan.trusted_modules is not None:
        check_origins(plan.config, plan.trusted_modules)
    source = bind_target(plan.dataset.target)()
    splits = dataset.prepare_splits(source, plan.dataset, plan.seed, runtime.worker_sync, emit)
    splits = apply_debug_subset(splits, plan.debug, runtime.batching)
    train, validation, test = make_feeds(splits, runtime, plan)
    startup_timer.end_part("data")

    run = training.compute_length(plan.training, train)
    metrics = training.objective_for(source.outputs).metrics
    watched = {"training.early_stopping": plan.training.early_stopping, "checkpoint.best": plan.checkpoint.sought}
    validates = validation is not None and plan.evaluator != "elsewhere"
    for key, monitored in watched.items():
        training.check_monitor(key, monitored, metrics, validates)
    make_model = make_model_maker(plan, splits.inputs, source.outputs, emit)
    engine, about_stages = make_engine(plan, runtime, make_model, source.outputs, run)
    if plan.hardware.xla:
        training.check_xla(engine.model, splits.inputs, runtime.strategy)
    startup_timer.end_part("build")
    engine.trace(train, validation, test)
    startup_timer.end_part("trace")
    doubts = (
        *about_stages,
        model.find_logits_warning(engine.model),
        model.keras_file_doubt(engine.model),
        *model.find_batch_norm_warnings(engine.model, runtime.batching),
        optimizer.find_warm_up_warning(plan.optimizer, run.total),
    )
    for note in filter(None, doubts):
        emit("note", text=note)
    resolved = {
        **runtime.to_values(),
        "workers": count_workers(plan),
        "learning_rate": optimizer.scale_to_batch(plan.optimizer, runtime.batching.global_size),
        "cache": resolve_cache(plan, splits),
        "steps": run.total,
        "steps_per_epoch": run.steps_per_epoch,
        "epochs": run.epochs,
        "parameters": engine.model.count_params(),
    }

    def export(folder: Path) -> None:
        described = source.inputs, source.outputs, splits.sample, runtime.policy, folder
        model.write_model(
            engine.gather_model(),
            *described,
            on_host=runtime.is_divided,
            preprocessing_model=splits.preprocessing_model,
        )

    about = collect_metadata(plan, source.outputs, splits, engine.model) if is_chief(plan) else None
    callbacks = [training.check_callback(bind_target(each)(), each.path) for each in plan.training.callbacks or ()]
    explain = functools.partial(dataset.explain_read_error, splits=splits.by_name())
    trained = runtime.strategy, engine, train, validation, test, export, callbacks
    facts = list_profile_facts(resolved, splits)
    known = dict(splits.counts()), source.outputs, about, facts, compute_peak(plan, runtime), splits.is_drawn_as_read
    return TrainingSetup(*trained, explain, resolved, *known)


def make_model_maker(plan: Plan, inputs: Inputs, outputs: Outputs, emit: Emit) -> Callable[[], keras.Model]:
    """Makes the config's model, with the weights that it is to begin with; to be called in the strategy's scope."""
    from scaleflow import model

    make = functools.partial(model.make_model, bind_target(plan.model.target, given=2), inputs, outputs)
    if plan.model.init_from is None:
        return make
    import keras

    saved = model.read_weights(plan.model.init_from, plan.config["model"]["init_from"])
    keras.utils.set_random_seed(plan.seed)  # reading it took from the random numbers
    first: list[keras.Model] = []

    def initialize() -> keras.Model:
        made = make()
        if first:  # a coordinator makes its model twice; Keras names the layers of the second otherwise
            model.copy_weights(first[0], made)
        else:
            emit("note", text=model.initialize_from(made, saved))
            first.append(made)
        return made

    return initialize


# ---------------------------------------------------------------------------------------------
# The engine
# ---------------------------------------------------------------------------------------------


def make_engine(
    plan: Plan, runtime: Runtime, make_model: Callable[[], keras.Model], outputs: Outputs, run: Length
) -> tuple[Engine, list[str]]:
    """What trains: a loop, or Keras's fit, around a model that is made in the strategy's scope.

    Returns:
        The engine, and what the user should know of how the model is divided.
    """
    from scaleflow import strategy

    if runtime.strategy_name == "parameter_server":
        return make_parameter_server_loop(plan, runtime, make_model, outputs, run), []
    with runtime.strategy.scope():
        with strategy.variable_scope(runtime.strategy_name):
            net = make_model()
        if plan.training.step is not None and is_class_target(plan.training.step):
            return make_custom_update_loop(plan, runtime, net, outputs, run), []
        if plan.training.engine == "fit":
            return make_fit_engine(plan, runtime, net, outputs, run), []
        return make_loop(plan, runtime, net, outputs, run)


def make_loop(plan: Plan, runtime: Runtime, net: keras.Model, outputs: Outputs, run: Length) -> tuple[Loop, list[str]]:
    """The loop around a model in one piece, or in stages."""
    from scaleflow import optimizer, strategy, training

    objective = training.objective_for(outputs)
    step = make_optimizer(plan, runtime, run.total)
    passes: ForwardBackward
    if runtime.is_divided:
        optimizer.update_in_place(step)
        passes, notes = strategy.build_pipeline(net, objective, runtime.devices, plan.strategy)
    else:
        passes, notes = training.TapeForwardBackward(net, make_loss_step(plan, outputs)), []
    options = plan.training.clip_norm, plan.hardware.xla
    return training.Loop(runtime.strategy, net, step, objective, *options, passes=passes), notes


def make_parameter_server_loop(
    plan: Plan, runtime: Runtime, make_model: Callable[[], keras.Model], outputs: Outputs, run: Length
) -> Loop:
    """The loop of a coordinator, which has the model twice: on the servers, and whole for itself.

    Raises:
        ConfigError: for a step that applies its own optimizers: it would have to know of servers.
    """
    import keras

    from scaleflow import training

    own = plan.training.step
    if own is not None and is_class_target(own):
        raise ConfigError(
            f"training.step._target_={own.path} with strategy=parameter_server: a class applies its own optimizers, "
            "which know nothing of servers; use a function (model, batch, weights) -> (loss, outputs)"
        )
    with runtime.evaluation_strategy.scope():
        whole = make_model()
    keras.utils.set_random_seed(plan.seed)  # the same weights again, as everywhere
    with runtime.strategy.scope():
        parts = (runtime.strategy, make_model(), make_optimizer(plan, runtime, run.total))
        objective = training.objective_for(outputs)
        loss = make_loss_step(plan, outputs)
        return training.ParameterServerLoop(
            *parts, objective, plan.training.clip_norm, loss, count_workers(plan), whole, runtime.evaluation_strategy
        )


def make_custom_update_loop(plan: Plan, runtime: Runtime, net: keras.Model, outputs: Outputs, run: Length) -> Loop:
    """The loop around a step of the user's that applies its own optimizers."""
    from scaleflow import training

    own = plan.training.step
    assert own is not None
    training.check_own_updates(plan.training, runtime.policy, plan.hardware.xla, own.path)
    return training.CustomUpdateLoop(
        strategy=runtime.strategy,
        model=net,
        objective=training.objective_for(outputs),
        outputs=outputs,
        own=bind_target(own)(),
        name=own.path,
        make_optimizer=make_optimizer_maker(plan, runtime, run.total),
    )


def make_fit_engine(plan: Plan, runtime: Runtime, net: keras.Model, outputs: Outputs, run: Length) -> FitEngine:
    """Keras's own engine."""
    from scaleflow import training

    per_execution = training.choose_steps_per_execution(plan.training.steps_per_loop, run.steps_per_epoch, run.total)
    return training.FitEngine(
        strategy=runtime.strategy,
        model=net,
        optimizer=make_optimizer(plan, runtime, run.total, takes_summed=False),
        objective=training.objective_for(outputs),
        steps_per_execution=per_execution,
    )


def make_loss_step(plan: Plan, outputs: Outputs) -> Any:
    """The way from a batch to its loss: the user's, or the one that follows from the kind of target."""
    from scaleflow import training

    own = plan.training.step
    if own is not None:
        return training.add_checks(bind_target(own, given=3), own.path, outputs)
    return training.make_loss_step(training.objective_for(outputs))


def make_optimizer(plan: Plan, runtime: Runtime, steps: int, takes_summed: bool = True) -> keras.optimizers.Optimizer:
    """The config's optimizer for a run of so many steps."""
    from scaleflow import optimizer

    rate = optimizer.make_learning_rate(plan.optimizer, runtime.batching.global_size, steps)
    scaled = runtime.policy == "mixed_float16"
    return optimizer.create_optimizer(
        bind_target(plan.optimizer.target), rate, loss_scaling=scaled, takes_summed=takes_summed
    )


def make_optimizer_maker(plan: Plan, runtime: Runtime, steps: int) -> MakeOptimizer:
    """What a training step of the user's makes its optimizers with: each sums gradients over the replicas itself."""
    from scaleflow import optimizer

    def make(variables: Sequence[Any], rate_factor: float = 1.0) -> keras.optimizers.Optimizer:
        options = dataclasses.replace(plan.optimizer, learning_rate=plan.optimizer.learning_rate * rate_factor)
        rate = optimizer.make_learning_rate(options, runtime.batching.global_size, steps)
        made = optimizer.create_optimizer(
            bind_target(plan.optimizer.target), rate, loss_scaling=False, takes_summed=False
        )
        made.build(list(variables))
        return made

    return make


# ---------------------------------------------------------------------------------------------
# What it stands on
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runtime:
    """What everything else is built on: devices, the strategy over them, the precision, the portions of a batch.

    Attributes:
        evaluation_strategy: the strategy under which splits are evaluated; a coordinator does so itself.
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
        """Whether the model is in stages on several devices, so that none needs to hold the whole."""
        return self.strategy_name == "pipeline"

    def to_values(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy_name,
            "precision": self.policy,
            "hardware": self.kind.lower(),
            "replicas": self.batching.replicas,
            "global_batch_size": self.batching.global_size,
        }


def setup_runtime(plan: Plan, emit: Emit) -> Runtime:
    """Sets up the process: nothing of TensorFlow may have run before it."""
    import keras

    from scaleflow import hardware, precision, strategy, training

    training.apply_debug(plan.debug)
    with guard_tpu_connection(plan, emit):
        devices = hardware.configure_devices(assigned_hardware(plan.hardware, os.environ))
    name = strategy.resolve_strategy(plan.strategy, devices.names)
    policy = precision.resolve_policy(plan.precision, devices.kind)
    warnings = check_rules(resolve_choices(plan, name, devices.kind.lower(), policy))
    with guard_rendezvous(plan, emit):
        spread, about_strategy = strategy.create_strategy(name, devices.names, plan.strategy, devices.tpu)
        agree = training.WorkerSync(spread, count_synchronous_workers(plan), bool)
        if not agree.is_same(digest_plan(plan)):
            agree.leave()
            raise ConfigError(
                "strategy=multi_worker: the workers were not all started with the same config, TensorFlow version and "
                "model.init_from; give each the same command"
            )
    keras.utils.set_random_seed(plan.seed)
    precision.apply_policy(policy)
    for note in filter(None, (about_strategy, *warnings)):
        emit("note", text=note)
    here = strategy.create_strategy("one_device", devices.names)[0] if name == "parameter_server" else spread
    portions = make_batching(plan.training, spread.num_replicas_in_sync, is_resumed=plan.resume is not None)
    return Runtime(devices.kind, devices.names, name, spread, here, policy, portions, agree)


def apply_debug_subset(splits: Splits, debug: Debug, batching: Batching) -> Splits:
    """The splits of `debug=overfit` and `debug=fast`."""
    from scaleflow import dataset

    if debug.overfit:
        splits = dataset.repeat_first_batch(splits, batching)
    if debug.fast:
        splits = dataset.limit_evaluation(splits, make_evaluation_batching(batching).global_size)
    return splits


def make_feeds(splits: Splits, runtime: Runtime, plan: Plan) -> tuple[Feed, Feed | None, Feed | None]:
    """The training split reshuffled from the seed, and the others in their order, in whole shares."""
    from scaleflow import dataset, hardware

    whole = make_evaluation_batching(runtime.batching)
    room = hardware.device_bytes(runtime.kind, plan.hardware)
    read = functools.partial(
        dataset.make_feed, transform=splits.transform, threads=plan.dataset.threads, device_bytes=room
    )

    def in_order(examples: Examples | None) -> Feed | None:
        return None if examples is None else read(examples, whole, runtime.evaluation_strategy)

    seed = None if plan.debug.overfit else plan.seed  # each of its batches is the same
    train = read(splits.train, runtime.batching, runtime.strategy, seed, buffer=plan.dataset.shuffle)
    train = dataset.augment_feed(train, plan.dataset.augment, plan.seed, splits.inputs, splits.outputs)
    validation = in_order(splits.validation)
    return train, validation, validation if splits.test is splits.validation else in_order(splits.test)


@contextlib.contextmanager
def guard_rendezvous(plan: Plan, emit: Emit) -> Iterator[None]:
    """Around what makes processes wait for each other."""
    if len(process_names(plan)) == 1:
        yield
        return
    with allow_kill(emit, peers=parse_tf_config(os.environ.get(TF_CONFIG)).peers, seconds=plan.cluster.start_seconds):
        yield


@contextlib.contextmanager
def guard_tpu_connection(plan: Plan, emit: Emit) -> Iterator[None]:
    """Around what waits for ever where something else than a TPU answers at a TPU's address."""
    if plan.hardware.name != "tpu":
        yield
        return
    seconds = plan.cluster.start_seconds
    vain = f"hardware.tpu={plan.hardware.tpu}: does not answer as a TPU within cluster.start_seconds={seconds:g}"
    with allow_kill(emit, vain=vain, seconds=seconds):
        yield


@contextlib.contextmanager
def allow_kill(emit: Emit, **what: Any) -> Iterator[None]:
    """Around a call of TensorFlow's that may never come back, during which no thread of this process runs."""
    emit("waiting", **what)
    end_with_parent(signal.SIGKILL)  # the thread that watches for the launcher's end is stopped too
    yield
    end_with_parent(0)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # TensorFlow's runtime has put its own there
    emit("met")


def end_with_parent(number: int) -> None:
    """Has the kernel send this process a signal when its launcher is gone; 0 for none. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def is_chief(plan: Plan) -> bool:
    """Whether this process's events are the run's."""
    return len(process_names(plan)) == 1 or parse_tf_config(os.environ.get(TF_CONFIG)).worker == 0


def digest_plan(plan: Plan) -> str:
    """What has to be the same on every worker: the config but for where each records, and TensorFlow's version."""
    own = ("tracking", "cluster", "resume")
    config = {key: value for key, value in plan.config.items() if key not in own}
    return json.dumps([config, version("tensorflow"), digest_file(plan.model.init_from)], sort_keys=True)


def digest_file(file: str | None) -> str | None:
    """Of a file's content."""
    if file is None:
        return None
    with Path(file).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def resolve_cache(plan: Plan, splits: Splits) -> str:
    """What `dataset.cache=auto` came to for the training split."""
    if plan.dataset.cache != "auto":
        return plan.dataset.cache
    return {"stream": "none", "memory": "memory", "file": "file"}[place_of_split(splits.train)]


def compute_peak(plan: Plan, runtime: Runtime) -> float | None:
    """The most operations a second that the devices of all workers can compute, as far as it is known."""
    from scaleflow import hardware

    if runtime.strategy_name == "parameter_server":
        return None  # the coordinator sees none of its workers' devices
    together = count_synchronous_workers(plan)
    used = plan.strategy.stages if runtime.is_divided else runtime.batching.replicas // together
    here = hardware.process_peak(runtime.kind, runtime.policy, -(-used // plan.hardware.logical_devices))
    return None if here is None else here * together


def list_profile_facts(resolved: Mapping[str, Any], splits: Splits) -> dict[str, Any]:
    """What the words about a profile need to know, as plain values."""
    known = ("strategy", "precision", "hardware", "replicas", "global_batch_size", "cache")
    return {name: resolved[name] for name in known} | {"input": find_example_location(splits.train)}


def find_example_location(examples: Examples) -> str:
    """Where the steps find their examples: in `memory`, or in a `stream`."""
    return "memory" if place_of_split(examples) == "memory" else "stream"


def place_of_split(examples: Examples) -> str:
    """`stream`, `file` for arrays that are mapped from one, or `memory`."""
    import numpy as np

    if isinstance(examples, Stream):
        return "stream"
    return "file" if isinstance(examples.inputs, np.memmap) else "memory"


def make_evaluation_batching(batching: Batching) -> Batching:
    """Evaluation takes a replica's whole share at once: without gradients there is memory for it."""
    return Batching(max(batching.share, EVALUATION_BATCH // batching.replicas), 1, batching.replicas)
