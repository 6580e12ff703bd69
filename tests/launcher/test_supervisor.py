"""The launcher with real processes, real signals and a real store."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from scaleflow.config.compose import ComposedConfig
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import MetricsLogged, RunEnded, RunReady, Waiting
from scaleflow.launcher.display import Display
from scaleflow.launcher.launch import discard_folder, launch_run
from scaleflow.launcher.prepare import PreparedRun
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.launcher.processes.supervisor import Supervisor, choose_reason, find_lost
from scaleflow.launcher.processes.worker_process import EndReason
from scaleflow.launcher.recording.monitor import REFUSED, RunMonitor
from scaleflow.runs import EventReader, EventWriter, RunSpec, Task, WorkerProcess
from scaleflow.runs.event_log import append_event
from scaleflow.runs.folder_use import create_folder
from scaleflow.worker.tasks import TrainModel
from tests.conftest import Command
from tests.event_log import events_in
from tests.launcher.test_display import READY, Clock, Terminal
from tests.launcher.test_recorder import FakeTracker
from tests.processes import NEW_STORE

#: It sleeps once in each epoch until there is a file `go` in its folder.
RESTING = "training.callbacks=[{_target_: tests.pace.Rest}]"

#: A run that would go on for hours and takes little of the processor.
LONG = (
    *("dataset=synthetic", "dataset.shape=[16]", "dataset.examples=400", "evaluation=none"),
    *("training.steps_per_loop=2", "training.epochs=100000", RESTING),
)


def slow_down(path: Path, seconds: float) -> str:
    """Returns the override of a run that is slow while a file exists, and creates the file."""
    path.touch()
    return f"training.callbacks=[{{_target_: tests.pace.Pace, path: {path}, seconds: {seconds}}}]"


def wait_for(condition: Callable[[], Any], timeout: float = 240) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


class LongRun:
    """A long run in the background, its output in files so that no pipe fills."""

    def __init__(self, command: Command, *words: str, only: bool = False, **environment: str) -> None:
        """Starts it; with `only`, by these words alone."""
        self.command = command
        self.out = command.folder / "out.txt"
        self.err = command.folder / "err.txt"
        with self.out.open("w") as out, self.err.open("w") as err:
            output = out.fileno(), err.fileno()
            self.launcher = command.start(*(() if only else LONG), *words, output=output, **environment)

    def worker(self) -> psutil.Process:
        (child,) = self.children()
        return child

    def children(self) -> list[psutil.Process]:
        """The run's processes that are alive, the chief first."""
        return processes(next(self.command.folder.glob("outputs/*/*")))

    def has_event(self, name: str) -> bool:
        found = list(self.command.folder.glob("outputs/*/*/events.jsonl"))
        return bool(found) and f'"event": "{name}"' in found[0].read_text().rpartition("\n")[0]

    def until(self, event: str) -> LongRun:
        self.wait_for(lambda: self.has_event(event))
        return self

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Waits for a condition; fails at once if the run ends before."""
        wait_for(lambda: condition() or self.launcher.poll() is not None)
        assert self.launcher.poll() is None, self.err.read_text()

    def end(self, timeout: float = 240) -> int:
        try:
            return self.launcher.wait(timeout)
        finally:
            self.launcher.close()


def processes(folder: Path) -> list[psutil.Process]:
    """Those that have reported themselves and are alive: the chief, then workers, then servers, by their numbers."""
    found = [event for path in sorted(folder.glob("events*.jsonl")) for event in events_in(path)]
    events = [event for event in found if event["event"] == "started"]
    events.sort(key=lambda e: (e["name"] != "coordinator", not e["name"].startswith("worker"), e["name"]))
    return [psutil.Process(event["pid"]) for event in events if psutil.pid_exists(event["pid"])]


def only_run(folder: Path) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("scaleflow").experiment_id])
    return found


def assert_all_points_are_kept(command: Command, run: Any) -> None:
    """The store's last value of each metric is the last one that the worker wrote."""
    last: dict[str, float] = {}
    for event in command.events():
        if event["event"] in ("metrics", "system"):
            last.update(event["values"])
    assert run.data.metrics == pytest.approx(last)
    assert last


@pytest.mark.slow  # test_prepare.py stops one
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_the_run_as_killed(command: Command, number: signal.Signals, code: int) -> None:
    long = LongRun(command).until("epoch")
    worker = long.worker()
    long.launcher.send_signal(number)
    assert long.end() == code
    assert not worker.is_running()
    run = only_run(command.folder)
    assert run.info.status == "KILLED"
    assert run.data.tags["scaleflow.status"] == "KILLED"
    assert_all_points_are_kept(command, run)
    assert "Traceback" not in long.err.read_text()


def test_a_worker_that_is_killed_ends_the_run_as_failed(command: Command) -> None:
    long = LongRun(command).until("epoch")
    long.worker().kill()
    assert long.end() == 1
    run = only_run(command.folder)
    assert run.info.status == "FAILED"
    assert "SIGKILL" in run.data.tags["scaleflow.error"]
    assert "SIGKILL" in long.err.read_text()
    assert "none; with cluster.max_restarts=3 a run restarts lost processes" in long.out.read_text()
    assert_all_points_are_kept(command, run)


def test_a_worker_does_not_outlive_its_launcher(command: Command) -> None:
    long = LongRun(command, "tracking=none").until("epoch")
    worker = long.worker()
    long.launcher.kill()
    long.launcher.wait()
    worker.wait(timeout=60)
    assert command.events()[-1]["status"] == "KILLED"  # it has saved


def test_a_signal_before_there_is_a_run_leaves_none(command: Command) -> None:
    long = LongRun(command)
    wait_for(lambda: list(command.folder.glob("outputs/*/*/worker-0.log")))
    long.launcher.send_signal(signal.SIGTERM)
    assert long.end() == 143
    assert not (command.folder / "mlartifacts").exists()


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output(command: Command) -> None:
    with command.start("training.epochs=60", "tracking=none") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(240) == 0
    assert errors == ""
    assert command.events()[-1]["status"] == "FINISHED"


def test_a_failure_leaves_its_reason_and_traceback(command: Command) -> None:
    data = ("dataset=synthetic", "dataset.kind=regression", "dataset.shape=[4]", "dataset.examples=200")
    ended = command("optimizer=sgd", "optimizer.learning_rate=1e30", *data)
    assert ended.returncode == 1
    run = only_run(command.folder)
    assert run.info.status == "FAILED"
    assert "not finite at step" in run.data.tags["scaleflow.error"]
    assert "not finite at step" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "Traceback" in (command.run_folder() / "traceback.txt").read_text()
    kept = command.folder / "mlartifacts" / "scaleflow" / run.info.run_id / "artifacts" / "traceback.txt"
    assert kept.is_file()


def test_inline_runs_everything_in_one_process(command: Command) -> None:
    own = command.folder / "own" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("_target_: own_model.build\n_partial_: true\n")
    (command.folder / "own_model.py").write_text(
        "import os\nfrom scaleflow.model import mlp\n\n\n"
        "def build(inputs, outputs):\n    print('built in', os.getpid(), '.')\n"
        "    return mlp.build(inputs, outputs, 8)\n"
    )
    process = command.start("--config-dir", "own", "model=mine", "debug=inline", "training.max_steps=2")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert f"built in {process.pid} ." in out
    assert only_run(command.folder).info.status == "FINISHED"


class Refusing(FakeTracker):
    """A store that refuses at one call, once it may."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.may = threading.Event()
        self.may.set()

        def refuse(call: tuple[Any, ...]) -> None:
            if call[0] == word:
                assert self.may.wait(60)
                raise ConfigError(f"the store refuses to {word}")

        self.fails = refuse


class Training(Task):
    """Builds, reports that, and takes steps until it has to stop."""

    trains = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.each_step: Callable[[], object] = lambda: None

    def run(self, process: WorkerProcess) -> None:
        self.calls.append("build")
        process.report_ready(READY)
        self.calls.append("train")
        for step in range(1, 12_001):
            if process.should_stop():
                break
            time.sleep(0.005)
            process.emit(MetricsLogged(step, {"train/loss": 1.0}))
            self.each_step()
        process.emit(RunEnded("KILLED", "stopped"))


@pytest.fixture
def inline(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Training, Refusing], tuple[int, str, Path]]:
    """Runs a training in this process with a store; gives the exit code, why there is no run, and the run's folder."""

    def run(training: Training, tracker: Refusing) -> tuple[int, str, Path]:
        monkeypatch.setattr("scaleflow.launcher.launch.make_tracker", lambda *a, **k: tracker)
        folder = tmp_path / "run"
        folder.mkdir()
        spec = RunSpec(plan("debug=inline", "tracking=none"), folder, 0.0, training)
        outcome = launch_run(PreparedRun(spec, ComposedConfig({})))
        return outcome.code, outcome.error, folder

    return run


@pytest.mark.parametrize(("word", "calls"), [("connect", []), ("start", ["build"])])
def test_inline_does_not_train_what_the_store_refuses(
    word: str, calls: list[str], inline: Callable[..., tuple[int, str, Path]]
) -> None:
    training = Training()
    code, error, folder = inline(training, Refusing(word))
    assert (code, error, training.calls) == (REFUSED, f"the store refuses to {word}", calls)
    assert not (folder / "events.jsonl").exists()


def test_an_inline_run_stays_although_a_slow_store_refuses_it(
    inline: Callable[..., tuple[int, str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scaleflow.launcher.processes.local_host.STORE_SECONDS", 0.0)
    training, tracker = Training(), Refusing("start")
    tracker.may.clear()
    training.each_step = tracker.may.set
    code, error, folder = inline(training, tracker)
    assert code == REFUSED
    assert re.match(r"the store refuses to start\nthe training until step \d+ is in .*run; ", error)
    assert isinstance(list(EventReader(folder / "events.jsonl").read())[-1], RunEnded)
    assert (folder / "config.yaml").exists()


class Lost:
    """A process that has ended, and for which reason."""

    is_lost, was_ended = True, False

    def __init__(self, why: str, is_reported: bool = False, is_lost_peer: bool = False, has_log: bool = True) -> None:
        self.find_reason = lambda: EndReason(why, is_reported, is_lost_peer, has_log)


@pytest.mark.parametrize(
    ("reasons", "why", "would_come_again"),
    [
        ([("peer is away", True, True)], "peer is away", False),
        ([("peer is away", True, True), ("killed", False)], "killed", False),
        ([("peer is away", True, True), ("no such file", True)], "no such file", True),
        ([("no such file", True), ("killed", False)], "killed", False),
        ([("peer is away", True, True), ("killed", False), ("refused", True, False, False)], "refused", True),
    ],
)
def test_the_reason_is_what_the_others_follow_from(reasons: list[Any], why: str, would_come_again: bool) -> None:
    chosen = choose_reason([Lost(*reason) for reason in reasons])  # type: ignore[misc]
    assert (chosen.why, chosen.would_come_again) == (why, would_come_again)


def test_who_was_ended_did_not_die() -> None:
    """Workers that end with a stalled coordinator are not started again by themselves."""
    ended, lost = Lost("ended"), Lost("killed")
    ended.was_ended = True
    assert find_lost([ended, lost]) == [lost]  # type: ignore[list-item]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("scaleflow.launcher.recording.monitor.time", clock)
    monkeypatch.setattr("scaleflow.launcher.processes.supervisor.time", clock)
    return clock


def monitor_of(plan: Plan, folder: Path) -> RunMonitor:
    recorder = SimpleNamespace(refusal=None, wake=lambda: None, outage="")
    return RunMonitor(RunSpec(plan, folder, 0.0, TrainModel()), recorder, Display(io.StringIO()), StopRequest())  # type: ignore[arg-type]


def test_an_outage_of_the_store_is_shown_once_and_so_is_its_end(plan: Callable[..., Plan], tmp_path: Path) -> None:
    """Also for jobs of a sweep that run side by side: the second one tells of it once the first one has ended."""
    uri = "http://user:word@127.0.0.1:1"
    jobs = [monitor_of(plan(f"tracking.uri={uri}", "tracking.offline=true"), tmp_path) for _ in range(2)]
    shown = [job.display._stream for job in jobs]

    def follow(*outages: str) -> list[str]:
        for job, outage in zip(jobs, outages, strict=True):
            job.recorder.outage = outage
            for _ in range(2):
                job.follow()
        texts = [each.getvalue() for each in shown]  # type: ignore[attr-defined]
        for each in shown:
            each.truncate(0)
        return [text.strip("\0") for text in texts]

    away = "note: the tracking server http://127.0.0.1:1 does not answer: recording locally; training goes on\n"
    back = "note: the tracking server http://127.0.0.1:1 answers again, and gets what was recorded locally\n"
    assert follow("", "") == ["", ""]
    assert follow("does not answer", "does not answer") == [away, ""]
    assert follow("does not answer", "") == ["", ""]
    assert follow("", "") == [back, ""]
    assert follow("does not answer", "") == [away, ""]
    append_event(jobs[0].spec.events, RunEnded("FINISHED"))
    jobs[0].finish(None)
    assert follow("", "does not answer") == ["", away]
    assert follow("", "") == ["", back]


WAITING = Waiting(8, vain="the TPU does not answer")


@pytest.mark.parametrize("late", [3600, 0, -3600])
def test_progress_counts_from_when_it_is_heard_whatever_the_chiefs_clock_says(
    late: int, plan: Callable[..., Plan], tmp_path: Path, clock: Clock
) -> None:
    monitor = monitor_of(plan("strategy=multi_worker", "cluster.stall_seconds=5", "tracking=none"), tmp_path)
    write = EventWriter(monitor.spec.events)
    for event in (READY, WAITING):
        write(replace(event, time=int(clock.now - late) * 1000))
    monitor.follow()
    clock.now += 4
    assert (monitor.find_stall(0.0), monitor.find_futile_wait()) == (None, None)
    clock.now += 2
    assert monitor.find_stall(0.0) == EndReason("no progress for cluster.stall_seconds=5, at step 0")
    assert monitor.find_futile_wait() is None
    clock.now += 3
    assert monitor.find_futile_wait() == EndReason("the TPU does not answer", is_reported=True)


class Process:
    """A worker that does nothing until it is killed; waiting for it takes a second each time."""

    is_lost, was_ended = False, False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.killed_at: float | None = None

    @property
    def is_alive(self) -> bool:
        return self.killed_at is None

    def wait(self, seconds: float) -> None:
        self._clock.now += 1

    def kill(self) -> None:
        self.killed_at = self._clock.now


@pytest.mark.parametrize(
    ("words", "why", "seconds"),
    [
        (["cluster.stall_seconds=5"], "no progress for cluster.stall_seconds=5, at step 0", [6, 6]),
        (["cluster.stall_seconds=null"], "the TPU does not answer", [8, None]),
    ],
)
def test_a_stall_ends_all_processes_and_a_futile_wait_the_chief(
    words: list[str],
    why: str,
    seconds: list[float | None],
    plan: Callable[..., Plan],
    tmp_path: Path,
    clock: Clock,
) -> None:
    monitor = monitor_of(plan("strategy=multi_worker", "tracking=none", *words), tmp_path)
    write = EventWriter(monitor.spec.events)
    write(READY)
    write(WAITING)
    processes, began = [Process(clock), Process(clock)], clock.now
    supervisor = Supervisor(monitor, None)  # type: ignore[arg-type]
    supervisor._watch(processes)  # type: ignore[arg-type]
    assert [process.killed_at and process.killed_at - began for process in processes] == seconds
    assert supervisor._reason is not None
    assert supervisor._reason.why == why


OWN_LOAD = """
from scaleflow.dataset.digits import Digits


class Mine(Digits):
    def load(self, split):
        {line}
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("raise KeyError('missing')", ["KeyError: 'missing'", "own_data.py, line 7, in load", "worker-0.log"]),
        ("breakpoint()", ["debug=inline"]),
        ("raise SystemExit('I quit')", ["worker 0 ended", "I quit"]),
    ],
)
def test_a_fault_in_ones_own_code_is_told_with_its_place(command: Command, line: str, words: list[str]) -> None:
    own = command.folder / "own"
    (own / "dataset").mkdir(parents=True)
    (own / "dataset" / "mine.yaml").write_text("_target_: own_data.Mine\n")
    (own / "own_data.py").write_text(OWN_LOAD.format(line=line))
    ended = command("--config-dir", "own", "dataset=mine")
    assert ended.returncode in (1, 2)
    assert len(ended.stderr.splitlines()) == 1
    for word in words:
        assert word in ended.stderr


def test_tracking_none_keeps_everything_in_the_folder(command: Command) -> None:
    ended = command("tracking=none", "training.max_steps=2", "evaluation=none")
    assert ended.returncode == 0, ended.stderr
    assert sorted(p.name for p in command.folder.iterdir()) == ["outputs"]
    assert (command.run_folder() / "model" / "saved_model").is_dir()


@pytest.mark.slow
def test_a_sweep_runs_each_job_and_one_that_fails_stops_no_other(command: Command) -> None:
    ended = command("-m", "training.epochs=1", "optimizer=sgd", "optimizer.learning_rate=0.1,-1,0.01", "tracking=none")
    assert ended.returncode == 1
    assert len(re.findall(r"^#\d+ FINISHED in", ended.stdout, re.M)) == 2
    assert "optimizer.learning_rate=-1: expected a number, above 0.0" in ended.stderr


@pytest.mark.slow
def test_two_commands_at_once_share_a_new_store(command: Command) -> None:
    words = ("training.epochs=1", "dataset.limit=200", "evaluation=none")
    processes = [command.start(*words, f"seed={n}", **NEW_STORE) for n in range(2)]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{command.folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("scaleflow").experiment_id])
    assert [r.info.status for r in runs] == ["FINISHED"] * 2
    assert {r.data.params["seed"] for r in runs} == {"0", "1"}


def test_a_refusal_closes_the_progress_bar(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that holds a run already is found while the bar waits for TensorFlow."""
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", shown)
    EventWriter(tmp_path / "events.jsonl")(RunReady("a-run"))
    run = PreparedRun(RunSpec(plan("tracking=none"), tmp_path, 0.0, TrainModel()), ComposedConfig({}))
    with pytest.raises(ConfigError, match="contains a run already"):
        launch_run(run)
    assert shown.getvalue().count("\x1b[?25l") == shown.getvalue().count("\x1b[?25h") == 1


def test_a_command_that_does_not_record_takes_away_only_its_own(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines may share a folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    create_folder(folder)
    theirs = ["config.yaml", "events.jsonl", "record.json", "worker-0.log"]
    for name in ("events-worker-1.jsonl", "worker-1.log", *theirs):
        (folder / name).touch()
    spec = RunSpec(plan("strategy=multi_worker", "tracking=none"), folder, 0.0, TrainModel(), worker=1)
    discard_folder(spec)
    assert sorted(path.name for path in folder.iterdir()) == theirs
    discard_folder(replace(spec, worker=0))
    assert not folder.exists()


def test_files_of_other_machines_processes_stay_in_the_folder(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    for name in ("events.jsonl", "events-worker-1.jsonl", "worker-0.log", "worker-1.log", "config.yaml"):
        (tmp_path / name).touch()
    discard_folder(
        RunSpec(plan("strategy=multi_worker", "cluster=tf_config", "tracking=none"), tmp_path, 0.0, TrainModel())
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-worker-1.jsonl", "worker-1.log"]


@pytest.mark.parametrize(
    ("words", "restarts", "advice"),
    [
        ((), 0, "none; with cluster.max_restarts=3 a run restarts lost processes from the last checkpoint"),
        (("checkpoint=none",), 0, "none; with cluster.max_restarts=3 a run restarts lost processes from the beginning"),
        (("cluster.max_restarts=2",), 2, "2, which is the limit; a larger cluster.max_restarts allows more"),
        (("strategy=multi_worker", "cluster=tf_config", "checkpoint=none"), 0, ""),
    ],
)
def test_a_lost_process_that_is_not_restarted_is_explained(
    plan: Any, tmp_path: Path, words: tuple[str, ...], restarts: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"worker": ["host0:2222", "host1:2222"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    words = ("strategy=one_device", *words)
    monitor = SimpleNamespace(spec=RunSpec(plan("tracking=none", *words), tmp_path, 0.0, TrainModel()), stop=None)
    supervisor = Supervisor(monitor, SimpleNamespace())  # type: ignore[arg-type]
    supervisor._restarts = restarts
    assert supervisor._advise_restarts() == advice
