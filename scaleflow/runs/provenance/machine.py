"""Lists everything that can change a run's numbers besides code and data: packages, machine, environment variables."""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from scaleflow.cluster.gpus import query_nvidia_smi, visible_gpus
from scaleflow.interfaces.secret_masking import mask_secrets, mask_text
from scaleflow.runs.provenance.git import read_origin, run_git

#: Environment variables that can change results, by prefix. The first group excludes those that cannot.
VARIABLES = re.compile(
    r"(?!TF_(CONFIG$|CPP_|CLI_|VAR_|LOG|DATA_DIR$|WORKSPACE$)|CUDA_VISIBLE_DEVICES$|NVIDIA_VISIBLE_DEVICES$|KERAS_HOME$|CUDA_HOME$|CUDA_PATH$)"
    r"(TF_|XLA_|KERAS_|OMP_|MKL_|KMP_|OPENBLAS_|DNNL_|ONEDNN_|CUDA_|CUDNN_|CUBLAS_|NVIDIA_|PYTHONHASHSEED$)\w*"
)

#: Variables that scikit-learn sets on import.
SET_BY_LIBRARIES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")

#: The CPU flags that decide which instructions TensorFlow uses.
CPU_FEATURES = re.compile(r"sse4_\d|avx\w*|fma|f16c|amx_\w+|asimd\w*|sve\w*|bf16|i8mm")

#: How much of /proc/cpuinfo is read: the kernel needs long to list many cores, and all cores are alike.
CPU_INFO_BYTES = 8192


@dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        source: where the package comes from, if not from an index: `git+URL@COMMIT` with credentials masked for a
            repository, `COMMIT` for a folder that is installed for editing and has no remote. Otherwise empty.
        path: the folder of a package that is installed for editing; otherwise empty.
    """

    name: str
    version: str
    source: str = ""
    path: str = ""

    @property
    def identity(self) -> str:
        """The version, with the commit if there is one."""
        if not self.source:
            return self.version
        commit = self.source.rpartition("@")[2]
        return f"{self.version} ({commit[:12]})"

    @property
    def requirement(self) -> str:
        """A line of a requirements file; it is a comment if the package exists only in a local folder."""
        if "+" in self.source:
            return f"{self.name} @ {self.source}"
        if self.path:
            return f"# {self.name}=={self.identity} is in {self.path}"
        return f"{self.name}=={self.version}"


def list_packages() -> dict[str, Package]:
    """Returns the installed packages by name, sorted. If a name occurs twice, the one that Python imports counts."""
    packages: dict[str, Package] = {}
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):  # noqa: PTH208  (twice as fast as Path)
                if name.endswith((".dist-info", ".egg-info")):
                    package = read_package(Path(folder or ".", name))
                    if package is not None:
                        packages.setdefault(package.name, package)
    return dict(sorted(packages.items(), key=lambda item: item[0].lower()))


def read_package(info: Path) -> Package | None:
    """Reads the name, version and origin of a package; None if its metadata has no name or version."""
    for path in (info / "METADATA", info / "PKG-INFO", info):
        try:
            with path.open("rb") as file:
                head = file.read(2048).decode(errors="replace").replace("\r", "").partition("\n\n")[0]
        except OSError:
            continue
        fields = dict(re.findall(r"^(Name|Version): *(\S+)", head, re.M))
        if len(fields) < 2:
            return None
        with contextlib.suppress(OSError, ValueError):
            origin = json.loads((info / "direct_url.json").read_bytes())
            return Package(fields["Name"], fields["Version"], *describe_origin(origin))
        return Package(fields["Name"], fields["Version"])
    return None


def describe_origin(origin: Mapping[str, Any]) -> tuple[str, str]:
    """Returns `source` and `path` of a package, from its `direct_url.json`."""
    url = mask_text(str(origin.get("url", "")))
    commit = origin.get("vcs_info", {}).get("commit_id")
    if commit:
        return f"{origin['vcs_info'].get('vcs', 'git')}+{url}@{commit}", ""
    if not origin.get("dir_info", {}).get("editable"):
        return "", ""
    folder = Path(unquote(urlsplit(url).path))
    try:
        commit = run_git(folder, "rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return "", str(folder)
    remote = re.sub(r"^([\w.-]+@[\w.-]+):(?!//)", r"ssh://\1/", read_origin(folder))
    source = f"git+{remote}@{commit}" if "://" in remote else commit
    return source, str(folder)


def count_cores() -> int:
    """Counts the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> dict[str, str]:
    """Returns the properties of this machine that can change the bits of a result, by their names in messages."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            info = file.read(CPU_INFO_BYTES)
    except OSError:
        info = ""
    model = re.search(r"^model name\s*: (.+)$", info, re.M)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", info, re.M)
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "CPU": model[1] if model else platform.processor(),
        "CPU features": " ".join(sorted(filter(CPU_FEATURES.fullmatch, flags[1].split()))) if flags else "",
        "CPU cores": str(count_cores()),
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        rows = query_nvidia_smi("index", "name", "driver_version")
        visible = visible_gpus()
        used = [row for row in rows if row[0] in visible] or rows[: len(visible)]
        if used:
            facts["GPUs"] = ", ".join(row[1] for row in used)
            facts["GPU driver"] = used[0][2]
    with contextlib.suppress(OSError, ValueError, KeyError):
        facts["CUDA"] = str(json.loads(Path("/usr/local/cuda/version.json").read_bytes())["cuda"]["version"])
    return facts


def list_relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that can change results, with secrets masked."""
    names = sorted(name for name in environment if VARIABLES.match(name) and name not in SET_BY_LIBRARIES)
    return {name: mask_secrets(environment[name], name) for name in names}
