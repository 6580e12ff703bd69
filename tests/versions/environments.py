"""Virtual environments with the oldest and the newest supported versions, and with versions between them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.processes import ROOT

if TYPE_CHECKING:
    from packaging.requirements import Requirement

#: Each is a file of constraints beside this one.
NAMES = ("oldest", "between", "newest")

#: The environments, each in a folder of its name.
FOLDER = ROOT / ".venv-versions"

TEST_PACKAGES = ("hypothesis>=6.150,<7", "pytest>=9,<10", "pytest-timeout>=2.4,<3", "pytest-xdist>=3.8,<4")

INSTALL_SECONDS = 1200.0


def find_constraints(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.txt")


def read_constraints(name: str) -> Iterator[Requirement]:
    from packaging.requirements import Requirement

    lines = (line.partition("#")[0].strip() for line in find_constraints(name).read_text().splitlines())
    return (Requirement(line) for line in lines if line)


def install_environment(name: str) -> Path:
    """Makes or updates the environment of a name, with the package in it. Returns its Python."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / name], check=True, timeout=INSTALL_SECONDS)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], timeout=INSTALL_SECONDS)
    words = ["--constraint", find_constraints(name), "--editable", ROOT, *TEST_PACKAGES]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True, timeout=INSTALL_SECONDS)
    return python
