"""The digest of everything that a Python interpreter reads at its start. Commands with one digest share a warm server.

It is computed before anything else is imported, so this module imports little.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

#: Prefixes of the variables that Python, TensorFlow, Keras, MLflow and their dependencies read at import.
#: `tests/warm/test_environment.py` compares them with those that are read.
IMPORT_PREFIXES = (
    *("ABSL_", "ARROW_", "AZURE_LOG", "CI", "CUDA_", "DATABRICKS_", "DO_NOT_TRACK", "EAGER_IMPORT", "GCS_"),
    *("GFORTRAN_", "GOMP_", "GOTO_", "GRPC_", "HDF5_", "HOME", "JAX_", "JE_ARROW_", "JOBLIB_", "KERAS_"),
    *("KMP_", "LANG", "LC_", "LD_", "LOKY_", "LSB_JOBID", "MALLOC_", "MATPLOTLIBRC", "MKL_"),
    *("MLFLOW_CONFIGURE", "MLFLOW_DISABLE", "MLFLOW_LOGGING", "MPLCONFIG", "NPY_", "NUMPY_", "NVIDIA_", "OMP_"),
    *("OPENBLAS_", "OPENSSL_", "OTEL_", "PANDAS_", "PBS_JOBID", "PILLOW_", "PROTOCOL_BUFFERS_", "PYDANTIC_"),
    *("PYTHON", "SCIPY_", "SKLEARN_", "SLURM_JOB_ID", "SQLITE_", "SSL", "TF_", "TORCH_", "TQDM_", "WRAPT_"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XLA_"),
)

#: Variables with such a prefix that may differ between commands: they are read later, or libraries set them.
READ_LATER = (
    *("CUDA_VISIBLE_DEVICES", "HDF5_PLUGIN_PATH", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    *("PYTHONBREAKPOINT", "PYTHONSTARTUP", "PYTHONUNBUFFERED", "TF_CONFIG"),
)

#: The namespaces of Linux in which a process sees other files, processes or networks.
NAMESPACES = ("mnt", "pid", "net", "user")


def digest_interpreter(flags: Sequence[str]) -> str:
    """Returns the digest of what `python FLAGS` would read if this process started it: 16 hexadecimal digits."""
    environment = sorted(
        f"{name}={value}"
        for name, value in {**os.environ, **locate_modules()}.items()
        if name.startswith(IMPORT_PREFIXES) and name not in READ_LATER
    )
    hard_limits = [resource.getrlimit(number)[1] for _, number in list_limits()]
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]  # noqa: PTH115
    user = os.geteuid(), os.getegid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    taken_in = [sys.executable, sys.version, *flags, environment, hard_limits, namespaces, user]
    taken_in += [read_group_limits(), describe_installation()]
    return hashlib.blake2b(repr(taken_in).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def locate_modules() -> dict[str, str]:
    """Returns PYTHONPATH with absolute folders, and with that of scaleflow if Python finds it there only by chance:
    `python -m` looks for modules in the current folder, too.
    """
    folders = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]  # noqa: PTH100
    package = str(Path(__file__).parents[3])
    if package not in sys.path[1:]:
        folders.append(package)
    return {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}


def list_limits() -> list[tuple[str, int]]:
    """Returns the names and numbers of this system's limits of processes."""
    return [(name, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]


def read_group_limits() -> list[str]:
    """Returns the limits of memory and processors of this process's control groups (cgroup v2)."""
    found = []
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = Path("/sys/fs/cgroup", next(line for line in lines if line.startswith("0::"))[4:])
        for folder in (group, *group.parents[:-3]):
            for name in ("memory.max", "cpu.max", "cpuset.cpus.effective"):
                with contextlib.suppress(OSError):
                    found.append((folder / name).read_text())
    return found


def describe_installation() -> list[tuple[str, int, int]]:
    """Returns the path, the size in bytes and the time of the last change of each folder of packages, and of each of
    scaleflow's modules and YAML files.
    """
    found = describe_files(folder for folder in sys.path if folder.endswith("-packages"))
    folders = [str(Path(__file__).parents[2])]
    for folder in folders:
        for entry in os.scandir(folder):
            if entry.is_dir():
                if entry.name != "__pycache__":
                    folders.append(entry.path)
            elif entry.name.endswith((".py", ".yaml")):
                status = entry.stat()
                found.append((entry.path, status.st_size, status.st_mtime_ns))
    return sorted(found)


def describe_files(paths: Iterable[str]) -> list[tuple[str, int, int]]:
    """Returns the same of these files and folders. Those that are gone are left out."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116
            found.append((path, status.st_size, status.st_mtime_ns))
    return found
