"""Measures system metrics: this machine and the run's processes on it, in the launcher, during training.

The names are MLflow's, so that its UI shows them as system metrics. Values of a process contain the process's name. All
values go through `events.jsonl`. If a run has several launchers, each measures its machine, under the machine's name.
The chief's launcher adds the values that the others write to the run's folder, if all machines see that folder. For
more than `MAX_NAMED` machines or processes, values are summarized.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from scaleflow.interfaces.events import Event, ProcessStarted, RunEnded, RunReady, RunRefused, SystemMetrics
from scaleflow.runs import EventReader, RunSpec
from scaleflow.runs.event_log import append_event, read_last_event

if TYPE_CHECKING:
    import psutil

#: The same interval as MLflow's.
SAMPLE_SECONDS = 10.0

#: Seconds before the measurement begins: values during the start of the processes are useless.
START_SECONDS = 1.0

MEGABYTE = 1e6

#: From this size in bytes, the pages of a process are not checked one by one.
LARGE = 8e9

#: Maximum number of machines, and of processes, with their own metrics. More would send thousands of metrics.
MAX_NAMED = 64

#: A process in the name of a metric. Any other name is a machine.
PROCESS_NAME = re.compile(r"(?:worker|server)-\d+|coordinator")

Values = dict[str, float]


class MeasuredProcess(Protocol):
    """A process of the run."""

    @property
    def spec(self) -> RunSpec: ...

    @property
    def pid(self) -> int: ...


#: Begins to measure. Returns a function that returns the current values.
Measuring = Callable[[], Callable[[], Values]]


def make_machine_metrics(spec: RunSpec, processes: Sequence[MeasuredProcess]) -> Measuring:
    """Returns a function that begins to measure this machine and the run's processes on it."""
    if spec.plan.task is None:
        return lambda: MachineMetrics(spec.folder, processes).measure
    return lambda: SharedRunMetrics(spec, processes).measure


@contextlib.contextmanager
def record_system_metrics(spec: RunSpec, measuring: Measuring) -> Iterator[None]:
    """Measures during the block, if `tracking.system_metrics` is set."""
    is_wanted = spec.plan.tracking.system_metrics and spec.plan.tracking.name != "none"
    if not is_wanted or not (spec.records or spec.plan.task):
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=append_samples, args=(spec, measuring, over), name="system metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def append_samples(spec: RunSpec, measuring: Measuring, over: threading.Event) -> None:
    """Appends an event every ten seconds. Drops events that cannot be written."""
    if over.wait(START_SECONDS):
        return
    measure = measuring()
    step: int | None = None
    while not over.wait(SAMPLE_SECONDS):
        values = summarize(measure())
        if step is None:
            step = next_sample(spec.events, RunReady if spec.records else ProcessStarted)  # a run begins with its chief
        if step is None or isinstance(read_last_event(spec.events), RunEnded | RunRefused):
            continue
        with contextlib.suppress(OSError):  # the worker reports a full disk
            append_event(spec.events, SystemMetrics(step, values))
            step += 1


def summarize(values: Values) -> Values:
    """Summarizes the values of more than `MAX_NAMED` machines, or processes, by minimum, median and maximum.

    For many processes, `system/worker-17/threads` and so on become `system/processes/threads_min`, `_median` and
    `_max`. For machines the names begin with `system/machines/`. All other values stay unchanged.
    """
    named: dict[str, dict[str, Values]] = {"processes": {}, "machines": {}}  # by metric, then by machine or process
    summary: Values = {}
    for key, value in values.items():
        _, *owners, name = key.split("/")
        for owner in owners:
            kind = "processes" if PROCESS_NAME.fullmatch(owner) else "machines"
            named[kind].setdefault(name, {})[owner] = value
        if not owners:
            summary[key] = value
    for kind, metrics in named.items():
        kind_owners: set[str] = set()
        for by_owner in metrics.values():
            kind_owners.update(by_owner)
        is_large = len(kind_owners) > MAX_NAMED
        for name, by_owner in metrics.items():
            if is_large:
                owner_values = list(by_owner.values())
                summary[f"system/{kind}/{name}_min"] = min(owner_values)
                summary[f"system/{kind}/{name}_median"] = median(owner_values)
                summary[f"system/{kind}/{name}_max"] = max(owner_values)
            else:
                for owner, value in by_owner.items():
                    summary[f"system/{owner}/{name}"] = value
    return summary


def next_sample(events: Path, first: type[Event]) -> int | None:
    """Returns the number of the next measurement; None before the event `first`."""
    step = 1
    is_ready = False
    for event in EventReader(events).read():
        is_ready = is_ready or isinstance(event, first)
        if isinstance(event, SystemMetrics):
            step = event.step + 1
    return step if is_ready else None


def name_by_host(values: Values, spec: RunSpec, host: str) -> Values:
    """Adds the machine's name to the names of values. Values of the process keep their names with its own name."""
    process_prefix = f"system/{spec.name.replace(' ', '-')}/"
    named: Values = {}
    for key, value in values.items():
        is_of_process = key.startswith(process_prefix)
        named[key if is_of_process else key.replace("system/", f"system/{host}/", 1)] = value
    return named


class SharedRunMetrics:
    """Measures a machine whose launcher is one of several, under the machine's name.

    The chief's launcher also records its values under MLflow's plain names, and adds the values that the others write
    to the run's folder from now on.
    """

    def __init__(self, spec: RunSpec, processes: Sequence[MeasuredProcess]) -> None:
        self._spec = spec
        self._machine = MachineMetrics(spec.folder, processes)
        self._host = socket.gethostname()
        self._others = {path: EventReader(path, path.stat().st_size) for path in self._reports()}

    def measure(self) -> Values:
        values = self._machine.measure()
        named = name_by_host(values, self._spec, self._host)
        return {**values, **named, **self._read_latest()} if self._spec.records else named

    def _read_latest(self) -> Values:
        """Returns the newest value of each metric that the others have written since the last call."""
        values: Values = {}
        for path in self._reports():
            for event in self._others.setdefault(path, EventReader(path)).read():
                if isinstance(event, SystemMetrics):
                    values |= event.values
        return values

    def _reports(self) -> list[Path]:
        return self._spec.files.list_process_events()


class MachineMetrics:
    """Measures a machine, the disk of the run's folder, and the run's processes on the machine.

    The processes' ids change when they restart.
    """

    def __init__(self, folder: Path, processes: Sequence[MeasuredProcess]) -> None:
        import psutil

        self._psutil = psutil
        self._folder = folder
        self._processes = processes
        self._known: dict[int, psutil.Process] = {}
        self._peak = 0
        network = psutil.net_io_counters()
        self._received = network.bytes_recv
        self._sent = network.bytes_sent
        self._devices = list_gpu_readers()
        psutil.cpu_percent()  # each call covers the time since the previous call, so the first returns no value
        self.measure()

    def measure(self) -> Values:
        """Returns the values under MLflow's names, in percent, megabytes (10^6 bytes) and watts."""
        values = self._of_host()
        for process in self._processes:
            with contextlib.suppress(self._psutil.Error):
                name = process.spec.file_name
                values |= {f"system/{name}/{key}": value for key, value in self._of_process(process.pid).items()}
        self._peak = max(self._peak, self._sum_memory())
        values["system/run_peak_memory_megabytes"] = self._peak / MEGABYTE
        for index, device in enumerate(self._devices):
            values |= {f"system/gpu_{index}_{key}": value for key, value in device().items()}
        return values

    def _sum_memory(self) -> int:
        """Returns the memory of the run's processes here, of its launcher and of its fork server, in bytes.

        Pages that processes share are counted once, except for large processes: checking their pages takes long.
        """
        me = self._psutil.Process()
        total = 0
        processes = {me}
        for started in self._processes:
            with contextlib.suppress(self._psutil.Error):
                worker = self._psutil.Process(started.pid)
                processes |= {worker, worker.parent() or me}
        for process in processes:
            with contextlib.suppress(self._psutil.Error):
                size = process.memory_info().rss
                total += size if size > LARGE else getattr(process.memory_full_info(), "pss", size)
        return total

    def _of_host(self) -> Values:
        psutil = self._psutil
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(str(self._folder))
        network = psutil.net_io_counters()
        return {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system/system_memory_usage_percentage": memory.percent,
            "system/disk_usage_percentage": disk.percent,
            "system/disk_available_megabytes": disk.free / MEGABYTE,
            "system/network_receive_megabytes": (network.bytes_recv - self._received) / MEGABYTE,
            "system/network_transmit_megabytes": (network.bytes_sent - self._sent) / MEGABYTE,
        }

    def _of_process(self, pid: int) -> Values:
        """Returns the values of a process. CPU utilization is in percent of one core, and unknown at the first call."""
        is_new = pid not in self._known
        process = self._known.setdefault(pid, self._psutil.Process(pid))
        with process.oneshot():
            share = process.cpu_percent()
            values = {
                "memory_usage_megabytes": process.memory_info().rss / MEGABYTE,
                "threads": float(process.num_threads()),
            }
        return values if is_new else {"cpu_utilization_percentage": share, **values}


def list_gpu_readers() -> list[Callable[[], Values]]:
    """Returns a function per NVIDIA GPU that reads its values; empty without a driver or nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no driver, or it does not answer: this does not end a run
        return []
    return [lambda handle=handle: read_gpu(pynvml, handle) for handle in handles]  # type: ignore[misc]


def read_gpu(nvml: Any, handle: Any) -> Values:
    """Reads the values that a GPU reports."""
    values: Values = {}
    with contextlib.suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        values["memory_usage_megabytes"] = memory.used / MEGABYTE
        values["memory_usage_percentage"] = 100 * memory.used / memory.total
    with contextlib.suppress(nvml.NVMLError):
        values["utilization_percentage"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(nvml.NVMLError):
        values["power_usage_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return values
