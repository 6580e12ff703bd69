"""The device that is checked: an NVIDIA GPU, or logical CPUs to try the checks themselves."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.measure import ROOT
from scaleflow.cluster.gpus import CUDA_DEVICES, query_nvidia_smi, visible_gpus
from scaleflow.runs.provenance.machine import count_cores

#: Memory of each logical GPU in MiB, at most: enough for the small models of the checks, and for what cuBLAS takes.
LOGICAL_MB = 4096

SAMPLE_SECONDS = 0.2
PROBE_SECONDS = 120

PACKAGES = ("scaleflow", "tensorflow", "keras", "mlflow", "numpy", "xprof", "nvidia-ml-py")
SMI_FIELDS = ("index", "uuid", "name", "memory.total", "driver_version")


@dataclass(frozen=True)
class Device:
    """What runs compute on.

    Attributes:
        kind: `gpu`, or `cpu` to try the checks.
        names: the GPUs as CUDA_VISIBLE_DEVICES names them; empty for CPUs.
        count: how many GPUs, or logical CPUs.
        memory_mb: of the smallest GPU, in MiB; 0 if it is not known.
    """

    kind: Literal["gpu", "cpu"]
    names: Sequence[str]
    count: int
    memory_mb: int = 0

    @property
    def limit_mb(self) -> int:
        """Memory limit of a logical GPU, in MiB: four of them leave half of the GPU free."""
        return min(LOGICAL_MB, self.memory_mb // 8) if self.memory_mb else LOGICAL_MB

    def words(self, logical: int = 1, limit_mb: int | None = None) -> list[str]:
        """Returns the overrides of `hardware`: a GPU divided into `logical` devices, or as many logical CPUs."""
        if self.kind == "cpu":
            return ["hardware=cpu", f"hardware.logical_devices={logical}"]
        if logical == 1 and limit_mb is None:
            return ["hardware=gpu"]
        divided = ["hardware=gpu", "hardware.memory_growth=false", f"hardware.logical_devices={logical}"]
        return [*divided, f"hardware.memory_limit_mb={limit_mb or self.limit_mb}"]

    def environment(self, count: int = 1) -> dict[str, str]:
        """Returns the variables that show a process the first `count` GPUs."""
        if self.kind != "gpu":
            return {}
        return {CUDA_DEVICES: ",".join(self.names[:count]), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as nvidia-smi counts


def find_device(cpus: int) -> Device | None:
    """Returns this machine's GPUs, or `cpus` logical CPUs if that is not 0; None if there is no GPU."""
    if cpus:
        return Device("cpu", (), cpus)
    names = visible_gpus()
    totals = [to_megabytes(row["memory.total"]) for row in list_gpus(names)]
    return Device("gpu", tuple(names), len(names), min(filter(None, totals), default=0)) if names else None


def list_gpus(names: Sequence[str]) -> list[dict[str, str]]:
    """Returns what nvidia-smi says of the GPUs that have one of these indices or UUIDs; nothing if it fails."""
    try:
        rows = [dict(zip(SMI_FIELDS, row, strict=True)) for row in query_nvidia_smi(*SMI_FIELDS)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return [row for row in rows if is_named(row["index"], row["uuid"], names)]


def is_named(index: str, uuid: str, names: Sequence[str]) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES, which may shorten a UUID, names a GPU."""
    return any(name.strip() == index or (len(name) > 4 and uuid.startswith(name.strip())) for name in names)


def to_megabytes(text: str) -> int:
    """Returns a number of nvidia-smi's; 0 for `[N/A]`."""
    return int(float(text)) if text.replace(".", "", 1).isdigit() else 0


def find_obstacle() -> str | None:
    """Returns why TensorFlow cannot use the GPUs that nvidia-smi lists, None if it can."""
    command = [sys.executable, "-m", "scaleflow.features.doctor.tensorflow_probe"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PROBE_SECONDS, env=environment
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, LookupError, ValueError) as error:
        return f"TensorFlow does not start ({type(error).__name__}): see scaleflow doctor"
    if answer["kind"] != "GPU":
        return (
            "nvidia-smi lists a GPU, and TensorFlow finds none: install CUDA with pip install '.[gpu]'; "
            "scaleflow doctor says what is missing"
        )
    fault = answer["computes"]["float32"]  # a GPU may lack other dtypes
    return None if fault is None else f"the GPU does not compute in float32: {fault}"


def describe_machine(device: Device | None) -> dict[str, Any]:
    """Returns what the report says about the machine: GPUs, driver, processor, versions."""
    gpus = list_gpus(device.names) if device and device.kind == "gpu" else []
    return {
        "gpus": [f"{gpu['name']}, {gpu['memory.total']} MiB" for gpu in gpus],
        "driver": next((gpu["driver_version"] for gpu in gpus), None),
        "logical CPUs in place of GPUs": device.count if device and device.kind == "cpu" else 0,
        "processor": f"{platform.machine()}, {count_cores()} cores",
        "system": platform.platform(),
        "versions": list_versions(),
    }


def list_versions() -> dict[str, str]:
    """Returns the versions of Python, of the main packages, and of NVIDIA's libraries that are installed with pip."""
    found = {"python": platform.python_version()}
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    found |= {name: installed[name] for name in PACKAGES if name in installed}
    return found | {name: version for name, version in sorted(installed.items()) if name.startswith("nvidia-cu")}


@contextlib.contextmanager
def sample_memory(device: Device) -> Iterator[list[int]]:
    """Yields a list that grows by the memory in use on the first GPU, in MiB, until the block ends; the first value is
    from before. It stays empty if nvidia-smi does not report it, as on a part of a GPU (MIG).
    """
    samples: list[int] = []
    over = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            for index, uuid, used in query_nvidia_smi("index", "uuid", "memory.used"):
                if is_named(index, uuid, device.names[:1]):
                    samples.append(int(float(used)))

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            read()

    read()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def join_environment(*parts: Mapping[str, str] | None) -> dict[str, str]:
    return {key: value for part in parts for key, value in (part or {}).items()}
