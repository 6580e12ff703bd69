"""What a launcher costs with hundreds of workers: the real launcher, with fake workers that only write events.

    python -m benchmarks.fleet                    # 8, 64 and 512 workers, one table; about four minutes
    python -m benchmarks.fleet --workers 8 16     # other numbers
    python -m benchmarks fleet                    # the targets

The host, the fork server, the supervisor, the monitor, the recorder with MLflow and an SQLite store, and TF_CONFIG are
scaleflow's own. The workers (`fleet_worker.py`) are small processes. The rule that one machine runs at most 64 workers
is one of configs, and is left out. Each run has a launcher process of its own:

    finish   every worker writes the same number of events, and ends: CPU, memory, delay
    kill     the last worker is killed in mid-run
    stop     the launcher gets SIGTERM in mid-run
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from benchmarks.fleet_worker import WORK
from benchmarks.measure import Benchmark, Results, Row, WrongResultError, environment, row, run, say, temporary_folder
from scaleflow.config.compose import compose_config, resolve_config
from scaleflow.config.plan import parse_plan
from scaleflow.interfaces import Plan, Point, Tracking
from scaleflow.interfaces.events import Event, MetricsLogged, ProcessStarted, RunEnded, RunReady
from scaleflow.launcher.display import Display
from scaleflow.launcher.launch import finish_run
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.launcher.processes.local_host import LocalHost
from scaleflow.launcher.processes.server_start import start_fork_server
from scaleflow.launcher.processes.stop import catch_stop_signals
from scaleflow.launcher.processes.supervisor import Supervisor
from scaleflow.launcher.processes.worker_process import EndReason, RunProcess
from scaleflow.launcher.recording.monitor import RunMonitor
from scaleflow.launcher.recording.recorder import Recorder
from scaleflow.launcher.recording.store_transfer import EventTransfer
from scaleflow.runs import EventReader, RunFolder, RunSpec
from scaleflow.tracking.store import MlflowTracker
from scaleflow.worker.tasks import TrainModel

Kind = Literal["finish", "kill", "stop"]

WORKERS = (8, 64, 512)
EVENTS = 100
SECONDS = 20.0

#: The limit of one run, in seconds.
TIMEOUT = 150.0

#: The step at which a worker is killed, or the launcher is told to stop.
FAULT_STEP = 20

#: The targets at 512 workers: CPU per event against that at 8, and memory in MiB.
MAX_CPU_RATIO = 1.5
MAX_MEMORY = 300.0

WORDS = ("strategy=multi_worker", "cluster.workers=2", "hardware=cpu", "dataset=synthetic")

#: The name of a run's store.
STORE = "mlflow.db"

HEAD = (
    *("workers", "events", "CPU of the start, ms a worker", "CPU, us an event", "CPU, % of a core, while training"),
    *("memory, MiB", "event to store: median, s", "p95, s", "dead worker noticed, s", "all stopped, s"),
)

Figures = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS, help="numbers of workers, at least 2")
    parser.add_argument("--events", type=int, default=EVENTS, help="metric events of each worker")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in which a worker writes them")
    parser.add_argument("--drive", choices=get_args(Kind), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.drive:
        print(json.dumps(Drive(options.drive, options.workers[0], options.events, options.seconds).run(Path.cwd())))
        return 0
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    with temporary_folder() as folder:
        for workers in options.workers:
            figures = measure(folder, workers, options.events, options.seconds)
            print(f"| {' | '.join(format_figures(workers, figures))} |", flush=True)
    return 0


def format_figures(workers: int, figures: Figures) -> list[str]:
    return [
        *(f"{workers:,}", f"{figures['events']:,.0f}", f"{figures['start cpu'] / workers * 1e3:.2f}"),
        *(f"{figures['cpu an event'] * 1e6:,.0f}", f"{figures['cpu share'] * 100:.1f}", f"{figures['memory']:.0f}"),
        *(f"{figures['delay']:.2f}", f"{figures['delay p95']:.2f}", f"{figures['noticed']:.2f}"),
        f"{figures['stopped']:.2f}",
    ]


def benchmark() -> Benchmark:
    """Rows of 512 workers against 8: the CPU per event of any worker, and the CPU in all; and the memory.

    The memory is that of the run of 512 workers whose CPU is measured.
    """
    few, _, many = WORKERS
    unused: dict[str, Figures] = {}

    def run_many(name: str, other: str, folder: Path) -> Figures:
        if name not in unused:
            unused[other] = run_fleet(folder, "finish", many, EVENTS, SECONDS)
            return unused[other]
        return unused.pop(name)

    def rows(results: Results) -> list[Row]:
        (ours, theirs), memory = ([results[f"{count} workers"] for count in (many, few)], results["memory"])
        of_chief = [[cpu * 1e6 for cpu in cpus] for cpus in (ours, theirs)]
        per_event = [[cpu / count for cpu in cpus] for cpus, count in zip(of_chief, (many, few), strict=True)]
        against, limit = f"{few} workers", [MAX_MEMORY] * len(memory)
        return [
            row(f"launcher of {many} workers, CPU per event", against, *per_event, "us", at_most=MAX_CPU_RATIO),
            row(
                f"launcher of {many} workers, CPU per event of the chief",
                against,
                *of_chief,
                "us",
                at_most=MAX_CPU_RATIO,
            ),
            row(f"launcher of {many} workers, memory", "the limit", memory, limit, "MiB", at_most=1.0),
        ]

    return Benchmark(
        {
            f"{few} workers": lambda folder: run_fleet(folder, "finish", few, EVENTS, SECONDS)["cpu an event"] * few,
            f"{many} workers": lambda folder: run_many("cpu", "memory", folder)["cpu an event"] * many,
            "memory": lambda folder: run_many("memory", "cpu", folder)["memory"],
        },
        rows,
    )


def measure(folder: Path, workers: int, events: int = EVENTS, seconds: float = SECONDS) -> Figures:
    """Runs all three kinds with a number of workers; returns what `Drive.run` does for each."""
    figures: Figures = {}
    for kind in ("kill", "stop", "finish"):
        figures |= run_fleet(folder, kind, workers, events, seconds)  # type: ignore[arg-type]
    return figures


def run_fleet(folder: Path, kind: Kind, workers: int, events: int, seconds: float) -> Figures:
    """Runs a launcher in a process of its own, in `folder/KIND-WORKERS`, and returns what `Drive.run` does.

    Raises:
        WrongResultError: if the run did not end as it should, the store lacks an event, or a process is left.
    """
    place = folder / f"{kind}-{workers}-{time.monotonic_ns()}"
    place.mkdir()
    make_store(folder)
    shutil.copy(folder / STORE, place)
    say(f"  {kind} {workers}")
    words = ["--drive", kind, "--workers", str(workers), "--events", str(events), "--seconds", str(seconds)]
    command = [sys.executable, "-m", "benchmarks.fleet", *words]
    variables = environment(place) | {WORK: json.dumps([events, seconds / events])}
    variables.pop(SERVER_ENV, None)  # its workers would train
    try:
        done = subprocess.run(
            command, cwd=place, env=variables, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as late:
        raise WrongResultError(f"{kind} of {workers} workers did not end within {TIMEOUT:g} s") from late
    if done.returncode:
        raise WrongResultError(f"the launcher of {workers} workers failed: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    check_end(place, kind, workers, events)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def make_store(folder: Path) -> None:
    """Makes the empty store that each run gets a copy of, since MLflow needs seconds for it."""
    if not (folder / STORE).exists():
        variable = f"sqlite:///{folder / STORE}"
        code = f"from benchmarks.fleet import *; MlflowTracker(Tracking(uri={variable!r})).connect()"
        run(["-c", code], folder)


def check_end(place: Path, kind: Kind, workers: int, events: int) -> None:
    """Checks how the run ended, that the store has all metrics of the chief, and that no process is left."""
    files = RunFolder(place / "run")
    reported = list(EventReader(files.events).read())
    points = {(name, each.step) for each in reported if isinstance(each, MetricsLogged) for name in each.values}
    expected = {"finish": "FINISHED", "kill": "FAILED", "stop": "KILLED"}[kind]
    last = reported[-1]
    if not isinstance(last, RunEnded) or last.status != expected:
        raise WrongResultError(f"the run ended with {last}, expected {expected}")
    if kind == "finish" and len(points) != 2 * events:
        raise WrongResultError(f"the chief wrote {len(points)} points, expected {2 * events}")
    with closing(sqlite3.connect(place / STORE)) as store:
        stored = set(store.execute("SELECT key, step FROM metrics WHERE key LIKE 'train/%'"))
        statuses = store.execute("SELECT status FROM runs").fetchall()
    if stored != points or statuses != [(expected,)]:
        raise WrongResultError(f"the store has {len(stored)} of {len(points)} points, and the runs {statuses}")
    paths = [files.events, *files.list_process_events()]
    started = [each for path in paths for each in EventReader(path).read() if isinstance(each, ProcessStarted)]
    if len(started) != workers:
        raise WrongResultError(f"{len(started)} of {workers} workers started")
    if left := [each.name for each in started if is_fake_worker(each.pid)]:
        raise WrongResultError(f"{', '.join(left)} outlived the launcher")


def is_fake_worker(pid: int) -> bool:
    """Whether this process id belongs to a fake worker that runs."""
    import psutil

    try:
        return "benchmarks.fleet_worker" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


class TimedTracker(MlflowTracker):
    """Notes the seconds from the time of each metric's event until the store has it."""

    def __init__(self, options: Tracking) -> None:
        super().__init__(options)
        self.delays: list[float] = []

    def log_metrics(self, points: Sequence[Point]) -> None:
        super().log_metrics(points)
        now = time.time()
        self.delays += [now - point.time / 1000 for point in points if point.key == "train/loss"]


class TimedHost(LocalHost):
    """Notes its processes, and when the launcher looks for the reason of an end, and when all processes are gone."""

    def __init__(self, server: str) -> None:
        super().__init__(server)
        self.processes: Sequence[RunProcess] = ()
        self.noticed_at = 0.0
        self.gone_at = 0.0

    @contextmanager
    def start(self, spec: RunSpec) -> Iterator[tuple[RunSpec, Sequence[RunProcess]]]:
        with super().start(spec) as (spec, self.processes):
            yield spec, self.processes
        self.gone_at = time.monotonic()

    def find_reason(self, processes: Sequence[RunProcess]) -> EndReason:
        self.noticed_at = time.monotonic()
        return super().find_reason(processes)


class Drive:
    """A launcher, in this process, with fake workers. Makes a fault at `FAULT_STEP` unless its kind is `finish`."""

    def __init__(self, kind: Kind, workers: int, events: int, seconds: float) -> None:
        self._kind = kind
        self._workers = workers
        self._events = events
        self._seconds = seconds
        self._host: TimedHost
        self._fault_at = 0.0
        self._cpu_at: dict[type[Event], tuple[float, float]] = {}  # (CPU, wall time) in seconds

    def run(self, folder: Path) -> Figures:
        """Runs it in `folder/run`, with the store that MLflow's variable names.

        Returns for `finish`:
            events: all that the workers wrote.
            start cpu: CPU seconds of this process until all workers had started.
            cpu an event, cpu share: its CPU while they wrote, divided by `events`, and by the seconds.
            memory: its peak memory, in MiB.
            delay, delay p95: seconds from a metric's event until the store has it.

        For `kill`, `noticed`, and for `stop`, `stopped`, both in seconds.
        """
        plan = make_plan(self._workers)
        tracker = TimedTracker(plan.tracking)
        (folder / "run").mkdir()
        with (
            (folder / "display.txt").open("w") as output,
            start_fork_server(module="benchmarks.fleet_worker") as server,
        ):
            spec = RunSpec(plan, folder / "run", time.time(), TrainModel(), server=server)
            self._host = TimedHost(server)
            with catch_stop_signals() as stop:
                recorder = Recorder(EventTransfer(tracker, spec.events))
                monitor = RunMonitor(spec, recorder, Display(output), stop, self._watch)
                tracker.connect()  # importing MLflow is not the workers'
                began = time.process_time()
                Supervisor(monitor, self._host).run()
                finish_run(monitor)
        return self._collect(tracker, spec, began)

    def _watch(self, event: Event) -> None:
        self._cpu_at.setdefault(type(event), (time.process_time(), time.monotonic()))
        if not isinstance(event, MetricsLogged) or event.step < FAULT_STEP or self._fault_at or self._kind == "finish":
            return
        self._fault_at = time.monotonic()
        if self._kind == "kill":
            os.kill(self._host.processes[-1].pid, signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _collect(self, tracker: TimedTracker, spec: RunSpec, began: float) -> Figures:
        if self._kind == "kill":
            return {"noticed": self._host.noticed_at - self._fault_at}
        if self._kind == "stop":
            return {"stopped": self._host.gone_at - self._fault_at}
        (ready, ready_at), (ended, ended_at) = self._cpu_at[RunReady], self._cpu_at[RunEnded]
        paths = [spec.events, *spec.files.list_process_events()]
        events = sum(path.read_bytes().count(b'"event": "metrics"') for path in paths)
        return {
            "events": events,
            "start cpu": ready - began,
            "cpu an event": (ended - ready) / events,
            "cpu share": (ended - ready) / (ended_at - ready_at),
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "delay": statistics.median(tracker.delays),
            "delay p95": statistics.quantiles(tracker.delays, n=20)[-1],
        }


def make_plan(workers: int) -> Plan:
    """Returns the plan of a run with any number of workers on this machine."""
    composed = compose_config(WORDS)
    plan = parse_plan(resolve_config(composed.config), composed.choices)
    tracking = replace(plan.tracking, uri=os.environ["MLFLOW_TRACKING_URI"])
    return replace(plan, cluster=replace(plan.cluster, workers=workers), tracking=tracking)


if __name__ == "__main__":
    sys.exit(main())
