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

from scaleflow.cluster import TF_CONFIG, assigned_hardware, in_step, names, parse, workers
from scaleflow.config.combinations import check, settled
from scaleflow.config.plan import batching
from scaleflow.config.targets import bind, names_class
from scaleflow.config.trust import check_origins
from scaleflow.errors import Refusal
from scaleflow.interfaces import (
    Batching,
    Debug,
    Emit,
    Examples,
    Feed,
    Inputs,
    MakeOptimizer,
    Outputs,
    Passes,
    Plan,
    Stream,
)
from scaleflow.worker.about import About, look_at
from scaleflow.worker.laps import Laps

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from scaleflow.dataset import Splits
    from scaleflow.training import Agreement, Engine, Fit, Length, Loop

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

#: Examples to a step of an evaluation, over all replicas, if a training step does not have more.
EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Built:
    """Everything a run needs, checked and traced.

    Attributes:
        explain: an error that ended the training, or one that names the example it came from.
        facts: what the words about a profile need to know.
        peak_flops: the most operations a second that the devices of all workers can compute, where that is known.
        is_drawn_as_read: whether the validation split is drawn from a stream as its records are read.
    """

    strategy: tf.distribute.Strategy
    loop: Engine
    train: Feed
    validation: Feed | None
    test: Feed | None
    export: Callable[[Path], None]
    callbacks: Sequence[Any]
    explain: Callable[[Exception], Exception]
    resolved: dict[str, Any]
    counts: dict[str, int]
    outputs: Outputs
    about: About | None
    facts: dict[str, Any]
    peak_flops: float | None
    is_drawn_as_read: bool


def build(plan: Plan, emit: Emit, laps: Laps | None = None) -> Built:
    """Makes everything, and compiles it: what is wrong with a model or a dataset shows here, before there is a run.

    Args:
        plan: checked.
        emit: takes notes.
        laps: measures how long the parts of it take.

    Raises:
        Refusal: where what was asked for can't work.
    """
    laps = laps or Laps(time.time())
    sys.path[:0] = [folder for folder in plan.search if folder not in sys.path]
    from scaleflow import dataset, model, optimizer, training

    laps.end("import")
    ground = settle(plan, emit)
    laps.end("build")
    if plan.trusted_modules is not None:
        check_origins(plan.config, plan.trusted_modules)
    source = bind(plan.dataset.target)()
    splits = dataset.prepare(source, plan.dataset, plan.seed, ground.agree, emit)
    splits = debugged(splits, plan.debug, ground.portions)
    train, validation, test = feeds(splits, ground, plan)
    laps.end("data")

    run = training.length(plan.training, train)
    metrics = training.objective_for(source.outputs).metrics
    watched = {"training.early_stopping": plan.training.early_stopping, "checkpoint.best": plan.checkpoint.sought}
    validates = validation is not None and plan.evaluator != "elsewhere"
    for key, monitored in watched.items():
        training.check_monitor(key, monitored, metrics, validates)
    make_model = model_maker(plan, splits.inputs, source.outputs, emit)
    engine, about_stages = make_engine(plan, ground, make_model, source.outputs, run)
    if plan.hardware.xla:
        training.check_xla(engine.model, splits.inputs, ground.strategy)
    laps.end("build")
    engine.trace(train, validation, test)
    laps.end("trace")
    doubts = (
        *about_stages,
        model.doubt(engine.model),
        model.keras_file_doubt(engine.model),
        *model.batch_norm_doubts(engine.model, ground.portions),
        optimizer.doubt(plan.optimizer, run.total),
    )
    for note in filter(None, doubts):
        emit("note", text=note)
    resolved = {
        **ground.resolved(),
        "workers": workers(plan),
        "learning_rate": optimizer.scaled_rate(plan.optimizer, ground.portions.global_size),
        "cache": resolved_cache(plan, splits),
        "steps": run.total,
        "steps_per_epoch": run.steps_per_epoch,
        "epochs": run.epochs,
        "parameters": engine.model.count_params(),
    }

    def export(folder: Path) -> None:
        described = source.inputs, source.outputs, splits.sample, ground.policy, folder
        model.export(engine.whole(), *described, on_host=ground.is_divided, front=splits.front)

    about = look_at(plan, source.outputs, splits, engine.model) if is_chief(plan) else None
    callbacks = [training.check_callback(bind(each)(), each.path) for each in plan.training.callbacks or ()]
    explain = functools.partial(dataset.explained, splits=splits.named())
    trained = ground.strategy, engine, train, validation, test, export, callbacks
    facts = facts_of(resolved, splits)
    known = dict(splits.counts()), source.outputs, about, facts, peak_of(plan, ground), splits.is_drawn_as_read
    return Built(*trained, explain, resolved, *known)


def model_maker(plan: Plan, inputs: Inputs, outputs: Outputs, emit: Emit) -> Callable[[], keras.Model]:
    """Makes the config's model, with the weights that it is to begin with; to be called in the strategy's scope."""
    from scaleflow import model

    make = functools.partial(model.make, bind(plan.model.target, given=2), inputs, outputs)
    if plan.model.init_from is None:
        return make
    import keras

    saved = model.read(plan.model.init_from, plan.config["model"]["init_from"])
    keras.utils.set_random_seed(plan.seed)  # reading it took from the random numbers
    first: list[keras.Model] = []

    def begun() -> keras.Model:
        made = make()
        if first:  # a coordinator makes its model twice; Keras names the layers of the second otherwise
            model.copy_weights(first[0], made)
        else:
            emit("note", text=model.begin_with(made, saved))
            first.append(made)
        return made

    return begun


# ---------------------------------------------------------------------------------------------
# The engine
# ---------------------------------------------------------------------------------------------


def make_engine(
    plan: Plan, ground: Ground, make_model: Callable[[], keras.Model], outputs: Outputs, run: Length
) -> tuple[Engine, list[str]]:
    """What trains: a loop, or Keras's fit, around a model that is made in the strategy's scope.

    Returns:
        The engine, and what the user should know of how the model is divided.
    """
    from scaleflow import strategy

    if ground.strategy_name == "parameter_server":
        return coordinated_loop(plan, ground, make_model, outputs, run), []
    with ground.strategy.scope():
        with strategy.birthplace(ground.strategy_name):
            net = make_model()
        if plan.training.step is not None and names_class(plan.training.step):
            return own_loop(plan, ground, net, outputs, run), []
        if plan.training.engine == "fit":
            return fit(plan, ground, net, outputs, run), []
        return loop(plan, ground, net, outputs, run)


def loop(plan: Plan, ground: Ground, net: keras.Model, outputs: Outputs, run: Length) -> tuple[Loop, list[str]]:
    """The loop around a model in one piece, or in stages."""
    from scaleflow import optimizer, strategy, training

    objective = training.objective_for(outputs)
    step = make_optimizer(plan, ground, run.total)
    passes: Passes
    if ground.is_divided:
        optimizer.update_in_place(step)
        passes, notes = strategy.pipelined(net, objective, ground.devices, plan.strategy)
    else:
        passes, notes = training.WholePasses(net, loss_step(plan, outputs)), []
    options = plan.training.clip_norm, plan.hardware.xla
    return training.Loop(ground.strategy, net, step, objective, *options, passes=passes), notes


def coordinated_loop(
    plan: Plan, ground: Ground, make_model: Callable[[], keras.Model], outputs: Outputs, run: Length
) -> Loop:
    """The loop of a coordinator, which has the model twice: on the servers, and whole for itself.

    Raises:
        Refusal: for a step that applies its own optimizers: it would have to know of servers.
    """
    import keras

    from scaleflow import training

    own = plan.training.step
    if own is not None and names_class(own):
        raise Refusal(
            f"training.step._target_={own.path} with strategy=parameter_server: a class applies its own optimizers, "
            "which know nothing of servers; use a function (model, batch, weights) -> (loss, outputs)"
        )
    with ground.evaluating.scope():
        whole = make_model()
    keras.utils.set_random_seed(plan.seed)  # the same weights again, as everywhere
    with ground.strategy.scope():
        parts = (ground.strategy, make_model(), make_optimizer(plan, ground, run.total))
        objective = training.objective_for(outputs)
        loss = loss_step(plan, outputs)
        return training.CoordinatedLoop(
            *parts, objective, plan.training.clip_norm, loss, workers(plan), whole, ground.evaluating
        )


def own_loop(plan: Plan, ground: Ground, net: keras.Model, outputs: Outputs, run: Length) -> Loop:
    """The loop around a step of the user's that applies its own optimizers."""
    from scaleflow import training

    own = plan.training.step
    assert own is not None
    training.check_own_updates(plan.training, ground.policy, plan.hardware.xla, own.path)
    return training.OwnLoop(
        strategy=ground.strategy,
        model=net,
        objective=training.objective_for(outputs),
        outputs=outputs,
        own=bind(own)(),
        name=own.path,
        make_optimizer=optimizer_maker(plan, ground, run.total),
    )


def fit(plan: Plan, ground: Ground, net: keras.Model, outputs: Outputs, run: Length) -> Fit:
    """Keras's own engine."""
    from scaleflow import training

    per_execution = training.steps_per_execution(plan.training.steps_per_loop, run.steps_per_epoch, run.total)
    return training.Fit(
        strategy=ground.strategy,
        model=net,
        optimizer=make_optimizer(plan, ground, run.total, takes_summed=False),
        objective=training.objective_for(outputs),
        steps_per_execution=per_execution,
    )


def loss_step(plan: Plan, outputs: Outputs) -> Any:
    """The way from a batch to its loss: the user's, or the one that follows from the kind of target."""
    from scaleflow import training

    own = plan.training.step
    if own is not None:
        return training.checked(bind(own, given=3), own.path, outputs)
    return training.supervised(training.objective_for(outputs))


def make_optimizer(plan: Plan, ground: Ground, steps: int, takes_summed: bool = True) -> keras.optimizers.Optimizer:
    """The config's optimizer for a run of so many steps."""
    from scaleflow import optimizer

    rate = optimizer.learning_rate(plan.optimizer, ground.portions.global_size, steps)
    scaled = ground.policy == "mixed_float16"
    return optimizer.make(bind(plan.optimizer.target), rate, loss_scaling=scaled, takes_summed=takes_summed)


def optimizer_maker(plan: Plan, ground: Ground, steps: int) -> MakeOptimizer:
    """What a training step of the user's makes its optimizers with: each sums gradients over the replicas itself."""
    from scaleflow import optimizer

    def make(variables: Sequence[Any], rate_factor: float = 1.0) -> keras.optimizers.Optimizer:
        options = dataclasses.replace(plan.optimizer, learning_rate=plan.optimizer.learning_rate * rate_factor)
        rate = optimizer.learning_rate(options, ground.portions.global_size, steps)
        made = optimizer.make(bind(plan.optimizer.target), rate, loss_scaling=False, takes_summed=False)
        made.build(list(variables))
        return made

    return make


# ---------------------------------------------------------------------------------------------
# What it stands on
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ground:
    """What everything else is built on: devices, the strategy over them, the precision, the portions of a batch.

    Attributes:
        evaluating: the strategy under which splits are evaluated; a coordinator does so itself.
    """

    kind: str
    devices: Sequence[str]
    strategy_name: str
    strategy: tf.distribute.Strategy
    evaluating: tf.distribute.Strategy
    policy: str
    portions: Batching
    agree: Agreement

    @property
    def is_divided(self) -> bool:
        """Whether the model is in stages on several devices, so that none needs to hold the whole."""
        return self.strategy_name == "pipeline"

    def resolved(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy_name,
            "precision": self.policy,
            "hardware": self.kind.lower(),
            "replicas": self.portions.replicas,
            "global_batch_size": self.portions.global_size,
        }


def settle(plan: Plan, emit: Emit) -> Ground:
    """Sets up the process: nothing of TensorFlow may have run before it."""
    import keras

    from scaleflow import hardware, precision, strategy, training

    training.look_inside(plan.debug)
    with reaching(plan, emit):
        devices = hardware.configure(assigned_hardware(plan.hardware, os.environ))
    name = strategy.resolve(plan.strategy, devices.names)
    policy = precision.resolve(plan.precision, devices.kind)
    warnings = check(settled(plan, name, devices.kind.lower(), policy))
    with meeting(plan, emit):
        spread, about_strategy = strategy.create(name, devices.names, plan.strategy, devices.tpu)
        agree = training.Agreement(spread, in_step(plan), bool)
        if not agree.is_same(fingerprint(plan)):
            agree.part()
            raise Refusal(
                "strategy=multi_worker: the workers were not all started with the same config, TensorFlow version and "
                "model.init_from; give each the same command"
            )
    keras.utils.set_random_seed(plan.seed)
    precision.apply(policy)
    for note in filter(None, (about_strategy, *warnings)):
        emit("note", text=note)
    here = strategy.create("one_device", devices.names)[0] if name == "parameter_server" else spread
    portions = batching(plan.training, spread.num_replicas_in_sync, goes_on=plan.resume is not None)
    return Ground(devices.kind, devices.names, name, spread, here, policy, portions, agree)


def debugged(splits: Splits, debug: Debug, portions: Batching) -> Splits:
    """The splits of `debug=overfit` and `debug=fast`."""
    from scaleflow import dataset

    if debug.overfit:
        splits = dataset.first_batch(splits, portions)
    if debug.fast:
        splits = dataset.one_evaluation(splits, evaluation(portions).global_size)
    return splits


def feeds(splits: Splits, ground: Ground, plan: Plan) -> tuple[Feed, Feed | None, Feed | None]:
    """The training split reshuffled from the seed, and the others in their order, in whole shares."""
    from scaleflow import dataset, hardware

    whole = evaluation(ground.portions)
    room = hardware.device_bytes(ground.kind, plan.hardware)
    read = functools.partial(dataset.feed, transform=splits.transform, threads=plan.dataset.threads, device_bytes=room)

    def in_order(examples: Examples | None) -> Feed | None:
        return None if examples is None else read(examples, whole, ground.evaluating)

    seed = None if plan.debug.overfit else plan.seed  # each of its batches is the same
    train = read(splits.train, ground.portions, ground.strategy, seed, buffer=plan.dataset.shuffle)
    train = dataset.augmented(train, plan.dataset.augment, plan.seed, splits.inputs, splits.outputs)
    validation = in_order(splits.validation)
    return train, validation, validation if splits.test is splits.validation else in_order(splits.test)


@contextlib.contextmanager
def meeting(plan: Plan, emit: Emit) -> Iterator[None]:
    """Around what makes processes wait for each other."""
    if len(names(plan)) == 1:
        yield
        return
    with waiting(emit, peers=parse(os.environ.get(TF_CONFIG)).peers, seconds=plan.cluster.start_seconds):
        yield


@contextlib.contextmanager
def reaching(plan: Plan, emit: Emit) -> Iterator[None]:
    """Around what waits for ever where something else than a TPU answers at a TPU's address."""
    if plan.hardware.name != "tpu":
        yield
        return
    seconds = plan.cluster.start_seconds
    vain = f"hardware.tpu={plan.hardware.tpu}: does not answer as a TPU within cluster.start_seconds={seconds:g}"
    with waiting(emit, vain=vain, seconds=seconds):
        yield


@contextlib.contextmanager
def waiting(emit: Emit, **what: Any) -> Iterator[None]:
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
    return len(names(plan)) == 1 or parse(os.environ.get(TF_CONFIG)).worker == 0


def fingerprint(plan: Plan) -> str:
    """What has to be the same on every worker: the config but for where each records, and TensorFlow's version."""
    own = ("tracking", "cluster", "resume")
    config = {key: value for key, value in plan.config.items() if key not in own}
    return json.dumps([config, version("tensorflow"), digest(plan.model.init_from)], sort_keys=True)


def digest(file: str | None) -> str | None:
    """Of a file's content."""
    if file is None:
        return None
    with Path(file).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def resolved_cache(plan: Plan, splits: Splits) -> str:
    """What `dataset.cache=auto` came to for the training split."""
    if plan.dataset.cache != "auto":
        return plan.dataset.cache
    return {"stream": "none", "memory": "memory", "file": "file"}[place_of_split(splits.train)]


def peak_of(plan: Plan, ground: Ground) -> float | None:
    """The most operations a second that the devices of all workers can compute, as far as it is known."""
    from scaleflow import hardware

    if ground.strategy_name == "parameter_server":
        return None  # the coordinator sees none of its workers' devices
    together = in_step(plan)
    used = plan.strategy.stages if ground.is_divided else ground.portions.replicas // together
    here = hardware.peak(ground.kind, ground.policy, -(-used // plan.hardware.logical_devices))
    return None if here is None else here * together


def facts_of(resolved: Mapping[str, Any], splits: Splits) -> dict[str, Any]:
    """What the words about a profile need to know, as plain values."""
    known = ("strategy", "precision", "hardware", "replicas", "global_batch_size", "cache")
    return {name: resolved[name] for name in known} | {"input": kept_in(splits.train)}


def kept_in(examples: Examples) -> str:
    """Where the steps find their examples: in `memory`, or in a `stream`."""
    return "memory" if place_of_split(examples) == "memory" else "stream"


def place_of_split(examples: Examples) -> str:
    """`stream`, `file` for arrays that are mapped from one, or `memory`."""
    import numpy as np

    if isinstance(examples, Stream):
        return "stream"
    return "file" if isinstance(examples.inputs, np.memmap) else "memory"


def evaluation(portions: Batching) -> Batching:
    """Evaluation takes a replica's whole share at once: without gradients there is memory for it."""
    return Batching(max(portions.share, EVALUATION_BATCH // portions.replicas), 1, portions.replicas)
