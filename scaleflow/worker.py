"""The worker's life: the one place where the groups meet.

A process of its own, `python -m scaleflow.worker`, reads one line of JSON from its standard input,
builds everything, says `ready`, trains and exports. Standard input stays open as long as the launcher
lives: its end ends the worker. It knows no tracker; what it has to tell goes to `events.jsonl`.
"""

from __future__ import annotations

import bdb
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.cluster import TF_CONFIG, parse
from scaleflow.errors import Refusal
from scaleflow.events import Writer
from scaleflow.interfaces import Batching, Emit, Examples, Feed, MakeOptimizer, Outputs, Plan, Stream
from scaleflow.masking import masked
from scaleflow.plan import batching, make_plan, workers

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

    from scaleflow.dataset import Splits
    from scaleflow.training import Fit, Length, Loop

EVENTS = "events.jsonl"
TRACEBACK = "traceback.txt"
MODEL = "model"

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

#: Examples to a step of an evaluation, over all replicas, if a training step does not have more.
EVALUATION_BATCH = 256

#: Keras imports these where it finds them, for wrappers and plots that a worker has no use for: a
#: second and more of every start. Whoever needs one in a model or dataset imports it as usual.
NOT_FOR_KERAS = ("sklearn", "matplotlib", "matplotlib.pyplot", "pandas")


@dataclass(frozen=True)
class Job:
    """What a worker is told.

    Attributes:
        plan: what to do.
        folder: the run's folder.
        started: when the command began, in seconds since the epoch.
        worker: this one's number; 0 is the chief, whose events are the run's.
    """

    plan: Plan
    folder: Path
    started: float
    worker: int = 0

    @property
    def events(self) -> Path:
        """Where this worker reports."""
        return self.folder / (EVENTS if self.worker == 0 else f"events-{self.worker}.jsonl")

    @property
    def log(self) -> Path:
        """Where this worker's output goes."""
        return self.folder / f"worker-{self.worker}.log"

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
    loop: Loop | Fit
    train: Feed
    validation: Feed | None
    test: Feed | None
    sample: np.ndarray[Any, Any]
    export: Callable[..., None]
    resolved: dict[str, Any]
    counts: dict[str, int]


def main() -> None:
    """The process: reads its job, works, and ends without waiting for TensorFlow's threads."""
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    job = Job.from_json(sys.stdin.buffer.readline().decode())
    if job.plan.strategy.name != "multi_worker":
        os.environ.pop(TF_CONFIG, None)  # with it a strategy of one process would wait for others
    threading.Thread(target=end_with_launcher, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
    text = str(error).strip().splitlines() or [""]
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename, plan.search)]
    place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return f"{type(error).__name__}: {text[0]}{place}"


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
    with ground.strategy.scope():
        net = model.make(bind(plan.model.target, given=2), source.inputs, source.outputs)
        loop = make_loop(plan, ground, net, source.outputs, run)
    loop.trace(train, validation, test)
    doubts = (
        model.doubt(net),
        *model.batch_norm_doubts(net, ground.portions),
        optimizer.doubt(plan.optimizer, run.total),
    )
    for note in filter(None, doubts):
        emit("note", text=note)
    resolved = {
        **ground.resolved(),
        "workers": workers(plan),
        "learning_rate": optimizer.scaled_rate(plan.optimizer, ground.portions.global_size),
        "steps": run.total,
        "steps_per_epoch": run.steps_per_epoch,
        "epochs": run.epochs,
        "parameters": net.count_params(),
    }
    export_net = functools.partial(model.export, net, source.inputs, source.outputs, policy=ground.policy)
    sample = first_inputs(splits.train, 8)
    return Built(ground.strategy, loop, train, validation, test, sample, export_net, resolved, dict(splits.counts()))


def make_loop(plan: Plan, ground: Ground, net: keras.Model, outputs: Outputs, run: Length) -> Loop | Fit:
    """What trains the model; called in the strategy's scope."""
    from scaleflow import optimizer, training
    from scaleflow.targets import bind, names_class

    own, objective = plan.training.step, training.objective_for(outputs)
    if own is not None and names_class(own):
        training.check_own_updates(plan.training, ground.policy, own.path)
        return training.OwnLoop(
            strategy=ground.strategy, model=net, objective=objective, outputs=outputs, own=bind(own)(), name=own.path,
            make_optimizer=optimizer_maker(plan, ground, run.total),
        )  # fmt: skip
    rate = optimizer.learning_rate(plan.optimizer, ground.portions.global_size, run.total)
    make_optimizer = functools.partial(
        optimizer.make, bind(plan.optimizer.target), rate, loss_scaling=ground.policy == "mixed_float16"
    )
    if plan.training.engine == "fit":
        training.check_fit(plan.training, ground.policy, ground.strategy)
        return training.Fit(
            strategy=ground.strategy, model=net, optimizer=make_optimizer(takes_summed=False), objective=objective,
            steps_per_execution=training.steps_per_execution(
                plan.training.steps_per_loop, run.steps_per_epoch, run.total
            ),
        )  # fmt: skip
    loss = training.checked(bind(own, given=3), own.path, outputs) if own else training.supervised(objective)
    return training.Loop(
        strategy=ground.strategy,
        model=net,
        optimizer=make_optimizer(),
        objective=objective,
        clip_norm=plan.training.clip_norm,
        passes=training.WholePasses(net, loss),
    )


def optimizer_maker(plan: Plan, ground: Ground, steps: int) -> MakeOptimizer:
    """What a training step of the user's makes its optimizers with: each sums gradients over the replicas itself."""
    from scaleflow import optimizer
    from scaleflow.targets import bind

    def make_optimizer(variables: Sequence[Any], rate_factor: float = 1.0) -> keras.optimizers.Optimizer:
        options = dataclasses.replace(plan.optimizer, learning_rate=plan.optimizer.learning_rate * rate_factor)
        rate = optimizer.learning_rate(options, ground.portions.global_size, steps)
        made = optimizer.make(bind(plan.optimizer.target), rate, loss_scaling=False, takes_summed=False)
        made.build(list(variables))
        return made

    return make_optimizer


@dataclass(frozen=True)
class Ground:
    """What everything else is built on: devices, the strategy over them, the precision, the portions of a batch."""

    kind: str
    strategy_name: str
    strategy: tf.distribute.Strategy
    policy: str
    portions: Batching

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

    devices = hardware.configure(plan.hardware)
    name = strategy.resolve(plan.strategy, devices.names)
    policy = precision.resolve(plan.precision, devices.kind)
    with meeting(plan, emit):
        spread, about_strategy = strategy.create(name, devices.names, plan.strategy)
        agree = training.Agreement(spread, workers(plan), bool)
        if not agree.is_same(fingerprint(plan)):
            agree.part()
            raise Refusal(
                "strategy=multi_worker: the workers were not all started with the same config and TensorFlow version; "
                "give each the same command"
            )
    keras.utils.set_random_seed(plan.seed)
    for note in filter(None, (about_strategy, precision.apply(policy, devices.kind))):
        emit("note", text=note)
    return Ground(devices.kind, name, spread, policy, batching(plan.training, spread.num_replicas_in_sync))


def feeds(splits: Splits, ground: Ground, seed: int) -> tuple[Feed, Feed | None, Feed | None]:
    """The training split reshuffled from the seed, and the others in their order, in whole shares."""
    from scaleflow import dataset

    whole = evaluation(ground.portions)

    def in_order(examples: Examples | None) -> Feed | None:
        return None if examples is None else dataset.feed(examples, whole, ground.strategy)

    train = dataset.feed(splits.train, ground.portions, ground.strategy, shuffle_seed=seed)
    return train, in_order(splits.validation), in_order(splits.test)


@contextlib.contextmanager
def meeting(plan: Plan, emit: Emit) -> Iterator[None]:
    """Around what makes workers wait for each other, during which no thread of this process runs."""
    if workers(plan) == 1:
        yield
        return
    emit("waiting", peers=parse(os.environ.get(TF_CONFIG)).peers, seconds=plan.cluster.start_seconds)
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

    agree = training.Agreement(built.strategy, workers(job.plan), told_to_stop)
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
        built.export(batch=built.sample, folder=job.folder / MODEL)
        return
    with tempfile.TemporaryDirectory() as folder:
        built.export(batch=built.sample, folder=Path(folder))


if __name__ == "__main__":
    main()
