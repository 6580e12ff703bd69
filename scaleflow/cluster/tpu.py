"""Where the TPU is, as far as that can be told without TensorFlow.

An address is `grpc://HOST:PORT` (several with commas), `local` for one that is attached to this machine,
or the name of one that Google Cloud's metadata server and API are asked for.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scaleflow.errors import ConfigError

LOCAL = "local"
GRPC = "grpc://"
PORT = 8470  # where a TPU worker listens, as TensorFlow's client takes it

#: In the order in which they are looked at: the first two as TensorFlow's own client does.
VARIABLES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "COLAB_TPU_ADDR", "TPU_WORKER_HOSTNAMES")

#: What a TPU that is attached to the machine shows itself as, with the driver of older and of newer ones.
DEVICE_FILES = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")
ROOT = Path("/")

#: TPU's library as Google's images have it; elsewhere the Python package `libtpu` brings it.
LIBRARIES = ("/lib/libtpu.so", "/usr/lib/libtpu.so")

PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class TpuAddress:
    """Where a TPU is, and what says so.

    Attributes:
        address: `grpc://HOST:PORT`, `local` or a name.
        origin: `hardware.tpu`, an environment variable, or a device file.
    """

    address: str
    origin: str

    def __str__(self) -> str:
        return f"{self.origin}={self.address}"


def find_tpu(asked: str | None) -> TpuAddress | None:
    """The TPU that is asked for, else the one that the environment or the device files tell of."""
    if asked is not None:
        return TpuAddress(check_tpu_address(asked), "hardware.tpu")
    for variable in VARIABLES:
        if value := os.environ.get(variable, "").strip():
            return TpuAddress(address_from_variable(variable, value), variable)
    files = device_files()
    return TpuAddress(LOCAL, files[0]) if files else None


def check_tpu_address(address: str) -> str:
    """An address as it was typed, unless TensorFlow would take it for something else."""
    host, colon, port = address.removeprefix(GRPC).partition(":")
    if not address.startswith(GRPC) and colon and port.isdigit():
        raise ConfigError(f"hardware.tpu={address}: would be taken for a name; write {GRPC}{address}")
    if not address.strip() or (address.startswith(GRPC) and not host):
        raise ConfigError(f"hardware.tpu={address}: expected grpc://HOST:{PORT}, local, a name, or null")
    return address


def address_from_variable(variable: str, value: str) -> str:
    if variable == "COLAB_TPU_ADDR":
        return value if value.startswith(GRPC) else GRPC + value
    if variable != "TPU_WORKER_HOSTNAMES":
        return value
    hosts = [host for host in value.split(",") if host.strip()]
    if len(hosts) > 1:
        raise ConfigError(
            f"TPU_WORKER_HOSTNAMES={value[:60]}: names {len(hosts)} hosts; say how they are reached, with "
            f"hardware.tpu={GRPC}HOST:PORT,... or the slice's name, or use hardware=cpu"
        )
    return LOCAL


def device_files() -> list[str]:
    return [str(path) for pattern in DEVICE_FILES for path in sorted(ROOT.glob(pattern))]


def format_device_files(between: str) -> str:
    """The device files in words."""
    return between.join(f"/{pattern.replace('[0-9]', '')}" for pattern in DEVICE_FILES)


def is_sure(place: TpuAddress) -> bool:
    """Whether a TPU may be taken that nobody has asked for.

    Device files of these names belong to other hardware as well: they count where TPU's library is there too.
    """
    if place.address != LOCAL:
        return True
    return bool(device_files()) and has_library(os.environ)


def has_library(environment: Mapping[str, str]) -> bool:
    named = environment.get("TPU_LIBRARY_PATH")
    return any(Path(path).exists() for path in ((named,) if named else LIBRARIES)) or find_spec("libtpu") is not None


def explain_no_tpu() -> str:
    """What was looked for, where nothing was found."""
    return (
        f"there is no TPU: looked for hardware.tpu, the environment variables {', '.join(VARIABLES)} and the device "
        f"files {format_device_files(' and ')}; give hardware.tpu={GRPC}HOST:{PORT}, or use strategy=mirrored"
    )


def explain_unreachable(place: TpuAddress) -> str | None:
    """Why a TPU can't be reached, found within seconds, where TensorFlow would wait for ever."""
    if place.address == LOCAL:
        found = device_files()
        return None if found else f"no TPU is attached to this machine: there is no {format_device_files(' and no ')}"
    if not place.address.startswith(GRPC):
        return explain_unknown_name()
    for endpoint in place.address.split(","):
        host, _, port = endpoint.removeprefix(GRPC).partition(":")
        reason = explain_no_answer(host, int(port) if port.isdigit() else PORT)
        if reason:
            return f"nothing answers at {endpoint} ({reason}); name a TPU that is up, or use strategy=mirrored"
    return None


def explain_unknown_name() -> str | None:
    """Why a name can't be looked up, if Google Cloud's metadata server is not there."""
    server = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP") or "metadata.google.internal"
    host, _, port = server.partition(":")
    reason = explain_no_answer(host, int(port) if port.isdigit() else 80)
    if reason is None:
        return None
    return (
        f"is a name, and {server}, where Google Cloud looks names up, does not answer ({reason}); "
        f"elsewhere give the address, hardware.tpu={GRPC}HOST:{PORT}"
    )


def explain_no_answer(host: str, port: int) -> str | None:
    """Why nothing answers at an address, or None where something does."""
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return None
