"""The worker's life: the one place where the groups meet.

A process of its own, `python -m scaleflow.worker`, reads one line of JSON from its standard input,
builds everything, says `ready`, trains and exports. Standard input stays open as long as the launcher
lives: its end ends the worker. It knows no tracker; what it has to tell goes to `events.jsonl`.
"""

from __future__ import annotations

import bdb
import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from scaleflow.cluster import TF_CONFIG, answers, in_step, names, parse, workers
from scaleflow.combinations import check, settled
from scaleflow.errors import Refusal
from scaleflow.events import Writer
from scaleflow.interfaces import Batching, Emit, Examples, Feed, Objective, Passes, Plan, Stream
from scaleflow.masking import masked
from scaleflow.plan import batching, make_plan

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

    from scaleflow.dataset import Splits
    from scaleflow.training import Loop

EVENTS = "events.jsonl"
TRACEBACK = "traceback.txt"
MODEL = "model"

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

#: How often a process that serves a coordinator looks whether that is there.
SECONDS_BETWEEN_LOOKS = 1.0

#: Examples to a step of an evaluation, over all replicas, if a training step does not have more.
EVALUATION_BATCH = 256

#: Keras imports these where it finds them, for wrappers and plots that a worker has no use for: a
#: second and more of every start. Whoever needs one in a model or dataset imports it as usual.
NOT_FOR_KERAS = ("sklearn", "matplotlib", "matplotlib.pyplot", "pandas")

#: Lines that TensorFlow's errors begin with, before they say what was wrong.
LEADS_TO_REASON = re.compile(r"\s*$|Graph execution error|Detected at node|<stack traces|\d+ root error|\s+File ")


@dataclass(frozen=True)
class Job:
    """What a worker is told.

    Attributes:
        plan: what to do.
        folder: the run's folder.
        started: when the command began, in seconds since the epoch.
        worker: this process's number; 0 is the chief, whose events are the run's.
    """

    plan: Plan
    folder: Path
    started: float
    worker: int = 0

    @property
    def name(self) -> str:
        """What users know this process by."""
        return names(self.plan)[self.worker]

    @property
    def serves(self) -> bool:
        """Whether it does what a coordinator tells it, instead of training on its own."""
        return self.plan.strategy.name == "parameter_server" and self.worker > 0

    @property
    def is_replaceable(self) -> bool:
        """Whether the others go on without it while it is started again: it holds nothing."""
        return self.serves and self.worker <= workers(self.plan)

    @property
    def events(self) -> Path:
        """Where this process reports."""
        return self.folder / (EVENTS if self.worker == 0 else f"events-{self.worker}.jsonl")

    @property
    def log(self) -> Path:
        """Where this process's output goes."""
        return self.folder / f"{self.name.replace(' ', '-')}.log"

    def to_json(self) -> str:
        plan = self.plan
        told = {"config": plan.config, "choices": plan.choices, "search": plan.search}
        return json.dumps({**told, "folder": str(self.folder), "started": self.started, "worker": self.worker})

    @classmethod
    def from_json(cls, text: str) -> Job:
        told = json.loads(text)
        plan = make_plan(told["config"], told["choices"], told["search"], look_outside=False)
        return cls(plan, Path(told["folder"]), told["started"], told["worker"])


@dataclass(frozen=True)
class Built:
    """Everything a run needs, checked and traced."""

    strategy: tf.distribute.Strategy
    loop: Loop
    train: Feed
    validation: Feed | None
    test: Feed | None
    export: Callable[[Path], None]
    resolved: dict[str, Any]
    counts: dict[str, int]


def main() -> None:
    """The process: reads its job, works, and ends without waiting for TensorFlow's threads."""
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    job = Job.from_json(sys.stdin.buffer.readline().decode())
    if len(names(job.plan)) == 1:
        os.environ.pop(TF_CONFIG, None)  # with it a strategy of one process would wait for others
    threading.Thread(target=end_with_launcher, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if job.serves:
        serve(job, Writer(job.events))
    import_keras()
    finished = work(job, Writer(job.events), stop.is_set)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if finished else 1)


def end_with_launcher(pipe: int) -> None:
    """Ends this process when the launcher is gone, even one that hangs in a collective."""
    while os.read(pipe, 1):
        pass
    print("the launcher is gone; this worker ends", file=sys.stderr, flush=True)
    os._exit(1)


def serve(job: Job, emit: Emit) -> NoReturn:
    """Trains or holds variables as a coordinator says, until that is gone or the launcher ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is lost with it that has to be saved
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "1"
    )  # a log that ends in what was wrong, not in TensorFlow's settings
    place = parse(os.environ.get(TF_CONFIG))
    chief = place.peers[0]
    from scaleflow import strategy

    emit("waiting", peers=place.peers, seconds=job.plan.cluster.start_seconds)
    strategy.serve(job.plan.hardware.inter_op_threads, job.plan.hardware.intra_op_threads)
    while not answers(chief):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    emit("met")
    emit("note", text=f"{job.name} serves the coordinator at {chief}")
    while answers(chief):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    emit("note", text="the coordinator is gone; how the run ended is in its record")
    emit("end", status="FINISHED")
    os._exit(0)


def work(job: Job, emit: Emit, told_to_stop: Callable[[], bool]) -> bool:
    """Builds, trains and exports; whatever happens, the last event says how it ended.

    Returns:
        False if it was refused or failed.
    """
    try:
        built = build(job.plan, emit)
    except Refusal as refusal:
        emit("refused", message=str(refusal))
        return False
    except Exception as error:
        traceback.print_exc()
        emit("refused", message=f"{told(error, job.plan)}; the traceback is in {job.log}", keep=True)
        return False
    announce(job, built, emit)
    try:
        train_and_export(job, built, emit, told_to_stop)
    except Exception as error:
        report_failure(job, error, emit)
        return False
    return True


def report_failure(job: Job, error: Exception, emit: Emit) -> None:
    """Tells of a fault; the launcher, which sees all workers, says how the run ended."""
    traceback.print_exc()
    if job.worker == 0:
        (job.folder / TRACEBACK).write_text(traceback.format_exc())
        emit("artifact", path=str(job.folder / TRACEBACK))
    emit("fault", error=told(error, job.plan))


def told(error: Exception, plan: Plan) -> str:
    """An error in a line, with the place in the user's own code where it came up."""
    if isinstance(error, bdb.BdbQuit):
        return "the debugger was left" + ("" if plan.debug.inline else "; in a worker it has no terminal: debug=inline")
    reason = next((line.strip() for line in str(error).splitlines() if not LEADS_TO_REASON.match(line)), "")
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename, plan.search)]
    place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return f"{type(error).__name__}: {reason}{place}"


def is_own(file: str, folders: Sequence[str]) -> bool:
    """Whether a source file is the user's, rather than ours or a library's."""
    path = Path(file)
    ours = path.is_relative_to(Path(__file__).parent) or "site-packages" in path.parts
    return not ours and any(path.is_relative_to(folder) for folder in folders)


def build(plan: Plan, emit: Emit) -> Built:
    """Makes everything, in the order in which TensorFlow needs it, and traces the loop."""
    sys.path[:0] = [folder for folder in plan.search if folder not in sys.path]
    from scaleflow import dataset, model, optimizer, training
    from scaleflow.targets import bind

    ground = settle(plan, emit)
    source = bind(plan.dataset.target)()
    splits = dataset.prepare(source, plan.dataset, plan.seed)
    train, validation, test = feeds(splits, ground, plan.seed)

    run = training.length(plan.training, train)
    objective = training.objective_for(source.outputs)
    training.check_monitor(plan.training, objective.metrics, validation is not None)
    rate = optimizer.learning_rate(plan.optimizer, ground.portions.global_size, run.total)

    factory = bind(plan.model.target, given=2)
    make_model = functools.partial(model.make, factory, source.inputs, source.outputs)
    make_optimizer = functools.partial(
        optimizer.make, bind(plan.optimizer.target), rate, loss_scaling=ground.policy == "mixed_float16"
    )
    loop, notes = make_loop(plan, ground, objective, make_model, make_optimizer)
    if plan.hardware.xla:
        training.check_xla(loop.model, source.inputs, ground.portions.replicas)
    loop.trace(train, validation, test)
    for note in filter(None, (*notes, model.doubt(loop.model), optimizer.doubt(plan.optimizer, run.total))):
        emit("note", text=note)
    resolved = {
        **ground.resolved(),
        "workers": workers(plan),
        "learning_rate": optimizer.scaled_rate(plan.optimizer, ground.portions.global_size),
        "steps": run.total,
        "steps_per_epoch": run.steps_per_epoch,
        "epochs": run.epochs,
        "parameters": loop.model.count_params(),
    }

    def export(folder: Path) -> None:
        net = loop.whole()
        model.export(net, source.inputs, source.outputs, sample, ground.policy, folder, on_host=ground.is_divided)

    sample = first_inputs(splits.train, 8)
    return Built(ground.strategy, loop, train, validation, test, export, resolved, dict(splits.counts()))


def make_loop(
    plan: Plan,
    ground: Ground,
    objective: Objective,
    make_model: Callable[[], keras.Model],
    make_optimizer: Callable[[], keras.optimizers.Optimizer],
) -> tuple[Loop, list[str]]:
    """The loop around a model and an optimizer that are made in the strategy's scope.

    Returns:
        The loop, and what the user should know of how the model is divided.
    """
    import keras

    from scaleflow import optimizer, strategy, training

    spread, here = ground.strategy, ground.evaluating
    if spread is not here:
        with here.scope():
            whole = make_model()
        keras.utils.set_random_seed(plan.seed)  # the same weights again, as everywhere
    passes: Passes | None = None
    notes: list[str] = []
    with spread.scope():
        with strategy.birthplace(ground.strategy_name):
            net = make_model()
        step = make_optimizer()
        if ground.is_divided:
            passes, notes = strategy.pipelined(net, objective, ground.devices, plan.strategy)
            optimizer.update_in_place(step)
        parts = (spread, net, step, objective, plan.training.clip_norm, plan.hardware.xla)
        if spread is here:
            return training.Loop(*parts, passes=passes), notes
        return training.CoordinatedLoop(*parts, workers(plan), whole, here), notes


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

    with reaching(plan, emit):
        devices = hardware.configure(plan.hardware)
    name = strategy.resolve(plan.strategy, devices.names)
    policy = precision.resolve(plan.precision, devices.kind)
    warnings = check(settled(plan, name, devices.kind.lower(), policy))
    with meeting(plan, emit):
        spread, about_strategy = strategy.create(name, devices.names, plan.strategy, devices.tpu)
        agree = training.Agreement(spread, in_step(plan), bool)
        if not agree.is_same(fingerprint(plan)):
            agree.part()
            raise Refusal(
                "strategy=multi_worker: the workers were not all started with the same config and TensorFlow version; "
                "give each the same command"
            )
    keras.utils.set_random_seed(plan.seed)
    precision.apply(policy)
    for note in filter(None, (about_strategy, *warnings)):
        emit("note", text=note)
    here = strategy.create("one_device", devices.names)[0] if name == "parameter_server" else spread
    portions = batching(plan.training, spread.num_replicas_in_sync)
    return Ground(devices.kind, devices.names, name, spread, here, policy, portions)


def feeds(splits: Splits, ground: Ground, seed: int) -> tuple[Feed, Feed | None, Feed | None]:
    """The training split reshuffled from the seed, and the others in their order, in whole shares."""
    from scaleflow import dataset

    whole = evaluation(ground.portions)

    def in_order(examples: Examples | None) -> Feed | None:
        return None if examples is None else dataset.feed(examples, whole, ground.evaluating)

    train = dataset.feed(splits.train, ground.portions, ground.strategy, shuffle_seed=seed)
    return train, in_order(splits.validation), in_order(splits.test)


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


def fingerprint(plan: Plan) -> str:
    """What has to be the same on every worker: the config but for where each records, and TensorFlow's version."""
    own = ("tracking", "cluster", "debug")
    config = {key: value for key, value in plan.config.items() if key not in own}
    return json.dumps([config, version("tensorflow")], sort_keys=True)


def import_keras() -> None:
    """Imports Keras without what it would import beside itself; for a process that is ours alone."""
    hidden = [name for name in NOT_FOR_KERAS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        import keras  # noqa: F401
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def evaluation(portions: Batching) -> Batching:
    """Evaluation takes a replica's whole share at once: without gradients there is memory for it."""
    return Batching(max(portions.share, EVALUATION_BATCH // portions.replicas), 1, portions.replicas)


def first_inputs(examples: Examples, count: int) -> np.ndarray[Any, Any]:
    """A few raw inputs, [count, *shape]."""
    import numpy as np

    if isinstance(examples, Stream):
        return np.stack([x for x, _ in examples.dataset.take(count).as_numpy_iterator()])
    return examples.inputs[:count]


def announce(job: Job, built: Built, emit: Emit) -> None:
    """Says `ready`: from here on there is a run."""
    plan = job.plan
    resolved = built.resolved
    params = {**plan.choices, **flatten(masked(plan.config))}
    params |= {f"resolved.{key}": str(value) for key, value in resolved.items()}
    params |= {f"resolved.examples.{split}": str(count) for split, count in built.counts.items()}
    chosen = plan.choices
    name = plan.tracking.run_name or "-".join(
        (chosen.get("dataset", "?"), chosen.get("model", "?"), resolved["strategy"], resolved["precision"])
    )
    emit(
        "ready",
        name=name,
        began=int(job.started * 1000),
        tags=plan.tracking.tags or {},
        params=params,
        steps=resolved["steps"],
        epochs=resolved["epochs"],
    )


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
    """Leaves by their dotted keys, as text; null as `null`, lists as JSON."""
    if isinstance(config, dict) and (config or not prefix):
        return {
            k: v
            for key, value in config.items()
            for k, v in flatten(value, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: config if isinstance(config, str) else json.dumps(config)}


def train_and_export(job: Job, built: Built, emit: Emit, told_to_stop: Callable[[], bool]) -> None:
    from scaleflow import training

    agree = training.Agreement(built.strategy, in_step(job.plan), told_to_stop)
    session = training.Session(
        built.loop,
        job.plan.training,
        built.train,
        built.validation,
        built.test,
        emit=emit,
        started=job.started,
        agree=agree,
    )
    result = session.run()
    if result.stopped:
        emit("end", status="KILLED", error=f"stopped at step {result.steps}")
        agree.part()
        return
    export(job, built)
    emit("model", path=str(job.folder / MODEL), step=result.steps)
    emit("end", status="FINISHED")
    agree.part()  # nobody leaves before the chief is through: a worker that is gone would look like one that died


def export(job: Job, built: Built) -> None:
    """Exports the model; every worker takes part, since reading some variables does, and the chief's is kept."""
    if job.worker == 0:
        built.export(job.folder / MODEL)
        return
    with tempfile.TemporaryDirectory() as folder:
        built.export(Path(folder))


if __name__ == "__main__":
    main()
