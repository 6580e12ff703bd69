"""The worker's life.

A process of its own, `python -m scaleflow.worker.main`, reads one line of JSON from its standard input,
builds everything (`assemble.py`), says `ready`, trains and exports. Standard input stays open as long
as the launcher lives: its end ends the worker. It knows no tracker; what it has to tell goes to `events.jsonl`.
"""

from __future__ import annotations

import bdb
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from filelock import FileLock, Timeout

from scaleflow.cluster import (
    NO_PROXY,
    TF_CONFIG,
    assigned_hardware,
    count_synchronous_workers,
    count_workers,
    find_task,
    find_unreachable,
    is_listening,
    no_proxy_for,
    parse_tf_config,
    process_names,
    wait_until_closed,
    without_evaluator,
)
from scaleflow.config.parse import flatten
from scaleflow.config.plan import make_plan
from scaleflow.errors import ConfigError, RunError
from scaleflow.events import EVENTS, EventReader, EventWriter, read_last_end
from scaleflow.interfaces import Emit, Plan, Tracer
from scaleflow.provenance import mark_process
from scaleflow.secret_masking import MaskedStream, find_environment_secrets, known_in, mask_secrets, remember_secrets
from scaleflow.user_metrics import user_metrics
from scaleflow.worker.build import TrainingSetup, build_training
from scaleflow.worker.evaluate import PROFILE, EvaluationSpec, evaluate_model
from scaleflow.worker.evaluator import EvaluationRelay, run_evaluator
from scaleflow.worker.metadata import report_confusion, report_metadata
from scaleflow.worker.out_of_memory import explain_out_of_memory
from scaleflow.worker.startup_timer import StartupTimer

if TYPE_CHECKING:
    from scaleflow.checkpoint import CheckpointManager
    from scaleflow.training import Session, WorkerSync

TRACEBACK = "traceback.txt"
MODEL = "model"
WRITE_LOCK = "run.lock"

#: How long a worker may go on without its launcher.
SECONDS_TO_SAVE = 30.0

#: How long a command waits for the process of an earlier one that still writes to the run's folder.
SECONDS_TO_WAIT = 60.0

#: How often a process that serves a coordinator looks whether that is there.
SECONDS_BETWEEN_LOOKS = 1.0

#: How long after a coordinator is gone its launcher may take to say how the run ended.
SECONDS_FOR_LAST_WORD = 10.0

#: Keras imports these where it finds them, for wrappers and plots that a worker has no use for: a
#: second and more of every start. Whoever needs one in a model or dataset imports it as usual.
NOT_FOR_KERAS = ("sklearn", "matplotlib", "matplotlib.pyplot", "pandas")

#: How long TensorFlow and Keras took to import, in this process or the server that it was forked from; and when.
import_seconds = 0.0
imported_at = 0.0

#: Metrics of the test split begin so.
TEST = "test/"

#: Lines that TensorFlow's errors begin with, before they say what was wrong.
LEADS_TO_REASON = re.compile(r"\s*$|Graph execution error|Detected at node|<stack traces|\d+ root error|\s+File ")

#: What tf.data says before it.
OF_TF_DATA = re.compile(r"^Error in user-defined function passed to \S+ transformation with iterator: Iterator::\S+: ")


@dataclass(frozen=True)
class RunSpec:
    """What a worker is told.

    Attributes:
        plan: what to do.
        folder: the run's folder.
        started: when the command began, in seconds since the epoch.
        worker: this process's number; 0 is the chief, whose events are the run's.
        attempt: how often the run's processes were started again before.
        parent: the folder of the sweep that this is a job of.
        label: what makes it another than the other jobs of its sweep, for the run's name.
        environment: what is added to the processes' environment.
        server: the address of the server that forks the processes; None: the run has one of its own.
        tags: of the run, for its launcher.
        measure: of a tracked model that is to be evaluated, instead of training one.
    """

    plan: Plan
    folder: Path
    started: float
    worker: int = 0
    attempt: int = 0
    parent: str | None = None
    label: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    server: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    measure: EvaluationSpec | None = None

    @property
    def name(self) -> str:
        """What users know this process by."""
        if self.plan.evaluator == "here":
            return "evaluator"
        return process_names(self.plan)[self.worker]

    @property
    def records(self) -> bool:
        """Whether what it reports is the run."""
        return self.worker == 0 and self.plan.evaluator != "here"

    @property
    def serves(self) -> bool:
        """Whether it does what a coordinator tells it, instead of training on its own."""
        return self.plan.strategy.name == "parameter_server" and self.worker > 0

    @property
    def is_replaceable(self) -> bool:
        """Whether the others go on without it while it is started again: it holds nothing."""
        return self.serves and self.worker <= count_workers(self.plan)

    @property
    def is_resumed(self) -> bool:
        """Whether the run has begun in an earlier process."""
        return self.attempt > 0 or self.plan.resume is not None

    @property
    def checkpoints(self) -> str:
        """Where the run's checkpoints are."""
        return self.plan.checkpoint.folder or str(self.folder / "checkpoints")

    @property
    def events(self) -> Path:
        """Where this process reports."""
        return self.folder / (EVENTS if self.records else f"events-{self.name.replace(' ', '-')}.jsonl")

    @property
    def log(self) -> Path:
        """Where this process's output goes."""
        return self.folder / f"{self.name.replace(' ', '-')}.log"

    def to_json(self, environment: Mapping[str, str] | None = None) -> str:
        """For a pipe; with the secrets that are to be masked, so for no file.

        The store's credentials are not in it, nor are secrets that neither the config nor the environment holds. Only
        the store's address is masked: a password that is also a word of the config (`mlflow`) would mask that, too.

        Args:
            environment: the process's.
        """
        plan = self.plan
        tracking = {
            key: mask_secrets(value) if key == "uri" else value for key, value in plan.config["tracking"].items()
        }
        config = {**plan.config, "tracking": tracking}
        told = {"config": config, "choices": plan.choices, "search": plan.search}
        own = {"folder": str(self.folder), "started": self.started, "worker": self.worker, "attempt": self.attempt}
        own |= {"parent": self.parent, "label": self.label}
        own["init_from"] = plan.model.init_from  # the file that it came to
        own["measure"] = None if self.measure is None else asdict(self.measure)
        secrets = known_in(json.dumps([told, own, dict(environment or {})]))
        return json.dumps({**told, **own, "secrets": secrets})

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        told = json.loads(text)
        remember_secrets(told["secrets"])
        plan = make_plan(told["config"], told["choices"], told["search"], look_outside=False)
        plan = replace(plan, model=replace(plan.model, init_from=told["init_from"]))
        measure = None if told["measure"] is None else EvaluationSpec(**told["measure"])
        own = {key: told[key] for key in ("started", "worker", "attempt", "parent", "label")}
        return cls(plan, Path(told["folder"]), measure=measure, **own)


def main() -> None:
    """The process: reads its job, works, and ends without waiting for TensorFlow's threads."""
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    remember_secrets(find_environment_secrets())
    job = RunSpec.from_json(sys.stdin.buffer.readline().decode())
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)
    if len(process_names(job.plan)) == 1:
        os.environ.pop(TF_CONFIG, None)  # with it a strategy of one process would wait for others
    elif job.plan.evaluator is not None:
        os.environ[TF_CONFIG] = without_evaluator(os.environ[TF_CONFIG])
    if TF_CONFIG in os.environ:
        os.environ[NO_PROXY] = no_proxy_for(os.environ, parse_tf_config(os.environ[TF_CONFIG]).peers)
    # With Ray it is the machine that is gone, and the run goes on elsewhere: it must not hear two of one process.
    patience = 0.0 if job.plan.cluster.name == "ray" else SECONDS_TO_SAVE
    threading.Thread(target=end_with_launcher, args=(os.dup(0), stop, patience), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import_keras()
    finished = False
    try:
        emit = EventWriter(job.events)
        emit("started", name=job.name, pid=os.getpid())
        if job.serves:
            serve_task(job, emit)
        finished = run_worker(job, emit, stop.is_set)
    except OSError:  # not even its events can be written; the launcher finds the same, and says so
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if finished else 1)


def end_with_launcher(pipe: int, stop: threading.Event, patience: float) -> None:
    """Has this process save and end when the launcher is gone, and ends it, too, if it hangs in a collective.

    Args:
        pipe: ends with the launcher.
        stop: asks for the end.
        patience: how long it may take, in seconds; 0 ends it at once.
    """
    while os.read(pipe, 1):
        pass
    print("the launcher is gone; this worker ends", file=sys.stderr, flush=True)
    if patience:
        stop.set()
        time.sleep(patience)
    os._exit(1)


def serve_task(spec: RunSpec, emit: Emit) -> NoReturn:
    """Trains or holds variables as a coordinator says, until that is gone or the launcher ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is lost with it that has to be saved
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "1"
    )  # a log that ends in what was wrong, not in TensorFlow's settings
    task = parse_tf_config(os.environ.get(TF_CONFIG))
    chief = task.peers[0]
    from scaleflow import strategy

    emit("waiting", peers=task.peers, seconds=spec.plan.cluster.start_seconds)
    strategy.serve(assigned_hardware(spec.plan.hardware, os.environ))
    while not is_listening(chief):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    emit("met")
    emit("note", text=f"{spec.name} serves the coordinator at {chief}")
    patience = spec.plan.cluster.stall_seconds or spec.plan.cluster.start_seconds
    has_ended = wait_until_closed(chief, patience)
    why = "the coordinator is gone" if has_ended else f"no answer from the coordinator ({chief}) for {patience:g} s"
    if spec.plan.cluster.name == "kubernetes" and not is_run_finished(
        spec.folder
    ):  # a pod that succeeds is not started again
        emit("end", status="KILLED", error=f"{why}, and the run is not finished")
    elif has_ended:
        emit("note", text=f"{why}; how the run ended is in its record")
        emit("end", status="FINISHED")
    else:
        emit("end", status="FAILED", error=why)
        os._exit(1)
    os._exit(0)


def is_run_finished(folder: Path) -> bool:
    """Whether the coordinator, which is gone, says in the run's folder that it is finished; waits for its last word."""
    deadline = time.monotonic() + SECONDS_FOR_LAST_WORD
    while (end := read_last_end(folder)) is None and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return end is not None and end["status"] == "FINISHED"


def run_worker(spec: RunSpec, emit: Emit, should_stop: Callable[[], bool]) -> bool:
    """Builds, trains and exports; whatever happens, the last event says how it ended.

    Returns:
        False if it was refused or failed.
    """
    with mark_process(spec.folder), user_metrics():
        return train_run(spec, emit, should_stop)


def train_run(spec: RunSpec, emit: Emit, should_stop: Callable[[], bool]) -> bool:
    writing = make_write_lock(spec.folder)
    try:
        if spec.measure is not None:
            evaluate_model(spec.plan, spec.measure, spec.folder, emit)
            emit("end", status="FINISHED")
            return True
        if spec.records:
            acquire_lock(writing)
        if spec.is_resumed or spec.plan.training.on_nan == "rollback":
            emit = DeduplicatingEmitter(spec.events, emit)
        if spec.records and spec.plan.evaluator is not None:
            emit = EvaluationRelay(Path(spec.checkpoints), emit, is_resumed=spec.is_resumed)
        startup_timer = make_startup_timer(spec)
        setup = build_training(spec.plan, emit, startup_timer)
        if spec.plan.evaluator == "here":
            report_ready(spec, setup, 0, emit)
            status = run_evaluator(setup, Path(spec.checkpoints), emit, should_stop, is_chief_gone(spec.plan))
            emit("end", status=status, **({} if status == "FINISHED" else {"error": "stopped"}))
            return True
        worker_sync = make_worker_sync(spec, setup, should_stop)
        session = begin_training(spec, setup, worker_sync, emit, startup_timer)
    except ConfigError as refusal:
        emit("refused", message=str(refusal))
        return False
    except Exception as error:
        traceback.print_exc()
        message = f"{format_failure(error, spec.plan)}; the traceback is in {spec.log}"
        emit("refused", message=message, keep=True, died=is_loss_of_peer(error))
        return False
    report_ready(spec, setup, session.step, emit)
    if spec.plan.debug.placement:
        where = "above" if spec.plan.debug.inline else f"in {spec.log}"
        emit("note", text=f"debug.placement: the device of each operation is {where}, as 'MatMul: (MatMul): /job:...'")
    try:
        train_and_export(spec, setup, session, worker_sync, emit)
    except Exception as error:
        report_failure(spec, setup.explain(error), emit, setup)
        return False
    return True


def is_chief_gone(plan: Plan) -> Callable[[], bool]:
    """Whether an evaluator's chief has not answered for `cluster.start_seconds`."""
    heard = time.monotonic()

    def is_answering() -> bool:
        nonlocal heard
        if plan.chief is None or is_listening(plan.chief):
            heard = time.monotonic()
        return time.monotonic() - heard > plan.cluster.start_seconds

    return is_answering


def make_write_lock(folder: Path) -> FileLock:
    """Held by the process that writes to a run's folder; it goes with the process, however that ends."""
    return FileLock(folder / WRITE_LOCK)


def acquire_lock(writing: FileLock) -> None:
    """Takes the lock, once an earlier process has let go of it."""
    try:
        writing.acquire(timeout=SECONDS_TO_WAIT)
    except Timeout as error:
        folder = Path(writing.lock_file).parent
        raise ConfigError(
            f"resume={folder}: another process has been writing there for a minute; end it first"
        ) from error


class DeduplicatingEmitter:
    """Leaves out the points that were reported before: a run that goes back to a checkpoint takes steps again.

    The values of the test split are at the step of the exported model, which may be one before that of the last time.

    Args:
        path: the run's events.
        emit: takes the others.
    """

    def __init__(self, path: Path, emit: Emit) -> None:
        self._emit = emit
        self._last: dict[str, int] = {}
        self._tested: set[tuple[str, int]] = set()
        for event in EventReader(path).read():
            if event["event"] == "metrics":
                self._note(event["values"], event["step"])

    def __call__(self, event: str, /, **fields: Any) -> None:
        if event == "metrics":
            step = fields["step"]
            new = {key: value for key, value in fields["values"].items() if self._is_new(key, step)}
            self._note(new, step)
            fields["values"] = new  # or none: the launcher hears that it goes on
        self._emit(event, **fields)

    def _note(self, keys: Iterable[str], step: int) -> None:
        self._last.update(dict.fromkeys(keys, step))
        self._tested.update((key, step) for key in keys if key.startswith(TEST))

    def _is_new(self, key: str, step: int) -> bool:
        return (key, step) not in self._tested if key.startswith(TEST) else step > self._last.get(key, -1)


def report_failure(spec: RunSpec, error: Exception, emit: Emit, setup: TrainingSetup) -> None:
    """Tells of a fault; the launcher, which sees all workers, says how the run ended."""
    traceback.print_exc()
    if spec.worker == 0:
        (spec.folder / TRACEBACK).write_text(mask_secrets(traceback.format_exc()))
        emit("artifact", path=str(spec.folder / TRACEBACK))
    import tensorflow as tf

    is_memory = isinstance(error, tf.errors.ResourceExhaustedError)
    text = (
        explain_out_of_memory(str(error), spec.plan, setup.resolved) if is_memory else format_failure(error, spec.plan)
    )
    is_lost = is_loss_of_peer(error)
    if (
        is_lost
        and find_task(spec.plan)
        and (away := find_unreachable(spec.plan, parse_tf_config(os.environ[TF_CONFIG]).peers))
    ):
        text = f"no answer from {away}: {text}"
    emit("fault", error=text, lost_peer=is_lost)


def is_loss_of_peer(error: Exception) -> bool:
    """Whether what came up is that another process is gone, or does not answer."""
    import tensorflow as tf

    return isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.DeadlineExceededError)


def format_failure(error: Exception, plan: Plan) -> str:
    """An error in a line, with the place in the user's own code where it came up."""
    if isinstance(error, bdb.BdbQuit):
        return "the debugger was left" + ("" if plan.debug.inline else "; in a worker it has no terminal: debug=inline")
    if found := re.search(r"\{\{node (\S+)/CheckNumericsV2\}\}", str(error)):
        return f"debug.nan: NaN or Inf came out of the operation {found[1]}; how it came to be is in the log"
    reason = next((line.strip() for line in str(error).splitlines() if not LEADS_TO_REASON.match(line)), "")
    reason = OF_TF_DATA.sub("while data was read: ", reason).partition(" [[{{node")[0].rstrip(":")
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_user_code(f.filename, plan.search)]
    place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return f"{type(error).__name__}: {reason}{place}"


def is_user_code(file: str, folders: Sequence[str]) -> bool:
    """Whether a source file is the user's, rather than ours or a library's."""
    path = Path(file)
    ours = path.is_relative_to(Path(__file__).parents[1]) or "site-packages" in path.parts
    return not ours and any(path.is_relative_to(folder) for folder in folders)


def import_keras() -> None:
    """Imports Keras without what it would import beside itself; for a process that is ours alone."""
    global import_seconds, imported_at
    if "keras" in sys.modules:
        return
    began = time.time()
    hidden = [name for name in NOT_FOR_KERAS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        import keras  # noqa: F401
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        imported_at = time.time()
        import_seconds = imported_at - began


def make_worker_sync(spec: RunSpec, setup: TrainingSetup, should_stop: Callable[[], bool]) -> WorkerSync:
    """Between the workers; a time limit is a reason to stop, too."""
    from scaleflow import training

    limit = spec.plan.checkpoint.max_seconds

    def must_stop() -> bool:
        return should_stop() or (limit is not None and time.time() - spec.started > limit)

    return training.WorkerSync(setup.strategy, count_synchronous_workers(spec.plan), must_stop)


def make_startup_timer(spec: RunSpec) -> StartupTimer:
    """The time since the command began, of which it is known how long the imports took, if they were made in it."""
    startup_timer = StartupTimer(spec.started, **{"import": import_seconds if imported_at > spec.started else 0.0})
    startup_timer.end_part("launch")
    return startup_timer


def begin_training(
    spec: RunSpec, setup: TrainingSetup, worker_sync: WorkerSync, emit: Emit, startup_timer: StartupTimer | None = None
) -> Session:
    """The run at its first step, or where its newest checkpoint was taken.

    Raises:
        ConfigError: if a checkpoint can't be gone on from.
    """
    from scaleflow import checkpoint, training

    options = spec.plan.checkpoint
    keeper = checkpoint.CheckpointManager(options, spec.checkpoints, emit, writes=spec.worker == 0)
    session = training.Session(
        setup.engine,
        spec.plan.training,
        setup.train,
        None if spec.plan.evaluator else setup.validation,
        setup.test,
        emit=emit,
        started=spec.started,
        agree=worker_sync,
        checkpoints=None if options.name == "none" else keeper,
        best=options.sought,
        ends_as_best=options.export == "best",
        callbacks=setup.callbacks,
        any_worker=worker_sync.any,
        tracer=make_tracer(spec, setup, emit),
        startup_timer=startup_timer,
        peak_flops=setup.peak_flops,
        histograms_every=histogram_interval(spec),
        is_drawn_as_read=setup.is_drawn_as_read,
    )
    keeper.check_writable()
    check_shared_checkpoints(spec, keeper, worker_sync)
    if not spec.is_resumed:
        keeper.check_empty()
    else:
        snapshot = keeper.load_newest()
        if not worker_sync.is_same(str(snapshot and snapshot.step)):
            worker_sync.leave()
            raise ConfigError(
                f"checkpoint.folder={spec.checkpoints}: the workers do not find the same checkpoints there; "
                "use a path that all of them see"
            )
        if snapshot is not None:
            session.restore(snapshot)
    return session


def check_shared_checkpoints(spec: RunSpec, manager: CheckpointManager, worker_sync: WorkerSync) -> None:
    """Refuses checkpoints that other machines than the chief's would not find again."""
    if (
        count_synchronous_workers(spec.plan) == 1
        or not find_task(spec.plan)
        or manager.is_shared(worker_sync.from_chief, worker_sync.all)
    ):
        return
    worker_sync.leave()
    raise ConfigError(
        f"checkpoint={spec.plan.checkpoint.name}: the machines do not share {spec.checkpoints}, so the others "
        "could not "
        "go on from what the chief saves there; use checkpoint.folder=PATH that all of them see, or an object store's "
        "(gs://...), or checkpoint=none"
    )


def make_tracer(spec: RunSpec, setup: TrainingSetup, emit: Emit) -> Tracer | None:
    """What traces the steps that the config names, in each worker that trains."""
    options = spec.plan.profiler
    if not options.windows or spec.plan.evaluator == "here":
        return None
    from scaleflow import training
    from scaleflow.profiler.tracer import StepTracer

    name = spec.name.replace(" ", "-")
    told = emit if spec.records else None
    apart = (
        len(process_names(spec.plan)) > 1 and setup.resolved["hardware"] == "cpu"
    )  # a GPU's trace is no child's to take

    def facts() -> dict[str, Any]:
        return {**setup.facts, "memory": training.measure_peaks()}

    return StepTracer(options, spec.folder / PROFILE, name, told, facts, apart)


def histogram_interval(spec: RunSpec) -> int | None:
    """After how many epochs the run's records have the distribution of its weights."""
    tracking = spec.plan.tracking
    return tracking.histograms_every_epochs if tracking.tensorboard and spec.records else None


def report_ready(spec: RunSpec, setup: TrainingSetup, step: int, emit: Emit) -> None:
    """Says `ready`: from here on there is a run, or it goes on at `step`."""
    plan = spec.plan
    resolved = setup.resolved
    params = {**plan.choices, **flatten_to_text(mask_secrets(plan.config))}
    params |= {f"resolved.{key}": str(value) for key, value in resolved.items()}
    params |= {f"resolved.examples.{split}": str(count) for split, count in setup.counts.items()}
    emit(
        "ready",
        name=make_run_name(plan, resolved, spec.label),
        began=int(spec.started * 1000),
        tags=plan.tracking.tags or {},
        params=params,
        steps=resolved["steps"],
        epochs=resolved["epochs"],
        search=list(plan.search),
        **({"parent": spec.parent} if spec.parent else {}),
        **({"resumed": step} if spec.is_resumed else {}),
    )
    if setup.metadata is not None and spec.records and not spec.is_resumed:
        report_metadata(setup.metadata, spec.folder, emit)


def make_run_name(plan: Plan, resolved: Mapping[str, Any], label: str) -> str:
    """The run's name. A label comes before the rest of a made-up one: lists of runs show the first 20 letters."""
    if plan.tracking.run_name:
        return f"{plan.tracking.run_name} {label}".rstrip()
    chosen = plan.choices
    parts = (chosen.get("dataset", "?"), chosen.get("model", "?"), resolved["strategy"], resolved["precision"])
    said = label.split()
    return f"{label} {'-'.join(part for part in parts if part not in said)}".strip()


def flatten_to_text(config: Any) -> dict[str, str]:
    """Leaves by their dotted keys, as text; null as `null`, lists as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flatten(config).items()}


def train_and_export(
    spec: RunSpec, setup: TrainingSetup, session: Session, worker_sync: WorkerSync, emit: Emit
) -> None:
    with user_metrics(session.log_metric):
        result = session.run()
    if isinstance(emit, EvaluationRelay):
        finish_evaluations(emit, session.step, spec.plan.cluster.start_seconds)
    if result.stopped:
        limit = spec.plan.checkpoint.max_seconds
        over = limit is not None and time.time() - spec.started > limit
        why = f"checkpoint.max_seconds={limit:g} are over, " if over else ""
        emit("end", status="KILLED", error=f"{why}stopped at step {result.steps}")
        worker_sync.leave()
        return
    if spec.records:
        evaluated = {"validation": setup.validation, "test": setup.test}
        report_confusion(setup.engine, evaluated, setup.outputs, spec.folder, emit)
    export_model(spec, setup)
    emit("model", path=str(spec.folder / MODEL), step=result.model_step)
    emit("end", status="FINISHED")
    # nobody leaves before the chief is through: a worker that is gone would look like one that died
    worker_sync.leave()


def finish_evaluations(emit: EvaluationRelay, step: int, seconds: float) -> None:
    """Waits for what the evaluator says of the last checkpoint, and tells it that no more will come."""
    if not emit.wait_for(step, seconds):
        emit("note", text=f"the evaluator has not evaluated the checkpoint at step {step} within {seconds:g} s")
    emit.end()


def export_model(spec: RunSpec, setup: TrainingSetup) -> None:
    """Exports the model; every worker takes part, since reading some variables does, and the chief's is kept."""
    if spec.worker == 0:
        export_model_to(spec.folder / MODEL, setup)
        return
    with tempfile.TemporaryDirectory() as folder:
        setup.export(Path(folder))


def export_model_to(folder: Path, setup: TrainingSetup) -> None:
    """Exports the model; raises `RunError` where the files can't be written."""
    import tensorflow as tf

    try:
        setup.export(folder)
    except (OSError, tf.errors.OpError) as error:
        if isinstance(error, tf.errors.ResourceExhaustedError) and "OOM" in str(error):
            raise  # not the disk, but the device's memory
        said = getattr(error, "strerror", None) or str(getattr(error, "message", None) or error)
        raise RunError(f"the model could not be exported to {folder}: {said.splitlines()[0]}") from error


if __name__ == "__main__":
    main()
