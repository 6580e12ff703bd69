"""The worker's life.

A process of its own, `python -m scaleflow.worker`, reads one line of JSON from its standard input,
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from scaleflow.assemble import Built, build
from scaleflow.cluster import TF_CONFIG, answers, in_step, names, parse, workers
from scaleflow.errors import Refusal
from scaleflow.events import Writer
from scaleflow.interfaces import Emit, Plan
from scaleflow.masking import masked
from scaleflow.plan import make_plan

if TYPE_CHECKING:
    pass

EVENTS = "events.jsonl"
TRACEBACK = "traceback.txt"
MODEL = "model"

#: How often a process that serves a coordinator looks whether that is there.
SECONDS_BETWEEN_LOOKS = 1.0

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
        report_failure(job, built.explain(error), emit)
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


def import_keras() -> None:
    """Imports Keras without what it would import beside itself; for a process that is ours alone."""
    hidden = [name for name in NOT_FOR_KERAS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        import keras  # noqa: F401
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


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
