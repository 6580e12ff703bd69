"""System metrics: what is measured, under which names, and when nothing is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.cluster.tf_config import EXAMPLE
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import ProcessStarted, RunEnded, RunReady, SystemMetrics
from scaleflow.launcher.recording import system_metrics
from scaleflow.launcher.recording.system_metrics import (
    MAX_NAMED,
    MachineMetrics,
    Measuring,
    list_gpu_readers,
    make_machine_metrics,
    record_system_metrics,
    summarize,
)
from scaleflow.runs import EventReader, EventWriter, RunSpec
from scaleflow.worker.tasks import TrainModel
from tests.launcher.test_supervisor import wait_for

OF_HOST = {
    "system/cpu_utilization_percentage",
    "system/system_memory_usage_megabytes",
    "system/system_memory_usage_percentage",
    "system/disk_usage_percentage",
    "system/disk_available_megabytes",
    "system/network_receive_megabytes",
    "system/network_transmit_megabytes",
    "system/run_peak_memory_megabytes",
}
OF_PROCESS = ("cpu_utilization_percentage", "memory_usage_megabytes", "threads")


@dataclass
class Handle:
    spec: Any
    pid: int


@pytest.fixture
def spec(plan: Callable[..., Plan], tmp_path: Path) -> RunSpec:
    return RunSpec(plan(), tmp_path, 0.0, TrainModel())


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "list_gpu_readers", list)


def test_the_machine_and_each_process_are_measured_by_name(tmp_path: Path, busy: subprocess.Popen[bytes]) -> None:
    """One that is gone is left out, and one that was started again is measured as the new one."""
    chief = Handle(SimpleNamespace(file_name="worker-0"), os.getpid())
    other = Handle(SimpleNamespace(file_name="worker-1"), busy.pid)
    machine = MachineMetrics(tmp_path, [chief, other])
    wait_for(lambda: machine.measure()["system/worker-1/cpu_utilization_percentage"] > 5)
    values = machine.measure()
    assert values.keys() == OF_HOST | {f"system/worker-{n}/{key}" for n in (0, 1) for key in OF_PROCESS}
    assert 5 < values["system/worker-0/memory_usage_megabytes"] < 20_000
    assert 0 < values["system/system_memory_usage_percentage"] <= 100
    busy.kill()
    busy.wait()
    assert not any(key.startswith("system/worker-1/") for key in machine.measure())
    other.pid = os.getpid()
    assert "system/worker-1/memory_usage_megabytes" in machine.measure()


#: Takes 200 MB, and has two forks that share them.
SHARING = """
import os, sys
kept = bytes(range(256)) * 800_000
pids = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        sys.stdin.read()
        os._exit(0)
    pids.append(pid)
print(*pids, flush=True)
sys.stdin.read()
"""


def test_the_peak_counts_a_page_that_processes_share_once_and_stays(tmp_path: Path) -> None:
    name, key = SimpleNamespace(file_name="worker-0"), "system/run_peak_memory_megabytes"
    before = MachineMetrics(tmp_path, []).measure()[key]
    with subprocess.Popen([sys.executable, "-c", SHARING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        machine = MachineMetrics(tmp_path, [Handle(name, int(pid)) for pid in parent.stdout.readline().split()])
        peak = machine.measure()[key]
        parent.communicate()
    assert 200 < peak - before < 300
    assert machine.measure()[key] >= peak


class FakeNvml:
    """A driver with two GPUs, the second of which tells only its memory."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=2_000_000_000, total=8_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if handle:
            raise self.NVMLError
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError
        return 120_500


def test_a_gpu_tells_what_it_can() -> None:
    memory = {"memory_usage_megabytes": 2000.0, "memory_usage_percentage": 25.0}
    assert system_metrics.read_gpu(FakeNvml(), 0) == {
        **memory,
        "utilization_percentage": 40.0,
        "power_usage_watts": 120.5,
    }
    assert system_metrics.read_gpu(FakeNvml(), 1) == memory


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list_gpu_readers() == []


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "START_SECONDS", 0.0)
    monkeypatch.setattr(system_metrics, "SAMPLE_SECONDS", 0.05)


def of_this_process(spec: RunSpec) -> Measuring:
    return make_machine_metrics(spec, [Handle(spec, os.getpid())])


def measured(spec: RunSpec) -> list[int]:
    return [event.step for event in EventReader(spec.events).read() if isinstance(event, SystemMetrics)]


def test_measurements_are_counted_from_when_there_is_a_run_and_on_when_it_goes_on(spec: RunSpec, often: None) -> None:
    write = EventWriter(spec.events)
    with record_system_metrics(spec, of_this_process(spec)):
        threading.Event().wait(0.3)
        assert measured(spec) == []
        write(RunReady("run"))
        wait_for(lambda: len(measured(spec)) > 1)
        write(RunEnded("KILLED"))
        threading.Event().wait(0.3)
        assert isinstance(list(EventReader(spec.events).read())[-1], RunEnded)
    first = measured(spec)
    assert first == list(range(1, len(first) + 1))
    with record_system_metrics(replace(spec, attempt=1), of_this_process(spec)):
        write(RunReady("run", resumed=1))
        wait_for(lambda: len(measured(spec)) > len(first) + 1)
    steps = measured(spec)
    assert steps == list(range(1, len(steps) + 1))
    assert "system metrics" not in {thread.name for thread in threading.enumerate()}


def test_a_launcher_of_each_machine_measures_it_by_its_name_and_the_chiefs_has_all(
    plan: Callable[..., Plan], tmp_path: Path, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["chief.example", "other.example"]
    monkeypatch.setattr("socket.gethostname", lambda: names.pop(0))
    monkeypatch.setenv("TF_CONFIG", EXAMPLE)
    chief = RunSpec(plan("cluster=tf_config", "strategy=multi_worker"), tmp_path, 0.0, TrainModel())
    other = replace(chief, worker=1)
    before = EventWriter(other.events)
    before(SystemMetrics(1, {"system/gone.example/disk_usage_percentage": 1.0}))  # of an earlier attempt
    with record_system_metrics(chief, of_this_process(chief)):
        wait_for(lambda: len(names) == 1)
        with record_system_metrics(other, of_this_process(other)):
            before(ProcessStarted(other.name, os.getpid()))
            EventWriter(chief.events)(RunReady("run"))

            def seen() -> set[str]:
                samples = [e for e in EventReader(chief.events).read() if isinstance(e, SystemMetrics)]
                return {key for sample in samples for key in sample.values}

            wait_for(lambda: "system/worker-1/threads" in seen())
    of_machine = {key.removeprefix("system/") for key in OF_HOST}
    of_hosts = {f"system/{host}.example/{key}" for host in ("chief", "other") for key in of_machine}
    of_processes = {f"system/worker-{n}/{key}" for n in (0, 1) for key in OF_PROCESS}
    assert seen() == OF_HOST | of_hosts | of_processes
    assert measured(other)[:2] == [1, 2]


@pytest.mark.parametrize("words", [("tracking.system_metrics=false",), ("tracking=none",)])
def test_nothing_is_measured_where_it_is_not_wanted(
    plan: Callable[..., Plan], tmp_path: Path, words: tuple[str, ...]
) -> None:
    spec = RunSpec(plan(*words), tmp_path, 0.0, TrainModel())
    with record_system_metrics(spec, make_machine_metrics(spec, [])):
        assert "system metrics" not in {thread.name for thread in threading.enumerate()}
    with record_system_metrics(RunSpec(plan(), tmp_path, 0.0, TrainModel(), worker=1), make_machine_metrics(spec, [])):
        assert "system metrics" not in {thread.name for thread in threading.enumerate()}


def test_few_processes_and_machines_keep_their_names() -> None:
    values = {"system/cpu_utilization_percentage": 5.0}
    values |= {f"system/worker-{number}/threads": 1.0 for number in range(MAX_NAMED)}
    values |= {f"system/host{number}/threads": 1.0 for number in range(MAX_NAMED)}
    assert summarize(values) == values


def test_many_processes_and_machines_are_summarized() -> None:
    count = MAX_NAMED + 1
    values = {"system/cpu_utilization_percentage": 5.0, "system/coordinator/threads": 0.0}
    values |= {f"system/worker-{number}/threads": float(number) for number in range(1, count)}
    values |= {f"system/host{number}/gpu_0_power_usage_watts": 2.0 * number for number in range(count)}
    assert summarize(values) == {
        "system/cpu_utilization_percentage": 5.0,
        "system/processes/threads_min": 0.0,
        "system/processes/threads_median": 32.0,
        "system/processes/threads_max": 64.0,
        "system/machines/gpu_0_power_usage_watts_min": 0.0,
        "system/machines/gpu_0_power_usage_watts_median": 64.0,
        "system/machines/gpu_0_power_usage_watts_max": 128.0,
    }


def test_many_machines_do_not_take_the_names_of_few_processes() -> None:
    values = {"system/worker-1/threads": 3.0, **{f"system/host{n}/threads": 1.0 for n in range(MAX_NAMED + 1)}}
    assert summarize(values)["system/worker-1/threads"] == 3.0
