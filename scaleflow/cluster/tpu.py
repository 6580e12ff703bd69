"""Finds a TPU and checks that it can be reached, without TensorFlow.

An address is `grpc://HOST:PORT` (or several, separated by commas), `local` for a TPU attached to this machine, or a
name that TensorFlow resolves with Google Cloud's metadata server and API.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scaleflow.cluster.network import explain_no_answer
from scaleflow.errors import ConfigError

LOCAL = "local"
GRPC = "grpc://"
PORT = 8470  # the TPU worker's port, as in TensorFlow's client

#: Environment variables for a TPU, by precedence. TensorFlow's client reads the first two in the same way.
VARIABLES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "COLAB_TPU_ADDR", "TPU_WORKER_HOSTNAMES")

#: Device files of an attached TPU: of the driver for older TPUs, and of the one for newer TPUs.
DEVICE_FILES = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")
ROOT = Path("/")

#: The TPU library in Google's images. Elsewhere the Python package `libtpu` contains it.
LIBRARIES = ("/lib/libtpu.so", "/usr/lib/libtpu.so")


@dataclass(frozen=True)
class TpuAddress:
    """The address of a TPU."""

    address: str  # `grpc://HOST:PORT`, `local` or a name
    origin: str  # the source of the address: `hardware.tpu`, an environment variable, or a device file

    def __str__(self) -> str:
        return f"{self.origin}={self.address}"


def find_tpu(requested: str | None) -> TpuAddress | None:
    """Returns the TPU from `hardware.tpu`, the environment or the device files, in this order; None without a TPU."""
    if requested is not None:
        return TpuAddress(check_tpu_address(requested), "hardware.tpu")
    for variable in VARIABLES:
        value = os.environ.get(variable, "").strip()
        if value:
            return TpuAddress(address_from_variable(variable, value), variable)
    files = device_files()
    return TpuAddress(LOCAL, files[0]) if files else None


def check_tpu_address(address: str) -> str:
    """Returns the address. Raises ConfigError if it is empty, or if TensorFlow would misread it as a name."""
    host, colon, port = address.removeprefix(GRPC).partition(":")
    if not address.startswith(GRPC) and colon and port.isdigit():
        raise ConfigError(f"hardware.tpu={address}: would be read as a name; for an address write {GRPC}{address}")
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
            f"TPU_WORKER_HOSTNAMES={value[:60]}: names {len(hosts)} hosts without their ports; set "
            f"hardware.tpu={GRPC}HOST:PORT,... or hardware.tpu to the name of the slice, or use hardware=cpu"
        )
    return LOCAL


def device_files() -> list[str]:
    """Returns the device files that an attached TPU has."""
    paths: list[str] = []
    for pattern in DEVICE_FILES:
        paths += map(str, sorted(ROOT.glob(pattern)))
    return paths


def format_device_files(between: str) -> str:
    return between.join(f"/{pattern.replace('[0-9]', '')}" for pattern in DEVICE_FILES)


def is_sure(tpu: TpuAddress) -> bool:
    """Returns whether `strategy=auto` may use this TPU although the user did not select it.

    Other hardware has device files with the same names, so a local TPU also needs the TPU library.
    """
    if tpu.address != LOCAL:
        return True
    if not device_files():
        return False
    library = os.environ.get("TPU_LIBRARY_PATH")
    libraries = [library] if library else LIBRARIES
    return any(Path(file).exists() for file in libraries) or find_spec("libtpu") is not None


def explain_no_tpu() -> str:
    """Returns the error message for a missing TPU. It lists the places that were searched."""
    return (
        f"there is no TPU: looked for hardware.tpu, the environment variables {', '.join(VARIABLES)} and the device "
        f"files {format_device_files(' and ')}; set hardware.tpu={GRPC}HOST:{PORT}, or use strategy=mirrored"
    )


def explain_unreachable(place: TpuAddress) -> str | None:
    """Returns why a TPU cannot be reached, or None. This takes seconds; TensorFlow would wait without a limit."""
    if place.address == LOCAL:
        if device_files():
            return None
        return f"no TPU is attached to this machine: there is no {format_device_files(' and no ')}"
    if not place.address.startswith(GRPC):
        return explain_unknown_name()
    for endpoint in place.address.split(","):
        reason = explain_no_answer(endpoint.removeprefix(GRPC), PORT)
        if reason:
            return (
                f"nothing answers at {endpoint} ({reason}); set hardware.tpu to a TPU that runs, or use "
                "strategy=mirrored"
            )
    return None


def explain_unknown_name() -> str | None:
    """Returns why a TPU's name cannot be resolved, or None if Google Cloud's metadata server answers."""
    server = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP") or "metadata.google.internal"
    reason = explain_no_answer(server, 80)
    if reason is None:
        return None
    return (
        f"is a name, but {server}, which resolves the names of TPUs on Google Cloud, does not answer ({reason}); on "
        f"other machines set the address, hardware.tpu={GRPC}HOST:{PORT}"
    )
