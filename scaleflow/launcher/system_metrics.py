"""System metrics: what this machine and each worker's process on it use, measured by the launcher as the run goes on.

The names are MLflow's, so that its page shows them as system metrics; what is a worker's own has the worker's name in
it. Workers know nothing of it, and the values go the way of all others, through `events.jsonl`. Where several
launchers are one run, each measures its machine, by the machine's name, and the chief's adds what the others report
into the run's folder, if that is one that all of them see.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scaleflow.cluster import find_task
from scaleflow.events import EventReader, EventWriter
from scaleflow.worker.main import RunSpec

if TYPE_CHECKING:
    import psutil

#: As often as MLflow's own.
SECONDS_BETWEEN_SAMPLES = 10.0

#: The first are worth nothing while all processes begin.
SECONDS_TO_BEGIN = 1.0

#: Bytes of the last event, if it is the end.
LONGEST_END = 1 << 16

MEGABYTE = 1e6

Values = dict[str, float]


class MeasuredProcess(Protocol):
    """A process of the run."""

    @property
    def job(self) -> RunSpec: ...

    @property
    def pid(self) -> int: ...


#: What gives the values of now, once it has begun to look.
Measuring = Callable[[], Callable[[], Values]]


def make_machine_metrics(spec: RunSpec, processes: Sequence[MeasuredProcess]) -> Measuring:
    """This machine, and the run's processes on it."""
    if find_task(spec.plan) is None:
        return lambda: MachineMetrics(spec.folder, processes).measure
    return lambda: SharedRunMetrics(spec, processes).measure


@contextlib.contextmanager
def record_system_metrics(spec: RunSpec, measuring: Measuring) -> Iterator[None]:
    """Measures as long as the block lasts, where that is wanted."""
    is_wanted = spec.plan.tracking.system_metrics and spec.plan.tracking.name != "none"
    if not is_wanted or not (spec.records or find_task(spec.plan)):
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
    """Appends an event every ten seconds; what can't be measured or written is left out."""
    if over.wait(SECONDS_TO_BEGIN):
        return
    measure = measuring()
    step: int | None = None
    while not over.wait(SECONDS_BETWEEN_SAMPLES):
        values = measure()
        if step is None:
            step = next_sample(spec.events, "ready" if spec.records else "started")  # a run is the chief's
        if step is None or has_ended(spec.events):
            continue
        with contextlib.suppress(OSError):  # a full disk is the worker's to tell of
            write = EventWriter(spec.events)
            write("system", step=step, values=values)
            write.close()
            step += 1


def next_sample(events: Path, begin: str) -> int | None:
    """The number of the next measurement; None before the event behind which there may be one."""
    step, is_ready = 1, False
    for event in EventReader(events).read():
        is_ready = is_ready or event["event"] == begin
        if event["event"] == "system":
            step = event["step"] + 1
    return step if is_ready else None


def has_ended(events: Path) -> bool:
    """Whether the last event is how the run ended: the processes are only taken down, and nothing comes behind it."""
    with events.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_END))
        lines = file.read().splitlines()
    return bool(lines) and lines[-1].startswith((b'{"event": "end"', b'{"event": "refused"'))


def name_by_host(values: Values, spec: RunSpec, host: str) -> Values:
    """Values by the machine's name, but for those of the process, which have its own."""
    own = f"system/{spec.name.replace(' ', '-')}/"
    return {
        key if key.startswith(own) else key.replace("system/", f"system/{host}/", 1): value
        for key, value in values.items()
    }


class SharedRunMetrics:
    """What is measured of a machine whose launcher is one of several, by the machine's name.

    The chief's are the run's, too, and with them comes what the others report into its folder from now on.
    """

    def __init__(self, spec: RunSpec, processes: Sequence[MeasuredProcess]) -> None:
        self._job = spec
        self._machine = MachineMetrics(spec.folder, processes)
        self._host = socket.gethostname()
        self._others = {path: EventReader(path, path.stat().st_size) for path in self._reports()}

    def measure(self) -> Values:
        own = self._machine.measure()
        named = name_by_host(own, self._job, self._host)
        return {**own, **named, **self._read_latest()} if self._job.records else named

    def _read_latest(self) -> Values:
        """The last that has come of each value since this was asked before."""
        values: Values = {}
        for path in self._reports():
            for event in self._others.setdefault(path, EventReader(path)).read():
                if event["event"] == "system":
                    values |= event["values"]
        return values

    def _reports(self) -> list[Path]:
        return sorted(self._job.folder.glob("events-*.jsonl"))


class MachineMetrics:
    """What is measured of a machine and the run's processes on it.

    Args:
        folder: the run's, for the disk that it is on.
        processes: handles with the number that the process has at that time, and its name.
    """

    def __init__(self, folder: Path, processes: Sequence[MeasuredProcess]) -> None:
        import psutil

        self._psutil = psutil
        self._folder = folder
        self._processes = processes
        self._known: dict[int, psutil.Process] = {}
        network = psutil.net_io_counters()
        self._received, self._sent = network.bytes_recv, network.bytes_sent
        self._devices = list_gpu_readers()
        psutil.cpu_percent()  # the first gives nothing: it is over the time since the one before
        self.measure()

    def measure(self) -> Values:
        """Values by MLflow's names: percentages, and megabytes of 10^6 bytes."""
        values = self._of_host()
        for process in self._processes:
            with contextlib.suppress(self._psutil.Error):
                name = process.job.name.replace(" ", "-")
                values |= {f"system/{name}/{key}": value for key, value in self._of_process(process.pid).items()}
        for index, device in enumerate(self._devices):
            values |= {f"system/gpu_{index}_{key}": value for key, value in device().items()}
        return values

    def _of_host(self) -> Values:
        psutil = self._psutil
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(str(self._folder)), psutil.net_io_counters()
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
        """Of one process; its share of the processor is in percent of one core."""
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
    """A function to each NVIDIA GPU that gives its values; none without a driver or without nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no driver, or one that does not answer: nothing that a run has to end for
        return []
    return [lambda handle=handle: read_gpu(pynvml, handle) for handle in handles]  # type: ignore[misc]


def read_gpu(nvml: Any, handle: Any) -> Values:
    """One GPU's values; what it does not tell is left out."""
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
